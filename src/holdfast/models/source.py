"""Where a model comes from: a bundled name, a GGUF file, a Hugging Face directory, or a model on the hub."""

import difflib
import hashlib
import json
import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from holdfast.config import DEFAULT_MODEL
from holdfast.errors import ModelError
from holdfast.models import hub
from holdfast.models.architecture import Architecture, Routing, from_hf_config, routing_of
from holdfast.models.bundled import BUNDLED
from holdfast.models.gguf_file import GGUFFile
from holdfast.models.tiktoken_file import TiktokenVocabulary, added_tokens, read_tiktoken, token_text

_HASH_BLOCK = 1 << 22

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GGUFSource:
    """One GGUF file with weights, vocabulary and chat template."""

    name: str
    path: Path
    is_mlx_quantised: ClassVar[bool] = False
    routing: ClassVar[Routing | None] = None  # no file of a mixture of experts can be loaded

    @cached_property
    def file(self) -> GGUFFile:
        return GGUFFile(self.path)

    @cached_property
    def architecture(self) -> Architecture:
        return self.file.architecture

    @property
    def vocab_size(self) -> int:
        return self.file.vocab_size

    @property
    def context(self) -> int | None:
        """The longest context that the model was trained for, where the file tells it."""
        return self.file.context

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
    """A Hugging Face directory: config.json, safetensors (sharded or not), tokenizer files.

    In front of an upstream a tokenizer is enough: only `architecture` and `weight_files` need the rest.
    """

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
    def config(self) -> dict[str, Any]:
        """config.json, where there is one; models that also see or hear describe the decoder in `text_config`."""
        config = self.read_json("config.json") or {}
        text = config.get("text_config")
        return config | text if isinstance(text, dict) else config

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        return self.read_json("tokenizer_config.json") or {}

    @cached_property
    def architecture(self) -> Architecture:
        config = self.read_json("config.json")
        if config is None:
            raise ModelError(f"{self.path} has no config.json, so it is not a Hugging Face model directory")
        return from_hf_config(config)

    @cached_property
    def vocab_size(self) -> int:
        """The number of token ids: of config.json, otherwise one more than the tokenizer's highest."""
        if (size := self._number("vocab_size")) is not None:
            return size
        if tiktoken := self.tiktoken:
            return 1 + max([*tiktoken.ranks.values(), *tiktoken.special_tokens.values()])
        if not (path := self.path / "tokenizer.json").is_file():
            raise ModelError(f"{self.path} has no vocabulary: neither a vocab_size in config.json nor a tokenizer.json")
        return _highest_id(path) + 1

    @cached_property
    def context(self) -> int | None:
        """The longest context that the model was trained for, where config.json tells it."""
        return self._number("max_position_embeddings")

    @cached_property
    def routing(self) -> Routing | None:
        """Which experts a token may go through; None where config.json does not tell, or there are none."""
        return routing_of(self.config)

    def _number(self, key: str) -> int | None:
        value = self.config.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ModelError(f"{self.path}/config.json has an invalid value: {key} is {value!r}")
        return value

    @cached_property
    def tiktoken(self) -> TiktokenVocabulary | None:
        """The vocabulary in tiktoken's format, where there is one and no tokenizer.json."""
        if (self.path / "tokenizer.json").is_file():
            return None
        return read_tiktoken(self.path, self.tokenizer_config, str(self.config.get("model_type", "")))

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
        for filename, config in (
            ("generation_config.json", self.read_json("generation_config.json") or {}),
            ("config.json", self.config),
        ):
            if (ids := config.get("eos_token_id")) is not None:
                listed = [ids] if isinstance(ids, int) else ids
                if not isinstance(listed, list) or any(type(token) is not int for token in listed):
                    raise ModelError(f"{self.path}/{filename} has an invalid value: eos_token_id is {ids!r}")
                return frozenset(listed)
        end = token_text(self.tokenizer_config.get("eos_token"))
        return frozenset(token for text, token in added_tokens(self.tokenizer_config).items() if text == end)

    @cached_property
    def tokenizer_hash(self) -> str:
        if self.tiktoken:
            return _text_hash(self.tiktoken.identity)
        path = self.path / "tokenizer.json"
        return _text_hash(path.read_text(encoding="utf-8") if path.is_file() else None)

    @cached_property
    def chat_template(self) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        stored = self.read_json("chat_template.json") or {}
        template = self.tokenizer_config.get("chat_template") or stored.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
        return template

    @cached_property
    def chat_template_hash(self) -> str:
        return _text_hash(self.chat_template)


