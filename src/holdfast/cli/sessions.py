"""`holdfast sessions`: the sessions of a running server. Its key: HOLDFAST_API_KEY."""

import argparse
import asyncio
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast.cli import purge, session_files
from holdfast.cli.client import Metadata, add_server, with_server
from holdfast.serving.grpc.gen import runtime_pb2 as pb

_PAGE = 1000
_STATES = {"live": pb.SESSION_STATE_LIVE, "parked": pb.SESSION_STATE_PARKED, "failed": pb.SESSION_STATE_FAILED}
_PIPED_WIDTH = 200  # ids are there to be copied: never cut


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "sessions", help="list, show, export, import, close and purge sessions", description=__doc__
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    for name, about, run in (
        ("list", "all of your sessions", _list),
        ("show", "how one of them stands", _show),
        ("close", "end sessions; what is on record stays until it is purged", _close),
    ):
        action = actions.add_parser(name, help=about)
        add_server(action)
        if name == "list":
            action.add_argument("--label", help="only those with this label")
            action.add_argument("--state", choices=list(_STATES), help="only those that stand so")
        else:
            action.add_argument("session_ids", nargs="+", metavar="SESSION")
        action.set_defaults(run=run)
    session_files.register(actions)
    purge.register(actions)


def _list(arguments: argparse.Namespace) -> int:
    table = Table("session", "label", "state", "tokens", "out of view", "idle")

    async def call(stub: Any, metadata: Metadata) -> None:
        wanted = pb.ListSessionsRequest(
            page_size=_PAGE, client_label=arguments.label, state=_STATES.get(arguments.state)
        )
        while True:
            page = await stub.ListSessions(wanted, metadata=metadata)
            for info in page.sessions:
                table.add_row(*_row(info))
            if not page.next_page_token:
                return
            wanted.page_token = page.next_page_token

    asyncio.run(with_server(arguments.server, call))
    console = Console()
    (console if console.is_terminal else Console(width=_PIPED_WIDTH)).print(table)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    console = Console()

    async def call(stub: Any, metadata: Metadata) -> None:
        for session_id in arguments.session_ids:
            request = pb.GetSessionInfoRequest(session_id=session_id)
            console.print(str(await stub.GetSessionInfo(request, metadata=metadata)), highlight=False)

    asyncio.run(with_server(arguments.server, call))
    return 0


def _close(arguments: argparse.Namespace) -> int:
    async def call(stub: Any, metadata: Metadata) -> None:
        for session_id in arguments.session_ids:
            closed = await stub.CloseSession(pb.CloseSessionRequest(session_id=session_id), metadata=metadata)
            print(f"{session_id}: closed after {closed.final_history_length:,} tokens")

    asyncio.run(with_server(arguments.server, call))
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
