"""Sessions by token ids on an upstream server: histories kept here, and one generation as a stream of events.

The wire formats are the backends' (sglang.py, vllm.py).
"""

import itertools
import secrets
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from holdfast.backends.passthrough import affinity
from holdfast.backends.servers import Server, Servers
from holdfast.backends.transport import Events, Overloaded
from holdfast.backends.validation import check_limit
from holdfast.config import UpstreamConfig
from holdfast.errors import (
    CapacityExhausted,
    InvalidArgument,
    SessionBusy,
    SessionNotFound,
    SnapshotMismatch,
    Unimplemented,
    UpstreamError,
    UpstreamInvalid,
    UpstreamUnreachable,
)
from holdfast.generation import Done, Event, Sampled, SamplingParams, StopReason
from holdfast.sessions.ports import BackendView, ModelInfo, WeightsLoaded
from holdfast.sessions.record import View

_NOT_OURS = "the weights are those of the upstream server: update them there, then PUT /control/weight_version here"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPiece:
    """What one event adds. `finish` is the reason if the generation is over, and `matched` the token that ended it."""

    sampled: Sequence[Sampled] = ()
    finish: str | None = None
    matched: int | None = None
    num_cached: int = 0


class StreamReader(Protocol):
    """Reads and checks the events of one stream, from its beginning. Pure; raises UpstreamError only."""

    def read(self, data: bytes) -> StreamPiece: ...


Opened = tuple[Events, StreamReader]


@dataclass(slots=True, eq=False)
class UpstreamSequence:
    """A history that is kept here. The upstream gets all of it each time, and finds its prefix in its own cache."""

    routing_key: str
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    stream: "UpstreamStream | None" = None


class UpstreamSequences(ABC):
    """All sequences of an upstream, each with a handle."""

    servers: Servers
    config: UpstreamConfig

    def __init__(self, model: ModelInfo, capacity: int) -> None:
        self._model = model
        self._capacity = capacity
        self._handles = itertools.count(1)
        self._sequences: dict[int, UpstreamSequence] = {}

    @abstractmethod
    async def _open_stream(
        self, server: Server, prompt: list[int], params: SamplingParams, headers: Mapping[str, str]
    ) -> Opened:
        """Start a generation from `prompt`."""

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def capacity(self) -> int:
        return self._capacity

    async def open(self, *, sink: int) -> int:
        return self._add(UpstreamSequence(secrets.token_hex(16)))

    async def pin(self, handle: int, sink: int) -> None:
        """Nothing to do: the upstream sees the whole history."""
        self._idle(handle)

    async def append(self, handle: int, tokens: Sequence[int]) -> Done:
        sequence = self._idle(handle)
        self._check_tokens(tokens)
        sequence.tokens.extend(tokens)
        return Done(
            stop_reason=None,
            num_generated=0,
            history_length=len(sequence.tokens),
            num_dropped=0,
            prefill_tokens=0,  # the upstream computes when it generates
            prefill_duration_s=0.0,
            total_duration_s=0.0,
            seed=None,
        )

    def generate(
        self, handle: int, params: SamplingParams, tokens: Sequence[int] = (), *, view: View | None = None
    ) -> "UpstreamStream":
        sequence = self._idle(handle)
        self._check_tokens(tokens)
        params.check_vocabulary(self._model.vocab_size)
        if params.constraint is not None:
            raise InvalidArgument(
                "response_format and forced tool calls need a chat session and --upstream-api chat here: "
                "the upstream enforces them",
                param="response_format",
            )
        if not (sequence.tokens or tokens):
            raise InvalidArgument("cannot generate from an empty history; append at least one token first")
        num_hidden = view.num_hidden if view else 0
        room = self._model.context - len(sequence.tokens) - len(tokens) + num_hidden
        if 0 < room < params.max_tokens:
            params = replace(params, max_tokens=room)
        headers = affinity(sequence.routing_key)

        async def opening(server: Server, prompt: list[int]) -> Opened:
            return await self._open_stream(server, view.of(prompt) if view else prompt, params, headers)

        return UpstreamStream(
            sequence,
            params,
            tokens,
            opening,
            servers=self.servers,
            num_retries=self.config.retry_aborted,
            num_hidden=num_hidden,
        )

    async def fork(self, handle: int) -> int:
        source = self._idle(handle)
        return self._add(UpstreamSequence(source.routing_key, array("i", source.tokens)))

    async def snapshot(self, handle: int) -> bytes | None:
        return None

    async def restore(self, content: bytes, tokens: Sequence[int]) -> int:
        raise SnapshotMismatch("an upstream backend has no snapshots")

    async def rewind(self, handle: int, length: int, *, is_limited: bool = True) -> int:
        sequence = self._idle(handle)
        if not 0 <= length <= len(sequence.tokens):
            raise InvalidArgument(f"cannot rewind a history of {len(sequence.tokens)} tokens to {length}")
        del sequence.tokens[length:]
        return 0

    async def close(self, handle: int) -> int:
        sequence = self._get(handle)
        if sequence.stream:
            sequence.stream.cancel()
        del self._sequences[handle]
        return len(sequence.tokens)

    def view(self, handle: int) -> BackendView:
        return BackendView(
            history_length=len(self._get(handle).tokens),
            num_dropped=0,
            kv_live_bytes=None,
            kv_reserved_bytes=None,
            inv1_violations=0,
            inv2_violations=0,
            failure=None,
        )

    async def label_weights(self, version: str) -> None:
        """Nothing to do: the upstream tells the version, or the turn's setup does."""
        return

    @property
    def max_weight_bytes(self) -> int:
        raise Unimplemented(_NOT_OURS)

    async def load_weights(self, path: Path, *, version: str, keeps_caches: bool) -> WeightsLoaded:
        raise Unimplemented(_NOT_OURS)

    def _add(self, sequence: UpstreamSequence) -> int:
        if len(self._sequences) >= self._capacity:
            raise CapacityExhausted(f"all {self._capacity} sequences are in use")
        handle = next(self._handles)
        self._sequences[handle] = sequence
        return handle

    def _get(self, handle: int) -> UpstreamSequence:
        try:
            return self._sequences[handle]
        except KeyError:
            raise SessionNotFound(handle) from None

    def _idle(self, handle: int) -> UpstreamSequence:
        sequence = self._get(handle)
        if sequence.stream:
            raise SessionBusy(f"sequence {handle} is busy")
        return sequence

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        last = self._model.vocab_size - 1
        for index, token in enumerate(tokens):
            if type(token) is not int or not 0 <= token <= last:
                raise InvalidArgument(f"token {token!r} at index {index} is not a token id between 0 and {last}")


