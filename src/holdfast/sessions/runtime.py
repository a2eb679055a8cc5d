"""What every door calls: create, append, generate, fork, rewind, info, close. All on one event loop."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from holdfast.errors import HistoryConflict, HoldfastError, InvalidArgument
from holdfast.generation import Done, Event, Sampled, SamplingParams, StopReason
from holdfast.observability.metrics import Metrics
from holdfast.sessions.capacity import SlabCapacity
from holdfast.sessions.generation_record import GenerationRecord
from holdfast.sessions.history import SpanPiece
from holdfast.sessions.journal import entries
from holdfast.sessions.journal.base import Journal, NoJournal, StoredSession
from holdfast.sessions.journal.entries import Entry, ForkedFrom, Pinned, SessionClosed, SessionKind, SessionOpened
from holdfast.sessions.journal.snapshots import SnapshotStore
from holdfast.sessions.operations import Conclude, Operations, live
from holdfast.sessions.parking import Parking
from holdfast.sessions.persistence import opened, restored, spans_since
from holdfast.sessions.portable.chat_port import ChatPort
from holdfast.sessions.ports import Backend, EventStream, ModelInfo
from holdfast.sessions.registry import SessionRegistry, new_session_id
from holdfast.sessions.session import Session
from holdfast.sessions.session_metrics import observe_batch, watch_sessions
from holdfast.sessions.view import PARKED, SessionView, view_of

_PIECE_TOKENS = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RewindResult:
    history_length: int
    recomputed_tokens: int


class Runtime:
    """Sessions on a backend. Every method raises at once where the session is unknown, closed or busy."""

    def __init__(
        self,
        backend: Backend,
        *,
        idle_ttl_s: float = 0,
        journal: Journal | None = None,
        snapshots: SnapshotStore | None = None,
        max_parked: int = 0,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._store = SessionRegistry(backend.capacity)
        self._idle_ttl_s = idle_ttl_s
        self._clock = clock
        self.journal: Journal = journal or NoJournal()
        self._numbers = itertools.count(self.journal.last_number + 1)
        for gone in self.journal.closed():
            self._store.remember(gone.session_id, gone.owner, gone.why)
        self.on_gone: Callable[[str], None] = lambda session_id: None  # who keeps more about a session drops it
        self.chats: ChatPort | None = None  # and tells it to whoever takes a session elsewhere
        self.metrics = metrics or Metrics()
        self._operations = Operations(backend, self.metrics)
        parking = Parking(backend, snapshots, self.metrics)
        self._places = SlabCapacity(self._store, parking, self._remove, max_parked=max_parked, metrics=self.metrics)
        watch_sessions(self.metrics, lambda: [self._view(session) for session in self._store])

    @property
    def capacity(self) -> int:
        return self._backend.capacity

    @property
    def model(self) -> ModelInfo:
        return self._backend.model

    async def create(
        self,
        owner: str,
        *,
        label: str = "",
        eos_token_ids: Sequence[int] = (),
        tokens: Sequence[int] = (),
        pin_tokens: int | None = None,
        metadata: Mapping[str, str] | None = None,
        kind: SessionKind = "tokens",
        group: str = "",
        is_kept: bool = True,
    ) -> SessionView:
        """A new session with an id of ours; the idle session that was used least recently may be parked for it, or
        go where no more may be parked. One that is not `is_kept` never makes another go, and is not journaled."""
        self._operations.check_open()
        for token in eos_token_ids:
            if not 0 <= token < self.model.vocab_size:
                raise InvalidArgument(f"eos_token_ids: {token} is outside the vocabulary of {self.model.vocab_size}")
        sink = self._checked_sink(self.model.sink if pin_tokens is None else pin_tokens)
        session = await self._place(
            lambda: self._backend.open(sink=sink),
            owner=owner,
            sink=sink,
            label=label,
            eos_token_ids=frozenset(eos_token_ids) or self.model.eos_token_ids,
            metadata=dict(metadata or {}),
            kind=kind,
            group=group,
            pin_tokens=pin_tokens,
            is_kept=is_kept,
        )
        try:
            await self._keep(session, opened(session))
            if tokens:
                await self.append(session.id, owner, tokens)
        except BaseException:
            await self._discard(session)
            raise
        return self._view(session)

    def restore(self, stored: StoredSession) -> None:
        """A session from the journal, parked until someone asks for it."""
        self._store.add_parked(restored(stored, self._clock))

    async def pin(self, session_id: str, owner: str, pin_tokens: int) -> None:
        """Keep the first `pin_tokens` for ever; only while the history is empty."""
        sink = self._checked_sink(pin_tokens)
        session = await self._enter(session_id, owner, 0)

        async def work() -> None:
            await self._backend.pin(live(session), sink)
            session.sink = sink

        async def conclude(backend_length: int) -> None:
            if session.sink == sink:
                await self._keep(session, Pinned(session.id, sink))

        await self._carry_out(session, work(), conclude)

    async def append(
        self, session_id: str, owner: str, tokens: Sequence[int], *, expected_length: int | None = None
    ) -> Done:
        """Add given tokens and compute them. A caller who leaves does not take the tokens back."""
        if not tokens:
            raise InvalidArgument("append needs at least one token")
        session = await self._enter(session_id, owner, expected_length, writes="tokens")
        before = len(session.history)

        async def conclude(backend_length: int) -> None:
            if backend_length == before + len(tokens):
                session.history.give(tokens)
                await self._keep_since(session, before)

        return await self._carry_out(session, self._backend.append(live(session), tokens), conclude)

    async def generate(
        self,
        session_id: str,
        owner: str,
        params: SamplingParams,
        *,
        tokens: Sequence[int] = (),
        expected_length: int | None = None,
        writes: SessionKind = "tokens",
    ) -> AsyncGenerator[list[Event], None]:
        """Append `tokens`, then sample: event batches, the last ending with Done, which comes once all is on record.

        Close the iterator to cancel; what was given and sampled until then stays.
        """
        session = await self._enter(session_id, owner, expected_length, writes=writes)
        started = self._clock()
        turn = GenerationRecord(session, tokens)
        stream = None
        try:
            stream = self._backend.generate(live(session), params, tokens)
            await stream.__aenter__()
            last = started
            async for batch in stream:
                now = self._clock()
                since = now - (last if turn.num_sampled else started)
                observe_batch(self.metrics, batch, since, is_first=not turn.num_sampled)
                last = now
                turn.record(batch)
                if isinstance(batch[-1], Done):
                    turn.keeping = asyncio.ensure_future(self._keep_since(session, turn.start))
                    await asyncio.shield(turn.keeping)
                yield batch
        finally:
            await asyncio.shield(self._operations.settle(session, self._end_generate(turn, stream)))

    async def _end_generate(self, turn: GenerationRecord, stream: EventStream | None) -> None:
        if stream is None:
            return
        await stream.__aexit__(None, None, None)
        rest = stream.rest()
        if rest:
            observe_batch(self.metrics, rest, 0.0, is_first=False)
        session = turn.session
        if session.gate.is_closed:
            return
        if turn.keeping is not None:
            await asyncio.gather(turn.keeping, return_exceptions=True)
            return
        turn.record(rest, backend_length=self._backend.view(live(session)).history_length)
        if len(session.history) > turn.start:
            await self._keep_since(session, turn.start)

    async def adopt(
        self,
        session_id: str,
        owner: str,
        given: Sequence[int],
        sampled: Sequence[Sampled],
        stop_reason: StopReason,
        *,
        expected_length: int,
    ) -> None:
        """Take over a turn that was generated elsewhere: tokens that were given, then tokens that were sampled."""
        session = await self._enter(session_id, owner, expected_length, writes="chat")
        tokens = [*given, *(token.token for token in sampled)]

        async def conclude(backend_length: int) -> None:
            if backend_length == expected_length + len(tokens):
                turn = GenerationRecord(session, given)
                turn.record(sampled, backend_length=backend_length)
                turn.end(stop_reason)

        await self._carry_out(session, self._backend.append(live(session), tokens), conclude)

    async def rewind(
        self, session_id: str, owner: str, length: int, *, writes: SessionKind = "tokens", is_limited: bool = True
    ) -> RewindResult:
        """Forget the tokens from `length` on; explicit, and counted."""
        session = await self._enter(session_id, owner, None, writes=writes)

        async def conclude(backend_length: int) -> None:
            if backend_length != length:
                return
            try:
                await self._keep_tokens(session, entries.HistoryRewound(session.id, length))
            except HoldfastError:  # all stays as it was: what was cut off is computed again
                await self._backend.append(live(session), session.history.slice(length, len(session.history)))
                raise
            session.history.rewind(length)
            session.num_rewinds += 1

        work = self._backend.rewind(live(session), length, is_limited=is_limited)
        return RewindResult(length, await self._carry_out(session, work, conclude))

    async def fork(
        self,
        session_id: str,
        owner: str,
        *,
        at_position: int | None = None,
        label: str = "",
        kind: SessionKind = "tokens",
        forked_turns: Sequence[int] = (),
    ) -> tuple[SessionView, int]:
        """A new session with the same past, and how many tokens had to be computed again for it.

        `forked_turns`: where it is to chat, those of the chat's turns that its past is made of.
        """
        source = await self._enter(session_id, owner, None)
        try:
            length = len(source.history) if at_position is None else at_position
            if not 0 <= length <= len(source.history):
                raise InvalidArgument(f"at_position must be 0 to {len(source.history)}, got {length}")
            fork = await self._place(
                lambda: self._backend.fork(live(source)),
                owner=owner,
                sink=source.sink,
                label=label or source.label,
                eos_token_ids=source.eos_token_ids,
                metadata=source.metadata,
                kind=kind,
                group=source.group,
                pin_tokens=source.pin_tokens,
                is_kept=source.is_kept,
            )
            fork.history = source.history.copy(len(source.history))
        finally:
            self._operations.end(source)
        recomputed = 0
        try:
            made = opened(fork, ForkedFrom(source.id, tuple(forked_turns)))
            spans = spans_since(fork, 0) if fork.kind == "tokens" else ()
            await self._keep(fork, made, *spans)
            if length < len(fork.history):
                recomputed = (await self.rewind(fork.id, owner, length)).recomputed_tokens
        except BaseException:
            await self._discard(fork)
            raise
        return self._view(fork), recomputed

    async def read_out(
        self, session_id: str, owner: str, *, with_snapshot: bool
    ) -> tuple[SessionOpened, list[Entry], bytes | None]:
        """A session as it stands: what it is, its spans, its cache. A parked one is not woken for it."""
        session = await self._enter(session_id, owner, None, is_woken=False)
        try:
            content = await self._places.snapshot_of(session) if with_snapshot else None
            self._check_not_closed(session)
            return opened(session), spans_since(session, 0), content
        except HoldfastError:
            self._check_not_closed(session)  # closing beats whatever came of it
            raise
        finally:
            self._operations.end(session)

    async def take_in(
        self, stored: StoredSession, facts: Sequence[Entry], content: bytes | None, on_kept: Callable[[], None]
    ) -> tuple[SessionView, int]:
        """A session that was made elsewhere, awake and on record, and how many tokens had to be computed for it.

        `facts` is all of it for the journal; `on_kept` is called once they are there, before anyone can use it.
        """
        self._operations.check_open()
        session = await asyncio.to_thread(restored, stored, self._clock)  # long ones take a while
        session.gate.enter()
        self._operations.begin()
        try:
            await self._places.admit(session, content)
            try:
                await self._keep(session, *facts)
                self._check_not_closed(session)
                on_kept()
            except BaseException:
                await self._discard(session)
                raise
        finally:
            self._operations.end(session)
        self.metrics.session_total.labels("imported").inc()
        return self._view(session), session.recomputed_tokens

    def next_number(self) -> int:
        """Of a session that is about to be made."""
        return next(self._numbers)

    def info(self, session_id: str, owner: str) -> SessionView:
        """How the session stands. Never waits, also while it is busy."""
        return self._view(self._store.get(session_id, owner))

    @contextlib.contextmanager
    def held(self, session_id: str, owner: str) -> Iterator[None]:
        """The session counts as busy, though others may still use it: it is neither evicted nor reaped meanwhile."""
        self._operations.check_open()
        session = self._store.get(session_id, owner)
        session.num_holds += 1
        self._operations.begin()
        try:
            yield
        finally:
            session.num_holds -= 1
            session.last_used = self._clock()
            self._operations.finish()

    def eos_token_ids(self, session_id: str, owner: str) -> frozenset[int]:
        """The tokens that end a generation of this session."""
        return self._store.get(session_id, owner).eos_token_ids

    def list_sessions(self, owner: str, *, after: int = 0) -> list[SessionView]:
        """The owner's sessions, oldest first, from the one after number `after` on."""
        return [self._view(session) for session in self._store if session.owner == owner and session.number > after]

    def history(self, session_id: str, owner: str, start: int = 0, end: int | None = None) -> list[SpanPiece]:
        """A copy of the history, span by span, the part that left the window included."""
        history = self._store.get(session_id, owner).history
        end = len(history) if end is None else end
        if not 0 <= start <= end <= len(history):
            raise InvalidArgument(f"the range {start} to {end} is not within the history of {len(history)} tokens")
        return list(history.pieces(start, end, limit=_PIECE_TOKENS))

    async def close(self, session_id: str, owner: str) -> int:
        """Free everything; what runs is cancelled first. Returns the final history length."""
        return await self._remove(self._store.get(session_id, owner), "closed")

    async def reap(self) -> None:
        """Close sessions that have been idle for too long, for ever. A task of the server's."""
        while self._idle_ttl_s:
            await asyncio.sleep(min(self._idle_ttl_s / 4, 30))
            while idle := self._store.idle_longer_than(self._idle_ttl_s):  # looked at anew after every wait
                await self._remove(idle[0], "expired")

    async def drain(self, timeout_s: float) -> bool:
        """Admit nothing new, wait for what runs. False where something still ran at the end."""
        return await self._operations.drain(timeout_s)

    async def park_all(self) -> None:
        """For a shutdown: all caches that are worth it go where the next process finds them."""
        await self._places.park_all()

    # Inside

    async def _enter(
        self,
        session_id: str,
        owner: str,
        expected_length: int | None,
        *,
        writes: SessionKind | None = None,
        is_woken: bool = True,
    ) -> Session:
        """The session, claimed for one operation and awake. `writes`: only sessions of that kind may be changed so."""
        session = self._store.get(session_id, owner)
        if not session.num_holds:  # who holds it may bring to an end what was begun
            self._operations.check_open()
        if session.parking is not None:  # the way back begins once it is there
            await asyncio.shield(session.parking)
            session = self._store.get(session_id, owner)
        session.enter()
        try:
            if expected_length is not None and expected_length != len(session.history):
                raise HistoryConflict(expected=expected_length, actual=len(session.history))
            if writes is not None and writes != session.kind:
                raise InvalidArgument(
                    f"session {session_id} {_USES[session.kind]}; elsewhere it can be read, forked and closed"
                )
            if session.handle is None and is_woken:
                await self._places.wake(session)
        except BaseException:
            session.leave()
            raise
        self._operations.begin()
        return session

    async def _carry_out(self, session: Session, work: Coroutine[Any, Any, T], conclude: Conclude) -> T:
        result = await self._operations.carry_out(session, work, conclude)
        self._check_not_closed(session)
        return result

    def _checked_sink(self, sink: int) -> int:
        if not 0 <= sink <= self.model.max_pin:
            raise InvalidArgument(f"pin_tokens must be 0 to {self.model.max_pin}, got {sink}", param="pin_tokens")
        return sink

    async def _place(self, opening: Callable[[], Coroutine[Any, Any, int]], **fields: Any) -> Session:
        """Make room, open, and keep; whatever happens in between, no place is lost."""
        handle = await self._places.opened(opening, may_evict=fields["is_kept"])
        session = Session(id=new_session_id(), number=self.next_number(), handle=handle, clock=self._clock, **fields)
        self._store.add(session)
        self.metrics.session_total.labels("created").inc()
        return session

    # Keeping

    async def _keep(self, session: Session, *facts: Entry) -> None:
        if session.is_kept:
            await self.journal.write(*facts)

    async def _keep_tokens(self, session: Session, *facts: Entry) -> None:
        """Tokens of a chat are kept with its turns."""
        if session.kind == "tokens":
            await self._keep(session, *facts)

    async def _keep_since(self, session: Session, start: int) -> None:
        """Put on record what the history has gained; where that fails, it has gained nothing."""
        try:
            await self._keep_tokens(session, *spans_since(session, start))
        except HoldfastError:
            await self._backend.rewind(live(session), start, is_limited=False)
            session.history.rewind(start)
            raise

    async def _remove(self, session: Session, why: str) -> int:
        """Take a session out, for good; its trajectory stays in the journal. Returns the final history length."""
        if session.parking is not None:
            await asyncio.shield(session.parking)
        self._store.remove(session, why)
        self.on_gone(session.id)
        self.metrics.session_total.labels(why).inc()

        async def finish() -> None:
            if session.handle is not None:
                await self._backend.close(session.handle)
            await self._places.forget(session)
            await self._keep(session, SessionClosed(session.id, why, time.time()))

        await asyncio.shield(asyncio.ensure_future(finish()))
        return len(session.history)

    async def _discard(self, session: Session) -> None:
        """Take back a session that its creator never learnt of, unless someone was faster."""
        if not session.gate.is_closed:
            await self._remove(session, "closed")

    def _check_not_closed(self, session: Session) -> None:
        """Closing beats everything: whoever is overtaken by it is told so, not that all went well."""
        if session.gate.is_closed:
            self._store.get(session.id, session.owner)

    def _view(self, session: Session) -> SessionView:
        self._check_not_closed(session)
        backend = PARKED if session.handle is None else self._backend.view(session.handle)
        return view_of(session, backend, self.model.recent)


_USES = {"chat": "chats over HTTP", "tokens": "was opened for raw tokens over gRPC"}
