"""Builds the native engine when the package is installed; without a compiler the package works on torch alone."""

import importlib.util
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("src/holdfast/engine/native")


class NativeBuild(BuildHookInterface):  # type: ignore[misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        spec = importlib.util.spec_from_file_location("native_build", Path(self.root) / NATIVE / "build.py")
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            libraries = build.build()
        except (OSError, subprocess.CalledProcessError) as error:
            words = getattr(error, "stderr", None) or str(error)
            self.app.display_warning(f"the native CPU engine was not built, torch takes its place: {words}")
            return
        build_data["artifacts"] += [str(path.relative_to(self.root)) for path in libraries]
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
