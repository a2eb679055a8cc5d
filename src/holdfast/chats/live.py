"""A turn in flight, as those who listen to its session are told of it. On the event loop; nobody waits."""

from collections.abc import Iterator, Sequence

from holdfast.chats.tokens import given_spans
from holdfast.chats.trajectory import PreparedTurn
from holdfast.chats.tree import Node
from holdfast.generation import Event, Sampled
from holdfast.sessions.watch import Discarded, NewTokens, NewTurn, SessionEvent, Watch, new_tokens, sampled_of


class LiveTurn:
    """`begin` with its prompt, then `sampled` with what comes; then it is `recorded`, or ends without that."""

    def __init__(self, watch: Watch, session_id: str, turn_id: str) -> None:
        self._watch = watch
        self._session_id = session_id
        self._turn_id = turn_id
        self._prepared: PreparedTurn | None = None
        self._tokens: list[Sampled] = []

    def begin(self, prepared: PreparedTurn) -> None:
        self._prepared = prepared
        if self._watch.has_listeners(self._session_id):
            for event in self._given(prepared):
                self._watch.tell(self._session_id, event)

    def sampled(self, batch: Sequence[Event]) -> None:
        tokens = sampled_of(batch)
        if tokens and self._prepared and self._watch.has_listeners(self._session_id):
            position = self._start(self._prepared) + len(self._tokens)
            self._watch.tell(self._session_id, self._sampled(position, tokens, self._prepared))
        self._tokens += tokens

    def recorded(self, node: Node) -> None:
        self._prepared = None
        self._watch.tell(self._session_id, NewTurn(node.turn, self._turn_id, node.ancestor(1).number))

    def end(self) -> None:
        """Nothing comes any more. What was told of it without being recorded is not on record."""
        if self._prepared is not None:
            self._watch.tell(self._session_id, Discarded(self._turn_id, self._prepared.parent.number))
            self._prepared = None

    def so_far(self) -> Iterator[SessionEvent]:
        """All that was told of it until now."""
        if self._prepared is not None:
            yield from self._given(self._prepared)
            if self._tokens:
                yield self._sampled(self._start(self._prepared), self._tokens, self._prepared)

    @staticmethod
    def _start(prepared: PreparedTurn) -> int:
        """Where its sampled tokens begin."""
        return prepared.parent.end + len(prepared.prompt.ids)

    def _given(self, prepared: PreparedTurn) -> Iterator[NewTokens]:
        parent, ids = prepared.parent, prepared.prompt.ids
        for kind, first, end in given_spans(len(ids), prepared.recalled):
            yield NewTokens(
                position=parent.end + first, kind=kind, ids=ids[first:end], turn_id=self._turn_id, parent=parent.number
            )

    def _sampled(self, position: int, tokens: Sequence[Sampled], prepared: PreparedTurn) -> NewTokens:
        return new_tokens(position, tokens, turn_id=self._turn_id, parent=prepared.parent.number)
