"""The requests of a run as a fixture: anonymous, and with long texts cut, each in the same way wherever it occurs."""

import gzip
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.agents.scripts import is_plan_or_summary

LONGEST = 240  # characters of a text that stays as it is
_KEPT = (120, 40)  # characters at the start and at the end of one that is cut
_UUID = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|\bses_[0-9A-Za-z]{20,}|\b[0-9a-f]{32}\b"
)
_ANY_DAY = 1_767_225_600  # the first of January 2026
_FACTS = ("agent", "packages", "scenario", "requests", "roots", "leaves", "edited")
_LEFT_OUT = re.compile(r"x-stainless-(?!retry)|user-agent|anthropic-dangerous|accept$")


def write_recording(path: Path, result: Mapping[str, Any], turns: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """`folder` is the run's. Turns of one group were sent at the same time."""
    facts = {name: result[name] for name in _FACTS}
    sent = [
        {
            "path": re.sub(r"^/sessions/[^/]+", "", turn["path"]),
            "headers": {k: v for k, v in turn["headers"].items() if not _LEFT_OUT.match(k)},
            "body": turn["body"],
            "group": group,
        }
        for turn, group in zip(turns, _groups(turns), strict=True)
    ]
    turns = cut(json.loads(anonymous(json.dumps(sent, ensure_ascii=False), folder)))
    text = json.dumps(facts | {"turns": turns}, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(path, "wb", mtime=0) if path.suffix == ".gz" else path.open("wb") as stream:
        stream.write(text.encode())


def _groups(turns: Sequence[Mapping[str, Any]]) -> list[int]:
    """The number of each turn's group: a turn that begins when one of the others has ended may depend on it."""
    groups: list[int] = []
    ends = float("inf")
    for turn in turns:
        is_next = turn["started"] >= ends
        ends = turn["ended"] if is_next else min(ends, turn["ended"])
        groups.append((groups[-1] if groups else 0) + is_next)
    return groups


def read_recording(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    recording: dict[str, Any] = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    return recording


def cut(value: Any) -> Any:
    """Texts that differ still do: what is cut out leaves its length and its hash."""
    if isinstance(value, dict):
        return {name: cut(item) for name, item in value.items()}
    if isinstance(value, list):
        return [cut(item) for item in value]
    if not isinstance(value, str) or len(value) <= LONGEST or is_plan_or_summary(value):
        return value
    head, tail = _KEPT
    digest = hashlib.blake2b(value.encode(), digest_size=4).hexdigest()
    return f"{value[:head]} [... {len(value)} characters, {digest} ...] {value[-tail:]}"


def anonymous(text: str, folder: Path) -> str:
    """Without this machine's paths, ports and days, and with numbers in the place of random ids."""
    for name, said in (("work", "/workspace"), ("home", "/home/user"), ("", "/run")):
        path = str(folder / name)
        text = text.replace(path, said).replace(path.replace("/", "-"), said.replace("/", "-"))
    text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:8000", text)
    for form in ("%Y-%m-%d", "%Y/%m/%d", "%A, %B %-d, %Y", "%B %-d, %Y", "%m/%d/%Y", "%-m/%-d/%Y"):
        text = text.replace(time.strftime(form), time.strftime(form, time.gmtime(_ANY_DAY)))
    text = re.sub(r"\b[0-9a-f]{64}\b", "0" * 64, text)
    text = re.sub(r"Linux \d+\.\d[\w.+-]*", "Linux 6.1", text)
    ids: dict[str, str] = {}
    return _UUID.sub(lambda found: ids.setdefault(found[0], f"00000000-0000-4000-8000-{len(ids):012d}"), text)
