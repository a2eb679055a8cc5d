"""One run: a scripted model, `holdfast serve` in front of it, an agent in front of that; then the checks."""

import asyncio
import collections
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from holdfast import errors
from holdfast.testing.fake_upstream import Fault
from tests.agents.agent import Agent, Command, Place, agents_folder, search_path
from tests.agents.door import Door
from tests.agents.model import ScriptedModel
from tests.agents.recording import write_recording
from tests.agents.server import HOLDFAST, HoldfastServer, own_env

_OPTIONS = {"header": ["--session-header", "x-claude-code-session-id,session-id,x-session-id"]}  # of the server
_NUM_FAULTS = {"faults": 2, "kill": 1}  # requests that are not answered
_LEAST_LEAVES = {"subagents": 3, "crowd": 7, "compaction": 2}


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    is_ok: bool
    detail: str = ""


def error_codes() -> frozenset[str]:
    """The codes of all errors that the server may send."""
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return frozenset(code for kind in classes if isinstance(code := getattr(kind, "code", None), str) and "_" in code)


_ERROR = re.compile(
    rf"\b({'|'.join(sorted(error_codes()))})\b|invalid_request_error|API Error|\"type\": ?\"error\"|"
    r"Error code: [45]\d\d|stream disconnected before completion"
)


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
        place = Place(
            url=door.url if kind == "header" else f"{door.url}/sessions/{session}",
            server=door.url,
            prefix=agents_folder() / agent.name,
            home=folder / "home",
            work=folder / "work",
            scenario=scenario,
            slow_s=slow_s,
        )
        checks: list[Check] = []
        for command in agent.commands(place):
            if kind == "restart" and checks:
                await server.restart()
            checks.append(await _ran(command, place, folder, agent.limit_s))
        if kind in ("run", "header"):  # they have opened a session of their own
            opened = (await _json(client, "GET", f"{server.url}/sessions"))["data"]
            (session,) = [one["session_id"] for one in opened if one["session_id"] != session]
        one = f"{server.url}/sessions/{session}"
        state = await _json(client, "GET", f"{one}?branches=all")
        samples = await _json(client, "POST", f"{one}/samples", {"format": "json", "branch": "all"})
    (folder / "session.json").write_text(json.dumps(state))
    (folder / "samples.json").write_text(json.dumps(samples))
    checks += [
        _all_recorded(door, state, num_faults=_NUM_FAULTS.get(kind, 0)),
        _same_ids(model, state),
        _same_samples(model, samples),
        _verified(folder / "samples.json"),
        _no_errors(state),
        _branched(kind, state),
    ]
    for check in checks:
        print(f"{'ok  ' if check.is_ok else 'FAIL'} {check.name}: {check.detail}", flush=True)
    tree = state["metadata"]["tree"]
    result = {
        "agent": agent.name,
        "packages": list(agent.packages),
        "scenario": scenario,
        "history": history,
        "date": time.strftime("%Y-%m-%d", time.gmtime(started)),
        "seconds": round(time.time() - started, 1),
        "is_ok": all(check.is_ok for check in checks),
        "checks": {check.name: check.is_ok for check in checks},
        "requests": len(door.turns),
        "turns": len(tree),
        "roots": sum(not turn["parent"] for turn in tree),
        "leaves": _num_leaves(tree),
        "samples": len(samples["samples"]),
        "edited": sum(bool(turn.get("edited")) for turn in tree),
        "most_at_once": _most_at_once(door.turns),
        "first_prompt_tokens": len(model.exchanges[0]["input_ids"]) if model.exchanges else 0,
    }
    if record:
        write_recording(record, result, door.turns, folder)
    return result


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


