"""Chat messages to token ids and back, with the model's own tokenizer. Optional: the extra `tokenization`.

The server takes token ids only; whoever renders text must use the tokenizer that the model was trained with.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast_sdk.errors import TokenizationMismatch
from holdfast_sdk.results import ModelInfo


class ChatTokenizer:
    """transformers' tokenizer of `path_or_name`: a directory, or a model's name where it may be downloaded."""

    def __init__(self, path_or_name: str | os.PathLike[str]) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as exc:
            raise ImportError(
                "ChatTokenizer needs transformers, which is not installed; run: pip install transformers jinja2"
            ) from exc
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path_or_name)

    def tokens_for_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """The ids of the whole conversation as the model's chat template renders it."""
        ids: list[int] = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
        )
        return ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of these ids, control tokens included."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def check(self, model: ModelInfo) -> None:
        """Raises TokenizationMismatch where this tokenizer cannot be the model's.

        Compared are the largest id and the end token. A tokenizer that passes may still be another one.
        """
        largest = max(self._tokenizer.get_vocab().values())
        if largest >= model.vocabulary_size:
            raise TokenizationMismatch(
                f"the tokenizer has ids up to {largest}, but {model.name} has {model.vocabulary_size} tokens",
                details={"largest_id": str(largest), "vocabulary_size": str(model.vocabulary_size)},
            )
        eos = self._tokenizer.eos_token_id
        if eos is not None and model.eos_token_ids and eos not in model.eos_token_ids:
            raise TokenizationMismatch(
                f"the tokenizer ends with id {eos}, but {model.name} ends with {list(model.eos_token_ids)}",
                details={"eos_token_id": str(eos), "model_eos_token_ids": str(list(model.eos_token_ids))},
            )
