"""Every session of a server, by id: create, claim, append, generate, fork, rewind, read, close. On one event loop."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError, InvalidArgument, SessionNotFound, WeightsBusy
from holdfast.generation import Done, Event, SamplingParams
from holdfast.metrics import Metrics
from holdfast.sessions.capacity import Parking, SlabCapacity, conversation_snapshot
from holdfast.sessions.history import SpanPiece
from holdfast.sessions.journal.base import (
    Entry,
    ForkedFrom,
    Journal,
    NoJournal,
    SessionClosed,
    SessionKind,
    StoredSession,
)
from holdfast.sessions.journal.snapshots import SnapshotStore
from holdfast.sessions.listing import SessionList
from holdfast.sessions.operations import Claim, Operations, RewindResult
from holdfast.sessions.ports import Backend, ModelInfo, WeightsLoaded
from holdfast.sessions.quotas import OwnerQuotas
from holdfast.sessions.record import TurnRecord
from holdfast.sessions.residence import OnLoaded, Residence
from holdfast.sessions.session import NAME, Session, SessionRegistry, new_session_id, opened, restored
from holdfast.sessions.view import (
    ANY,
    MAX_PAGE,
    PARKED,
    Page,
    SessionState,
    SessionView,
    Wanted,
    page_of,
    view_of,
    watch_sessions,
)
from holdfast.sessions.watch import Watch

logger = logging.getLogger(__name__)

_PIECE_TOKENS = 4096


class Runtime:
    """Sessions on a backend. Every method raises at once where the session is unknown, closed or busy.

    With a journal a session may rest there: `using` has it in memory, and everything else wants it there.
    `on_loaded` is called in a thread with each session that was read, and what it returns once that is in memory;
    `on_removed` with the id of each that is in memory no more: so whoever keeps more about it can load and drop that.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        idle_ttl_s: float = 0,
        journal: Journal | None = None,
        snapshots: SnapshotStore | None = None,
        max_parked: int = 0,
        max_reply_tokens: int = 0,
        quotas: OwnerQuotas | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_loaded: OnLoaded = lambda stored: lambda: None,
        on_removed: Callable[[str], None] = lambda session_id: None,
    ) -> None:
        self._backend = backend
        self.journal: Journal = journal or NoJournal()
        self._keeps = self.journal.keeps_bodies
        self._registry = SessionRegistry(backend.capacity, is_kept_elsewhere=self._keeps)
        self._idle_ttl_s = idle_ttl_s
        self._clock = clock
        self._on_removed = on_removed
        self.max_reply_tokens = max_reply_tokens  # 0: no limit
        self._is_loading_weights = False
        self._quotas = quotas or OwnerQuotas()
        self.metrics = metrics or Metrics()
        self.watch = Watch()
        self._residence = Residence(
            self._registry,
            self.journal,
            backend,
            self.metrics,
            clock,
            watch=self.watch,
            on_loaded=on_loaded,
            on_left=on_removed,
        )
        self._capacity = self._residence.capacity = SlabCapacity(
            self._registry,
            Parking(backend, snapshots, self.metrics),
            self._give_up,
            max_parked=max_parked,
            watch=self.watch,
            is_kept_elsewhere=self._keeps,
        )
        self._operations = Operations(
            backend,
            self._capacity,
            self.journal,
            self.metrics,
            clock,
            quotas=self._quotas,
            watch=self.watch,
            drop=self._drop,
            max_reply_tokens=max_reply_tokens,
        )
        watch_sessions(self.metrics, lambda: [self._view(session) for session in self._registry])

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
        name: str = "",
        group: str = "",
        is_kept: bool = True,
    ) -> SessionView:
        """A new session. To make room, the least recently used idle session is parked; where no more may be parked one
        is put to rest, or evicted without a journal. A session that is not `is_kept` evicts nobody and is not
        journaled. A forest has no slab of its own: its conversations have (`open_cache`)."""
        self._operations.check_open()
        for token in eos_token_ids:
            if not 0 <= token < self.model.vocab_size:
                raise InvalidArgument(f"eos_token_ids: {token} is outside the vocabulary of {self.model.vocab_size}")
        sink = self.checked_pin(self.model.sink if pin_tokens is None else pin_tokens)
        session = await self._place(
            None if kind == "forest" else lambda: self._backend.open(sink=sink),
            owner=owner,
            sink=sink,
            label=label,
            eos_token_ids=frozenset(eos_token_ids) or self.model.eos_token_ids,
            metadata=dict(metadata or {}),
            kind=kind,
            name=name,
            group=group,
            pin_tokens=pin_tokens,
            is_kept=is_kept,
        )
        async with self._making(session):
            await self._record_new(session, opened(session))
            if tokens:
                await self.append(session.id, owner, tokens)
            return self._view(session)

    async def free_name(self, owner: str, metadata: Mapping[str, str]) -> str:
        """The name that the metadata of a new session gives it, unless another one has that."""
        name = metadata.get(NAME, "")
        return "" if name and await self.journal.find_named(owner, name) else name

    def using(self, session_id: str, owner: str) -> AbstractAsyncContextManager[None]:
        """The owner's session is in memory for as long as the context lasts: for a whole request. Raises
        SessionNotFound, or SessionElsewhere where another member of the cluster owns it."""
        return self._residence.using(session_id, owner)

    async def record(self, session_id: str, owner: str, *entries: Entry) -> None:
        """Write facts about a session to the journal, if it is journaled."""
        await self._operations.record(self._registry.get(session_id, owner), *entries)

    def drop(self, session_id: str, owner: str, error: HoldfastError) -> None:
        """Forget a session without closing it; whoever uses it gets the error."""
        self._drop(self._registry.get(session_id, owner), error)

    def claim(
        self,
        session_id: str,
        owner: str,
        *,
        turn_id: str = "",
        kind: SessionKind | None = None,
        expected_length: int | None = None,
    ) -> Claim:
        """The session for the caller alone, to be released. `kind` and `expected_length` must be the session's."""
        session = self._registry.get(session_id, owner)
        self._operations.check_open()
        claim = Claim(session, self._operations, turn_id=turn_id)
        try:
            claim.check(kind=kind, expected_length=expected_length)
        except BaseException:
            claim.release_now()
            raise
        return claim

    async def append(
        self, session_id: str, owner: str, tokens: Sequence[int], *, expected_length: int | None = None
    ) -> Done:
        """Add given tokens and compute them. If the caller disconnects, the appended tokens stay."""
        if not tokens:
            raise InvalidArgument("append needs at least one token")
        async with self.claim(session_id, owner, kind="tokens", expected_length=expected_length) as claim:
            return await claim.append(tokens)

    async def generate(
        self,
        session_id: str,
        owner: str,
        params: SamplingParams,
        *,
        tokens: Sequence[int] = (),
        expected_length: int | None = None,
    ) -> AsyncGenerator[list[Event], None]:
        """As `Claim.generate`, on a session that is claimed for as long as it takes."""
        async with (
            self.claim(session_id, owner, kind="tokens", expected_length=expected_length) as claim,
            contextlib.aclosing(claim.generate(params, tokens)) as batches,
        ):
            async for batch in batches:
                yield batch

    async def rewind(self, session_id: str, owner: str, length: int) -> RewindResult:
        """Forget the tokens from `length` on."""
        async with self.claim(session_id, owner, kind="tokens") as claim:
            return await claim.rewind(length)

    async def fork(
        self, session_id: str, owner: str, *, at_position: int | None = None, label: str = ""
    ) -> tuple[SessionView, int]:
        """A token session with the same past, and how many tokens had to be computed again for it."""
        recomputed = 0
        async with contextlib.AsyncExitStack() as making:
            async with self.claim(session_id, owner) as claim:
                length = claim.history_length if at_position is None else at_position
                if not 0 <= length <= claim.history_length:
                    raise InvalidArgument(f"at_position must be 0 to {claim.history_length}, got {length}")
                fork = await self._forked(claim, label, "tokens")
                await making.enter_async_context(self._making(fork))
            spans = fork.history.entries_since(fork.id, 0)
            await self._record_new(fork, opened(fork, ForkedFrom(session_id)), *spans)
            if length < len(fork.history):
                recomputed = (await self.rewind(fork.id, owner, length)).recomputed_tokens
            return self._view(fork), recomputed

    async def fork_chat(
        self, claim: Claim, turns: Sequence[TurnRecord], *, label: str = "", is_copy: bool = True
    ) -> SessionView:
        """A chat session whose past is made of these turns. `is_copy`: they are what the claimed session is at the end
        of; otherwise its next turn computes them."""
        fork = await self._forked(claim, label, claim.session.kind, turns=None if is_copy else turns)
        fork.num_turns = fork.last_turn = len(turns)
        async with self._making(fork):
            origin = ForkedFrom(claim.session.id, tuple(turn.number for turn in turns))
            await self._record_new(fork, opened(fork, origin))
            self._operations.count_bytes(fork, fork.history.num_bytes)  # the bodies of its turns are shared
            return self._view(fork)

    async def open_cache(self, claim: Claim, source: Claim | None = None, turns: Sequence[TurnRecord] = ()) -> str:
        """The id of a new session that caches a conversation of the claimed forest: a copy of the session that `source`
        has claimed; or `turns`, whose snapshot is there, parked; or empty. It is gone when the forest is, and may be
        gone before."""
        of, copied = claim.session, source.session if source else None
        if source is not None:
            await source.wake()
        sink = copied.sink if copied else self.checked_pin(self.model.sink if of.pin_tokens is None else of.pin_tokens)
        if turns and turns[0].facts.pinned is not None:
            sink = turns[0].facts.pinned
        opening = source.fork if source else None if turns else lambda: self._backend.open(sink=sink)
        cache = await self._place(
            opening,
            snapshot_id=conversation_snapshot(of.id, turns[-1].number) if turns else "",
            owner=of.owner,
            sink=sink,
            label=of.label,
            eos_token_ids=of.eos_token_ids,
            pin_tokens=of.pin_tokens,
            is_kept=False,
            cache_of=of.id,
        )
        if copied is not None:
            cache.history = copied.history.copy(len(copied.history))
        for turn in turns:
            cache.history.repeat(turn)
        if of.gate.is_closed:  # closed meanwhile, without this one
            await self._discard(cache)
            claim.check_not_closed()
        return cache.id

    async def drop_cache(self, session_id: str, owner: str) -> None:
        """Close what `open_cache` has opened, unless it is gone already."""
        with contextlib.suppress(SessionNotFound):
            await self._discard(self._registry.get(session_id, owner))

    async def name_snapshot(self, claim: Claim, turn: int) -> None:
        """A cache is at the end of this turn: its next snapshot has that name, and an earlier one is of no use."""
        session = claim.session
        name = conversation_snapshot(session.cache_of, turn)
        if name != session.snapshot_id and self._capacity.has_snapshot(session.snapshot_id):
            await self._capacity.forget(session)
        session.snapshot_id = name

    def has_snapshot(self, session_id: str, turn: int) -> bool:
        """Whether a forest's conversation can be restored at the end of a turn."""
        return self._capacity.has_snapshot(conversation_snapshot(session_id, turn))

    @property
    def has_free_slab(self) -> bool:
        return not self._registry.is_full

    @property
    def num_free_slabs(self) -> int:
        """Sessions that can be opened without parking another."""
        return self._registry.num_free

    @property
    def num_sessions(self) -> int:
        """In memory, those of hidden caches included."""
        return len(self._registry)

    def check_open(self) -> None:
        """Raises Draining where nothing new may begin."""
        self._operations.check_open()

    async def take_in(
        self, stored: StoredSession, entries: Sequence[Entry], snapshot: bytes | None, on_recorded: Callable[[], None]
    ) -> tuple[SessionView, int]:
        """A session that was made elsewhere, awake and on record, and how many tokens had to be computed for it.

        `entries` is all of it for the journal; `on_recorded` is called once they are there, before anyone can use it.
        """
        self._operations.check_open()
        session = await asyncio.to_thread(restored, stored, self._clock)  # long ones take a while
        await self._count(session)
        async with self._making(session), Claim(session, self._operations) as claim:
            if session.kind == "forest":
                async with self._capacity.parked_place():
                    self._registry.add_parked(session)
            else:
                await self._capacity.admit(session, snapshot)
            await self._record_new(session, *entries)
            claim.check_not_closed()
            on_recorded()
        self.metrics.session_total.labels("imported").inc()
        return self._view(session), session.recomputed_tokens

    def info(self, session_id: str, owner: str) -> SessionView:
        """The state of the session. Never waits, even while it is busy."""
        return self._view(self._registry.get(session_id, owner))

    def row(self, session: Session) -> SessionView:
        """The state of a session, which may have left the memory meanwhile."""
        handle = None if session.gate.is_closed else session.handle
        return view_of(session, PARKED if handle is None else self._backend.view(handle), self.model.recent)

    def counts(self) -> Counter[tuple[str, str]]:
        """How many sessions in memory are live, parked or busy, by owner and one of these words."""
        found: Counter[tuple[str, str]] = Counter()
        for session in self._registry:
            if session.is_kept:
                found[session.owner, "parked" if session.handle is None else "live"] += 1
                found[session.owner, "busy"] += session.is_busy
        return found

    def find(self, session_id: str, owner: str) -> Session:
        """The owner's session, to be looked at. Raises SessionNotFound."""
        return self._registry.get(session_id, owner)

    async def list_sessions(
        self,
        owner: str,
        *,
        wanted: Wanted = ANY,
        after: int = 0,
        size: int = MAX_PAGE,
    ) -> Page:
        """The owner's sessions that are wanted, oldest first, from the one after number `after` on."""
        if self._keeps and wanted.state is not SessionState.LIVE:
            listing = SessionList(self.journal, self._in_memory, self.model.recent)
            return await listing.page(owner, wanted, after=after, size=size)
        mine = [
            session
            for session in self._registry
            if session.owner == owner and session.number > after and session.is_kept
            if wanted.may_be(session.id, session.label, session.group)
        ]
        mine.sort(key=lambda session: session.number)
        return page_of((self._view(session) for session in mine), wanted.state, size)

    def _in_memory(self, session_id: str, owner: str) -> SessionView | None:
        session = self._registry.find(session_id, owner)
        return None if session is None else self._view(session)

    def history(self, session_id: str, owner: str, start: int = 0, end: int | None = None) -> list[SpanPiece]:
        """A copy of the history, span by span, the part that left the window included."""
        history = self._registry.get(session_id, owner).history
        end = len(history) if end is None else end
        if not 0 <= start <= end <= len(history):
            raise InvalidArgument(f"the range {start} to {end} is not within the history of {len(history)} tokens")
        return list(history.pieces(start, end, limit=_PIECE_TOKENS))

    async def close(self, session_id: str, owner: str) -> int:
        """Free everything; what runs is cancelled first. Returns the final history length."""
        return await self._remove(self._registry.get(session_id, owner), "closed")

    @contextlib.contextmanager
    def weights_claimed(self) -> Iterator[None]:
        """Nobody else may load weights meanwhile. Raises WeightsBusy where someone does."""
        if self._is_loading_weights:
            raise WeightsBusy("other weights are being loaded; try again when that is done")
        self._is_loading_weights = True
        try:
            yield
        finally:
            self._is_loading_weights = False

    @property
    def max_weight_bytes(self) -> int:
        """The size of all weights in float32. Raises Unimplemented where they are another server's."""
        return self._backend.max_weight_bytes

    async def load_weights(self, path: Path, *, version: str, keeps_caches: bool) -> WeightsLoaded:
        """As `Backend.load_weights`, for a caller that has claimed them."""
        return await self._backend.load_weights(path, version=version, keeps_caches=keeps_caches)

    async def label_weights(self, version: str) -> None:
        """Tokens that our engine samples from now on carry this version."""
        await self._backend.label_weights(version)

    async def reap(self) -> None:
        """Close sessions that have been idle for too long, for ever. A task of the server's."""
        while self._idle_ttl_s:
            await asyncio.sleep(min(self._idle_ttl_s / 4, 30))
            try:
                while idle := self._registry.idle_longer_than(self._idle_ttl_s):  # looked at anew after every wait
                    await self._remove(idle[0], "expired")
                await self._residence.expire(self._idle_ttl_s)
            except HoldfastError as exc:  # the journal fails; it is tried again
                logger.warning("idle sessions could not be closed: %s", exc)

    async def drain(self, timeout_s: float) -> bool:
        """Admit nothing new, wait for what runs. False where something still ran at the end."""
        return await self._operations.drain(timeout_s)

    async def recount_bytes(self) -> None:
        """Count anew what each owner has on record: after a start and after a purge. Takes long on a large journal."""
        if self._quotas.counts_bytes and self.journal.keeps_bodies:
            before = self._quotas.num_bytes.copy()
            on_record = Counter(await asyncio.to_thread(self.journal.num_bytes_by_owner))
            on_record.update(self._quotas.num_bytes - before)  # what came meanwhile
            self._quotas.num_bytes = on_record

    async def hand_over(self, timeout_s: float = 0.0) -> None:
        """Put every session to rest, with a snapshot, as soon as it is free, so that another process or member can go
        on with it. Sessions that are still busy after `timeout_s` are dropped. Nothing is loaded from now on."""
        await self._residence.hand_over(timeout_s)

    # Inside

    def checked_pin(self, sink: int) -> int:
        """A number of tokens that may be pinned."""
        if not 0 <= sink <= self.model.max_pin:
            raise InvalidArgument(f"pin_tokens must be 0 to {self.model.max_pin}, got {sink}", param="pin_tokens")
        return sink

    async def _place(self, opening: Callable[[], Coroutine[Any, Any, int]] | None, **fields: Any) -> Session:
        """Make room, open the session in the backend, register it. If that fails, no slot is lost. Without `opening`
        it is parked."""
        is_kept = fields["is_kept"]
        number = await self.journal.next_number() if is_kept or not self._keeps else 0
        session = Session(id=new_session_id(), number=number, clock=self._clock, **fields)
        await self._count(session)
        try:
            if opening is None:
                async with self._capacity.parked_place(may_exceed=bool(session.cache_of)):
                    self._registry.add_parked(session)
            else:
                session.handle = await self._capacity.opened(opening, may_evict=is_kept or bool(session.cache_of))
                self._registry.add(session)
        except BaseException:
            self._uncount(session)
            raise
        self.metrics.session_total.labels("created").inc()
        return session

    @contextlib.asynccontextmanager
    async def _making(self, session: Session) -> AsyncIterator[None]:
        """A new session stays in memory until it is made. Where that fails it is taken back, unless someone was
        faster: its creator never learns of it."""
        with self._residence.held(session):
            try:
                yield
            except BaseException:
                self._uncount(session)
                await self._discard(session)
                raise

    async def _record_new(self, session: Session, *entries: Entry) -> None:
        await self._operations.record(session, *entries)
        self.watch.changed(session)
        if self._keeps:
            self._uncount(session)  # the journal counts it from now on

    async def _count(self, session: Session) -> None:
        """One more session of the owner, if it may have one."""
        if session.is_kept:
            owner = session.owner
            await self._quotas.claim_session(owner, partial(self.journal.count_open, owner) if self._keeps else None)
            session.is_counted = True

    def _uncount(self, session: Session) -> None:
        if session.is_counted:
            session.is_counted = False
            self._quotas.release_session(session.owner)

    async def _give_up(self, session: Session) -> None:
        """An idle session leaves the memory: it can be read again, or without a journal is gone."""
        if self._keeps:
            await self._residence.rest([session])
        else:
            self.metrics.session_evicted.labels("capacity").inc()
            await self._remove(session, "evicted")

    def _drop(self, session: Session, error: HoldfastError) -> None:
        self._residence.drop(session, error)
        self._uncount(session)

    async def _forked(
        self, claim: Claim, label: str, kind: SessionKind, turns: Sequence[TurnRecord] | None = None
    ) -> Session:
        """A copy of the claimed session; of one that has taken these `turns` instead, which gets no slab."""
        source = claim.session
        has_slab = kind != "forest" and turns is None
        if has_slab:
            await claim.wake()
        pinned = turns[0].facts.pinned if turns else None
        fork = await self._place(
            claim.fork if has_slab else None,
            owner=source.owner,
            sink=source.sink if pinned is None else pinned,
            label=label or source.label,
            eos_token_ids=source.eos_token_ids,
            metadata=source.metadata,
            kind=kind,
            group=source.group,
            pin_tokens=source.pin_tokens,
            is_kept=source.is_kept,
        )
        if turns is None:
            fork.history = source.history.copy(len(source.history))
        for turn in turns or ():
            fork.history.repeat(turn)
        return fork

    async def _remove(self, session: Session, why: str) -> int:
        """Take a session out, for good; its trajectory stays in the journal. Returns the final history length."""
        if session.parking is not None:
            await asyncio.shield(session.parking)
        self._registry.remove(session, why)
        has_slab = session.handle is not None
        if has_slab:
            self._capacity.begin_closing()
        self._uncount(session)
        if not self._keeps:
            self._operations.count_bytes(session, -session.num_bytes)
        self._on_removed(session.id)
        self.watch.closed(session, why)
        self.metrics.session_total.labels(why).inc()

        async def finish() -> None:
            try:
                if session.handle is not None:
                    await self._backend.close(session.handle)
            finally:
                if has_slab:
                    self._capacity.finish_closing()
            await self._capacity.forget(session)
            try:
                await self._operations.record(session, SessionClosed(session.id, why, time.time()))
            except HoldfastError:
                self._registry.forget(session.id)  # the journal knows whether it is closed
                raise
            if session.kind == "forest":
                for cache in self._registry.caches_of(session.id):
                    await self._discard(cache)

        finishing = asyncio.ensure_future(finish())
        self._residence.closing(session.id, finishing)
        await asyncio.shield(finishing)
        return len(session.history)

    async def _discard(self, session: Session) -> None:
        """Take back a session that its creator never learnt of, unless someone was faster."""
        if not session.gate.is_closed and session in self._registry:
            await self._remove(session, "closed")

    def _view(self, session: Session) -> SessionView:
        session.check_here()
        backend = PARKED if session.handle is None else self._backend.view(session.handle)
        return view_of(session, backend, self.model.recent)
