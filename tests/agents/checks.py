"""What must hold after a run: everything that the agent asked is on record, token by token, and nothing else is."""

import collections
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import errors
from tests.agents.door import Door
from tests.agents.model import ScriptedModel, logprob_of
from tests.agents.server import HOLDFAST, own_env

_LEAST_LEAVES = {"subagents": 3, "forks": 3, "crowd": 7, "compaction": 2}


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


def all_recorded(door: Door, state: Any, num_faults: int) -> Check:
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


def same_ids(model: ScriptedModel, state: Any) -> Check:
    """Prompt and reply of each turn, the reply as the tree counts it, against the model's log."""
    sampled = {turn["turn"]: turn["sampled_tokens"] for turn in state["metadata"]["tree"]}
    recorded: collections.Counter[Any] = collections.Counter()
    for record in state["records"]:
        choice = record["response"]["choices"][0]
        ids = choice.get("token_ids") or [entry[1] for entry in choice["meta_info"]["output_token_logprobs"]]
        ids = tuple(ids)[: sampled[record["turn"]]]
        recorded[tuple(record["request"]["input_ids"]), ids] += 1
    return _compared("ids of the turns are those of the model's log", recorded, _logged(model))


def same_samples(model: ScriptedModel, samples: Any) -> Check:
    """The tokens of all samples, split into turns, and their logprobs, against the model's log."""
    name = "ids and logprobs in the samples are those of the model's log"
    turns = {}
    for sample in samples["samples"]:
        tokens, first = sample["tokens"], len(sample["tokens"]) - len(sample["loss_mask"])
        for turn in sample["turns"]:
            prompt, reply = tokens[: turn["sampled_start"]], tokens[turn["sampled_start"] : turn["end"]]
            turns[turn["number"]] = (tuple(prompt), tuple(reply))
            logprobs = sample["logprobs"][turn["sampled_start"] - first : turn["end"] - first]
            if logprobs != [logprob_of(at, token) for at, token in enumerate(reply)]:
                return Check(name, False, f"turn {turn['number']} has other logprobs")
    return _compared(name, collections.Counter(turns.values()), _logged(model))


def _compared(name: str, ours: collections.Counter[Any], theirs: collections.Counter[Any]) -> Check:
    missing, extra = theirs - ours, ours - theirs
    detail = f"{ours.total()} turns, {sum(len(p) + len(r) for p, r in ours.elements()):,} ids"
    if missing or extra:
        detail += f"; {len(missing)} of the log are missing, {len(extra)} are not in it"
    return Check(name, not missing and not extra, detail)


def verified(path: Path) -> Check:
    done = subprocess.run(
        [*HOLDFAST, "samples", "verify", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=own_env(),
    )
    said = (done.stdout + done.stderr).strip().replace(str(path), "samples")
    return Check("samples verify", done.returncode == 0, said)


def no_errors(state: Any) -> Check:
    found = [
        f"turn {record['turn']}, {message['role']}: {text[max(0, at.start() - 80) : at.end() + 80]!r}"
        for record in state["records"]
        for message in record["request"]["messages"]
        if message["role"] != "system"
        for text in _texts(message)
        if (at := _ERROR.search(text))
    ]
    return Check("no error text in a trajectory", not found, "; ".join(found[:3]))


def branched(kind: str, state: Any) -> Check:
    """The scenario did happen: subagents are conversations of their own, and a compaction begins another one."""
    wanted, found = _LEAST_LEAVES.get(kind, 1), num_leaves(state["metadata"]["tree"])
    return Check("the tree has the branches of the scenario", found >= wanted, f"{found}, expected {wanted} or more")


def num_leaves(tree: Sequence[dict[str, Any]]) -> int:
    return len({turn["turn"] for turn in tree} - {turn["parent"] for turn in tree})


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def most_at_once(turns: Sequence[dict[str, Any]]) -> int:
    return max((sum(x["started"] <= t["started"] < x.get("ended", 0) for x in turns) for t in turns), default=0)
