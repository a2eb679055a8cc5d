"""One call, or a few, to the gRPC door of a running server; what goes wrong is one sentence."""

import argparse
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc

from holdfast.cli.chat_session import ServerError
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc

Metadata = list[tuple[str, str]]
Call = Callable[[Any, Metadata], Awaitable[None]]


def add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server", default="127.0.0.1:50051", metavar="HOST:PORT", help="its gRPC door (default: %(default)s)"
    )


async def with_server(address: str, call: Call) -> None:
    key = os.environ.get("HOLDFAST_API_KEY", "")
    metadata = [("authorization", f"Bearer {key}")] if key else []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            await call(stub, metadata)
        except grpc.aio.AioRpcError as exc:
            trailers: Iterable[tuple[str, Any]] = exc.trailing_metadata() or ()  # type: ignore[assignment]
            has_said = any(key == "grpc-status-details-bin" for key, _ in trailers)
            if exc.code() is grpc.StatusCode.UNAVAILABLE and not has_said:
                raise ServerError(f"no answer from {address}: is `holdfast serve` running there?") from exc
            raise ServerError(f"{address}: {exc.details()}") from exc
