"""Sessions to files and back. What both doors call; on one event loop, heavy work in threads."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields, replace
from typing import Any

from holdfast.errors import SessionFileRefused, SessionNotFound, StorageUnavailable
from holdfast.sessions.journal.base import StoredSession, StoredTurn
from holdfast.sessions.journal.entries import Entry, Rewarded, TokensGiven, TokensSampled, TurnDelivered, TurnFields
from holdfast.sessions.persistence import restored, spans_since
from holdfast.sessions.portable.compatibility import check_fit
from holdfast.sessions.portable.content import ModelIdentity, PortableSession, PortableTurn, Span
from holdfast.sessions.portable.file import decode, encode
from holdfast.sessions.ports import ModelInfo
from holdfast.sessions.registry import new_session_id
from holdfast.sessions.runtime import Runtime

_FIELDS = [field.name for field in fields(TurnFields)]
_AT_ONCE = 2  # files that come in; each is held in memory, whole
_STALL_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """`reused_tokens` came with their cache, `recomputed_tokens` were computed here; together they are the history."""

    session_id: str
    history_length: int
    reused_tokens: int
    recomputed_tokens: int


class Transfers:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._places = asyncio.Semaphore(_AT_ONCE)

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

        Few files come in at once: the others are not read before it is their turn.
        """
        async with self._places:
            return await self._import(owner, await _received(chunks))

    async def _import(self, owner: str, data: bytearray) -> Imported:
        runtime = self._runtime
        session = await asyncio.to_thread(self._read, data)
        stored = _stored(session, session_id=new_session_id(), number=runtime.next_number(), owner=owner)

        def take_over() -> None:
            pass

        if runtime.chats is not None and session.opened.kind == "chat":
            take_over = await asyncio.to_thread(runtime.chats.prepared, stored, session.turns)
        view, recomputed = await runtime.take_in(stored, _facts(stored, session), session.snapshot, take_over)
        return Imported(
            session_id=view.session_id,
            history_length=view.history_length,
            reused_tokens=view.history_length - recomputed,
            recomputed_tokens=recomputed,
        )

    @property
    def _model(self) -> ModelInfo:
        """With the template that is really used."""
        model, chats = self._runtime.model, self._runtime.chats
        return replace(model, chat_template_hash=chats.template_hash) if chats else model

    # Out

    async def _of_open(self, session_id: str, owner: str, *, with_snapshot: bool) -> PortableSession:
        runtime = self._runtime
        if runtime.info(session_id, owner).kind == "tokens":
            opened, spans, snapshot = await runtime.read_out(session_id, owner, with_snapshot=with_snapshot)
            return PortableSession(
                opened=replace(opened, owner="", number=0),
                model=ModelIdentity.of(self._model),
                spans=_spans(spans),
                snapshot=snapshot,
            )
        if runtime.chats is None:
            return await self._of_record(session_id)
        async with runtime.chats.exported(session_id, owner) as chat:
            opened, spans, snapshot = await runtime.read_out(session_id, owner, with_snapshot=with_snapshot)
        session = PortableSession(
            opened=replace(opened, owner="", number=0),
            model=ModelIdentity.of(self._model),
            turns=chat.turns,
            reward=chat.reward,
            snapshot=snapshot,
        )
        is_at_tip = await asyncio.to_thread(_is_history, session, _spans(spans))
        return session if is_at_tip else replace(session, snapshot=None)  # the cache is that of another turn

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
        turns = [
            _portable(
                turn,
                await journal.read_request(session_id, turn.number),
                await journal.read_response(session_id, turn.number),
            )
            for turn in stored.turns
        ]
        session = restored(stored, lambda: 0.0)
        return PortableSession(
            opened=replace(stored.opened, owner="", number=0, forked_from=None),
            model=ModelIdentity.of(self._model),
            spans=_spans(spans_since(session, 0)) if session.kind == "tokens" else (),
            turns=tuple(turns),
            reward=stored.reward,
        )

    # In

    def _read(self, data: bytes | bytearray) -> PortableSession:
        session = decode(data)
        if session.opened.kind == "chat" and self._runtime.chats is None:
            raise SessionFileRefused("the session chats, and this server has no OpenAI door for it", reason="no_chat")
        check_fit(session, self._model)
        return session


async def _received(chunks: AsyncIterator[bytes]) -> bytearray:
    data = bytearray()
    while True:
        try:
            async with asyncio.timeout(_STALL_S):
                data += await anext(chunks)
        except StopAsyncIteration:
            return data
        except TimeoutError:
            raise SessionFileRefused(
                f"no more of the session file came for {_STALL_S:g} s; send it again", reason="truncated"
            ) from None


def _spans(entries: list[Entry]) -> tuple[Span, ...]:
    return tuple(entry for entry in entries if isinstance(entry, TokensGiven | TokensSampled))


def _is_history(session: PortableSession, spans: tuple[Span, ...]) -> bool:
    """Whether these spans are the path to a chat's last turn."""
    told, held = array("i"), array("i")
    for turn in session.path():
        told += turn.given
        told += turn.sampled
    for span in spans:
        held += span.tokens
    return told == held


def _portable(turn: StoredTurn, request: bytes, response: bytes) -> PortableTurn:
    kept: dict[str, Any] = {name: getattr(turn, name) for name in _FIELDS}
    kept |= {"ticket_key": "", "body_hash": b""}
    return PortableTurn(**kept, request=request, response=response, reward=turn.reward, is_delivered=turn.is_delivered)


def _stored(session: PortableSession, *, session_id: str, number: int, owner: str) -> StoredSession:
    """The session under its new name, as the journal would give it back."""
    turns = (_stored_turn(replace(turn, session_id=session_id)) for turn in session.turns)
    spans = (replace(span, session_id=session_id) for span in session.spans)
    opened = replace(session.opened, session_id=session_id, number=number, owner=owner)
    return StoredSession(opened=opened, steps=(*spans, *turns), reward=session.reward)


def _stored_turn(turn: PortableTurn) -> StoredTurn:
    kept: dict[str, Any] = {name: getattr(turn, name) for name in _FIELDS}
    return StoredTurn(
        **kept,
        request_bytes=len(turn.request),
        response_bytes=len(turn.response),
        reward=turn.reward,
        is_delivered=turn.is_delivered,
    )


def _facts(stored: StoredSession, session: PortableSession) -> list[Entry]:
    """All of it for the journal, to be written together."""
    session_id = stored.opened.session_id
    facts: list[Entry] = [stored.opened]
    facts += [step for step in stored.steps if isinstance(step, TokensGiven | TokensSampled)]
    for turn in session.turns:
        facts.append(replace(turn, session_id=session_id))
        if turn.is_delivered:
            facts.append(TurnDelivered(session_id, turn.number))
        if turn.reward is not None:
            facts.append(Rewarded(session_id, turn.number, turn.reward))
    if session.reward is not None:
        facts.append(Rewarded(session_id, None, session.reward))
    return facts
