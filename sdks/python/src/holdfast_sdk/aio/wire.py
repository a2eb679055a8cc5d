"""The asyncio connection: carries out flows and opens streams over one gRPC channel."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import grpc

from holdfast_sdk.address import Address
from holdfast_sdk.errors import Cancelled, HoldfastError
from holdfast_sdk.flow import Call, Flow, Pause, Step
from holdfast_sdk.gen.runtime_pb2_grpc import RuntimeServiceStub
from holdfast_sdk.status import from_rpc_error

T = TypeVar("T")


class AsyncWire:
    """Connects at the first call, on the event loop that makes it."""

    def __init__(self, address: Address, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._address = address
        self._sleep = sleep

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        address = self._address
        if address.credentials is None:
            return grpc.aio.insecure_channel(address.target, options=address.options)
        return grpc.aio.secure_channel(address.target, address.credentials, options=address.options)

    @cached_property
    def _stub(self) -> RuntimeServiceStub:
        return RuntimeServiceStub(self._channel)

    async def run(self, flow: Flow[T]) -> T:
        """Do what the flow asks for until it returns."""
        resume: Callable[[Any], Step] = flow.send
        answer: Any = None
        while True:
            try:
                step = resume(answer)
            except StopIteration as stop:
                result: T = stop.value
                return result
            try:
                answer, resume = await self._perform(step), flow.send
            except HoldfastError as error:
                answer, resume = error, flow.throw

    def stream(self, call: Call) -> "AsyncStream":
        """Sends the request now; the answers come as the stream is read."""
        return AsyncStream(self._start(call))

    async def close(self) -> None:
        """Ends every call that is still running."""
        await self._channel.close(grace=None)

    async def _perform(self, step: Step) -> Any:
        if isinstance(step, Pause):
            return await self._sleep(step.seconds)
        with translated():
            return await self._start(step)

    def _start(self, call: Call) -> Any:
        method = getattr(self._stub, call.rpc)
        return method(call.request, timeout=call.timeout_s, metadata=self._address.metadata)


class AsyncStream(AsyncIterator[Any]):
    """The messages that the server sends in answer to one call."""

    def __init__(self, rpc: Any) -> None:
        self._rpc = rpc
        self._messages = aiter(rpc)

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Any:
        with translated():
            return await anext(self._messages)

    def close(self) -> None:
        """Tells the server to stop; nothing happens where it has ended."""
        self._rpc.cancel()


@contextmanager
def translated() -> Iterator[None]:
    """grpc raises CancelledError also where only the call was cancelled; that must not look like our task's end."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Cancelled("the call was cancelled on this side", grpc_status=grpc.StatusCode.CANCELLED) from error
