"""What one turn adds to a session's history: the tokens it was given, then the sampled ones."""

import asyncio
from collections.abc import Sequence

from holdfast.generation import Done, Event, Sampled, StopReason
from holdfast.sessions.session import Session


class GenerationRecord:
    """Records a generation into its session, in order, each token once."""

    def __init__(self, session: Session, tokens: Sequence[int]) -> None:
        self.session = session
        self._tokens = tokens
        self.start = len(session.history)
        self.keeping: asyncio.Task[None] | None = None  # its way into the journal
        self._span = None if tokens else session.history.begin_sampled()

    @property
    def num_sampled(self) -> int:
        return self._span.length if self._span else 0

    def record(self, events: Sequence[Event], *, backend_length: int | None = None) -> None:
        """Take `events` over. Any event, or a backend that has grown, means that the tokens were taken in."""
        grown = backend_length is not None and backend_length > self.start
        if self._span is None and (events or grown):
            self.session.history.give(self._tokens)
            self._span = self.session.history.begin_sampled()
        for event in events:
            if isinstance(event, Sampled) and self._span:
                self.session.history.sample(self._span, event)
            elif isinstance(event, Done):
                self.end(event.stop_reason)

    def end(self, reason: StopReason | None) -> None:
        if self._span:
            self._span.stop_reason = reason
