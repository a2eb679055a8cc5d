"""Export and import of sessions as files, for both endpoints. On one event loop, heavy work in threads."""

import asyncio
import contextlib
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from holdfast.errors import InvalidArgument, SessionFileRefused, SessionNotFound, StorageUnavailable
from holdfast.sessions.journal.base import (
    Entry,
    Rewarded,
    StoredSession,
    TokensGiven,
    TokensSampled,
    TurnRecorded,
    with_bodies,
)
from holdfast.sessions.limits import Pace, check_ids, check_label, check_metadata
from holdfast.sessions.ports import ModelInfo
from holdfast.sessions.record import TurnRecord
from holdfast.sessions.runtime import Runtime
from holdfast.sessions.session import new_session_id, restored
from holdfast.sessions.session_file import ModelIdentity, PortableSession, Span, check_fit, decode, encode

_AT_ONCE = 4  # files that come in; each is held in memory, whole
_AT_ONCE_OF_OWNER = 2
_SMALL = 1 << 18  # bytes; a file needs no place before it is larger than that
_STALL_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """`reused_tokens` came with their cache, `recomputed_tokens` were computed here; together they are the history."""

    session_id: str
    history_length: int
    reused_tokens: int
    recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class ChatContent:
    turns: tuple[TurnRecord, ...]
    reward: float | None


class ChatPort(Protocol):
    """What knows the turns of chat sessions, which are in the file too."""

    @property
    def template_hash(self) -> str:
        """Of the template that chats are rendered with, which may be the server's own choice."""

    async def content(self, session_id: str, owner: str) -> ChatContent:
        """All that is on record of a chat that the caller has claimed."""

    def prepare_import(self, stored: StoredSession) -> Callable[[], None]:
        """Checks that this chat can be continued here, or raises SessionFileRefused. Blocks, changes nothing.

        What it returns, called on the event loop, takes the chat over.
        """


