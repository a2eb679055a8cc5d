"""Text to token ids and back, by the model's own tokenizer: tokenizer.json, tiktoken's files, or a GGUF file's."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import DecodeStream

from holdfast.errors import ContextTooLong, InvalidArgument, ModelError
from holdfast.models import GGUFSource, ModelSource
from holdfast.models.tiktoken_file import LLAMA3_SPLIT, QWEN2_SPLIT, TiktokenVocabulary, token_text

_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types that are matched before any merging

# Where every pre-tokenizer that `_can_split` knows splits, whatever comes before and after: their patterns match white
# space only at the start of a part, or after punctuation that line breaks follow, and look ahead at most one character.
_BOUNDARY = re.compile(r"(?<=[!-~])(?= [!-~])|(?<=[A-Za-z0-9])(?=\n[!-~])")
_PLAIN_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]  # they stand for themselves in a vocabulary
_OTHER_BYTES = [byte for byte in range(256) if byte not in _PLAIN_BYTES]  # they follow from character 256 on
_BYTE_CHARS = [chr(byte if byte in _PLAIN_BYTES else 256 + _OTHER_BYTES.index(byte)) for byte in range(256)]
_PIECE = 1 << 18  # characters that are tokenized at once; the tokenizer takes 60 to 380 bytes of memory for each


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back. `bos_token` and `eos_token` are the texts that chat templates may insert."""

    inner: RustTokenizer
    eos_token_ids: frozenset[int]
    bos_token: str = ""
    eos_token: str = ""
    max_bytes: int = 0  # of a text that is tokenized; 0: no limit

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, in which the text of a control token becomes that token. No BOS or EOS is added.

        Raises InvalidArgument for bytes that the vocabulary has no token for: the tokenizer would drop them silently.
        """
        return self._encode(self.inner, text)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text`, in which the text of a control token stays plain text. Raises as `encode` does."""
        return self._encode(self._plain, text)

    def check_size(self, num_bytes: int, field: str | None = None) -> None:
        """Raises ContextTooLong for more text than may be tokenized at once."""
        if 0 < self.max_bytes < num_bytes:
            size, limit = f"{num_bytes / 2**20:.1f} MB", f"{self.max_bytes / 2**20:g} MB"
            raise ContextTooLong(
                f"{field or 'the prompt'}: {size} of text is more than the {limit} that a request may have "
                "(--max-text-mb)",
                param=field,
            )

    def fewest_tokens(self, text: str) -> int:
        """A lower bound for the number of tokens of `text`, without tokenizing it; 0 where none is known."""
        composes = self.inner.normalizer is not None and not text.isascii()  # up to four characters become one
        return -(-len(text) // (self._longest * (4 if composes else 1))) if self._longest else 0

    def _encode(self, inner: RustTokenizer, text: str) -> list[int]:
        try:
            data = text.encode()
        except UnicodeEncodeError as exc:
            raise InvalidArgument(f"the text is not valid Unicode at character {exc.start}") from exc
        self.check_size(len(data))
        if missing := self._missing_bytes.intersection(data) if self._missing_bytes else None:
            raise InvalidArgument(f"the model's vocabulary has no token for the byte 0x{min(missing):02X} of this text")
        ids: list[int] = []
        for piece in self._pieces(text):
            # A batch of one releases the interpreter lock, and is faster.
            ids += inner.encode_batch_fast([piece], add_special_tokens=False)[0].ids
        return ids

    def _pieces(self, text: str) -> Iterator[str]:
        """`text` in pieces that are tokenized as they are in the whole text."""
        start = 0
        while self._can_split and (found := _BOUNDARY.search(text, start + _PIECE)):
            yield text[start : found.start()]
            start = found.start()
        yield text[start:]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        text: str = self.inner.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def is_control(self, token: int) -> bool:
        """Whether this is a control token, such as the one that ends a turn."""
        return token in self._control

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Every control token by its text."""
        return {str(self._added[token].content): token for token in sorted(self._control)}

    @property
    def is_byte_level(self) -> bool:
        """Whether the bytes of a text are those of its tokens, one after the other."""
        return bool(self._bytes_by_char)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which may be only a part of a character."""
        known = self._known_bytes.get(token)
        if known is None:
            known = self._known_bytes[token] = self._token_bytes(token)
        return known

    @cached_property
    def _known_bytes(self) -> dict[int, bytes]:
        return {}

    def _token_bytes(self, token: int) -> bytes:
        text = self.inner.id_to_token(token)
        if text is None:
            return b""
        if token in self._added or not self._bytes_by_char:
            return self.decode([token]).encode()
        return bytes(self._bytes_by_char[char] for char in text)

    @cached_property
    def _plain(self) -> RustTokenizer:
        plain = RustTokenizer.from_str(self.inner.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _bytes_by_char(self) -> dict[str, int]:
        """The byte behind each character of a byte-level vocabulary; empty for other vocabularies."""
        if not isinstance(self.inner.decoder, decoders.ByteLevel):
            return {}
        return {char: byte for byte, char in enumerate(_BYTE_CHARS)}

    @cached_property
    def _missing_bytes(self) -> frozenset[int]:
        """Bytes that have no token in a byte-level vocabulary (small vocabularies lack some)."""
        chars = self._bytes_by_char.items()
        return frozenset(byte for char, byte in chars if self.inner.token_to_id(char) is None)

    @cached_property
    def _is_plain_bytes(self) -> bool:
        """Whether every byte of a text ends up in a token: nothing is dropped, replaced or taken with a neighbour."""
        kind = type(self.inner.normalizer)
        strips = any(token.lstrip or token.rstrip for token in self._added.values())
        return bool(self._bytes_by_char) and kind in (type(None), normalizers.NFC) and not strips

    @cached_property
    def _longest(self) -> int:
        """The most characters that one token stands for; 0 if there is no such number."""
        return max(map(len, self.inner.get_vocab())) if self._is_plain_bytes else 0

    @cached_property
    def _can_split(self) -> bool:
        """Whether text may be tokenized in pieces that end at `_BOUNDARY`."""
        has_spaces = any(re.search(r"\s", token.content) for token in self._added.values())
        if not self._is_plain_bytes or has_spaces or self.inner.pre_tokenizer is None:
            return False
        state = json.loads(self.inner.pre_tokenizer.__getstate__())
        steps = state.get("pretokenizers", [state])
        splits = [step.get("pattern", {}).get("Regex") for step in steps if step["type"] == "Split"]
        by_words = [step["use_regex"] for step in steps if step["type"] == "ByteLevel"]
        return (
            all(step["type"] in ("Split", "Digits", "ByteLevel") for step in steps)
            and not any(step.get("add_prefix_space") or step.get("invert") for step in steps)
            and all(step.get("behavior", "Isolated") == "Isolated" for step in steps)
            and all(pattern in (LLAMA3_SPLIT, QWEN2_SPLIT) for pattern in splits)
            and bool(splits or any(by_words))
        )

    @cached_property
    def _control(self) -> frozenset[int]:
        return frozenset(i for i, token in self._added.items() if token.special)

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        added: dict[int, AddedToken] = self.inner.get_added_tokens_decoder()
        return added


class Detokenizer:
    """Token ids in, text out, as soon as it is certain and never half a character. Control tokens make no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._length = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._stream.step(self._tokenizer.inner, token) or ""
        self._length += len(text)
        return text

    def finish(self) -> str:
        """What was held back: bytes that never became a character, as replacement characters."""
        rest = self._tokenizer.decode(self._ids, skip_special=True)[self._length :]
        self._length += len(rest)
        return rest


def load_tokenizer(source: ModelSource) -> Tokenizer:
    if isinstance(source, GGUFSource):
        return _from_gguf(source)
    inner = _from_tiktoken(source.tiktoken) if source.tiktoken else _from_json(source.path)
    bos, eos = (token_text(source.tokenizer_config.get(key)) for key in ("bos_token", "eos_token"))
    return Tokenizer(inner, source.eos_token_ids, bos, eos)


def _from_json(folder: Path) -> RustTokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json, which chat and text need; token ids work without it")
    try:
        return RustTokenizer.from_file(str(path))
    except Exception as exc:
        raise ModelError(f"{path} is not a readable tokenizer: {exc}") from exc


def _from_tiktoken(vocabulary: TiktokenVocabulary) -> RustTokenizer:
    """tiktoken merges any two neighbours that are a token together, the lowest rank first: so each is a merge here."""
    ranks = vocabulary.ranks
    texts = {token: "".join(_BYTE_CHARS[byte] for byte in token) for token in ranks}
    merges = [
        (texts[token[:cut]], texts[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    special = vocabulary.special_tokens
    plain = {texts[token]: rank for token, rank in ranks.items()}
    try:
        inner = RustTokenizer(models.BPE(vocab=plain | special, merges=merges, ignore_merges=True))
        inner.pre_tokenizer = pre_tokenizers.Sequence([_split(vocabulary.pattern), _bytes_only()])
    except Exception as exc:
        raise ModelError(f"{vocabulary.path} cannot be used with the split {vocabulary.pattern!r}: {exc}") from exc
    for text in special:
        if text in plain or _is_one_word(inner, text):
            raise ModelError(f"{vocabulary.path}: the control token {text!r} is also what plain text may become")
    inner.normalizer = normalizers.NFC() if vocabulary.composes else None
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    return inner


def _is_one_word(inner: RustTokenizer, text: str) -> bool:
    return [word for word, _ in inner.pre_tokenizer.pre_tokenize_str(text)] == [text]


def _from_gguf(source: GGUFSource) -> Tokenizer:
    file = source.file
    kind = file.value("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"{source.path}: GGUF tokenizer {kind!r} is not supported for text; known: gpt2 (byte-level BPE)"
        )
    tokens: list[str] = file.value("tokenizer.ggml.tokens")
    kinds: list[int] = file.value("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = [tuple(merge.split(" ", 1)) for merge in file.value("tokenizer.ggml.merges")]
    inner = RustTokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=True)
    )
    inner.pre_tokenizer = _pre_tokenizer(source, file.value("tokenizer.ggml.pre", "default"))
    inner.decoder = decoders.ByteLevel()
    for special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        inner.add_tokens(
            [
                AddedToken(token, normalized=False, special=special)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind == wanted
            ]
        )
    eos = file.value("tokenizer.ggml.eos_token_id")
    bos = file.value("tokenizer.ggml.bos_token_id")
    return Tokenizer(
        inner,
        source.eos_token_ids,
        "" if bos is None else tokens[bos],
        "" if eos is None else tokens[eos],
    )


def _pre_tokenizer(source: GGUFSource, name: str) -> Any:
    """How text is split before merging. `name` is llama.cpp's."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    known: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), words],
        "gpt-2": [words],
        "default": [words],
        "qwen2": [_split(QWEN2_SPLIT), _bytes_only()],
        "llama-bpe": [_split(LLAMA3_SPLIT), _bytes_only()],
    }
    if name not in known:
        raise ModelError(f"{source.path}: pre-tokenizer {name!r} is not supported; known: {', '.join(known)}")
    return pre_tokenizers.Sequence(known[name])


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _bytes_only() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
