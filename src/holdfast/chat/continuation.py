"""The token ids of the next turn, without rendering earlier turns again.

The history stays as it was sampled. Only the new messages are rendered, after a synthetic conversation whose last
assistant text is a sentinel; what follows the sentinel is the tail to append.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.chat.messages import Message
from holdfast.chat.template import NO_END_OF_TURN, SENTINEL, SYSTEM, USER, Renderer, Tools, probe
from holdfast.chat.tool_calls import hermes_system_block, render_call, render_result
from holdfast.errors import InvalidArgument, ModelError
from holdfast.sessions.record import TemplateInputs

Variables = Mapping[str, Any]
Fits = Callable[[int], None]  # raises where so many tokens are too many


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to append before the reply; `is_reasoning`: the reply begins inside a reasoning block."""

    ids: list[int]
    is_reasoning: bool
    num_control: int  # control tokens that the messages spelled out


class Continuation:
    """Converts messages to the token ids to append."""

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

    def first(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        variables: Variables | None = None,
        fits: Fits | None = None,
    ) -> Prompt:
        """The whole first prompt. `fits` may refuse it by its length before it is tokenized."""
        shown, tools = self._renderable(messages, tools)
        text = self._renderer.text(shown, prompt=True, tools=tools, variables=variables)
        if fits:
            fits(self._renderer.fewest_tokens(text))
        return Prompt(self._renderer.encode(text), _opens_reasoning(text), self._renderer.count_control(messages))

    def whole_text(self, messages: Sequence[Message], tools: Tools, variables: Variables) -> str:
        """The text of the whole conversation and a generation prompt, of any length, as its tokens would spell it."""
        shown, tools = self._renderable(messages, tools)
        text = self._renderer.text(shown, prompt=True, tools=tools, variables=variables, is_limited=False)
        normalizer = self._renderer.tokenizer.inner.normalizer
        text = self._renderer.restored(text)
        return str(normalizer.normalize_str(text)) if normalizer else text

    def tail(
        self,
        last_token: int | None,
        messages: Sequence[Message],
        tools: Tools = (),
        variables: Variables | None = None,
        fits: Fits | None = None,
        *,
        start: int = 1,
    ) -> Prompt:
        """What to append to a history that ends in `last_token`, for `messages` and the next generation prompt.

        `start` is the index of the first new message in the whole conversation.
        """
        shown, tools = self._renderable(messages, tools, start)
        text, ids = self._tail(shown, tools, variables or {}, fits)
        ids = ids[1:] if last_token == ids[0] else ids
        return Prompt(ids, _opens_reasoning(text), self._renderer.count_control(messages))

    def num_trimmed(self, last_token: int) -> int:
        """How many tokens at the end of a reply that ends in `last_token` are left out when the chat goes on."""
        return 0

    def root(self, tools: Tools = (), variables: Variables | None = None) -> TemplateInputs:
        """The part of tools and variables that is fixed for the whole conversation."""
        variables = variables or {}
        shown, native = self._renderable([SYSTEM, USER] if "system" in self.abilities.first_roles else [USER], tools)
        plain = self._renderer.text(shown, prompt=False, tools=native)
        lasting = {
            name: value
            for name, value in variables.items()
            if self._renderer.text(shown, prompt=False, tools=native, variables={name: value}) != plain
        }
        return TemplateInputs(_spelled(list(tools)), _spelled(lasting))

    def pinned(
        self, messages: Sequence[Message], limit: int, tools: Tools = (), variables: Variables | None = None
    ) -> int:
        """How many tokens at the start hold the system prompt and the tools, `limit` at most."""
        leading = []
        for message in messages:
            if message["role"] not in ("system", "developer"):
                break
            leading.append(message)
        shown, tools = self._renderable(leading, tools)
        texts = (
            self._renderer.text([*shown, USER | {"content": text}], prompt=True, tools=tools, variables=variables)
            for text in ("A", "1")
        )
        one, other = map(self._renderer.encode, texts)
        shared = 0
        while one[shared] == other[shared]:
            shared += 1
        whole = [index + 1 for index in range(shared) if one[index] == self.end_of_turn]
        return min(whole[-1] if whole else 0, limit)

    def _tail(
        self, messages: Sequence[Message], tools: Tools, variables: Variables, fits: Fits | None = None
    ) -> tuple[str, list[int]]:
        """Text and ids from the end of the synthetic assistant turn."""
        follows_call = bool(messages) and messages[0]["role"] == "tool"
        prefix = (follows_call and self.abilities.after_call) or self.abilities.after_text
        text = self._renderer.text([*prefix, *messages], prompt=True, tools=tools, variables=variables)
        text = text.rpartition(SENTINEL)[2]
        if fits:  # what comes before the end of the turn is not appended
            ending = self._renderer.tokenizer.decode([self.end_of_turn])
            fits(self._renderer.fewest_tokens(text.partition(ending)[2]))
        ids = self._renderer.encode(text)
        for is_end in (self._ends.__contains__, self._renderer.tokenizer.is_control):
            for index, token in enumerate(ids):
                if is_end(token):
                    return text, ids[index:]
        raise ModelError(NO_END_OF_TURN)

    def _renderable(self, messages: Sequence[Message], tools: Tools, start: int = 0) -> tuple[list[Message], Tools]:
        """Messages and tools in a form that this template renders in full. InvalidArgument if there is none."""
        roles = self.abilities.next_roles if start else self.abilities.first_roles
        shown = [self._supported(message) for message in messages]
        for index, message in enumerate(shown, start):
            if (role := message["role"]) not in roles:
                where = f"messages[{index}].role"
                known = "at this position" if role in self.abilities.first_roles else "at all"
                raise InvalidArgument(
                    f"{where}: this model's chat template does not support {role} messages {known}", param=where
                )
        if tools and not self.abilities.has_tools:
            shown = shown if start else _with_system(shown, hermes_system_block(tools))
            tools = ()
        return shown, tools

    def _supported(self, message: Message) -> Message:
        """The message in a role and form that the template supports."""
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


def _with_system(messages: list[Message], block: str) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        return [messages[0] | {"content": f"{messages[0]['content']}\n\n{block}"}, *messages[1:]]
    return [{"role": "system", "content": block}, *messages]


def _opens_reasoning(text: str) -> bool:
    """Whether the generation prompt ends in an open reasoning tag."""
    return text.rstrip().endswith("<think>")


def _spelled(value: Any) -> str:
    """As JSON, members in the order in which they are rendered."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
