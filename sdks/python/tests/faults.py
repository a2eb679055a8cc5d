"""What can go wrong on the way to the fake server, planned by tests; and a record of what arrived there."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status


async def refuse(
    context: Any,
    status: grpc.StatusCode,
    code: str | None,
    *,
    details: Mapping[str, str] | None = None,
    message: str = "",
    domain: str = "holdfast",
) -> NoReturn:
    """End the call as the server does: status, and the code as ErrorInfo where there is one."""
    trailers: tuple[tuple[str, bytes], ...] = ()
    if code is not None:
        packed = AnyMessage()
        packed.Pack(ErrorInfo(domain=domain, reason=code, metadata=dict(details or {})))
        body = Status(code=status.value[0], message=message, details=[packed]).SerializeToString()
        trailers = (("grpc-status-details-bin", body),)
    await context.abort(status, message or str(code), trailers)
    raise AssertionError("abort raises")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """How one call goes wrong; `after`: only once its work is done, so that the answer alone is lost."""

    status: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    code: str | None = None
    details: Mapping[str, str] = field(default_factory=dict)
    domain: str = "holdfast"
    message: str = "planned"
    after: bool = False
    stalls: bool = False  # never answers
    num_events: int = 0  # a stream gives so many before it fails
    ends: bool = False  # a stream then ends as if all were well

    async def strike(self, context: Any) -> None:
        if self.stalls:
            await asyncio.get_running_loop().create_future()
        if not self.ends:
            await refuse(
                context, self.status, self.code, details=self.details, message=self.message, domain=self.domain
            )


class Faults(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """`plan` says what goes wrong next; `calls` and `metadata` have what came in, in order."""

    def __init__(self) -> None:
        self._planned: dict[str, list[Fault]] = defaultdict(list)
        self.calls: list[str] = []
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str | bytes]] = []

    def plan(self, rpc: str, *faults: Fault) -> None:
        self._planned[rpc].extend(faults)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        rpc = details.method.rsplit("/", 1)[-1]
        self.calls.append(rpc)
        self.metadata.append(dict(details.invocation_metadata))
        handler: Any = await continuation(details)
        fault = self._planned[rpc].pop(0) if self._planned[rpc] else None
        if handler is None or handler.request_streaming:
            return handler
        if handler.response_streaming:
            return handler._replace(unary_stream=self._stream(handler.unary_stream, fault))
        return handler._replace(unary_unary=self._unary(handler.unary_unary, fault))

    def _unary(self, inner: Any, fault: Fault | None) -> Any:
        async def handle(request: Any, context: Any) -> Any:
            self.requests.append(request)
            if fault and not fault.after:
                await fault.strike(context)
            answer = await inner(request, context)
            if fault:
                await replace(fault, after=False).strike(context)
            return answer

        return handle

    def _stream(self, inner: Any, fault: Fault | None) -> Any:
        async def handle(request: Any, context: Any) -> AsyncIterator[Any]:
            self.requests.append(request)
            if fault and fault.num_events == 0:
                await fault.strike(context)
                return
            num_events = 0
            async for event in inner(request, context):
                yield event
                num_events += 1
                if fault and num_events == fault.num_events:
                    await fault.strike(context)
                    return

        return handle
