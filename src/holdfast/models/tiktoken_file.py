"""Vocabularies in tiktoken's format: in each line a token in base64 and its rank. The tokenizer is built in `chat`.

Such a file tells neither how text is split before tokens are merged nor which control tokens there are. Both must be
known from the files beside it: with a guess, every token of a training run might be wrong.
"""

import base64
import binascii
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import ModelError

NAMES = ("tiktoken.model", "tokenizer.model", "qwen.tiktoken")

_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s*\Z")
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = _WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
QWEN2_SPLIT = _WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
KIMI_SPLIT = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_WORDS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_WORDS}?|\p{{N}}{{1,3}}{_REST}"
)
_SPLITS = {  # by the tokenizer's class, or by the model's type
    "QWenTokenizer": QWEN2_SPLIT,
    "TikTokenTokenizer": KIMI_SPLIT,
    "ChatGLM4Tokenizer": LLAMA3_SPLIT,
    "llama": LLAMA3_SPLIT,
}
_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205)))


@dataclass(frozen=True, slots=True)
class TiktokenVocabulary:
    path: Path
    ranks: dict[bytes, int]
    pattern: str  # how text is split before bytes are merged
    special_tokens: dict[str, int]
    composes: bool = False  # text is brought into Unicode's form NFC first

    @property
    def identity(self) -> str:
        """All that decides which tokens a text has."""
        facts = [self.pattern, self.special_tokens, self.composes]
        return json.dumps([*facts, [(token.hex(), rank) for token, rank in self.ranks.items()]])


def token_text(token: str | dict[str, Any] | None) -> str:
    """The text of a token as tokenizer_config.json names it."""
    return str(token.get("content", "")) if isinstance(token, dict) else token or ""


def added_tokens(config: dict[str, Any]) -> dict[str, int]:
    """The ids of control tokens in tokenizer_config.json, by text."""
    added = config.get("added_tokens_decoder")
    try:
        return {token_text(token): int(number) for number, token in (added or {}).items()}
    except (AttributeError, TypeError, ValueError) as exc:
        raise ModelError("tokenizer_config.json has no usable added_tokens_decoder") from exc


def read_tiktoken(folder: Path, config: dict[str, Any], model_type: str) -> TiktokenVocabulary | None:
    """The vocabulary in `folder`; None if it has no such file. `config` is its tokenizer_config.json.

    Raises ModelError for a file in another format, and where the split or the control tokens are not known.
    """
    files = [folder / name for name in NAMES] + sorted(folder.glob("*.tiktoken"))
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        return None
    ranks = _read_ranks(path)
    kind = str(config.get("tokenizer_class", ""))
    pattern = config.get("pat_str") or config.get("pattern") or _SPLITS.get(kind) or _SPLITS.get(model_type)
    if not isinstance(pattern, str):
        raise ModelError(
            f"{path} is a tiktoken vocabulary, and how it splits text is not known: give the regular expression as "
            f'"pat_str" in {folder}/tokenizer_config.json, or save a tokenizer.json with transformers'
        )
    is_qwen = kind == "QWenTokenizer"
    special = added_tokens(config)
    if is_qwen and not special:
        special = {text: len(ranks) + index for index, text in enumerate(_QWEN_TOKENS)}
    if not special or set(special.values()) & set(ranks.values()):
        raise ModelError(
            f"{path} is a tiktoken vocabulary, and its control tokens are not known: list them in added_tokens_decoder "
            f"of {folder}/tokenizer_config.json with ids of their own, or save a tokenizer.json with transformers"
        )
    return TiktokenVocabulary(path, ranks, pattern, special, composes=is_qwen)


def _read_ranks(path: Path) -> dict[bytes, int]:
    lines = path.read_bytes().splitlines()
    if not lines or not _LINE.match(lines[0]):
        raise ModelError(
            f"{path} is a SentencePiece model, which is not read here: save a tokenizer.json beside it, with "
            "transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    try:
        pairs = [line.split() for line in lines if line.strip()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as exc:
        raise ModelError(f"{path} is truncated or damaged; download it again ({exc})") from exc
    if len(set(ranks.values())) != len(pairs):
        raise ModelError(f"{path} is damaged: a token or a rank is there twice; download it again")
    return ranks
