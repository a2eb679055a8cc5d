"""Who listens to sessions, and what they have not been told yet. On one event loop, where nobody waits for a listener.

The operations on sessions tell what they do; where nobody listens, that costs a look at an empty dict. A listener that
falls too far behind is dropped: it is told so, and nothing more.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from holdfast.errors import CapacityExhausted, Draining
from holdfast.generation import Event, Sampled
from holdfast.sessions.history import SpanKind
from holdfast.sessions.record import TurnRecord
from holdfast.sessions.session import Session

MAX_EVENTS = 1024  # that a listener may have unread
MAX_TOKENS = 16_384  # sampled ones among them
MAX_LISTENERS = 64  # to one session, and of one owner to all of its sessions
MAX_ROWS = 10_000  # changed and closed sessions that a listener to all sessions may have unread


@dataclass(slots=True, kw_only=True)
class NewTokens:
    """Tokens from `position` on, all of a kind. Of a chat: those of a turn below turn `parent` that is in flight."""

    position: int
    kind: SpanKind
    ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    turn_id: str = ""
    parent: int = 0

    def copy(self) -> "NewTokens":
        """One that can take others over. Given tokens, which may be many, are shared."""
        if self.kind is not SpanKind.SAMPLED:
            return self
        return replace(self, ids=self.ids[:], logprobs=self.logprobs[:], sampling_logprobs=self.sampling_logprobs[:])

    def takes_over(self, more: "NewTokens") -> bool:
        """Whether `more` goes on from here, and is part of this now. Mutates."""
        if not self.kind is more.kind is SpanKind.SAMPLED:
            return False
        if more.turn_id != self.turn_id or more.position != self.position + len(self.ids):
            return False
        self.ids += more.ids
        self.logprobs += more.logprobs
        self.sampling_logprobs += more.sampling_logprobs
        return True


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A turn is on record. `root`: the first turn of its conversation."""

    turn: TurnRecord
    turn_id: str
    root: int


@dataclass(frozen=True, slots=True)
class Discarded:
    """A turn in flight has ended, and nothing of it is on record."""

    turn_id: str
    parent: int


@dataclass(frozen=True, slots=True)
class Changed:
    """The state of the session is another one: it is busy or free, live or parked, longer or shorter."""

    session: Session


@dataclass(frozen=True, slots=True)
class Closed:
    why: str  # closed, expired or evicted; or moved: another server may have it


@dataclass(frozen=True, slots=True)
class Lagged:
    """The listener did not read, and is told nothing more."""


SessionEvent = NewTokens | NewTurn | Discarded | Changed | Closed | Lagged
_LAST: Final = (Closed, Lagged)


class SessionListener:
    """What one listener to a session has not been told yet."""

    def __init__(self) -> None:
        self._events: deque[SessionEvent] = deque()
        self._num_tokens = 0
        self._is_over = False
        self._error: Exception | None = None
        self._bell = asyncio.Event()

    def put(self, event: SessionEvent) -> None:
        if self._is_over:
            return
        last = self._events[-1] if self._events else None
        if isinstance(event, NewTokens):
            self._num_tokens += len(event.ids) if event.kind is SpanKind.SAMPLED else 0
            if not (isinstance(last, NewTokens) and last.takes_over(event)):
                self._events.append(event.copy())
        else:
            if isinstance(event, Changed) and isinstance(last, Changed):
                self._events.pop()
            self._events.append(event)
        if len(self._events) > MAX_EVENTS or self._num_tokens > MAX_TOKENS:
            self._events.clear()
            self._events.append(Lagged())
        self._is_over = isinstance(self._events[-1], _LAST)
        self._bell.set()

    def end(self, error: Exception) -> None:
        """Whoever takes what is left gets the error then."""
        self._error = error
        self._bell.set()

    async def take(self) -> list[SessionEvent]:
        """What has come meanwhile; waits for it. Nothing follows `Closed` or `Lagged`."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._bell.clear()
            await self._bell.wait()
        events = list(self._events)
        self._events.clear()
        self._num_tokens = 0
        return events


class ServerListener:
    """Which of an owner's sessions have changed, and which are gone, since the listener was told last."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.changed: dict[str, Session] = {}
        self.closed: dict[str, None] = {}
        self.has_lagged = False
        self._error: Exception | None = None
        self._ended = asyncio.Event()

    def change(self, session: Session) -> None:
        self.changed[session.id] = session
        self._bound()

    def close(self, session_id: str) -> None:
        self.changed.pop(session_id, None)
        self.closed[session_id] = None
        self._bound()

    def _bound(self) -> None:
        if len(self.changed) + len(self.closed) > MAX_ROWS:
            self.has_lagged = True
            self.changed.clear()
            self.closed.clear()

    def end(self, error: Exception) -> None:
        self._error = error
        self._ended.set()

    async def pause(self, seconds: float) -> None:
        """Returns after that time. Raises where the server stops."""
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            return
        assert self._error is not None
        raise self._error