ModelSource = GGUFSource | HFSource


def open_model(argument: str = DEFAULT_MODEL, *, tokenizer_only: bool = False, may_fetch: bool = True) -> ModelSource:
    """The model that `argument` names, without its weights. Raises ModelError where there is none.

    `tokenizer_only`: an upstream computes, so any architecture will do, and no weights are needed.
    `may_fetch`: a model of the hub that is not in its local cache is downloaded, which blocks and may take long.
    """
    if bundled := BUNDLED.get(argument):
        if path := bundled.path:
            bundled.check_size(path)
            return GGUFSource(bundled.name, path)
        raise ModelError(f"model {argument} is not installed; run: holdfast models pull {argument}")
    path, on_hub = Path(argument).expanduser(), hub.parse_id(argument)
    if path.is_dir():
        if on_hub:
            logger.warning("%s is a directory here: it is used, and not the model of that name on the hub", path)
        return _directory(path.resolve().name, path, tokenizer_only=tokenizer_only)
    if path.is_file():
        return GGUFSource(path.stem, path)
    if on_hub:
        folder = hub.find(on_hub, tokenizer_only=tokenizer_only, is_offline=not may_fetch)
        if folder is None and not may_fetch:
            raise ModelError(f"{on_hub} is not in the local cache of the hub; run: holdfast models pull {on_hub}")
        folder = folder or hub.fetch(on_hub, tokenizer_only=tokenizer_only)
        return _directory(on_hub.repository, folder, tokenizer_only=tokenizer_only)
    wanted = argument.lower()
    near = [name for name in BUNDLED if wanted and wanted in name] or difflib.get_close_matches(wanted, BUNDLED, n=1)
    hint = f"did you mean {near[0]}?" if near else f"bundled models: {', '.join(BUNDLED)}"
    raise ModelError(
        f"no model {argument!r}: it is not a bundled model, a GGUF file, a model directory or an id on the hub ({hint})"
    )


def _directory(name: str, path: Path, *, tokenizer_only: bool) -> HFSource:
    source = HFSource(name, path)
    _ = source.vocab_size if tokenizer_only else source.architecture
    return source


def require_plain_weights(source: ModelSource) -> None:
    """Raise ModelError for a model that only the MLX engine can load."""
    if source.is_mlx_quantised:
        raise ModelError(f"{source.path} is quantised for MLX; use --device mlx, or the model it was converted from")


def _highest_id(path: Path) -> int:
    """The highest token id in a tokenizer.json. Its merges, most of the file, are passed over."""
    import msgspec  # not where only the engine is used

    class Entry(msgspec.Struct):
        id: int

    class Model(msgspec.Struct):
        vocab: dict[str, int] | list[Any]  # a list where the tokenizer is a Unigram model

    class File(msgspec.Struct):
        model: Model
        added_tokens: list[Entry] = []

    try:
        file = msgspec.json.decode(path.read_bytes(), type=File)
    except (msgspec.DecodeError, OSError) as exc:
        raise ModelError(f"{path} has no usable vocabulary: {exc}") from exc
    vocab = file.model.vocab
    ids: list[int] = list(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))
    return max(ids + [token.id for token in file.added_tokens], default=-1)


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
