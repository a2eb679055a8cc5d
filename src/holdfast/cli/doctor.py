"""`holdfast doctor`: what this machine can run, what is missing, and how many sessions fit."""

import argparse
import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.cli import examination
from holdfast.cli.data_directory import DataDirectory, look_at_data
from holdfast.cli.diagnosis import (
    Device,
    Finding,
    Level,
    chosen_device,
    judge_data,
    judge_extra,
    judge_fit,
    judge_memory,
    judge_mlx,
    judge_native,
    judge_torch,
)
from holdfast.cli.doors import judge_doors
from holdfast.cli.examination import Library, Memory
from holdfast.cli.flags import add_flags, settings
from holdfast.cli.model_check import ModelFacts, check_engine, check_model
from holdfast.cli.sizing import Sizes, WindowRow, window_table
from holdfast.config import DEFAULT_MODEL, ChatConfig, EngineConfig, ServeConfig, UpstreamConfig
from holdfast.engine.factory import is_native, resolved_dtype
from holdfast.engine.native.library import usable_variants

_DOORS = (
    *("grpc", "http", "keys_file", "tls_cert", "tls_key", "insecure"),
    *("data_dir", "snapshot_memory_mb", "backend"),
)
_ENGINE = ("device", "dtype", "sessions", "sink", "recent", "max_pin", "prefill_chunk", "rewind_tokens")
_FLAGS: tuple[tuple[type[Any], str, tuple[str, ...]], ...] = (
    (ServeConfig, "doors", _DOORS),
    (ChatConfig, "chat", ("chat_template",)),
    (EngineConfig, "engine", _ENGINE),
    (UpstreamConfig, "upstream", ("upstream",)),
)
_EXTRAS = (("parquet", "pyarrow", "samples as Parquet files"), ("bench", "matplotlib", "plots of `holdfast bench`"))
_MARKS: dict[Level, str] = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "problem": "[red]problem[/]"}
_MB = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that was found; `--json` prints it."""

    would_start: bool
    findings: tuple[Finding, ...]
    windows: tuple[WindowRow, ...]
    device: Device
    torch: Library
    mlx: Library
    memory: Memory
    data: DataDirectory | None
    model: ModelFacts | None
    sizes: Sizes | None


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this machine can run, what is missing",
        description="What this machine can run and what is missing. Exits with 0 where `holdfast serve` would start.",
    )
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="as for serve (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="the same as JSON on stdout, and nothing else")
    for cls, title, shown in _FLAGS:
        others = [field.name for field in dataclasses.fields(cls) if field.name not in shown]
        add_flags(parser, cls, title, without=others)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    report = examine(
        arguments.model,
        settings(ServeConfig, arguments),
        settings(EngineConfig, arguments),
        settings(ChatConfig, arguments),
        settings(UpstreamConfig, arguments),
    )
    if arguments.json:
        print(json.dumps(dataclasses.asdict(report), indent=2, default=str))
    else:
        _show(report)
    return 0 if report.would_start else 1


def examine(name: str, doors: ServeConfig, engine: EngineConfig, chat: ChatConfig, upstream: UpstreamConfig) -> Report:
    """Everything looked at and judged. Takes seconds: torch is imported, but no weights are read."""
    torch, mlx, memory = examination.find_torch(), examination.find_mlx(), examination.find_memory()
    is_mac, is_embedded = examination.is_apple_silicon(), doors.backend == "embedded"
    device = chosen_device(engine.device, torch, mlx, is_apple_silicon=is_mac) if is_embedded else ""
    data = look_at_data(Path(doors.data_dir).expanduser()) if doors.data_dir else None
    model, model_findings = check_model(name, chat if doors.http else None, device)
    dtype = resolved_dtype(engine.dtype, model.architecture, device) if model else engine.dtype
    has_native = model is not None and device == "cpu" and is_native(model.architecture, dtype)
    findings = [
        Finding("Python", "ok", platform.python_version()),
        judge_native(usable_variants(), device),
        judge_torch(torch, device, is_needed=not has_native),
        judge_mlx(mlx, device, is_apple_silicon=is_mac),
        *(judge_extra(extra, adds, is_installed=examination.is_installed(module)) for extra, module, adds in _EXTRAS),
        judge_memory(memory),
        *judge_doors(doors, upstream),
        judge_data(data),
    ]
    findings += model_findings
    sizes: Sizes | None = None
    windows: tuple[WindowRow, ...] = ()
    if is_embedded and model:
        shape, found = check_engine(model, engine, dtype)
        findings += found
        if shape:
            free_bytes = torch.cuda[0].free_bytes if device == "cuda" and torch.cuda else memory.available_bytes
            sizes = model.sizes(dtype, device, free_bytes)
            windows = window_table(sizes, shape, model.architecture.context)
            findings.append(judge_fit(sizes, shape, engine.sessions, doors.snapshot_memory_mb * 2**20, device))
    return Report(
        would_start=all(finding.level != "problem" for finding in findings),
        findings=tuple(findings),
        windows=windows,
        device=device,
        torch=torch,
        mlx=mlx,
        memory=memory,
        data=data,
        model=model,
        sizes=sizes,
    )


def _show(report: Report) -> None:
    console = Console(highlight=False)
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in report.findings:
        table.add_row(_MARKS[finding.level], finding.what, escape(finding.says))
    console.print(table)
    if report.windows:
        sizing = Table("--recent", "MB a session", f"sessions that fit ({report.device})", box=None, padding=(0, 2))
        for row in report.windows:
            fitting = "" if row.num_fitting is None else f"{row.num_fitting:,}"
            sizing.add_row(f"{row.recent:,}", f"{row.slab_bytes / _MB:,.0f}", fitting)
        console.print()
        console.print(sizing)
    console.print(
        "\n[green]holdfast serve would start with these settings[/]"
        if report.would_start
        else "\n[red]holdfast serve would not start with these settings[/]"
    )
