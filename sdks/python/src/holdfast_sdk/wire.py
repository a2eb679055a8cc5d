"""The blocking connection: carries out flows and opens streams over one gRPC channel."""

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

from holdfast_sdk.address import Address
from holdfast_sdk.errors import HoldfastError
from holdfast_sdk.flow import Call, Flow, Pause, Step
from holdfast_sdk.gen.runtime_pb2_grpc import RuntimeServiceStub
from holdfast_sdk.status import from_rpc_error

T = TypeVar("T")


class Wire:
    def __init__(self, address: Address, sleep: Callable[[float], None] = time.sleep) -> None:
        self._metadata = address.metadata
        self._sleep = sleep
        if address.credentials is None:
            self._channel = grpc.insecure_channel(address.target, options=address.options)
        else:
            self._channel = grpc.secure_channel(address.target, address.credentials, options=address.options)
        self._stub = RuntimeServiceStub(self._channel)

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

    def stream(self, call: Call) -> "Stream":
        """Sends the request now; the answers come as the stream is read."""
        return Stream(self._start(call))

    def close(self) -> None:
        """Ends every call that is still running."""
        self._channel.close()

    def _perform(self, step: Step) -> Any:
        if isinstance(step, Pause):
            return self._sleep(step.seconds)
        try:
            return self._start(step)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def _start(self, call: Call) -> Any:
        method = getattr(self._stub, call.rpc)
        return method(call.request, timeout=call.timeout_s, metadata=self._metadata)


class Stream(Iterator[Any]):
    """The messages that the server sends in answer to one call."""

    def __init__(self, rpc: Any) -> None:
        self._rpc = rpc

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Any:
        try:
            return next(self._rpc)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def close(self) -> None:
        """Tells the server to stop; nothing happens where it has ended."""
        self._rpc.cancel()
