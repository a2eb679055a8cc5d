"""The asyncio connections: carries out flows and opens streams, over one gRPC channel for each address."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import grpc

from holdfast_sdk.address import Address
from holdfast_sdk.errors import Cancelled, HoldfastError
from holdfast_sdk.flow import Call, Flow, Pause, Step
from holdfast_sdk.gen.runtime_pb2_grpc import RuntimeServiceStub
from holdfast_sdk.route import Route
from holdfast_sdk.status import from_rpc_error

T = TypeVar("T")


class AsyncWire:
    """Connects at the first call, on the event loop that makes it."""

    def __init__(self, addresses: Sequence[Address], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._addresses = addresses
        self.sleep = sleep
        self.route = Route(len(addresses))

    @cached_property
    def _channels(self) -> list[grpc.aio.Channel]:
        return [_channel(address) for address in self._addresses]

    @cached_property
    def _stubs(self) -> list[RuntimeServiceStub]:
        return [RuntimeServiceStub(channel) for channel in self._channels]

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

    def stream(self, flow: Flow[Any]) -> "AsyncStream":
        """Sends the call of the flow now; the answers come as the stream is read."""
        return AsyncStream(self, flow)

    def start(self, call: Call, index: int) -> Any:
        """Sends the call to the address with this index."""
        method = getattr(self._stubs[index], call.rpc)
        return method(call.request, timeout=call.timeout_s, metadata=self._addresses[index].metadata)

    async def close(self) -> None:
        """Ends every call that is still running."""
        await asyncio.gather(*(channel.close(grace=None) for channel in self._channels))

    async def _perform(self, step: Step) -> Any:
        if isinstance(step, Pause):
            return await self.sleep(step.seconds)
        index = self.route.current
        try:
            with translated():
                return await self.start(step, index)
        except HoldfastError as failure:
            self.route.failed(index, failure)
            raise


def _channel(address: Address) -> grpc.aio.Channel:
    if address.credentials is None:
        return grpc.aio.insecure_channel(address.target, options=address.options)
    return grpc.aio.secure_channel(address.target, address.credentials, options=address.options)


class AsyncStream(AsyncIterator[Any]):
    """The messages that the server sends in answer to one call. Until the first has come, the flow says whether an
    error means that the call is sent again."""

    def __init__(self, wire: AsyncWire, flow: Flow[Any]) -> None:
        self._wire = wire
        self._flow = flow
        self._has_begun = self._is_closed = False
        self._open(next(flow))

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Any:
        while True:
            try:
                with translated():
                    message = await anext(self._messages)
                self._has_begun = True
                return message
            except HoldfastError as failure:
                self._wire.route.failed(self._index, failure, has_begun=self._has_begun)
                if self._has_begun or self._is_closed:
                    raise
                step = self._flow.throw(failure)
            while isinstance(step, Pause):
                await self._wire.sleep(step.seconds)
                step = self._flow.send(None)
            self._open(step)

    def close(self) -> None:
        """Tells the server to stop; nothing happens where it has ended."""
        self._is_closed = True
        self._rpc.cancel()

    def _open(self, call: Step) -> None:
        assert isinstance(call, Call)
        self._index = self._wire.route.current
        self._rpc = self._wire.start(call, self._index)
        self._messages = aiter(self._rpc)
        if self._is_closed:  # meanwhile
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
