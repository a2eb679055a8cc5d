"""One run: a scripted model, `holdfast serve` in front of it, an agent in front of that; then the checks."""

import asyncio
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import termios
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from holdfast.testing.fake_upstream import Fault
from tests.agents.agent import Agent, Command, Place, agents_folder, search_path
from tests.agents.checks import (
    Check,
    all_recorded,
    branched,
    most_at_once,
    no_errors,
    num_leaves,
    same_ids,
    same_samples,
    verified,
)
from tests.agents.door import Door
from tests.agents.model import ScriptedModel
from tests.agents.recording import write_recording
from tests.agents.server import HoldfastServer

_OPTIONS = {"header": ["--session-header", "x-claude-code-session-id,session-id,x-session-id"]}  # of the server
_NUM_FAULTS = {"faults": 2, "kill": 1}  # requests that are not answered


async def run(
    agent: Agent,
    scenario: str,
    *,
    history: str,
    slow_s: int,
    options: Sequence[str] = (),
    record: Path | None = None,
) -> dict[str, Any]:
    """Runs it, prints a line for each check, and returns the result as JSON. Files stay in the run's folder.

    `options` are further ones of `holdfast serve`.
    """
    folder = agents_folder() / "runs" / f"{agent.name}-{scenario}"
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("home", "work", "data"):
        (folder / name).mkdir(parents=True)
    kind, started = scenario.rpartition(":")[2], time.time()
    async with (
        ScriptedModel(agent.script, folder / "model.jsonl") as model,
        HoldfastServer(["--upstream", model.url, *_OPTIONS.get(kind, []), *options], folder) as server,
        Door(server, folder / "door.jsonl") as door,
        aiohttp.ClientSession() as client,
    ):
        if kind == "faults":
            body = b'{"error": {"message": "overloaded"}}'
            model.faults.extend([Fault(), Fault(), Fault(status=503, body=body), Fault(), Fault(status=500, body=body)])
        session = (await _json(client, "POST", f"{server.url}/sessions", {"history": history}))["session_id"]
        url = door.url if kind == "header" else f"{door.url}/sessions/{session}"
        place = _place(agent, folder, url=url, server=door.url, scenario=scenario, slow_s=slow_s)
        checks: list[Check] = []
        for command in agent.commands(place):
            if kind == "restart" and checks:
                await server.restart()
            checks.append(await _ran(command, place, folder, agent.limit_s))
        state, samples = await _outcome(client, server.url, session, folder, is_own=kind in ("run", "header"))
    checks += [
        all_recorded(door, state, num_faults=_NUM_FAULTS.get(kind, 0)),
        same_ids(model, state),
        same_samples(model, samples),
        verified(folder / "samples.json"),
        no_errors(state),
        branched(kind, state),
    ]
    for check in checks:
        print(f"{'ok  ' if check.is_ok else 'FAIL'} {check.name}: {check.detail}", flush=True)
    result = {
        "agent": agent.name,
        "packages": list(agent.packages),
        "scenario": scenario,
        "history": history,
        "date": time.strftime("%Y-%m-%d", time.gmtime(started)),
        "seconds": round(time.time() - started, 1),
        "is_ok": all(check.is_ok for check in checks),
        "checks": {check.name: check.is_ok for check in checks},
        **_figures(door, model, state["metadata"]["tree"]),
        "samples": len(samples["samples"]),
    }
    if record:
        write_recording(record, result, door.turns, folder)
    return result


def _place(agent: Agent, folder: Path, **facts: Any) -> Place:
    return Place(prefix=agents_folder() / agent.name, home=folder / "home", work=folder / "work", **facts)


