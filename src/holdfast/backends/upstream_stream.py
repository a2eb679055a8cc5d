"""One generation on an upstream, as the event stream that sessions know."""

import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from holdfast.backends.stream_reader import StreamPiece, StreamReader
from holdfast.backends.transport import Events
from holdfast.errors import UpstreamError, UpstreamUnreachable
from holdfast.generation import Done, Event, SamplingParams, StopReason


@dataclass(slots=True, eq=False)
class UpstreamSequence:
    """A history that lives here; the upstream gets all of it each time, and finds its prefix in its own cache."""

    routing_key: str
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    stream: "UpstreamStream | None" = None


Opened = tuple[Events, StreamReader]


class UpstreamStream:
    """Events of one generation, read from the upstream as they are asked for. Leaving closes the request.

    Entering waits for the first token: whatever fails before it leaves the history as it was.
    """

    def __init__(
        self,
        sequence: UpstreamSequence,
        params: SamplingParams,
        tokens: Sequence[int],
        opening: Callable[[list[int]], Awaitable[Opened]],
    ) -> None:
        self._sequence = sequence
        self._params = params
        self._tokens = tokens
        self._opening = opening
        self._source: Events | None = None
        self._reader: StreamReader
        self._waiting: list[Event] = []
        self._finish: StreamPiece | None = None
        self._is_over = False
        self._is_cancelled = False
        self._num_sampled = 0
        self._num_cached = 0
        self._started_at = 0.0
        self._first_at = 0.0

    async def __aenter__(self) -> Self:
        self._started_at = time.perf_counter()
        self._sequence.stream = self
        try:
            prompt = [*self._sequence.tokens, *self._tokens]
            self._source, self._reader = await self._opening(prompt)
            piece = await self._next()
            while piece is not None and not piece.sampled and not piece.finish:
                piece = await self._next()
        except BaseException:
            self._end()
            raise
        self._first_at = time.perf_counter()
        self._sequence.tokens.extend(self._tokens)
        self._take(piece)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._source is not None and not self._is_over:
            self._waiting.append(self._done(StopReason.CANCELLED))
        self._end()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Event]:
        while not self._waiting:
            if self._is_over:
                raise StopAsyncIteration
            try:
                piece = await self._next()
            except UpstreamError:
                self._is_over = True
                raise
            self._take(piece)
        return self.rest()

    def rest(self) -> list[Event]:
        batch, self._waiting = self._waiting, []
        return batch

    def cancel(self) -> None:
        """End it from outside: whoever iterates gets a Done that says so."""
        self._is_cancelled = True
        if self._source is not None:
            self._source.close()

    async def _next(self) -> StreamPiece | None:
        """The next event, checked; None at the end, which must follow a finish reason."""
        assert self._source is not None
        try:
            data = None if self._is_cancelled else await self._source.next()
            piece = None if data is None or data == b"[DONE]" else self._reader.read(data)
        except UpstreamError:
            if self._is_cancelled:
                return None
            raise
        if piece is None and self._finish is None and not self._is_cancelled:
            raise UpstreamUnreachable("the upstream's stream ended before the generation did")
        return piece

    def _take(self, piece: StreamPiece | None) -> None:
        if piece is None:
            self._waiting.append(self._done(StopReason.CANCELLED if self._is_cancelled else self._stop_reason()))
            self._end()
            return
        self._num_cached = piece.num_cached or self._num_cached
        self._num_sampled += len(piece.sampled)
        self._sequence.tokens.extend(sampled.token for sampled in piece.sampled)
        self._waiting.extend(piece.sampled)
        if piece.finish:
            self._finish = piece

    def _stop_reason(self) -> StopReason:
        assert self._finish is not None
        if self._finish.finish == "length":
            return StopReason.MAX_TOKENS
        last = self._finish.matched
        if last is None and self._num_sampled:
            last = self._sequence.tokens[-1]
        is_stop = last in self._params.stop_token_ids and last not in self._params.eos_token_ids
        return StopReason.STOP_TOKEN if is_stop else StopReason.EOS

    def _done(self, reason: StopReason) -> Done:
        now = time.perf_counter()
        history = len(self._sequence.tokens)
        return Done(
            stop_reason=reason,
            num_generated=self._num_sampled,
            history_length=history,
            num_dropped=0,
            prefill_tokens=max(0, history - self._num_sampled - self._num_cached),
            prefill_duration_s=self._first_at - self._started_at,
            total_duration_s=now - self._started_at,
            seed=self._params.seed,
        )

    def _end(self) -> None:
        self._is_over = True
        if self._source is not None:
            self._source.close()
        if self._sequence.stream is self:
            self._sequence.stream = None
