"""Which sessions exist, who has to go when there is no room, and what became of those that are gone."""

import secrets
from collections import OrderedDict
from collections.abc import Iterator

from holdfast.errors import CapacityExhausted, SessionNotFound
from holdfast.sessions.session import Session

_REMEMBERED = 10_000  # ids of gone sessions; beyond that the oldest become merely unknown


def new_session_id() -> str:
    """Unguessable: 128 random bits in hex."""
    return secrets.token_hex(16)


class SessionRegistry:
    """Sessions by id. Room is claimed before a session is opened, so that two creators never share a place."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._claimed = 0
        self._gone: OrderedDict[str, tuple[str, str]] = OrderedDict()  # id -> (owner, why)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    @property
    def num_live(self) -> int:
        return sum(session.handle is not None for session in self._sessions.values())

    @property
    def num_parked(self) -> int:
        return len(self._sessions) - self.num_live

    @property
    def is_full(self) -> bool:
        return self.num_live + self._claimed >= self._capacity

    def claim_place(self) -> Session | None:
        """Reserve a place; where all are taken, the idle session that has to make room for it."""
        victim = None
        if self.is_full:
            idle = [s for s in self._sessions.values() if s.handle is not None and not s.is_busy and not s.parking]
            if not idle:
                raise CapacityExhausted(f"all {self._capacity} sessions are busy; try again soon or raise --sessions")
            victim = min(idle, key=lambda session: session.last_used)
        self._claimed += 1
        return victim

    def longest_parked(self) -> Session | None:
        """The idle parked session that was used least recently."""
        idle = [session for session in self._sessions.values() if session.handle is None and not session.is_busy]
        return min(idle, key=lambda session: session.last_used, default=None)

    def release_place(self) -> None:
        """Give a claimed place back, or have it filled by a session that is here already."""
        self._claimed -= 1

    def add(self, session: Session) -> None:
        """Fill a claimed place."""
        self._claimed -= 1
        self._sessions[session.id] = session

    def add_parked(self, session: Session) -> None:
        self._sessions[session.id] = session

    def remove(self, session: Session, why: str) -> None:
        """Take a session out and remember why. From now on nobody can claim it."""
        session.gate.close()
        session.closed_why = why
        del self._sessions[session.id]
        self.remember(session.id, session.owner, why)

    def remember(self, session_id: str, owner: str, why: str) -> None:
        """What became of a session that is gone."""
        self._gone[session_id] = (owner, why)
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)

    def get(self, session_id: str, owner: str) -> Session:
        """The owner's session. To anyone else it does not exist and never did."""
        session = self._sessions.get(session_id)
        if session is not None and session.owner == owner:
            return session
        gone_owner, why = self._gone.get(session_id, ("", "unknown"))
        raise SessionNotFound(session_id, detail=why if gone_owner == owner else "unknown")

    def idle_longer_than(self, seconds: float) -> list[Session]:
        return [s for s in self._sessions.values() if not s.is_busy and s.idle_s > seconds]
