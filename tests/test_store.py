"""Gate and store, driven by hypothesis against plain sets."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from holdfast.errors import CapacityExhausted, SessionBusy, SessionFailed, SessionNotFound
from holdfast.sessions import session as stores
from holdfast.sessions.session import Session, SessionGate, SessionRegistry, new_session_id
from tests.effort import examples

OWNERS = ("ann", "bob")


def live_session(number: int, owner: str = "ann", clock: Callable[[], float] = lambda: 0.0) -> Session:
    session = Session(id=new_session_id(), number=number, owner=owner, sink=4, eos_token_ids=frozenset(), clock=clock)
    session.handle = 0
    return session


class StoreMachine(RuleBasedStateMachine):
    """Create, use, park, wake, fail, close and expire in any order: nobody is lost, nobody busy is evicted, and the
    places that are taken are those of the sessions with a slab."""

    sessions = Bundle("sessions")

    @initialize(capacity=st.integers(1, 4))
    def start(self, capacity: int) -> None:
        self.now = 0.0
        self.capacity = capacity
        self.store = SessionRegistry(capacity)
        self.living: dict[str, Session] = {}
        self.busy: set[str] = set()
        self.gone: dict[str, tuple[str, str]] = {}

    def _tick(self) -> None:
        self.now += 1

    def _live(self) -> list[Session]:
        return [session for session in self.living.values() if session.handle is not None]

    @rule(target=sessions, owner=st.sampled_from(OWNERS))
    def create(self, owner: str) -> object:
        self._tick()
        live = self._live()
        idle = [s for s in live if s.id not in self.busy]
        if len(live) == self.capacity and not idle:
            with pytest.raises(CapacityExhausted):
                self.store.claim_place()
            return multiple()
        victim = self.store.claim_place()
        if len(live) == self.capacity:
            assert victim is min(idle, key=lambda s: s.last_used)
            self.store.remove(victim, "evicted")
            del self.living[victim.id]
            self.gone[victim.id] = (victim.owner, "evicted")
        else:
            assert victim is None
        session = live_session(len(self.gone) + len(self.living), owner, lambda: self.now)
        self.store.add(session)
        self.living[session.id] = session
        return session

    @rule(target=sessions, owner=st.sampled_from(OWNERS), has_slab=st.booleans())
    def load(self, owner: str, has_slab: bool) -> Session:
        """One that was at rest, and may have a slab before it is here."""
        session = live_session(len(self.gone) + len(self.living), owner, lambda: self.now)
        if not has_slab or self.store.is_full:
            session.handle = None
        self.store.add_parked(session)
        self.living[session.id] = session
        return session

    @rule(session=sessions)
    def park(self, session: Session) -> None:
        """Those that have left the store are freed as well: they took no place any more."""
        session.handle = None

    @rule(session=sessions)
    def wake(self, session: Session) -> None:
        if session.id not in self.living:
            session.handle = 0
        elif session.handle is None and not self.store.is_full:
            assert self.store.claim_place() is None
            session.handle = 0
            self.store.release_place()

    @rule(session=sessions)
    def fail(self, session: Session) -> None:
        """A session that has failed keeps its slab until it is closed."""
        if session.id not in self.busy:
            session.failure = "INV-1"

    @rule()
    def claim_and_give_up(self) -> None:
        if len(self._live()) < self.capacity:
            assert self.store.claim_place() is None
            self.store.release_place()

    @rule(session=sessions)
    def enter(self, session: Session) -> None:
        self._tick()
        if session.id in self.gone:
            with pytest.raises(SessionNotFound):
                session.enter()
        elif session.id in self.busy:
            with pytest.raises(SessionBusy):
                session.enter()
        elif session.failure:
            with pytest.raises(SessionFailed):
                session.enter()
        else:
            session.enter()
            self.busy.add(session.id)

    @rule(session=sessions)
    def leave(self, session: Session) -> None:
        self._tick()
        if session.id in self.busy:
            session.leave()
            self.busy.discard(session.id)

    @rule(session=consumes(sessions), why=st.sampled_from(["closed", "expired"]))
    def remove(self, session: Session, why: str) -> None:
        if session.id in self.living:
            self.store.remove(session, why)
            del self.living[session.id]
            self.gone[session.id] = (session.owner, why)

    @rule(session=sessions, owner=st.sampled_from(OWNERS))
    def look_up(self, session: Session, owner: str) -> None:
        if session.id in self.living and session.owner == owner:
            assert self.store.get(session.id, owner) is session
            return
        with pytest.raises(SessionNotFound) as caught:
            self.store.get(session.id, owner)
        was_mine, why = self.gone.get(session.id, ("", "unknown"))
        assert caught.value.detail == (why if was_mine == owner else "unknown")

    @invariant()
    def the_living_are_those_in_the_store(self) -> None:
        if hasattr(self, "store"):
            assert {session.id for session in self.store} == set(self.living)
            idle = {s.id for s in self.store.idle_longer_than(3)}
            assert idle == {s.id for s in self.living.values() if s.id not in self.busy and self.now - s.last_used > 3}

    @invariant()
    def the_places_taken_are_those_of_the_sessions_with_a_slab(self) -> None:
        if hasattr(self, "store"):
            num_live = len(self._live())
            assert self.store.num_live == num_live <= self.capacity
            assert self.store.num_parked == len(self.living) - num_live
            assert self.store.num_free == self.capacity - num_live


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=examples(100), stateful_step_count=40)


def test_closing_beats_busy() -> None:
    gate = SessionGate("x")
    gate.enter()
    gate.close()
    with pytest.raises(SessionNotFound):
        gate.enter()
    gate.leave()
    with pytest.raises(SessionNotFound):
        gate.enter()
    with pytest.raises(SessionNotFound):
        gate.close()


def test_ids_are_unguessable_and_the_gone_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({new_session_id() for _ in range(1000)}) == 1000
    assert len(new_session_id()) == 32
    monkeypatch.setattr(stores, "_REMEMBERED", 1)
    store = SessionRegistry(4)
    sessions = []
    for number in range(2):
        store.claim_place()
        sessions.append(live_session(number))
        store.add(sessions[-1])
    for session in sessions:
        store.remove(session, "closed")
    for session, detail in zip(sessions, ("unknown", "closed"), strict=True):
        with pytest.raises(SessionNotFound) as caught:
            store.get(session.id, "ann")
        assert caught.value.detail == detail
