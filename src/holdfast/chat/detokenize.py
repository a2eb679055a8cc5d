"""Tokens to text as they come. Never shows half a character."""

from tokenizers.decoders import DecodeStream

from holdfast.chat.tokenizer import Tokenizer


class Detokenizer:
    """Feed it ids; it gives back the text that is certain so far. Control tokens make no text."""

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
