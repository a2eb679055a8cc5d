"""Gate and store, driven by hypothesis against plain sets."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from holdfast.errors import CapacityExhausted, SessionBusy, SessionNotFound
from holdfast.sessions import session as stores
from holdfast.sessions.session import Session, SessionGate, SessionRegistry, new_session_id
from tests.effort import examples

OWNERS = ("ann", "bob")


class StoreMachine(RuleBasedStateMachine):
    """Create, use, release, close and expire in any order: nobody is lost, nobody busy is evicted."""

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

    @rule(target=sessions, owner=st.sampled_from(OWNERS))
    def create(self, owner: str) -> object:
        self._tick()
        idle = [s for s in self.living.values() if s.id not in self.busy]
        if len(self.living) == self.capacity and not idle:
            with pytest.raises(CapacityExhausted):
                self.store.claim_place()
            return multiple()
        victim = self.store.claim_place()
        if len(self.living) == self.capacity:
            assert victim is min(idle, key=lambda s: s.last_used)
            self.store.remove(victim, "evicted")
            del self.living[victim.id]
            self.gone[victim.id] = (victim.owner, "evicted")
        else:
            assert victim is None
        session = Session(
            id=new_session_id(),
            number=len(self.gone) + len(self.living),
            owner=owner,
            handle=0,
            sink=4,
            eos_token_ids=frozenset(),
            clock=lambda: self.now,
        )
        self.store.add(session)
        self.living[session.id] = session
        return session

    @rule()
    def claim_and_give_up(self) -> None:
        if len(self.living) < self.capacity:
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
            assert len(self.store) <= self.capacity
            idle = {s.id for s in self.store.idle_longer_than(3)}
            assert idle == {s.id for s in self.living.values() if s.id not in self.busy and self.now - s.last_used > 3}


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
        fields = {"owner": "ann", "handle": 0, "sink": 0, "eos_token_ids": frozenset(), "clock": lambda: 0.0}
        sessions.append(Session(id=new_session_id(), number=number, **fields))  # type: ignore[arg-type]
        store.add(sessions[-1])
    for session in sessions:
        store.remove(session, "closed")
    for session, detail in zip(sessions, ("unknown", "closed"), strict=True):
        with pytest.raises(SessionNotFound) as caught:
            store.get(session.id, "ann")
        assert caught.value.detail == detail
