"""The next turn's tokens, without rendering the past again.

History stays as it was sampled. Only the new messages are rendered, behind a synthetic conversation
whose last assistant text is a sentinel; what follows the sentinel is the tail to append.
"""

from collections.abc import Sequence

from holdfast.chat.template import ChatTemplate, Message
from holdfast.chat.tokenizer import Tokenizer
from holdfast.errors import ModelError

_SENTINEL = "holdfast-sentinel-7f3a"
_SYNTHETIC: list[Message] = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _SENTINEL}]


class Continuation:
    """Turns messages into the ids to append."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self.end_of_turn = self._after_sentinel([])[0]

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end an assistant's turn."""
        return self._tokenizer.eos_token_ids | {self.end_of_turn}

    def first(self, messages: Sequence[Message]) -> list[int]:
        """The whole first prompt."""
        return self._tokenizer.encode(self._template.render(messages, add_generation_prompt=True))

    def pinned(self, messages: Sequence[Message], limit: int) -> int:
        """How many first tokens hold as many whole leading system messages as fit `limit`."""
        best = 0
        for end in range(1, len(messages) + 1):
            if messages[end - 1]["role"] != "system":
                break
            text = self._template.render(messages[:end], add_generation_prompt=False)
            if (size := len(self._tokenizer.encode(text))) <= limit:
                best = size
        return best

    def tail(self, history: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """What to append to `history` for `messages` and the next generation prompt."""
        ids = self._after_sentinel(messages)
        return ids[1:] if history and history[-1] == ids[0] else ids

    def _after_sentinel(self, messages: Sequence[Message]) -> list[int]:
        """The ids from the end of the synthetic assistant turn on."""
        text = self._template.render([*_SYNTHETIC, *messages], add_generation_prompt=bool(messages))
        ids = self._tokenizer.encode(text.rpartition(_SENTINEL)[2])
        for index, token in enumerate(ids):
            if self._tokenizer.is_control(token):
                return ids[index:]
        raise ModelError("the chat template does not mark where an assistant's turn ends, so it cannot be continued")
