"""Messages to ids by the model's template, so that nobody's text turns into control tokens."""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.chat.messages import Message, for_template
from holdfast.chat.template import ChatTemplate
from holdfast.chat.tokenizer import Tokenizer
from holdfast.errors import InvalidArgument

Tools = Sequence[Mapping[str, Any]]

_NONCE = secrets.token_hex(8)
_STAND_IN = f"\uf8f0{_NONCE}:%d\uf8f1"
_STAND_INS = re.compile(f"\uf8f0{_NONCE}:([0-9]+)\uf8f1")


class Renderer:
    """Template and tokenizer as one. With `allow_control`, control tokens spelled in messages become real ones."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, *, allow_control: bool = False) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self._allow_control = allow_control
        self._controls = tokenizer.control_tokens  # text -> id
        spelled = "|".join(map(re.escape, sorted(self._controls, key=len, reverse=True)))
        self._pattern = re.compile(spelled) if spelled else None
        self._texts = list(self._controls)

    def text(
        self,
        messages: Sequence[Message],
        *,
        prompt: bool,
        tools: Tools = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The rendered conversation; control tokens in messages are stand-ins that only `encode` understands."""
        shown = [self._guarded(for_template(message)) for message in messages]
        return self.template.render(
            shown,
            add_generation_prompt=prompt,
            **({"tools": [self._guarded(dict(tool)) for tool in tools]} if tools else {}),
            **(variables or {}),
        )

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text. What a message spelled out like a control token stays plain text."""
        if not _STAND_INS.search(text) or self._pattern is None:
            return self.tokenizer.encode(text)
        ids: list[int] = []
        end = 0
        for match in self._pattern.finditer(text):
            ids += self._plain(text[end : match.start()])
            ids.append(self._controls[match.group()])
            end = match.end()
        return ids + self._plain(text[end:])

    def count_control(self, messages: Sequence[Message]) -> int:
        """How many control tokens the messages spell out."""
        if self._pattern is None:
            return 0
        return sum(len(self._pattern.findall(text)) for message in messages for text in _strings(message))

    def _plain(self, text: str) -> list[int]:
        restored = _STAND_INS.sub(lambda match: self._texts[int(match.group(1))], text)
        ids = self.tokenizer.encode_plain(restored)
        for token in ids:
            if self.tokenizer.is_control(token):
                spelled = self.tokenizer.decode([token])
                raise InvalidArgument(
                    f"messages: the text {spelled!r} is a control token of this model", param="messages"
                )
        return ids

    def _guarded(self, value: Any) -> Any:
        if self._allow_control or self._pattern is None:
            return value
        if isinstance(value, str):
            return self._pattern.sub(lambda match: _STAND_IN % self._texts.index(match.group()), value)
        if isinstance(value, Mapping):
            return {self._guarded(key): self._guarded(item) for key, item in value.items()}
        return [self._guarded(item) for item in value] if isinstance(value, list | tuple) else value


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for item in inner for text in _strings(item)]
