"""The token ids of the next turn, without rendering earlier turns again.

The history stays as it was sampled. Only the new messages are rendered, after a synthetic conversation whose last
assistant text is a sentinel; what follows the sentinel is the tail to append.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.chat.abilities import NO_END_OF_TURN, SYSTEM, USER, after_sentinel, probe, renamed, tail_ids
from holdfast.chat.messages import Message, for_template
from holdfast.chat.template import Renderer, Tools
from holdfast.chat.tool_calls import hermes_system_block, render_call, render_result
from holdfast.errors import InvalidArgument, ModelError, TemplateError
from holdfast.sessions.record import TemplateInputs

Variables = Mapping[str, Any]
Fits = Callable[[int], None]  # raises where so many tokens are too many


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to append before the reply; `is_reasoning`: the reply begins inside a reasoning block."""

    ids: list[int]
    is_reasoning: bool
    num_control: int  # control tokens that the messages spelled out


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of every prompt of a conversation, whatever of it is left out. The turn that comes next is shown
    without what it begins with, where that is one of `ends`: the end of the reply before it, for example."""

    ids: list[int]
    ends: frozenset[tuple[int, ...]] = frozenset()

    def num_closing(self, given: Sequence[int]) -> int:
        return max((len(end) for end in self.ends if tuple(given[: len(end)]) == end), default=0)


class Continuation:
    """Converts messages to the token ids to append."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.abilities, self._ends = probe(renderer)
        self.end_of_turn = self._ends.after_text
        self.max_trim_tokens = int(self._ends.may_differ)

    @property
    def tells_time(self) -> bool:
        """Whether the template may say what day it is."""
        return "strftime_now" in self._renderer.template.source

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end an assistant's turn when they are sampled."""
        return self._ends.stops

    def first(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        variables: Variables | None = None,
        fits: Fits | None = None,
        *,
        at: float | None = None,
    ) -> Prompt:
        """The whole first prompt. `fits` may refuse it by its length before it is tokenized.

        `at` is the time that the template is told, by default the current one.
        """

        def render(messages: Sequence[Message]) -> str:
            shown, native = self._renderable(messages, tools)
            return self._renderer.text(shown, prompt=True, tools=native, variables=variables, at=at)

        text = _named(render, messages)
        if fits:
            fits(self._renderer.fewest_tokens(text))
        return Prompt(self._renderer.encode(text), _opens_reasoning(text), self._renderer.count_control(messages))

    def rendered_reply(self, messages: Sequence[Message], reply: Message, tools: Tools = ()) -> list[int]:
        """The tokens of a reply to `messages` as the template renders it, the end of the turn included."""
        texts = []
        for spoken, prompt in ((messages, True), ([*messages, reply], False)):
            shown, native = self._renderable(spoken, tools)
            texts.append(self._renderer.text(shown, prompt=prompt, tools=native))
        return self._renderer.encode(texts[1].removeprefix(texts[0]))

    def whole_text(
        self, messages: Sequence[Message], tools: Tools, variables: Variables, *, at: float | None = None
    ) -> str:
        """The text of the whole conversation and a generation prompt, of any length, as its tokens would spell it."""
        shown, tools = self._renderable(messages, tools)
        text = self._renderer.text(shown, prompt=True, tools=tools, variables=variables, is_limited=False, at=at)
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
        reply: Message | None = None,
    ) -> Prompt:
        """What to append to the history for `messages` and the next generation prompt. The last reply was sampled up to
        `last_token`, which may be trimmed; see `num_trimmed`.

        `start` is the index of the first new message in the whole conversation, `reply` the message before it.
        """
        prefix = self._prefix(last_token, messages, reply, start)

        def render(messages: Sequence[Message]) -> str:
            shown, native = self._renderable(messages, tools, start)
            return self._renderer.text([*prefix, *shown], prompt=True, tools=native, variables=variables)

        text = after_sentinel(_named(render, messages, start))
        if fits:  # what comes before the end of the turn is not appended
            ending = self._renderer.tokenizer.decode([self.end_of_turn])
            fits(self._renderer.fewest_tokens(text.partition(ending)[2]))
        ids = tail_ids(self._renderer, text, self._ends.boundaries)
        if not ids:
            raise ModelError(NO_END_OF_TURN)
        is_ended = last_token == ids[0] and not self.num_trimmed(ids[0])
        num_control = self._renderer.count_control(messages)
        return Prompt(ids[1:] if is_ended else ids, _opens_reasoning(text), num_control)

    def num_trimmed(self, last_token: int) -> int:
        """How many tokens at the end of a reply that was sampled up to `last_token` are not part of the history: the
        template may render another end, and which one, only the next message tells."""
        return int(self._ends.may_differ and last_token in self._ends.stops)

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
        texts = []
        for text in ("A", "1"):
            shown, native = self._renderable([*leading, USER | {"content": text}], tools)
            texts.append(self._renderer.text(shown, prompt=True, tools=native, variables=variables))
        one, other = map(self._renderer.encode, texts)
        shared = 0
        while one[shared] == other[shared]:
            shared += 1
        ends = self._ends.boundaries if self._ends.may_differ else {self.end_of_turn}
        whole = [index + 1 for index in range(shared) if one[index] in ends]
        return min(whole[-1] if whole else 0, limit)

    def opening(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        variables: Variables | None = None,
        *,
        at: float | None = None,
    ) -> Opening:
        """What a prompt without the first turns begins with: what the whole one has before a user's message and a later
        turn does not have. `at` as in `first`."""
        leading = list(itertools.takewhile(lambda message: message["role"] in ("system", "developer"), messages))
        whole = self.first([*leading, USER], tools, variables, at=at).ids
        ended, unended = (self.tail(last, [USER], tools, variables).ids for last in (self.end_of_turn, None))
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(reversed(whole), reversed(ended), strict=False))
        rest = whole[len(whole) - len([*same]) :]
        boundaries, is_control = self._ends.boundaries, self._renderer.tokenizer.is_control
        is_closed = len(rest) > 1 and rest[0] in boundaries and is_control(rest[1])  # by a token of its own
        rest = rest[is_closed:]
        ends = {tuple(tail[: len(tail) - len(rest)]) for tail in (ended, unended) if tail[-len(rest) :] == rest}
        if is_closed or ended != unended:
            ends |= {(token,) for token in boundaries}
        return Opening(whole[: len(whole) - len(rest)], frozenset(ends - {()}))

    def _prefix(
        self, last_token: int | None, messages: Sequence[Message], reply: Message | None, start: int
    ) -> list[Message]:
        """The synthetic conversation whose last turn ends as the history's does."""
        abilities, ends = self.abilities, self._ends
        is_result = bool(messages) and messages[0]["role"] == "tool"
        ends_as_call = last_token == ends.after_call != ends.after_text
        if abilities.after_call is None or not (is_result or ends_as_call):
            return abilities.after_text
        if not (is_result and abilities.shows_call_name):
            return abilities.after_call
        calls = (reply or {}).get("tool_calls") or ()
        answered = [call for call in calls if call.get("id") == messages[0].get("tool_call_id")] or calls
        if not answered:
            where = f"messages[{start}]"
            raise InvalidArgument(
                f"{where}: this model's chat template renders a tool's result with the name of the call before it, "
                "and the reply before it called no tool",
                param=where,
            )
        return renamed(abilities.after_call, answered[0])

    def _renderable(self, messages: Sequence[Message], tools: Tools, start: int = 0) -> tuple[list[Message], Tools]:
        """Messages and tools in a form that this template renders in full. InvalidArgument if there is none."""
        abilities = self.abilities
        shown = [self._supported(message) for message in messages]
        for index, message in enumerate(shown, start):
            roles = abilities.next_roles if start else abilities.later_roles if index else abilities.first_roles
            if (role := message["role"]) not in roles:
                where = f"messages[{index}].role"
                known = "at this position" if role in abilities.first_roles else "at all"
                says = f"{where}: this model's chat template does not support {role} messages {known}"
                raise InvalidArgument(says + self._words(message), param=where)
        if not abilities.has_tools:
            if abilities.must_alternate:
                shown = _joined(shown, [message["role"] == "tool" for message in messages])
            if tools and not start:
                shown = _offering(shown, hermes_system_block(tools), to_system="system" in abilities.first_roles)
            tools = ()
        is_text, field = abilities.wants_text_arguments, abilities.reasoning_field
        return [for_template(message, is_text=is_text, reasoning_field=field) for message in shown], tools

    def _words(self, message: Message) -> str:
        """What the template itself says about a message that it does not support."""
        try:
            self._renderer.text([message, USER], prompt=True)
        except TemplateError as exc:
            return f" ({exc})"
        return ""

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


