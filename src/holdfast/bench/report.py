"""One format for what every bench found: raw series, figures by round, gates, and what it all ran on."""

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from holdfast.bench.gates import Gate
from holdfast.bench.summary import Summary, summarize
from holdfast.errors import ConfigError

FORMAT = "holdfast-bench/1"

Better = Literal["lower", "higher", ""]  # "": neither


@dataclass(slots=True)
class Series:
    """Raw values in the order in which they were measured."""

    unit: str
    values: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Figure:
    """One value a round, and what they come to."""

    unit: str
    better: Better = ""
    values: list[float] = field(default_factory=list)
    summary: Summary | None = None

    def add(self, value: float) -> None:
        self.values.append(value)
        self.summary = summarize(self.values)


@dataclass(slots=True, kw_only=True)
class Report:
    """`is_partial`: interrupted or failed; what is here was measured all the same."""

    format: str = FORMAT
    scenario: str
    command: str
    started_at: str
    duration_s: float = 0.0
    is_quick: bool = False
    is_partial: bool = False
    commit: str = ""
    hardware: dict[str, str | int] = field(default_factory=dict)
    load_before: list[float] = field(default_factory=list)
    load_after: list[float] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    def values(self, name: str) -> list[float]:
        """Of the figure or series `name`; empty where it was not measured."""
        found = self.figures.get(name) or self.series.get(name)
        return found.values if found else []


def encode(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def read(path: Path) -> Report:
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror or exc}") from exc
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"{path} is not the report of a bench: {exc}") from exc
    if report.format != FORMAT:
        raise ConfigError(f"{path} has the format {report.format!r}, not {FORMAT!r}")
    return report


def write(path: Path, content: bytes) -> None:
    """All of it or nothing: whoever reads `path` meanwhile finds the old content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror or exc}") from exc
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
