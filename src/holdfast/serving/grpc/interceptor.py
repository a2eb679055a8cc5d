"""Around every gRPC call: API key and owner, decoding, the error table, a count."""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from holdfast.backends.passthrough import carried, carried_headers
from holdfast.errors import (
    Draining,
    Fenced,
    HoldfastError,
    InvalidArgument,
    PayloadTooLarge,
    SessionNotFound,
    StreamStalled,
)
from holdfast.metrics import Metrics
from holdfast.serving.cluster.grpc_forward import GrpcForwarder, OwnerAnswered
from holdfast.serving.cluster.membership import MEMBER, Cluster, Using
from holdfast.serving.keys import LOCAL_OWNER, Keys
from holdfast.serving.pacing import Pacing
from holdfast.serving.running_calls import RunningCalls

logger = logging.getLogger(__name__)

current_owner: contextvars.ContextVar[str] = contextvars.ContextVar("current_owner", default=LOCAL_OWNER)

Handler = Any  # grpc's RpcMethodHandler: which of its four behaviours is set tells its kind


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Guards the methods of one service; others (health, reflection) pass untouched."""

    def __init__(
        self,
        service: str,
        keys: Keys,
        metrics: Metrics,
        using: Using,
        *,
        stall_s: float = 0.0,
        cluster: Cluster | None = None,
        forwarder: GrpcForwarder | None = None,
        pacing: Pacing | None = None,
    ) -> None:
        """`using` has the session of a call in memory. `stall_s`: how long a stream waits for its client to read a
        message; 0: no limit."""
        self._prefix = f"/{service}/"
        self._using = using
        self.running = RunningCalls()
        self._pacing = pacing or Pacing()
        self._stall_s = stall_s
        self._keys = keys
        self._metrics = metrics
        self._cluster = cluster
        self._forwarder = forwarder

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Handler]], details: Any) -> Handler:
        if details.method.rpartition("/")[2] not in _GENERATING:  # who asks for tokens waits in admission
            await self._pacing.wait()
        handler = await continuation(details)
        if handler is None or not details.method.startswith(self._prefix):
            return handler
        method = details.method.removeprefix(self._prefix)
        decode = _decoder(handler.request_deserializer, _MAX_MB.get(method, 1))
        encode = _encoder(handler.response_serializer)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._unary(method, handler.unary_unary, decode), None, encode)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(method, handler.unary_stream, decode), None, encode
            )
        return grpc.stream_unary_rpc_method_handler(self._uploads(method, handler.stream_unary, decode), None, encode)

    def _unary(self, method: str, behaviour: Any, decode: Any) -> Any:
        async def answer(data: bytes, context: Any) -> AsyncGenerator[Any, None]:
            request = decode(data)
            async with self._on_session(method, request):
                yield await behaviour(request, context)

        async def call(data: bytes, context: Any) -> Any:
            async with self._watched(method, context):
                return [message async for message in self._answers(method, data, context, answer)][-1]

        return call

    @contextlib.asynccontextmanager
    async def _on_session(self, method: str, request: Any) -> AsyncIterator[None]:
        """While the call lasts, the session that its request names is in memory."""
        async with contextlib.AsyncExitStack() as held:
            if self._cluster is not None and method == "CreateSession":
                await self._cluster.check_room()
            if "session_id" in request.DESCRIPTOR.fields_by_name:
                may_be_closed = method == "ExportSession"
                with contextlib.suppress(SessionNotFound) if may_be_closed else contextlib.nullcontext():
                    await held.enter_async_context(self._using(request.session_id, current_owner.get()))
            yield

    def _stream(self, method: str, behaviour: Any, decode: Any) -> Any:
        async def answer(data: bytes, context: Any) -> AsyncGenerator[Any, None]:
            request = decode(data)
            async with (
                self._on_session(method, request),
                contextlib.aclosing(behaviour(request, context)) as messages,
            ):
                async for message in messages:
                    yield message

        async def call(data: bytes, context: Any) -> None:
            async with (
                self._watched(method, context),
                contextlib.aclosing(self._answers(method, data, context, answer)) as messages,
            ):
                async for message in messages:
                    self.running.begin_sending()
                    await self._write(context, message)
                    self.running.finish_sending()

        return call

    def _answers(self, method: str, data: bytes, context: Any, answer: Any) -> AsyncGenerator[Any, None]:
        """What `answer` yields, or the member that owns the session."""
        if self._forwarder is None:
            return answer(data, context)  # type: ignore[no-any-return]
        local = partial(answer, data, context)
        return self._forwarder.answers(self._prefix + method, data, context, current_owner.get(), local)

    async def _write(self, context: Any, message: Any) -> None:
        try:
            async with asyncio.timeout(self._stall_s or None):
                await context.write(message)
        except TimeoutError:
            raise StreamStalled(f"nothing was read for {self._stall_s:g} s (--stream-stall-s)") from None

    def _uploads(self, method: str, behaviour: Any, decode: Any) -> Any:
        async def call(chunks: AsyncIterator[bytes], context: Any) -> Any:
            async def decoded() -> AsyncIterator[Any]:
                async for chunk in chunks:
                    yield decode(chunk)

            async with self._watched(method, context):
                return await behaviour(decoded(), context)

        return call

    def _watched(self, method: str, context: Any) -> "_Watch":
        return _Watch(method, context, self._keys, self._metrics, running=self.running, cluster=self._cluster)


class _Watch:
    """Authenticates on the way in; on the way out counts the call and turns errors into statuses."""

    def __init__(
        self,
        method: str,
        context: Any,
        keys: Keys,
        metrics: Metrics,
        *,
        running: RunningCalls,
        cluster: Cluster | None,
    ) -> None:
        self._method = method
        self._cluster = cluster
        self._context = context
        self._keys = keys
        self._metrics = metrics
        self._running = running

    async def __aenter__(self) -> None:
        try:
            metadata = self._context.invocation_metadata() or ()
            given = {name: [v for key, v in metadata if key == name] for name in ("authorization", "x-api-key")}
            current_owner.set(self._keys.owner_of(*given.values()))
            carried.set(carried_headers((name, value) for name, value in metadata if isinstance(value, str)))
            self._running.check_open()
        except HoldfastError as exc:
            await self._abort(exc)
        if self._cluster:  # a forwarded call's are replaced by those of the member that answers
            self._context.set_trailing_metadata(((MEMBER, self._cluster.name),))
        await self._running.__aenter__()

    async def __aexit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        try:
            await self._running.__aexit__(kind, exc, traceback)
        except Draining as draining:
            exc = draining
        if exc is None:
            self._count("OK")
        elif isinstance(exc, HoldfastError):
            if isinstance(exc, Fenced) and self._cluster:
                self._cluster.suspect()
            await self._abort(exc)
        elif isinstance(exc, OwnerAnswered):
            self._count(exc.code.name)
            await self._context.abort(exc.code, exc.message, exc.trailing_metadata)
        elif isinstance(exc, Exception):
            self._count("INTERNAL")
            logger.error("%s failed", self._method, exc_info=exc)
            await self._context.abort(grpc.StatusCode.INTERNAL, "internal error; see the server log")
        else:  # cancelled: the client is gone or out of time
            self._count("CANCELLED")

    async def _abort(self, error: HoldfastError) -> None:
        self._count(code_of(error).name)
        await abort(self._context, error)

    def _count(self, code: str) -> None:
        self._metrics.grpc_requests.labels(self._method, code).inc()


# Messages of methods that take tokens, or parts of a file, in MB; those of others have 1. Decoding blocks the loop, and
# a message of many small fields takes long.
_GENERATING = ("AppendTokens", "Generate", "Turn")
_MAX_MB = {"CreateSession": 16, "AppendTokens": 16, "Turn": 16, "Generate": 16, "ImportSession": 64}


def _decoder(deserialize: Callable[[bytes], Any], max_mb: int) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        if len(data) > max_mb << 20:
            raise PayloadTooLarge(f"the request message is larger than {max_mb} MB")
        try:
            return deserialize(data)
        except DecodeError as exc:
            raise InvalidArgument("the request is not a valid message for this method") from exc

    return decode


def _encoder(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """What another member has answered is bytes already."""
    return lambda message: message if isinstance(message, bytes) else serialize(message)


# The error table of the gRPC endpoint

DOMAIN = "holdfast"
_MAX_TOLD = 1000  # characters: what a client wrote may be in a message, and trailers have a limit

STATUS = {
    "session_not_found": grpc.StatusCode.NOT_FOUND,
    "session_busy": grpc.StatusCode.ABORTED,
    "history_conflict": grpc.StatusCode.ABORTED,
    "constraint_failed": grpc.StatusCode.INVALID_ARGUMENT,
    "invalid_argument": grpc.StatusCode.INVALID_ARGUMENT,
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "capacity_exhausted": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "queue_timeout": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "quota_exceeded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "stream_stalled": grpc.StatusCode.CANCELLED,
    "paused": grpc.StatusCode.UNAVAILABLE,
    "payload_too_large": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "journal_failed": grpc.StatusCode.UNAVAILABLE,
    "fenced": grpc.StatusCode.UNAVAILABLE,
    "session_elsewhere": grpc.StatusCode.UNAVAILABLE,
    "storage_unavailable": grpc.StatusCode.UNAVAILABLE,
    "upstream_invalid": grpc.StatusCode.UNAVAILABLE,
    "upstream_unreachable": grpc.StatusCode.UNAVAILABLE,
    "upstream_aborted": grpc.StatusCode.UNAVAILABLE,
    "upstream_unavailable": grpc.StatusCode.UNAVAILABLE,
    "upstream_timeout": grpc.StatusCode.DEADLINE_EXCEEDED,
    "session_failed": grpc.StatusCode.FAILED_PRECONDITION,
    "recompute_too_long": grpc.StatusCode.FAILED_PRECONDITION,
    "unimplemented": grpc.StatusCode.UNIMPLEMENTED,
    "draining": grpc.StatusCode.UNAVAILABLE,
}


def code_of(error: HoldfastError) -> grpc.StatusCode:
    return STATUS.get(error.code, grpc.StatusCode.INTERNAL)


async def abort(context: Any, error: HoldfastError) -> None:
    """End the call with the error's status, its sentence and its facts. Always raises."""
    details = {key: value[:_MAX_TOLD] for key, value in error.details.items()}
    info = error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN, metadata=details)
    detail = any_pb2.Any()
    detail.Pack(info)
    number = code_of(error).value[0]
    status = status_pb2.Status(code=number, message=str(error)[:_MAX_TOLD], details=[detail])
    await context.abort_with_status(rpc_status.to_status(status))
