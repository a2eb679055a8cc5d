"""The next turn's tokens, without rendering the past again.

History stays as it was sampled. Only the new messages are rendered, behind a synthetic conversation
whose last assistant text is a sentinel; what follows the sentinel is the tail to append.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.chat.messages import Message
from holdfast.chat.rendering import Renderer, Tools
from holdfast.chat.template_probe import SENTINEL, probe
from holdfast.chat.tool_calls import hermes_system_block, render_call, render_result
from holdfast.errors import InvalidArgument, ModelError

Variables = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to append before an answer; `is_reasoning`: the answer begins inside a reasoning block."""

    ids: list[int]
    is_reasoning: bool
    num_control: int  # control tokens that the messages spelled out


@dataclass(frozen=True, slots=True)
class TemplateInputs:
    """What shapes the first render and so belongs to a whole conversation: tools, and variables that show there."""

    tools: str = "[]"
    variables: str = "{}"


class Continuation:
    """Turns messages into the ids to append."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.abilities = probe(renderer)
        self._ends = renderer.tokenizer.eos_token_ids
        self.end_of_turn = self._tail([], (), {})[1][0]
        self._ends |= {self.end_of_turn}

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end an assistant's turn."""
        return self._ends

    def first(self, messages: Sequence[Message], tools: Tools = (), variables: Variables | None = None) -> Prompt:
        """The whole first prompt."""
        shown, tools = self._expressed(messages, tools)
        text = self._renderer.text(shown, prompt=True, tools=tools, variables=variables)
        return Prompt(self._renderer.encode(text), _opens_reasoning(text), self._renderer.count_control(messages))

    def tail(
        self,
        last_token: int | None,
        messages: Sequence[Message],
        tools: Tools = (),
        variables: Variables | None = None,
        *,
        start: int = 1,
    ) -> Prompt:
        """What to append to a history that ends in `last_token`, for `messages` and the next generation prompt.

        `start` is the index of the first new message in the whole conversation.
        """
        shown, tools = self._expressed(messages, tools, start)
        text, ids = self._tail(shown, tools, variables or {})
        ids = ids[1:] if last_token == ids[0] else ids
        return Prompt(ids, _opens_reasoning(text), self._renderer.count_control(messages))

    def root(self, tools: Tools = (), variables: Variables | None = None) -> TemplateInputs:
        """What of tools and variables belongs to the conversation as a whole."""
        variables = variables or {}
        shown, native = self._expressed([_SYSTEM, _USER] if "system" in self.abilities.first_roles else [_USER], tools)
        plain = self._renderer.text(shown, prompt=False, tools=native)
        lasting = {
            name: value
            for name, value in variables.items()
            if self._renderer.text(shown, prompt=False, tools=native, variables={name: value}) != plain
        }
        return TemplateInputs(canonical(list(tools)), canonical(lasting))

    def pinned(
        self, messages: Sequence[Message], limit: int, tools: Tools = (), variables: Variables | None = None
    ) -> int:
        """How many first tokens hold the system prompt and the tools, as far as `limit` allows."""
        leading = []
        for message in messages:
            if message["role"] not in ("system", "developer"):
                break
            leading.append(message)
        shown, tools = self._expressed(leading, tools)
        one, other = (
            self._renderer.encode(
                self._renderer.text(
                    [*shown, {"role": "user", "content": text}], prompt=True, tools=tools, variables=variables
                )
            )
            for text in ("A", "1")
        )
        shared = 0
        while one[shared] == other[shared]:
            shared += 1
        whole = [index + 1 for index in range(shared) if one[index] == self.end_of_turn]
        return min(whole[-1] if whole else 0, limit)

    def _tail(self, messages: Sequence[Message], tools: Tools, variables: Variables) -> tuple[str, list[int]]:
        """Text and ids from the end of the synthetic assistant turn on."""
        prefix = self.abilities.prefix_for(messages)
        text = self._renderer.text([*prefix, *messages], prompt=True, tools=tools, variables=variables)
        text = text.rpartition(SENTINEL)[2]
        ids = self._renderer.encode(text)
        for is_end in (self._ends.__contains__, self._renderer.tokenizer.is_control):
            for index, token in enumerate(ids):
                if is_end(token):
                    return text, ids[index:]
        raise ModelError("the chat template does not mark where an assistant's turn ends, so it cannot be continued")

    def _expressed(self, messages: Sequence[Message], tools: Tools, start: int = 0) -> tuple[list[Message], Tools]:
        """Messages that this template shows in full; what it cannot show is refused by name."""
        roles = self.abilities.next_roles if start else self.abilities.first_roles
        shown = [self._spoken(message) for message in messages]
        for index, message in enumerate(shown, start):
            if (role := message["role"]) not in roles:
                where = f"messages[{index}].role"
                here = "here" if role in self.abilities.first_roles else "at all"
                raise InvalidArgument(
                    f"{where}: this model's chat template does not show {role} messages {here}", param=where
                )
        if tools and not self.abilities.has_tools:
            shown = shown if start else _with_system(shown, hermes_system_block(tools))
            tools = ()
        return shown, tools

    def _spoken(self, message: Message) -> Message:
        """The message in roles and forms that the template knows."""
        role = message["role"]
        if role == "developer" and role not in self.abilities.first_roles:
            return message | {"role": "system"}
        if self.abilities.has_tools:
            return message
        if role == "tool":
            return {"role": "user", "content": render_result(message["content"])}
        if calls := message.get("tool_calls"):
            texts = [render_call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            content = "\n".join([*([message["content"]] if message["content"] else []), *texts])
            return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}
        return message


_USER: Message = {"role": "user", "content": "-"}
_SYSTEM: Message = {"role": "system", "content": "-"}


def _with_system(messages: list[Message], block: str) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        return [messages[0] | {"content": f"{messages[0]['content']}\n\n{block}"}, *messages[1:]]
    return [{"role": "system", "content": block}, *messages]


def _opens_reasoning(text: str) -> bool:
    """Whether the generation prompt itself has begun to think."""
    return text.rstrip().endswith("<think>")


def canonical(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