def _named(render: Callable[[Sequence[Message]], str], messages: Sequence[Message], start: int = 0) -> str:
    """What `render` gives for all messages. Where the template refuses them, the error names the first that it refuses.

    That is the last of the fewest messages for which it raises the same; none if it does so for any message.
    """

    def refusal(given: Sequence[Message]) -> str | None:
        try:
            render(given)
        except InvalidArgument as exc:
            return str(exc)
        return None

    try:
        return render(messages)
    except TemplateError as exc:
        says = str(exc)
        if not messages or refusal([USER]) == says:
            raise
        works, fails = 0, len(messages)
        while fails - works > 1:
            middle = (works + fails) // 2
            works, fails = (works, middle) if refusal(messages[:middle]) == says else (middle, fails)
        where = f"messages[{start + fails - 1}]"
        raise TemplateError(f"{where}: {says}", param=where) from exc


def _joined(messages: list[Message], are_results: list[bool]) -> list[Message]:
    """User messages that tool results became, joined with their neighbours: the roles must alternate."""
    joined: list[Message] = []
    is_open = False  # the last user message may be joined with the next one
    for message, is_result in zip(messages, are_results, strict=True):
        if joined and joined[-1]["role"] == message["role"] == "user" and (is_open or is_result):
            joined[-1] = joined[-1] | {"content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
        is_open = is_result
    return joined


def _offering(messages: list[Message], block: str, *, to_system: bool) -> list[Message]:
    """The messages with the text that offers tools: in the system message, or before the first user's text."""
    if to_system and not (messages and messages[0]["role"] == "system"):
        return [{"role": "system", "content": block}, *messages]
    if to_system:
        return [messages[0] | {"content": f"{messages[0]['content']}\n\n{block}"}, *messages[1:]]
    index = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if index is None:
        raise InvalidArgument("tools: this model's chat template shows tools only in a user message", param="tools")
    offer = messages[index] | {"content": f"{block}\n\n{messages[index]['content']}"}
    return [*messages[:index], offer, *messages[index + 1 :]]


def _opens_reasoning(text: str) -> bool:
    """Whether the generation prompt ends in an open reasoning tag."""
    return text.rstrip().endswith("<think>")


def _spelled(value: Any) -> str:
    """As JSON, members in the order in which they are rendered."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
