"""A request for a chat in any dialect, as a chat completion request by type: what both kinds of routes begin with."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from starlette.requests import Request

from holdfast.chat.messages import Message
from holdfast.chat.tokenizer import Tokenizer
from holdfast.chats.turn import run_off_loop
from holdfast.errors import InvalidArgument
from holdfast.serving.http.bodies import Decoded, convert_chat, decode_chat
from holdfast.serving.http.dialects import CHAT
from holdfast.serving.http.dialects.base import Dialect, Json, Translated, new_id, own_path
from holdfast.serving.http.render import ChatWriter
from holdfast.serving.http.schema import ChatCompletion, RelayedChat
from holdfast.sessions.ports import ModelInfo

T = TypeVar("T", bound=ChatCompletion | RelayedChat)


class Past(NamedTuple):
    """What is on record of the conversation that a request continues."""

    messages: Sequence[Message] = ()
    tools: Sequence[Json] = ()


Earlier = Callable[[Translated], Past]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall(Generic[T]):
    """A request by type, and how its reply is written. `raw` are the bytes as they came."""

    decoded: Decoded[T]
    translated: Translated
    dialect: Dialect
    raw: bytes

    def without(self, names: Sequence[str]) -> "ChatCall[T]":
        """The same, with these fields ignored too."""
        return replace(self, decoded=self.decoded.without(names))

    @property
    def body(self) -> T:
        return self.decoded.body

    @property
    def ignored(self) -> tuple[str, ...]:
        return (*self.translated.ignored, *(own_path(path, self.dialect.names) for path in self.decoded.ignored))

    @property
    def new_messages(self) -> list[Message]:
        """The messages without instructions."""
        return self.body.messages[bool(self.translated.instructions) :]

    @property
    def with_usage(self) -> bool:
        options = self.body.stream_options
        return bool(options and options.include_usage)

    def writer(self, model: ModelInfo, tokenizer: Tokenizer) -> ChatWriter:
        """Its id says whether the first message are instructions, so that later requests can leave them out."""
        own = self.body if isinstance(self.body, ChatCompletion) else None
        return ChatWriter(
            model=model.name,
            tokenizer=tokenizer,
            with_logprobs=bool(own and own.logprobs),
            with_meta_info=bool(own and own.return_meta_info),
            with_matched_stop=self.dialect.with_matched_stop,
            id=new_id(self.dialect.id_prefix + ("i" if self.translated.instructions else "")),
        )


async def read_chat(
    request: Request, kind: type[T], earlier: Earlier, *, may_ignore: bool, unread: frozenset[str]
) -> ChatCall[T]:
    """The request's body. `unread`: known fields that have no effect on this model."""
    dialect: Dialect = request.scope["holdfast.dialect"]
    raw = await request.body()
    if dialect is CHAT:  # nothing to translate: decoded once
        decoded = await decode_chat(raw, kind, may_ignore=may_ignore, unread=unread)
        return ChatCall(decoded=decoded, translated=dialect.translate(decoded.fields), dialect=dialect, raw=raw)
    fields = (await decode_chat(raw, dict[str, Any], may_ignore=False)).fields
    try:
        translated = await run_off_loop(partial(dialect.translate, fields), len(raw))
    except RecursionError as exc:
        raise InvalidArgument("the request body is nested too deeply") from exc
    if translated.ignored and not may_ignore:
        where = translated.ignored[0]
        raise InvalidArgument(f"{where} is not supported here", param=where)
    first = [translated.instructions] if translated.instructions else []
    past = earlier(translated)
    fields = translated.fields | {"messages": [*first, *past.messages, *translated.fields["messages"]]}
    if translated.has_their_tools and past.tools:
        fields["tools"] = list(past.tools)
    convert = partial(convert_chat, fields, kind, may_ignore=may_ignore)
    decoded = await run_off_loop(partial(convert, unread=unread, num_bytes=len(raw)), len(raw))
    return ChatCall(decoded=decoded, translated=translated, dialect=dialect, raw=raw)


def agent_ids(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The ids by which agents name their own sessions, threads and subagents, as far as they are sane."""
    return {
        name.decode(): value.decode("latin-1")[:MAX_ID] for name, value in headers if name in _AGENT_HEADERS and value
    }


MAX_ID = 256
_AGENT_HEADERS = {
    *(b"x-claude-code-session-id", b"x-claude-code-agent-id", b"session-id", b"session_id", b"thread-id"),
    *(b"x-codex-parent-thread-id", b"x-session-id", b"x-parent-session-id", b"x-client-request-id"),
}