class Watch:
    """All listeners of a server. `num_sampled` and `first_tokens` go on only while some listen to all sessions."""

    def __init__(self) -> None:
        self._sessions: dict[str, list[SessionListener]] = {}  # by id
        self._servers: list[ServerListener] = []
        self._is_closed = False
        self.num_sampled = 0
        self.first_tokens: deque[tuple[float, float]] = deque(maxlen=1024)  # when, and after how long

    # Listeners

    def listen(self, session_id: str) -> SessionListener:
        """To be given back."""
        self._check(len(self._sessions.get(session_id, ())))
        listener = SessionListener()
        self._sessions.setdefault(session_id, []).append(listener)
        return listener

    def leave(self, session_id: str, listener: SessionListener) -> None:
        listeners = self._sessions[session_id]
        listeners.remove(listener)
        if not listeners:
            del self._sessions[session_id]

    def listen_to_all(self, owner: str) -> ServerListener:
        """To be given back."""
        self._check(sum(listener.owner == owner for listener in self._servers))
        listener = ServerListener(owner)
        self._servers.append(listener)
        return listener

    def leave_all(self, listener: ServerListener) -> None:
        self._servers.remove(listener)

    @property
    def num_listeners(self) -> int:
        return len(self._servers) + sum(map(len, self._sessions.values()))

    def close(self) -> None:
        """The server stops: every listener gets Draining, and there are no new ones."""
        self._is_closed = True
        for server in self._servers:
            server.end(Draining())
        for listeners in self._sessions.values():
            for listener in listeners:
                listener.end(Draining())

    def _check(self, num_listeners: int) -> None:
        """Whether there may be one more."""
        if self._is_closed:
            raise Draining
        if num_listeners >= MAX_LISTENERS:
            raise CapacityExhausted(f"{MAX_LISTENERS} clients listen here already; close one of their streams first")

    # What operations tell

    def has_listeners(self, session_id: str) -> bool:
        return session_id in self._sessions

    def tell(self, session_id: str, event: SessionEvent) -> None:
        for listener in self._sessions.get(session_id, ()):
            listener.put(event)

    def changed(self, session: Session) -> None:
        """The session is busy or free now, live or parked, has another length or another reward."""
        if not session.gate.is_closed:
            self._note(session)

    def left(self, session: Session, *, is_moved: bool) -> None:
        """The session is not in memory any more. `is_moved`: another server may have it next."""
        self._note(session)
        if is_moved and session.is_kept:
            self.tell(session.id, Closed("moved"))

    def _note(self, session: Session) -> None:
        """Of what no list shows, such as a forest's caches, nobody is told."""
        if session.is_kept and (self._sessions or self._servers):
            self.tell(session.id, Changed(session))
            self._note_row(session)

    def _note_row(self, session: Session) -> None:
        for listener in self._servers:
            if session.is_kept and listener.owner == session.owner:
                listener.change(session)

    def given(self, session: Session, position: int, tokens: Sequence[int]) -> None:
        """A session of raw tokens was given some."""
        if session.kind == "tokens" and tokens and session.id in self._sessions:
            self.tell(session.id, NewTokens(position=position, kind=SpanKind.GIVEN, ids=list(tokens)))
        if self._servers:
            self._note_row(session)

    def sampled(self, session: Session, batch: Sequence[Event]) -> None:
        """The events of a generation, whose tokens the session has by now."""
        if session.kind == "tokens" and session.id in self._sessions:
            tokens = sampled_of(batch)
            self.tell(session.id, new_tokens(len(session.history) - len(tokens), tokens))
        if self._servers:
            self._note_row(session)
            self.num_sampled += len(sampled_of(batch))

    def began(self, at: float, first_token_s: float) -> None:
        """The first token of a generation came after so long."""
        if self._servers:
            self.first_tokens.append((at, first_token_s))

    def adopted(self, num_sampled: int) -> None:
        """So many tokens were sampled elsewhere."""
        if self._servers:
            self.num_sampled += num_sampled

    def closed(self, session: Session, why: str) -> None:
        if not session.is_kept:
            return
        self.tell(session.id, Closed(why))
        for listener in self._servers:
            if listener.owner == session.owner:
                listener.close(session.id)


def sampled_of(batch: Sequence[Event]) -> list[Sampled]:
    return [event for event in batch if isinstance(event, Sampled)]


def new_tokens(position: int, tokens: Sequence[Sampled], *, turn_id: str = "", parent: int = 0) -> NewTokens:
    return NewTokens(
        position=position,
        kind=SpanKind.SAMPLED,
        ids=[token.token for token in tokens],
        logprobs=[token.logprob for token in tokens],
        sampling_logprobs=[token.sampling_logprob for token in tokens],
        turn_id=turn_id,
        parent=parent,
    )