class UpstreamStream:
    """Events of one generation, read from the upstream as the caller iterates. Leaving closes the request.

    Entering waits for the first token: an error before it leaves the history unchanged, and the request may be sent
    again. Later it is not: the caller has tokens already, and others may be sampled with other weights.
    """

    def __init__(
        self,
        sequence: UpstreamSequence,
        params: SamplingParams,
        tokens: Sequence[int],
        opening: Callable[[Server, list[int]], Awaitable[Opened]],
        *,
        servers: Servers,
        num_retries: int,
        num_hidden: int = 0,
    ) -> None:
        self._sequence = sequence
        self._params = params
        self._tokens = tokens
        self._opening = opening
        self._servers = servers
        self._num_retries = num_retries
        self._num_hidden = num_hidden  # tokens of the history that are not in the prompt
        self._server: Server
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
            key = self._sequence.routing_key
            piece, _ = await self._servers.run(key, self._begin, num_retries=self._num_retries)
        except BaseException:
            self._end()
            raise
        self._first_at = time.perf_counter()
        self._sequence.tokens.extend(self._tokens)
        self._take(piece)
        return self

    async def _begin(self, server: Server) -> StreamPiece | None:
        """The first piece with tokens."""
        self._server, self._finish = server, None
        try:
            self._source, self._reader = await self._opening(server, [*self._sequence.tokens, *self._tokens])
            piece = await self._next()
            while piece is not None and not piece.sampled:
                piece = await self._next()
            return piece
        except UpstreamError as exc:
            if self._source is not None:
                self._source.close()
            if isinstance(exc, Overloaded | UpstreamInvalid):
                await self._servers.confirm(server, was_turned_away=isinstance(exc, Overloaded))
            raise

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
            except UpstreamError as exc:
                self._is_over = True
                if isinstance(exc, UpstreamUnreachable):
                    self._servers.lost(self._server, exc)
                raise
            self._take(piece)
        return self.rest()

    def rest(self) -> list[Event]:
        batch, self._waiting = self._waiting, []
        return batch

    def cancel(self) -> None:
        """End the generation from outside: the caller that iterates gets a Done with CANCELLED."""
        self._is_cancelled = True
        if self._source is not None:
            self._source.close()

    async def _next(self) -> StreamPiece | None:
        """The next event, checked; None at the end, which must come after a finish reason."""
        assert self._source is not None
        try:
            data = None if self._is_cancelled else await self._source.next()
            piece = None if data is None or data == b"[DONE]" else self._reader.read(data)
        except UpstreamError:
            if self._is_cancelled:
                return None
            raise
        if piece is None:
            if self._finish is None and not self._is_cancelled:
                raise UpstreamUnreachable("the upstream closed the stream before the generation was finished")
            return None
        if piece.sampled and self._finish is not None:
            raise UpstreamInvalid("the upstream sent tokens after the end of the generation")
        if piece.finish and not (piece.sampled or self._num_sampled):
            raise UpstreamInvalid("the upstream returned no tokens")
        check_limit(self._num_sampled + len(piece.sampled), self._params.max_tokens)
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
            num_dropped=self._num_hidden,
            prefill_tokens=max(0, history - self._num_hidden - self._num_sampled - self._num_cached),
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
