"""Responses and conversations of the stateless Responses API, in memory. Each owner has so many, the latest used."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from holdfast.chat.messages import Message
from holdfast.errors import ResponseNotFound
from holdfast.serving.http.dialects.base import Json, new_id

MAX_ENTRIES = 1000
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A response or a conversation. `body` is what the client gets; `given` are the messages before the reply, without
    instructions, and `messages` and `tools` those that a later request continues."""

    body: Json
    given: Sequence[Message] = ()
    messages: Sequence[Message] = ()
    tools: Sequence[Json] = ()
    num_bytes: int = 0


class ResponseStore:
    """Beyond `max_entries` or `max_bytes` of one owner the least recently used are forgotten."""

    def __init__(self, *, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._by_owner: dict[str, OrderedDict[str, Kept]] = {}
        self._num_bytes: dict[str, int] = {}

    def get(self, owner: str, id: str) -> Kept:
        entries = self._by_owner.get(owner, OrderedDict())
        if id not in entries:
            raise ResponseNotFound(
                f"there is no {id!r} here: without a session only the latest responses are kept, in memory; "
                "use a session (POST /sessions), which keeps every turn on record"
            )
        entries.move_to_end(id)
        return entries[id]

    def put(self, owner: str, kept: Kept) -> None:
        id = kept.body["id"]
        self.discard(owner, id)
        kept = replace(kept, num_bytes=len(msgspec.json.encode([kept.body, kept.messages, kept.tools])))
        entries = self._by_owner.setdefault(owner, OrderedDict())
        entries[id] = kept
        self._num_bytes[owner] = self._num_bytes.get(owner, 0) + kept.num_bytes
        while entries and (len(entries) > self._max_entries or self._num_bytes[owner] > self._max_bytes):
            self.discard(owner, next(iter(entries)))

    def discard(self, owner: str, id: str) -> None:
        if kept := self._by_owner.get(owner, OrderedDict()).pop(id, None):
            self._num_bytes[owner] -= kept.num_bytes

    def open_conversation(self, owner: str, messages: Sequence[Message], metadata: Json) -> Json:
        body = new_conversation(metadata)
        self.put(owner, Kept(body=body, messages=messages))
        return body


def new_conversation(metadata: Json) -> Json:
    return {"id": new_id("conv_"), "object": "conversation", "created_at": int(time.time()), "metadata": metadata}
