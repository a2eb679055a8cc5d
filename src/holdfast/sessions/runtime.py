"""What every door calls: create, append, generate, fork, rewind, info, close. All on one event loop."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from holdfast.errors import Draining, HistoryConflict, InvalidArgument, SessionFailed
from holdfast.generation import Done, Event, Sampled, SamplingParams, StopReason
from holdfast.observability.metrics import Metrics
from holdfast.sessions.observe import observe_batch, watch_sessions
from holdfast.sessions.ports import Backend, EventStream, ModelInfo
from holdfast.sessions.session import Session
from holdfast.sessions.spans import SpanPiece
from holdfast.sessions.store import Store, new_session_id
from holdfast.sessions.turn import Turn
from holdfast.sessions.view import SessionView, view_of

_PIECE_TOKENS = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rewound:
    history_length: int
    recomputed_tokens: int


class Runtime:
    """Sessions on a backend. Every method raises at once where the session is unknown, closed or busy."""

    def __init__(
        self,
        backend: Backend,
        *,
        idle_ttl_s: float = 0,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._store = Store(backend.capacity)
        self._idle_ttl_s = idle_ttl_s
        self._clock = clock
        self._is_draining = False
        self._settling: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._num_running = 0
        self._all_idle = asyncio.Event()
        self._all_idle.set()
        self.on_gone: Callable[[str], None] = lambda session_id: None  # who keeps more about a session drops it
        self.metrics = metrics or Metrics()
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
        may_evict: bool = True,
    ) -> SessionView:
        """A new session with an id of ours; the idle session that was used least recently may go for it."""
        self._check_open()
        for token in eos_token_ids:
            if not 0 <= token < self.model.vocab_size:
                raise InvalidArgument(f"eos_token_ids: {token} is outside the vocabulary of {self.model.vocab_size}")
        sink = self._checked_sink(self.model.sink if pin_tokens is None else pin_tokens)
        session = await self._place(
            lambda: self._backend.open(sink=sink),
            may_evict=may_evict,
            owner=owner,
            sink=sink,
            label=label,
            eos_token_ids=frozenset(eos_token_ids) or self.model.eos_token_ids,
            metadata=dict(metadata or {}),
        )
        if tokens:
            try:
                await self.append(session.id, owner, tokens)
            except BaseException:
                await self._discard(session)
                raise
        return self._view(session)

    async def pin(self, session_id: str, owner: str, pin_tokens: int) -> None:
        """Keep the first `pin_tokens` for ever; only while the history is empty."""
        sink = self._checked_sink(pin_tokens)
        session = self._enter(session_id, owner, 0)

        async def work() -> None:
            await self._backend.pin(session.handle, sink)
            session.sink = sink

        await self._carry_out(session, work(), lambda backend_length: None)

    async def append(
        self, session_id: str, owner: str, tokens: Sequence[int], *, expected_length: int | None = None
    ) -> Done:
        """Add given tokens and compute them. A caller who leaves does not take the tokens back."""
        if not tokens:
            raise InvalidArgument("append needs at least one token")
        session = self._enter(session_id, owner, expected_length)
        before = len(session.history)

        def conclude(backend_length: int) -> None:
            if backend_length == before + len(tokens):
                session.history.give(tokens)

        return await self._carry_out(session, self._backend.append(session.handle, tokens), conclude)

    async def generate(
        self,
        session_id: str,
        owner: str,
        params: SamplingParams,
        *,
        tokens: Sequence[int] = (),
        expected_length: int | None = None,
    ) -> AsyncGenerator[list[Event], None]:
        """Append `tokens`, then sample: event batches, the last ending with Done.

        Close the iterator to cancel; what was given and sampled until then stays.
        """
        session = self._enter(session_id, owner, expected_length)
        started = self._clock()
        turn = Turn(session, tokens)
        stream = None
        try:
            stream = self._backend.generate(session.handle, params, tokens)
            await stream.__aenter__()
            last = started
            async for batch in stream:
                now = self._clock()
                since = now - (last if turn.num_sampled else started)
                observe_batch(self.metrics, batch, since, is_first=not turn.num_sampled)
                last = now
                turn.record(batch)
                yield batch
        finally:
            await asyncio.shield(self._settle(session, self._end_generate(turn, stream)))

    async def _end_generate(self, turn: Turn, stream: EventStream | None) -> None:
        if stream is None:
            return
        await stream.__aexit__(None, None, None)
        rest = stream.rest()
        if rest:
            observe_batch(self.metrics, rest, 0.0, is_first=False)
        if not turn.session.gate.is_closed:
            turn.record(rest, backend_length=self._backend.view(turn.session.handle).history_length)

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
        session = self._enter(session_id, owner, expected_length)
        tokens = [*given, *(token.token for token in sampled)]

        def conclude(backend_length: int) -> None:
            if backend_length == expected_length + len(tokens):
                turn = Turn(session, given)
                turn.record(sampled, backend_length=backend_length)
                turn.end(stop_reason)

        await self._carry_out(session, self._backend.append(session.handle, tokens), conclude)

    async def rewind(self, session_id: str, owner: str, length: int) -> Rewound:
        """Forget the tokens from `length` on; explicit, and counted."""
        session = self._enter(session_id, owner, None)

        def conclude(backend_length: int) -> None:
            if backend_length == length:
                session.history.rewind(length)
                session.num_rewinds += 1

        work = self._backend.rewind(session.handle, length)
        return Rewound(length, await self._carry_out(session, work, conclude))

    async def fork(
        self, session_id: str, owner: str, *, at_position: int | None = None, label: str = "", may_evict: bool = True
    ) -> tuple[SessionView, int]:
        """A new session with the same past, and how many tokens had to be computed again for it."""
        source = self._enter(session_id, owner, None)
        try:
            length = len(source.history) if at_position is None else at_position
            if not 0 <= length <= len(source.history):
                raise InvalidArgument(f"at_position must be 0 to {len(source.history)}, got {length}")
            fork = await self._place(
                lambda: self._backend.fork(source.handle),
                may_evict=may_evict,
                owner=owner,
                sink=source.sink,
                label=label or source.label,
                eos_token_ids=source.eos_token_ids,
                metadata=source.metadata,
            )
            fork.history = source.history.copy(len(source.history))
        finally:
            self._leave(source)
        recomputed = 0
        if length < len(fork.history):
            try:
                recomputed = (await self.rewind(fork.id, owner, length)).recomputed_tokens
            except BaseException:
                await self._discard(fork)
                raise
        return self._view(fork), recomputed

    def info(self, session_id: str, owner: str) -> SessionView:
        """How the session stands. Never waits, also while it is busy."""
        return self._view(self._store.get(session_id, owner))

    @contextlib.contextmanager
    def held(self, session_id: str, owner: str) -> Iterator[None]:
        """The session counts as busy, though others may still use it: it is neither evicted nor reaped meanwhile."""
        session = self._store.get(session_id, owner)
        session.num_holds += 1
        try:
            yield
        finally:
            session.num_holds -= 1
            session.last_used = self._clock()

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
        self._is_draining = True
        if not self._num_running:
            return True
        try:
            await asyncio.wait_for(self._all_idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    # Inside

    def _check_open(self) -> None:
        if self._is_draining:
            raise Draining("the server is shutting down; try another one")

    def _enter(self, session_id: str, owner: str, expected_length: int | None) -> Session:
        self._check_open()
        session = self._store.get(session_id, owner)
        session.enter()
        if expected_length is not None and expected_length != len(session.history):
            session.leave()
            raise HistoryConflict(expected=expected_length, actual=len(session.history))
        self._num_running += 1
        self._all_idle.clear()
        return session

    def _leave(self, session: Session) -> None:
        session.leave()
        self._num_running -= 1
        if not self._num_running:
            self._all_idle.set()

    async def _carry_out(self, session: Session, work: Coroutine[Any, Any, T], conclude: Callable[[int], None]) -> T:
        """The result of `work`. A caller who leaves cancels it; `conclude` learns in any case what came of it."""
        task = asyncio.ensure_future(work)

        async def ending() -> None:
            await asyncio.gather(task, return_exceptions=True)
            if not session.gate.is_closed:
                conclude(self._backend.view(session.handle).history_length)

        try:
            await asyncio.shield(self._settle(session, ending()))
        except asyncio.CancelledError:
            task.cancel()
            raise
        result = await task
        self._check_not_closed(session)
        return result

    def _settle(self, session: Session, ending: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Bring an operation to its end whoever still waits; only then is the session free again."""

        async def settle() -> None:
            try:
                await ending
                if not session.gate.is_closed:
                    self._check(session)
            finally:
                self._leave(session)

        task = asyncio.ensure_future(settle())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        return task

    def _check(self, session: Session) -> None:
        view = self._backend.view(session.handle)
        if view.failure and not session.failure:
            session.failure = view.failure
            for kind in ("inv1", "inv2"):
                if getattr(view, f"{kind}_violations"):
                    self.metrics.invariant_violations.labels(kind).inc()
        try:
            session.check(view.history_length)
        except SessionFailed:
            self.metrics.invariant_violations.labels("inv1").inc()
            raise

    def _checked_sink(self, sink: int) -> int:
        if not 0 <= sink <= self.model.max_pin:
            raise InvalidArgument(f"pin_tokens must be 0 to {self.model.max_pin}, got {sink}", param="pin_tokens")
        return sink

    async def _place(
        self, opening: Callable[[], Coroutine[Any, Any, int]], *, may_evict: bool = True, **fields: Any
    ) -> Session:
        """Make room, open, and keep; whatever happens in between, no place is lost."""
        victim = self._store.claim_place(may_evict=may_evict)
        try:
            if victim is not None:
                self.on_gone(victim.id)
                self.metrics.session_evicted.labels("capacity").inc()
                self.metrics.session_total.labels("evicted").inc()
                await self._backend.close(victim.handle)
            handle = await opening()
        except BaseException:
            self._store.release_place()
            raise
        number = next(self._numbers)
        session = Session(id=new_session_id(), number=number, handle=handle, clock=self._clock, **fields)
        self._store.add(session)
        self.metrics.session_total.labels("created").inc()
        return session

    async def _remove(self, session: Session, why: str) -> int:
        self._store.remove(session, why)
        self.on_gone(session.id)
        self.metrics.session_total.labels(why).inc()
        return await asyncio.shield(asyncio.ensure_future(self._backend.close(session.handle)))

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
        return view_of(session, self._backend.view(session.handle), self.model.recent)
