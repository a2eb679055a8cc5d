"""Two ways to reach a session from the terminal: an engine in this process, or a server."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

import grpc

from holdfast.errors import ConfigError, HoldfastError
from holdfast.generation import Done, Event, Sampled, SamplingParams, StopReason, Truncated
from holdfast.models import ModelSource
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc
from holdfast.serving.keys import LOCAL_OWNER
from holdfast.sessions.runtime import Runtime
from holdfast.sessions.view import SessionView

_STOP_REASONS = {
    pb.STOP_REASON_MAX_TOKENS: StopReason.MAX_TOKENS,
    pb.STOP_REASON_EOS: StopReason.EOS,
    pb.STOP_REASON_STOP_TOKEN: StopReason.STOP_TOKEN,
    pb.STOP_REASON_CANCELLED: StopReason.CANCELLED,
}


class ChatSession(Protocol):
    """One session at a time: `open` it, `say` things, `close` it."""

    @property
    def sink(self) -> int: ...

    @property
    def max_pin(self) -> int: ...

    async def open(self, pin_tokens: int) -> None: ...

    def say(self, tokens: Sequence[int], params: SamplingParams) -> AsyncGenerator[Event, None]: ...

    async def last_token(self) -> int:
        """The end of the history, also of what an interrupted answer left there."""

    async def facts(self) -> SessionView | pb.SessionInfo: ...

    async def close(self) -> None: ...


class LocalSession:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._session = ""

    @property
    def sink(self) -> int:
        return self._runtime.model.sink

    @property
    def max_pin(self) -> int:
        return self._runtime.model.max_pin

    async def open(self, pin_tokens: int) -> None:
        self._session = (await self._runtime.create(LOCAL_OWNER, pin_tokens=pin_tokens)).session_id

    async def say(self, tokens: Sequence[int], params: SamplingParams) -> AsyncGenerator[Event, None]:
        batches = self._runtime.generate(self._session, LOCAL_OWNER, params, tokens=tokens)
        async with contextlib.aclosing(batches):
            async for batch in batches:
                for event in batch:
                    yield event

    async def last_token(self) -> int:
        length = (await self.facts()).history_length
        return self._runtime.history(self._session, LOCAL_OWNER, length - 1)[0].tokens[0]

    async def facts(self) -> SessionView:
        return self._runtime.info(self._session, LOCAL_OWNER)

    async def close(self) -> None:
        await self._runtime.close(self._session, LOCAL_OWNER)


class ServerError(HoldfastError):
    """What a server said, in its own words."""

    code = "server"


class ServerSession:
    def __init__(self, address: str, key: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub: Any = rpc.RuntimeServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = [("authorization", f"Bearer {key}")] if key else []
        self._address = address
        self._session = ""
        self._model = pb.GetModelInfoResponse()

    async def connect(self, source: ModelSource) -> None:
        """Learn the server's model; text means the same on both sides only with the same tokenizer."""
        with self._translated():
            self._model = await self._stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=self._metadata)
        if self._model.tokenizer_hash != source.tokenizer_hash:
            raise ConfigError(
                f"{self._address} serves {self._model.name}, whose tokenizer is not that of {source.name}; "
                "name its model with --model"
            )

    @property
    def sink(self) -> int:
        return self._model.sink

    @property
    def max_pin(self) -> int:
        return self._model.max_pin_tokens

    async def open(self, pin_tokens: int) -> None:
        with self._translated():
            request = pb.CreateSessionRequest(client_label="holdfast chat", pin_tokens=pin_tokens)
            self._session = (await self._stub.CreateSession(request, metadata=self._metadata)).session_id

    async def say(self, tokens: Sequence[int], params: SamplingParams) -> AsyncGenerator[Event, None]:
        sampling = pb.SamplingOptions(
            seed=params.seed,
            temperature=params.temperature,
            top_p=params.top_p,
            stop_token_ids=sorted(params.eos_token_ids),
        )
        request = pb.TurnRequest(
            session_id=self._session, token_ids=tokens, max_tokens=params.max_tokens, sampling=sampling
        )
        call = self._stub.Turn(request, metadata=self._metadata)
        try:
            with self._translated():
                async for message in call:
                    yield _event(message)
        finally:
            call.cancel()

    async def last_token(self) -> int:
        length = (await self.facts()).history_length
        request = pb.GetHistoryRequest(session_id=self._session, from_position=length - 1)
        with self._translated():
            chunk = await self._stub.GetHistory(request, metadata=self._metadata).read()
        return int(chunk.token_ids[0])

    async def facts(self) -> pb.SessionInfo:
        with self._translated():
            request = pb.GetSessionInfoRequest(session_id=self._session)
            info: pb.SessionInfo = await self._stub.GetSessionInfo(request, metadata=self._metadata)
            return info

    async def close(self) -> None:
        with self._translated():
            await self._stub.CloseSession(pb.CloseSessionRequest(session_id=self._session), metadata=self._metadata)

    @contextlib.contextmanager
    def _translated(self) -> Any:
        try:
            yield
        except grpc.aio.AioRpcError as exc:
            if exc.code() is grpc.StatusCode.UNAVAILABLE:
                raise ServerError(f"no answer from {self._address}: is `holdfast serve` running there?") from exc
            raise ServerError(f"{self._address}: {exc.details()}") from exc


def _event(message: pb.GenerateEvent) -> Event:
    if message.HasField("token"):
        token = message.token
        return Sampled(token=token.token_id, logprob=token.logprob, sampling_logprob=token.sampling_logprob)
    if message.HasField("truncated"):
        return Truncated(message.truncated.from_position, message.truncated.to_position)
    done = message.done
    return Done(
        stop_reason=_STOP_REASONS.get(done.stop_reason),
        num_generated=done.generated_token_count,
        history_length=done.history_length,
        num_dropped=done.dropped_token_count,
        prefill_tokens=done.prefill_tokens,
        prefill_duration_s=done.prefill_duration_seconds,
        total_duration_s=done.total_duration_seconds,
        seed=done.seed,
    )
