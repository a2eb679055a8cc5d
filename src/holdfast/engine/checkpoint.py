"""The safetensors files of a model directory: which of them holds which tensor. Reads no tensor itself."""

from pathlib import Path
from typing import Any

from holdfast.errors import ModelError
from holdfast.models import HFSource


class Checkpoint:
    """Opening checks that every file is whole."""

    def __init__(self, source: HFSource, framework: str) -> None:
        from safetensors import SafetensorError, safe_open

        self._where = source.path
        self._files: dict[str, tuple[Path, Any]] = {}
        for path in source.weight_files:
            try:
                file: Any = safe_open(path, framework=framework)
            except (SafetensorError, OSError) as exc:
                raise ModelError(f"{path} is truncated or damaged; download it again ({exc})") from exc
            self._files |= dict.fromkeys(file.keys(), (path, file))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def find(self, name: str) -> tuple[Path, Any]:
        """The path of the file that holds `name`, and the file as safetensors opened it."""
        if name not in self._files:
            raise ModelError(f"{self._where} lacks the tensor {name}")
        return self._files[name]
