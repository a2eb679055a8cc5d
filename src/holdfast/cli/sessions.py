"""`holdfast sessions`: the sessions of a running server, over gRPC. Its key: HOLDFAST_API_KEY."""

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from holdfast.cli.lines import ServerError
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc

_PAGE = 1000
_PIPED_WIDTH = 200  # ids are there to be copied: never cut

Call = Callable[[Any, list[tuple[str, str]]], Awaitable[None]]


def register(commands: Any) -> None:
    parser = commands.add_parser("sessions", help="list, show and close a server's sessions", description=__doc__)
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    for name, about, run in (
        ("list", "all of your sessions", _list),
        ("show", "how one of them stands", _show),
        ("close", "end sessions; what is on record stays until it is purged", _close),
    ):
        action = actions.add_parser(name, help=about)
        action.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT", help="default: %(default)s")
        if name != "list":
            action.add_argument("session_ids", nargs="+", metavar="SESSION")
        action.set_defaults(run=run)


def _list(arguments: argparse.Namespace) -> int:
    table = Table("session", "label", "state", "tokens", "out of view", "idle")

    async def call(stub: Any, metadata: list[tuple[str, str]]) -> None:
        token = ""
        while True:
            request = pb.ListSessionsRequest(page_size=_PAGE, page_token=token)
            page = await stub.ListSessions(request, metadata=metadata)
            for info in page.sessions:
                table.add_row(*_row(info))
            if not (token := page.next_page_token):
                return

    asyncio.run(_with_server(arguments.server, call))
    console = Console()
    (console if console.is_terminal else Console(width=_PIPED_WIDTH)).print(table)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    console = Console()

    async def call(stub: Any, metadata: list[tuple[str, str]]) -> None:
        for session_id in arguments.session_ids:
            request = pb.GetSessionInfoRequest(session_id=session_id)
            console.print(str(await stub.GetSessionInfo(request, metadata=metadata)), highlight=False)

    asyncio.run(_with_server(arguments.server, call))
    return 0


def _close(arguments: argparse.Namespace) -> int:
    async def call(stub: Any, metadata: list[tuple[str, str]]) -> None:
        for session_id in arguments.session_ids:
            closed = await stub.CloseSession(pb.CloseSessionRequest(session_id=session_id), metadata=metadata)
            print(f"{session_id}: closed after {closed.final_history_length:,} tokens")

    asyncio.run(_with_server(arguments.server, call))
    return 0


def _row(info: pb.SessionInfo) -> tuple[str, ...]:
    state = pb.SessionState.Name(info.state).removeprefix("SESSION_STATE_").lower()
    return (
        info.session_id,
        info.client_label,
        state,
        f"{info.history_length:,}",
        f"{info.dropped_token_count:,}",
        f"{info.idle_seconds:,.0f} s",
    )


async def _with_server(address: str, call: Call) -> None:
    key = os.environ.get("HOLDFAST_API_KEY", "")
    metadata = [("authorization", f"Bearer {key}")] if key else []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            await call(stub, metadata)
        except grpc.aio.AioRpcError as exc:
            if exc.code() is grpc.StatusCode.UNAVAILABLE:
                raise ServerError(f"no answer from {address}: is `holdfast serve` running there?") from exc
            raise ServerError(f"{address}: {exc.details()}") from exc
