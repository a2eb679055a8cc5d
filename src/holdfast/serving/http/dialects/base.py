"""What an API for chats must translate: its requests to chat completion requests, chat completions to its replies.

Knows JSON values and replies, nothing of sessions.
"""

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import msgspec

from holdfast.chat.messages import IgnoredFields, Message, read_messages
from holdfast.chat.reply import ReplyEnd, ReplyPiece
from holdfast.errors import InvalidArgument
from holdfast.serving.http.render import Writer

Json = dict[str, Any]


class StreamFrame(Protocol):
    """What any stream may have to say besides its content. After the first `error` nothing follows."""

    def ping(self) -> bytes:
        """What keeps the connection open and says nothing."""
        ...

    def error(self, envelope: Json, status: int) -> bytes:
        """An error in OpenAI's envelope as the last event."""
        ...


class StreamEncoder(StreamFrame, Protocol):
    """One streamed reply as bytes."""

    def encode(self, index: int, item: ReplyPiece | ReplyEnd) -> bytes:
        """What an event of choice `index` adds to the stream; empty where that is nothing."""
        ...

    def whole(self, body: bytes) -> bytes:
        """A chat completion as all events of a stream, its end included."""
        ...

    def end(self) -> bytes: ...


Keep = Callable[[Json, Message], None]  # gets a reply as the client can ask for it again, and as a message


def keep_nothing(reply: Json, message: Message) -> None:
    """For replies that nobody can ask for again."""


class ReplyFormat(Protocol):
    """How the reply to one request is written. `id` and the writer's are what the client is told."""

    def keeping(self, keep: Keep) -> "ReplyFormat":
        """The same, but each reply that is complete goes to `keep` too."""
        ...

    def encoder(self, writer: Writer, *, with_usage: bool) -> StreamEncoder: ...

    def whole(self, body: bytes, id: str) -> bytes:
        """A chat completion as the body of the response."""
        ...

    def refusal(self, body: bytes, status: int, request_id: str) -> bytes:
        """An upstream's error as the body of the response."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """A request as the fields of a chat completion request, and how its reply is written.

    `ignored`: the paths of what was left out. `previous`: the response that the messages continue, if they are only the
    new ones; `conversation`: or the conversation. `has_their_tools`: tools, too, are those of that response.
    `instructions`: a message that goes before all others, and that no later request inherits. `is_kept`: a later
    request may continue this one, with or without a session.
    """

    fields: Json
    reply: ReplyFormat
    ignored: tuple[str, ...] = ()
    previous: str = ""
    conversation: str = ""
    has_their_tools: bool = False
    instructions: Message | None = None
    is_kept: bool = False


class Dialect(Protocol):
    """One API. `with_matched_stop`: its replies name the stop string, so the chat completion must too."""

    name: str
    names: Mapping[str, str]  # of fields, as patterns: how their paths begin in chat completions, and here
    id_prefix: str
    with_matched_stop: bool

    def translate(self, body: Any) -> Translated:
        """InvalidArgument names the path of what cannot be understood or honoured."""
        ...

    def error(self, envelope: Json, status: int, request_id: str) -> Json:
        """An error in OpenAI's envelope as the body of a response."""
        ...

    def error_event(self, envelope: Json, status: int) -> bytes:
        """The same as the last event of a stream of which nothing else is known."""
        ...


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What other APIs repeat of a chat completion, be it ours or an upstream's. Missing counts are 0."""

    message: Message
    finish_reason: str
    created: int
    stop_string: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int

    @classmethod
    def read(cls, body: bytes) -> "Completion":
        return cls.of(msgspec.json.decode(body))

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> "Completion":
        choice, usage = reply["choices"][0], reply.get("usage")
        known = ("role", "content", "tool_calls", "reasoning_content", "reasoning")
        matched = choice.get("matched_stop", choice.get("stop_reason"))  # as SGLang and vLLM call it
        return cls(
            message=read_messages([{name: choice["message"].get(name) for name in known}])[0],
            finish_reason=choice["finish_reason"],
            created=_count(reply, "created"),
            stop_string=matched if isinstance(matched, str) and choice["finish_reason"] == "stop" else None,
            prompt_tokens=_count(usage, "prompt_tokens"),
            cached_tokens=_count(_member(usage, "prompt_tokens_details"), "cached_tokens"),
            completion_tokens=_count(usage, "completion_tokens"),
            reasoning_tokens=_count(_member(usage, "completion_tokens_details"), "reasoning_tokens"),
        )


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _count(value: Any, name: str) -> int:
    number = _member(value, name)
    return number if type(number) is int and number >= 0 else 0


def upstream_message(body: bytes) -> str:
    """What an upstream says is wrong, whatever envelope it uses."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = None
    inner = _member(said, "error")
    found = _member(inner, "message") or _member(said, "message") or inner or _member(said, "detail")
    return found if found and isinstance(found, str) else body.decode(errors="replace") or "the upstream gave no reason"


# What the translations share


def as_object(value: Any, where: str) -> Mapping[str, Any]:
    """An object; empty where there is none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise invalid(where, "must be an object")
    return value


def as_list(value: Any, where: str) -> list[Any]:
    """A list; empty where there is none."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid(where, "must be a list")
    return value


def as_text(value: Any, where: str) -> str:
    """A string; empty where there is none."""
    if not isinstance(value, str | None):
        raise invalid(where, "must be a string")
    return value or ""


def invalid(where: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{where} {problem}", param=where)


def ignored_paths(body: Mapping[str, Any], read: Set[str], inner: Set[str], left_out: Sequence[str]) -> tuple[str, ...]:
    """The paths of what has no effect: fields of the body that are not `read`, what was `left_out` as a whole, and in
    messages and tools the fields that are not `inner` ones. null is the same as absent."""

    def below(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield from below(item, f"{path}[{index}]")
        elif isinstance(value, Mapping) and path not in left_out:
            for name, item in value.items():
                if item is not None and name not in inner:
                    yield f"{path}.{name}"
                elif name in ("content", "output", "summary", "tools"):
                    yield from below(item, f"{path}.{name}")

    unread = (name for name in sorted(set(body) - read) if body[name] is not None)
    parts = (below(body.get(name), name) for name in ("system", "messages", "input", "tools"))
    found = IgnoredFields()
    for path in chain(unread, left_out, *parts):
        found.add(path)
    return tuple(found.paths)


def own_path(path: str, names: Mapping[str, str]) -> str:
    """The path of a field as this API has it. `names`: how paths begin in chat completions, and here."""
    for theirs, own in {**names, r"(tools\[\d+\])\.function": r"\1", r"(tool_choice)\.function": r"\1"}.items():
        path = re.sub(rf"^{theirs}(?=[.\[]|$)", own, path)
    return path


def in_own_names(envelope: Json, names: Mapping[str, str]) -> Json:
    """An error whose field is named as this API has it."""
    error, path = envelope["error"], envelope["error"].get("param") or ""
    own = own_path(path, names)
    if own == path:
        return envelope
    return {"error": error | {"message": error["message"].replace(path, own, 1), "param": own}}


def event(kind: str, value: Json) -> bytes:
    """One server-sent event with a name."""
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
