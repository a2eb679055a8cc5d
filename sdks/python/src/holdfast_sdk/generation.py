"""A generation as it arrives: what both kinds keep, and the blocking one."""

from collections.abc import Iterator
from types import TracebackType

from holdfast_sdk import convert
from holdfast_sdk.errors import Cancelled, ConnectionFailed, DeadlineExceeded, HoldfastError
from holdfast_sdk.gen import runtime_pb2 as pb
from holdfast_sdk.results import Done, Token
from holdfast_sdk.session_flows import SessionFlows
from holdfast_sdk.wire import Stream


class GenerationRecord:
    """What has arrived so far. `tokens` are ids; `truncated` are position ranges that the model no longer sees."""

    def __init__(self, session: SessionFlows, *, is_turn: bool) -> None:
        self.tokens: list[int] = []
        self.truncated: list[range] = []
        self._done: Done | None = None
        self._is_turn = is_turn
        self._has_begun = False
        self._was_refused = False
        self._is_open = True
        self._session = session
        self._length_before, session.history_length = session.history_length, None

    @property
    def is_done(self) -> bool:
        """Whether the last event has arrived; False for ever where the generation was cancelled or failed."""
        return self._done is not None

    @property
    def done(self) -> Done:
        """How it ended."""
        if self._done is None:
            state = "is still running" if self._is_open else "was cancelled or failed"
            raise RuntimeError(f"this generation {state}, so there is no `done`; ask `is_done` first")
        return self._done

    def _take(self, event: pb.GenerateEvent) -> list[Token]:
        """Write the event down; its tokens. A server that knows no batches sends them one by one."""
        self._has_begun = True
        kind = event.WhichOneof("event")
        if kind == "truncated":
            self.truncated.append(convert.truncated(event.truncated))
        elif kind == "done":
            self._done = convert.done(event.done)
        sent = event.tokens.tokens if kind == "tokens" else [event.token] if kind == "token" else []
        tokens = [convert.token(token) for token in sent]
        self.tokens += [token.id for token in tokens]
        return tokens

    def _check_end(self) -> None:
        """The stream is over, without an error. Then its last event must have come."""
        if self._done is None and not self._is_open:
            raise Cancelled("this generation was cancelled or has failed; nothing more comes")
        if self._done is None:
            raise ConnectionFailed("the server ended the generation without saying how")

    def _is_failure(self, error: HoldfastError) -> bool:
        """Whether the generation failed with this error; being cancelled after the last event is no failure."""
        if self._done is not None and isinstance(error, Cancelled):
            return False
        is_lost = isinstance(error, Cancelled | ConnectionFailed | DeadlineExceeded) and not error.is_untouched
        self._was_refused = not (is_lost or self._has_begun)
        return True

    def _close(self) -> bool:
        """Tell the session what is known about its history now; False where that was done before."""
        was_open, self._is_open = self._is_open, False
        if not was_open:
            return False
        if self._done is None and not self._was_refused:
            self._session.leave_stream()
        if self._session.history_length is None:
            # Before the first event of a turn nobody knows whether its tokens arrived: with the old length, giving
            # them again is refused with HistoryConflict instead of adding them twice.
            is_unchanged = self._was_refused or (self._is_turn and not self._has_begun)
            self._session.history_length = (
                self._done.history_length if self._done else self._length_before if is_unchanged else None
            )
        return True


class Generation(GenerationRecord):
    """Sampled tokens, one by one. Leaving the `for` loop or the `with` block early cancels the generation, and so
    does dropping the object; the tokens that were streamed stay in the session's history."""

    def __init__(self, stream: Stream, session: SessionFlows, *, is_turn: bool = False) -> None:
        super().__init__(session, is_turn=is_turn)
        self._stream = stream

    def __iter__(self) -> Iterator[Token]:
        """What is still to come; raises Cancelled where it was cancelled."""
        try:
            for event in self._stream:
                yield from self._take(event)
            self._check_end()
        except HoldfastError as error:
            if self._is_failure(error):
                raise
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Stop at the next step; nothing happens where it has ended. May be called from another thread."""
        if self._close():
            self._stream.close()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()