def _all_recorded(door: Door, state: Any, num_faults: int) -> Check:
    """`num_faults`: how many requests failed, or were left by the agent."""
    statuses = collections.Counter(exchange["status"] for exchange in door.turns)
    num_turns, num_requests = len(state["metadata"]["tree"]), len(door.turns)
    bad = [f"{x['path']} {x['status']} {x.get('error', '')[:300]}" for x in door.turns if x["status"] != 200]
    bad += [f"{x['path']} was left by the agent" for x in door.turns if x["status"] == 200 and "is_whole" not in x]
    is_ok = num_turns + num_faults == num_requests and num_turns > 0 and len(bad) == num_faults
    detail = f"{num_turns} turns, {num_requests} requests, statuses {dict(statuses)}"
    return Check("turns on record are the agent's requests", is_ok, "; ".join([detail, *bad[:5]]))


def _logged(model: ScriptedModel) -> collections.Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    return collections.Counter((tuple(x["input_ids"]), tuple(x["output_ids"])) for x in model.exchanges)


def _same_ids(model: ScriptedModel, state: Any) -> Check:
    """Prompt and reply of each turn, the reply as the tree counts it, against the model's log."""
    sampled = {turn["turn"]: turn["sampled_tokens"] for turn in state["metadata"]["tree"]}
    recorded: collections.Counter[Any] = collections.Counter()
    for record in state["records"]:
        choice = record["response"]["choices"][0]
        ids = choice.get("token_ids") or [entry[1] for entry in choice["meta_info"]["output_token_logprobs"]]
        ids = tuple(ids)[: sampled[record["turn"]]]
        recorded[tuple(record["request"]["input_ids"]), ids] += 1
    return _compared("ids of the turns are those of the model's log", recorded, _logged(model))


def _same_samples(model: ScriptedModel, samples: Any) -> Check:
    """The tokens of all samples, split into turns, against the model's log."""
    turns = {}
    for sample in samples["samples"]:
        for turn in sample["turns"]:
            tokens = sample["tokens"]
            prompt, reply = tokens[: turn["sampled_start"]], tokens[turn["sampled_start"] : turn["end"]]
            turns[turn["number"]] = (tuple(prompt), tuple(reply))
    return _compared(
        "ids in the samples are those of the model's log", collections.Counter(turns.values()), _logged(model)
    )


def _compared(name: str, ours: collections.Counter[Any], theirs: collections.Counter[Any]) -> Check:
    missing, extra = theirs - ours, ours - theirs
    detail = f"{ours.total()} turns, {sum(len(p) + len(r) for p, r in ours.elements()):,} ids"
    if missing or extra:
        detail += f"; {len(missing)} of the log are missing, {len(extra)} are not in it"
    return Check(name, not missing and not extra, detail)


def _verified(path: Path) -> Check:
    done = subprocess.run(
        [*HOLDFAST, "samples", "verify", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=own_env(),
    )
    said = (done.stdout + done.stderr).strip().replace(str(path), "samples")
    return Check("samples verify", done.returncode == 0, said)


def _no_errors(state: Any) -> Check:
    found = [
        f"turn {record['turn']}, {message['role']}: {text[max(0, at.start() - 80) : at.end() + 80]!r}"
        for record in state["records"]
        for message in record["request"]["messages"]
        if message["role"] != "system"
        for text in _texts(message)
        if (at := _ERROR.search(text))
    ]
    return Check("no error text in a trajectory", not found, "; ".join(found[:3]))


def _branched(kind: str, state: Any) -> Check:
    """The scenario did happen: subagents are conversations of their own, and a compaction begins another one."""
    wanted, found = _LEAST_LEAVES.get(kind, 1), _num_leaves(state["metadata"]["tree"])
    return Check("the tree has the branches of the scenario", found >= wanted, f"{found}, expected {wanted} or more")


def _num_leaves(tree: Sequence[dict[str, Any]]) -> int:
    return len({turn["turn"] for turn in tree} - {turn["parent"] for turn in tree})


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _most_at_once(turns: Sequence[dict[str, Any]]) -> int:
    return max((sum(x["started"] <= t["started"] < x.get("ended", 0) for x in turns) for t in turns), default=0)
