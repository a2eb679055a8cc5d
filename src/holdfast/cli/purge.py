"""`holdfast sessions purge`: closed sessions are forgotten for good."""

import argparse
import asyncio
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.cli.chat_session import ServerError
from holdfast.errors import ConfigError
from holdfast.sessions.journal.base import ClosedSession
from holdfast.sessions.journal.sqlite import SqliteJournal
from holdfast.sessions.purge import closed_sessions, purge

_ABOUT = """Forget closed sessions for good: tokens, turns, replies. Without SESSION, --closed or --older-than those
that are past the server's --retain-days. With an admin's key, or where no keys are set, those of all owners."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SHOWN = 10
_TIMEOUT_S = 600


def register(actions: Any) -> None:
    parser = actions.add_parser("purge", help="forget closed sessions for good", description=_ABOUT)
    parser.add_argument("session_ids", nargs="*", metavar="SESSION", help="these, whenever they were closed")
    parser.add_argument("--closed", action="store_true", help="all that are closed")
    parser.add_argument("--older-than", type=_age, metavar="AGE", help="closed longer ago: 90s, 30m, 12h, 7d")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--http", default="127.0.0.1:8000", metavar="HOST:PORT", help="the server's HTTP door (default: %(default)s)"
    )
    where.add_argument("--data-dir", type=Path, metavar="DIR", help="a data directory that no server uses now")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.set_defaults(run=_purge)


def _purge(arguments: argparse.Namespace) -> int:
    if arguments.session_ids and (arguments.closed or arguments.older_than is not None):
        raise ConfigError("give SESSION, or --closed or --older-than, not both")
    older_than_s = 0.0 if arguments.closed and arguments.older_than is None else arguments.older_than
    if arguments.data_dir is not None:
        return asyncio.run(_offline(arguments, older_than_s))
    asked: dict[str, Any] = {"session_ids": arguments.session_ids or None, "older_than_s": older_than_s}
    found = _post(arguments.http, asked | {"dry_run": True})["sessions"]
    if not _is_wanted([entry["session_id"] for entry in found], is_sure=arguments.yes):
        return 0 if not found else 1
    ids = [entry["session_id"] for entry in found]
    purged = sum(
        _post(arguments.http, {"session_ids": ids[first : first + 1000]})["purged"]
        for first in range(0, len(ids), 1000)
    )
    print(f"purged {_counted(purged)}")
    return 0


async def _offline(arguments: argparse.Namespace, older_than_s: float | None) -> int:
    directory: Path = arguments.data_dir.expanduser()
    if not arguments.session_ids and older_than_s is None:
        raise ConfigError("say which: SESSION, --closed or --older-than AGE")
    if not (directory / "journal.db").exists():
        raise ConfigError(f"{directory} has no journal: it is no data directory of a server")
    journal = await asyncio.to_thread(SqliteJournal, directory)
    try:
        found: list[ClosedSession] = await closed_sessions(
            journal,
            session_ids=set(arguments.session_ids) if arguments.session_ids else None,
            before=None if older_than_s is None else time.time() - older_than_s,
        )
        if not _is_wanted([session.session_id for session in found], is_sure=arguments.yes):
            return 0 if not found else 1
        await purge(journal, found)
    finally:
        await journal.close()
    print(f"purged {_counted(len(found))}")
    return 0


def _is_wanted(session_ids: Sequence[str], *, is_sure: bool) -> bool:
    """Whether these are to go: there are some, and whoever asked is sure."""
    if not session_ids:
        print("nothing to purge")
        return False
    if is_sure:
        return True
    for session_id in session_ids[:_SHOWN]:
        print(session_id)
    if len(session_ids) > _SHOWN:
        print(f"... and {len(session_ids) - _SHOWN:,} more")
    if not sys.stdin.isatty():
        raise ConfigError("nobody is here to be asked: give --yes to purge these")
    answer = input(f"forget {_counted(len(session_ids))} for good? [y/N] ")
    return answer.strip().lower() in ("y", "yes")


def _counted(number: int) -> str:
    return "1 session" if number == 1 else f"{number:,} sessions"


def _post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"content-type": "application/json"}
    if key := os.environ.get("HOLDFAST_API_KEY", ""):
        headers["authorization"] = f"Bearer {key}"
    base = address if "://" in address else f"http://{address}"
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"{address} is not HOST:PORT")
    request = urllib.request.Request(f"{base}/sessions/purge", json.dumps(body).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as exc:
        raise ServerError(f"{address}: {_said(exc)}") from exc
    except (OSError, ValueError) as exc:
        raise ServerError(f"no answer from {address}: is `holdfast serve` running there?") from exc


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {error.code}"


def _age(text: str) -> float:
    found = re.fullmatch(r"(\d+)([smhd])", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no age like 90s, 30m, 12h or 7d")
    return float(found.group(1)) * _UNITS[found.group(2)]
