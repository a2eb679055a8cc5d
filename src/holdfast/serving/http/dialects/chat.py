"""OpenAI's chat completions, the form that all other APIs are translated to: here nothing is translated."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.chat.reply import ReplyEnd, ReplyPiece
from holdfast.serving.http.dialects.base import Json, Keep, ReplyFormat, StreamEncoder, Translated
from holdfast.serving.http.render import Writer

_NAMES: Mapping[str, str] = {}
DONE = b"data: [DONE]\n\n"


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class ChatDialect:
    name = "chat"
    names = _NAMES
    id_prefix = "chatcmpl-"
    with_matched_stop = False

    def translate(self, body: Any) -> Translated:
        return Translated(fields=body, reply=ChatReplies())

    def error(self, envelope: Json, status: int, request_id: str) -> Json:
        return envelope

    def error_event(self, envelope: Json, status: int) -> bytes:
        return sse(envelope)


@dataclass(frozen=True, slots=True)
class ChatReplies:
    """Chat completions, or text completions with their own writer."""

    def encoder(self, writer: Writer, *, with_usage: bool) -> StreamEncoder:
        return ChunkEncoder(writer, with_usage=with_usage)

    def keeping(self, keep: Keep) -> ReplyFormat:
        return self

    def whole(self, body: bytes, id: str) -> bytes:
        return body

    def refusal(self, body: bytes, status: int, request_id: str) -> bytes:
        return body


class ChunkEncoder:
    """Reply events of one or several choices to server-sent events."""

    def __init__(self, writer: Writer, *, with_usage: bool = False) -> None:
        self._writer = writer
        self._with_usage = with_usage
        self._num_calls: dict[int, int] = {}  # by choice; a choice that is not in it has not begun
        self._ends: dict[int, ReplyEnd] = {}

    def encode(self, index: int, item: ReplyPiece | ReplyEnd) -> bytes:
        chunks = b""
        if index not in self._num_calls:
            self._num_calls[index] = 0
            if opening := self._writer.opening(index):
                chunks = sse(opening)
        if isinstance(item, ReplyEnd):
            self._ends[index] = item
            chunks += sse(self._writer.finish(index, item))
        else:
            if chunk := self._writer.chunk(index, item, self._num_calls[index]):
                chunks += sse(chunk)
            self._num_calls[index] += len(item.calls)
        return chunks

    def whole(self, body: bytes) -> bytes:
        """A chat completion as one chunk with its usage, every value spelled as it was."""
        reply = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        choices = []
        for choice in msgspec.json.decode(reply["choices"], type=list[dict[str, msgspec.Raw]]):
            message: dict[str, Any] = msgspec.json.decode(choice["message"], type=dict[str, msgspec.Raw])
            calls = msgspec.json.decode(message.get("tool_calls", b"null"), type=list[dict[str, msgspec.Raw]] | None)
            if calls:
                message["tool_calls"] = [{**call, "index": index} for index, call in enumerate(calls)]
            choices.append({key: value for key, value in choice.items() if key != "message"} | {"delta": message})
        return sse(reply | {"object": "chat.completion.chunk", "choices": choices}) + DONE

    def end(self) -> bytes:
        usage = sse(self._writer.usage([self._ends[i] for i in sorted(self._ends)])) if self._with_usage else b""
        return usage + DONE

    def ping(self) -> bytes:
        return b": ping\n\n"

    def error(self, envelope: Json, status: int) -> bytes:
        return sse(envelope)