async def _outcome(
    client: aiohttp.ClientSession, server: str, session: str, folder: Path, *, is_own: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The session and its samples, as the server tells them. `is_own`: the agent has opened another session itself."""
    if is_own:
        opened = (await _json(client, "GET", f"{server}/sessions"))["data"]
        (session,) = [one["session_id"] for one in opened if one["session_id"] != session]
    one = f"{server}/sessions/{session}"
    state = await _json(client, "GET", f"{one}?branches=all")
    samples = await _json(client, "POST", f"{one}/samples", {"format": "json", "branch": "all"})
    (folder / "session.json").write_text(json.dumps(state))
    (folder / "samples.json").write_text(json.dumps(samples))
    return state, samples


def _figures(door: Door, model: ScriptedModel, tree: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "requests": len(door.turns),
        "turns": len(tree),
        "roots": sum(not turn["parent"] for turn in tree),
        "leaves": num_leaves(tree),
        "edited": sum(bool(turn.get("edited")) for turn in tree),
        "most_at_once": most_at_once(door.turns),
        "first_prompt_tokens": len(model.exchanges[0]["input_ids"]) if model.exchanges else 0,
    }


async def _json(client: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> Any:
    async with client.request(method, url, json=body) as answer:
        text = await answer.text()
        if answer.status != 200:
            raise RuntimeError(f"{method} {url}: {answer.status} {text}")
        return json.loads(text)


async def _ran(command: Command, place: Place, folder: Path, limit_s: float) -> Check:
    """The command in an environment of its own, where any other host than this one cannot be reached."""
    env = {
        "PATH": search_path(place.prefix),
        "HOME": str(place.home),
        "TMPDIR": str(place.home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "no_proxy": "127.0.0.1,localhost",
        "DO_NOT_TRACK": "1",
    }
    env |= {name.upper(): value for name, value in env.items() if name.endswith("proxy")} | dict(command.env)
    number = len(list(folder.glob("output.*")))  # noqa: ASYNC240
    terminal, end = pty.openpty() if command.typed else (None, None)
    with (folder / f"output.{number}").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            env=env,
            cwd=place.work,
            stdin=asyncio.subprocess.PIPE if end is None else end,
            stdout=output if end is None else end,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        if terminal is not None and end is not None:
            os.close(end)
            threading.Thread(target=_type, args=(terminal, command, output)).start()
        try:
            limit_s = command.killed_after_s or limit_s
            await asyncio.wait_for(process.communicate(None if command.typed else command.stdin.encode()), limit_s)
            code = f"{process.returncode}"
        except TimeoutError:
            code = "killed" if command.killed_after_s else f"none within {limit_s} s"
        finally:
            _end_group(process.pid)
    said = (folder / f"output.{number}").read_bytes()
    is_said = _plain(command.says.encode()) in _plain(said)
    name, text = command.writes or ("", "")
    is_written = not name or ((file := place.work / name).is_file() and file.read_text() == text)
    is_ok = code == ("killed" if command.killed_after_s else "0") and is_said and is_written
    detail = "" if is_said else f", and its output lacks {command.says!r}"
    detail += "" if is_written else f", and it did not do its work: {name}"
    return Check(f"exit code of command {number + 1}", is_ok, code + detail + ("" if is_ok else f": {said[-600:]!r}"))


def _plain(shown: bytes) -> bytes:
    """Without control sequences and white space, which terminals treat as they like."""
    return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]|\s", b"", shown)


def _type(terminal: int, command: Command, output: Any) -> None:
    """Copies what the terminal shows until the program closes it, and types what the command says. A thread."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    shown, waiting = b"", list(command.typed)
    with suppress(OSError, ValueError):  # the program has ended
        while piece := os.read(terminal, 65536):
            output.write(piece)
            output.flush()
            shown += piece
            if waiting and _plain(command.says.encode()) in _plain(shown):
                time.sleep(1)
                os.write(terminal, waiting.pop(0).encode())
                time.sleep(0.5)
                os.write(terminal, b"\r")
    os.close(terminal)


def _end_group(pid: int) -> None:
    """End what the command has left behind, all of it started by us in a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(pid, 9)