class Transfers:
    """`chats` is None on a server that has no chat sessions."""

    def __init__(self, runtime: Runtime, chats: ChatPort | None = None) -> None:
        self._runtime = runtime
        self._chats = chats
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._places_of = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(_AT_ONCE_OF_OWNER))

    async def export(
        self, session_id: str, owner: str, *, with_snapshot: bool = True, is_admin: bool = False
    ) -> list[bytes]:
        """The session as a file, in parts. Closed sessions too, as long as they are on record: their owner's, and
        with `is_admin` anyone's."""
        try:
            session = await self._of_open(session_id, owner, with_snapshot=with_snapshot)
        except SessionNotFound as gone:
            session = await self._of_closed(session_id, owner, gone, is_admin=is_admin)
        return await asyncio.to_thread(encode, session)

    async def import_file(self, owner: str, chunks: AsyncIterator[bytes]) -> Imported:
        """A new session, whose tokens are exactly those of the file. All of it is imported, or SessionFileRefused.

        Few files come in at once, fewer still of one owner: of the others only the beginning is read before it is
        their turn. So a client that sends hardly anything keeps nobody waiting.
        """
        data, pace = bytearray(), Pace(_STALL_S)
        async with contextlib.AsyncExitStack() as place:
            is_whole = has_place = False
            while not is_whole:
                try:
                    chunk = await pace.wait_for(anext(chunks))
                except StopAsyncIteration:
                    is_whole = True
                except TimeoutError:
                    raise SessionFileRefused(
                        f"the upload of the session file stalled for {_STALL_S:g} s, or is too slow; send it again",
                        reason="truncated",
                    ) from None
                else:
                    data += chunk
                    pace.received(len(chunk))
                if not has_place and (is_whole or len(data) > _SMALL):
                    await place.enter_async_context(self._places_of[owner])
                    await place.enter_async_context(self._places)
                    has_place = True
            return await self._import(owner, data)

    async def _import(self, owner: str, data: bytearray) -> Imported:
        runtime = self._runtime
        session = await asyncio.to_thread(self._read, data)
        number = await runtime.journal.next_number()
        name = await runtime.free_name(owner, session.opened.metadata) if session.opened.kind != "tokens" else ""
        stored = _stored(session, session_id=new_session_id(), number=number, owner=owner, name=name)

        def take_over() -> None:
            pass

        if self._chats is not None and session.opened.kind != "tokens":
            take_over = await asyncio.to_thread(self._chats.prepare_import, stored)
        view, recomputed = await runtime.take_in(stored, _facts(stored), session.snapshot, take_over)
        return Imported(
            session_id=view.session_id,
            history_length=view.history_length,
            reused_tokens=view.history_length - recomputed,
            recomputed_tokens=recomputed,
        )

    @property
    def _model(self) -> ModelInfo:
        """With the template that is really used."""
        model, chats = self._runtime.model, self._chats
        return replace(model, chat_template_hash=chats.template_hash) if chats else model

    # Out

    async def _of_open(self, session_id: str, owner: str, *, with_snapshot: bool) -> PortableSession:
        kind = self._runtime.info(session_id, owner).kind
        if kind != "tokens" and self._chats is None:
            return await self._of_record(session_id)
        chat = ChatContent((), None)
        async with self._runtime.claim(session_id, owner) as claim:
            if kind != "tokens" and self._chats is not None:
                chat = await self._chats.content(session_id, owner)
            opened, entries, snapshot = await claim.read_out(with_snapshot=with_snapshot)
        spans = _spans(entries)
        session = PortableSession(
            opened=replace(opened, owner="", number=0),
            model=ModelIdentity.of(self._model),
            spans=spans if kind == "tokens" else (),
            turns=chat.turns,
            reward=chat.reward,
            snapshot=snapshot,
        )
        if kind == "tokens" or await asyncio.to_thread(_is_history, session, spans):
            return session
        return replace(session, snapshot=None)  # the cache is at another turn than the chat's last one

    async def _of_closed(
        self, session_id: str, owner: str, gone: SessionNotFound, *, is_admin: bool
    ) -> PortableSession:
        try:
            stored = await self._runtime.journal.read_session(session_id)
        except SessionNotFound:
            raise gone from None
        if stored.closed_at is None or not (is_admin or stored.opened.owner == owner):
            raise gone
        return await self._of_record(session_id)

    async def _of_record(self, session_id: str) -> PortableSession:
        """A session as the journal has it, without a cache."""
        journal = self._runtime.journal
        stored = await journal.read_session(session_id)
        if stored.failure:
            raise StorageUnavailable(f"session {session_id} cannot be exported: {stored.failure}")
        turns = [await with_bodies(turn, session_id, journal) for turn in stored.turns]
        session = restored(stored, lambda: 0.0)
        return PortableSession(
            opened=replace(stored.opened, owner="", number=0, forked_from=None),
            model=ModelIdentity.of(self._model),
            spans=_spans(session.history.entries_since(session.id, 0)) if session.kind == "tokens" else (),
            turns=tuple(turns),
            reward=stored.reward,
        )

    # In

    def _read(self, data: bytes | bytearray) -> PortableSession:
        session = decode(data)
        if session.opened.kind != "tokens" and self._chats is None:
            raise SessionFileRefused(
                "this is a chat session, and the server runs without the HTTP endpoint", reason="no_chat"
            )
        opened = session.opened
        try:
            check_label("label", opened.label)
            check_label("group", opened.group)
            check_metadata("metadata", opened.metadata)
            check_ids("eos_token_ids", opened.eos_token_ids)
        except InvalidArgument as exc:
            raise SessionFileRefused(f"the session cannot be imported: {exc}", reason="beyond_limits") from exc
        check_fit(session, self._model)
        return session


def _spans(entries: list[Entry]) -> tuple[Span, ...]:
    return tuple(entry for entry in entries if isinstance(entry, TokensGiven | TokensSampled))


def _is_history(session: PortableSession, spans: tuple[Span, ...]) -> bool:
    """Whether these spans are the path to a chat's last turn."""
    told, held = array("i"), array("i")
    for turn in session.path():
        told += turn.given
        told += turn.sampled[: turn.num_lasting]
    for span in spans:
        held += span.tokens
    return told == held


def _stored(session: PortableSession, *, session_id: str, number: int, owner: str, name: str) -> StoredSession:
    """The session under its new id, as the journal would return it."""
    spans = (replace(span, session_id=session_id) for span in session.spans)
    opened = replace(session.opened, session_id=session_id, number=number, owner=owner, name=name)
    return StoredSession(opened=opened, steps=(*spans, *session.turns), reward=session.reward)


def _facts(stored: StoredSession) -> list[Entry]:
    """All of it for the journal, to be written together."""
    session_id = stored.opened.session_id
    facts: list[Entry] = [stored.opened]
    facts += [step for step in stored.steps if isinstance(step, TokensGiven | TokensSampled)]
    facts += [TurnRecorded(session_id, turn) for turn in stored.turns]
    return facts if stored.reward is None else [*facts, Rewarded(session_id, None, stored.reward)]
