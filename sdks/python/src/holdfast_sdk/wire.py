"""The blocking connections: carries out flows and opens streams, over one gRPC channel for each address."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc

from holdfast_sdk.address import Address
from holdfast_sdk.errors import HoldfastError
from holdfast_sdk.flow import Call, Flow, Pause, Step
from holdfast_sdk.gen.runtime_pb2_grpc import RuntimeServiceStub
from holdfast_sdk.route import Route
from holdfast_sdk.status import from_rpc_error

T = TypeVar("T")


class Wire:
    """A channel connects when it is first used."""

    def __init__(self, addresses: Sequence[Address], sleep: Callable[[float], None] = time.sleep) -> None:
        self._metadata = addresses[0].metadata  # the same for all
        self.sleep = sleep
        self._channels = [_channel(address) for address in addresses]
        self._stubs = [RuntimeServiceStub(channel) for channel in self._channels]
        self.route = Route(len(addresses))

    def run(self, flow: Flow[T]) -> T:
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
                answer, resume = self._perform(step), flow.send
            except HoldfastError as error:
                answer, resume = error, flow.throw

    def stream(self, flow: Flow[Any]) -> "Stream":
        """Sends the call of the flow now; the answers come as the stream is read."""
        return Stream(self, flow)

    def start(self, call: Call, index: int) -> Any:
        """Sends the call to the address with this index."""
        method = getattr(self._stubs[index], call.rpc)
        return method(call.request, timeout=call.timeout_s, metadata=self._metadata)

    def close(self) -> None:
        """Ends every call that is still running."""
        for channel in self._channels:
            channel.close()

    def _perform(self, step: Step) -> Any:
        if isinstance(step, Pause):
            return self.sleep(step.seconds)
        index = self.route.current
        try:
            return self.start(step, index)
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
            self.route.failed(index, failure)
            raise failure from error


def _channel(address: Address) -> grpc.Channel:
    if address.credentials is None:
        return grpc.insecure_channel(address.target, options=address.options)
    return grpc.secure_channel(address.target, address.credentials, options=address.options)


class Stream(Iterator[Any]):
    """The messages that the server sends in answer to one call. Until the first has come, the flow says whether an
    error means that the call is sent again."""

    def __init__(self, wire: Wire, flow: Flow[Any]) -> None:
        self._wire = wire
        self._flow = flow
        self._has_begun = self._is_closed = False
        self._open(next(flow))

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Any:
        while True:
            try:
                message = next(self._rpc)
                self._has_begun = True
                return message
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                self._wire.route.failed(self._index, failure, has_begun=self._has_begun)
                if self._has_begun or self._is_closed:
                    raise failure from error
                failure.__cause__ = error
                self._open(self._flow.throw(failure))

    def close(self) -> None:
        """Tells the server to stop; nothing happens where it has ended."""
        self._is_closed = True
        self._rpc.cancel()

    def _open(self, step: Step) -> None:
        while isinstance(step, Pause):
            self._wire.sleep(step.seconds)
            step = self._flow.send(None)
        self._index = self._wire.route.current
        self._rpc = self._wire.start(step, self._index)
        if self._is_closed:  # meanwhile
            self._rpc.cancel()
