"""`holdfast doctor`: check whether `holdfast serve` would start on this machine, and how many sessions fit."""

import argparse
import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.cli import checks, machine
from holdfast.cli.checks import Device, Finding, Level, ModelFacts
from holdfast.cli.machine import DataDirectory, Library, Memory
from holdfast.cli.models import Sizes, WindowRow, window_table
from holdfast.config import (
    DEFAULT_MODEL,
    ChatConfig,
    EngineConfig,
    ServeConfig,
    UpstreamConfig,
    add_flags,
    from_arguments,
)
from holdfast.engine.factory import is_native, resolved_dtype
from holdfast.engine.native.library import usable_variants

_FLAGS: dict[type[Any], tuple[str, ...]] = {  # those that decide whether a server starts
    ServeConfig: (
        *("grpc", "http", "keys_file", "tls_cert", "tls_key", "insecure"),
        *("data_dir", "snapshot_memory_mb", "backend"),
    ),
    ChatConfig: ("chat_template",),
    EngineConfig: (
        *("device", "dtype", "sessions", "sink", "recent", "max_pin", "prefill_chunk", "rewind_tokens"),
        *("proposer", "draft_length", "draft_model"),
    ),
    UpstreamConfig: ("upstream",),
}
_EXTRAS = (
    ("client", ("holdfast_sdk",), "`holdfast sessions` and `holdfast chat --server`"),
    ("parquet", ("pyarrow",), "samples as Parquet files"),
    ("bench", ("holdfast_sdk", "matplotlib", "openai", "psutil"), "`holdfast bench`"),
)
_MARKS: dict[Level, str] = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "problem": "[red]problem[/]"}
_MB = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything that was found, as `--json` prints it."""

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
        description="What this machine can run and what is missing. Exits with 0 if `holdfast serve` would start.",
    )
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="as for serve (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON to stdout, and nothing else")
    for cls, names in _FLAGS.items():
        add_flags(parser, cls, only=names)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    diagnosis = diagnose(
        arguments.model,
        from_arguments(ServeConfig, arguments),
        from_arguments(EngineConfig, arguments),
        from_arguments(ChatConfig, arguments),
        from_arguments(UpstreamConfig, arguments),
    )
    if arguments.json:
        print(json.dumps(dataclasses.asdict(diagnosis), indent=2, default=str))
    else:
        _show(diagnosis)
    return 0 if diagnosis.would_start else 1


def diagnose(
    name: str, server: ServeConfig, engine: EngineConfig, chat: ChatConfig, upstream: UpstreamConfig
) -> Diagnosis:
    """Run every check. Takes seconds: torch is imported, but no weights are read."""
    torch, mlx, memory = machine.find_torch(), machine.find_mlx(), machine.find_memory()
    is_mac, is_embedded = machine.is_apple_silicon(), server.backend == "embedded"
    device = checks.chosen_device(engine.device, torch, mlx, is_apple_silicon=is_mac) if is_embedded else ""
    data = machine.find_data(Path(server.data_dir).expanduser()) if server.data_dir else None
    model, model_findings = checks.check_model(name, chat if server.http else None, device)
    dtype = resolved_dtype(engine.dtype, model.architecture, device) if model else engine.dtype
    variants = usable_variants()
    has_native = device == "cpu" and (is_native(model.architecture, dtype) if model else bool(variants))
    findings = [
        Finding("Python", "ok", platform.python_version()),
        checks.check_native(variants, device),
        checks.check_torch(torch, device, is_needed=not has_native),
        checks.check_mlx(mlx, device, is_apple_silicon=is_mac),
        *(
            checks.check_extra(extra, adds, is_installed=all(map(machine.is_installed, modules)))
            for extra, modules, adds in _EXTRAS
        ),
        checks.check_memory(memory),
        *checks.check_server(server, upstream),
        checks.check_data(data),
        *model_findings,
    ]
    sizes: Sizes | None = None
    windows: tuple[WindowRow, ...] = ()
    if is_embedded and model:
        shape, finding = checks.check_engine(model, engine, dtype)
        findings.append(finding)
        if shape:
            free_bytes = torch.cuda[0].free_bytes if device == "cuda" and torch.cuda else memory.available_bytes
            sizes = model.sizes(engine, device, free_bytes)
            windows = window_table(sizes, shape, model.architecture.context)
            snapshot_bytes = server.snapshot_memory_mb * 2**20
            total = memory.total_bytes
            findings.append(checks.check_fit(sizes, shape, engine.sessions, snapshot_bytes, device, total_bytes=total))
    return Diagnosis(
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


def _show(diagnosis: Diagnosis) -> None:
    console = Console(highlight=False)
    for finding in diagnosis.findings:  # one line each, however long: commands in it can be copied
        mark = f"{_MARKS[finding.level]}{' ' * (8 - len(finding.level))}"
        console.print(f"{mark} {finding.what:<15} {escape(finding.says)}", soft_wrap=True)
    if diagnosis.windows:
        fitting = f"sessions that fit ({diagnosis.device})"
        windows = Table("--recent", "MB per session", fitting, box=None, padding=(0, 2))
        for row in diagnosis.windows:
            number = "" if row.num_fitting is None else f"{row.num_fitting:,}"
            windows.add_row(f"{row.recent:,}", f"{row.slab_bytes / _MB:,.0f}", number)
        console.print()
        console.print(windows)
    console.print(
        "\n[green]holdfast serve would start with these settings[/]"
        if diagnosis.would_start
        else "\n[red]holdfast serve would not start with these settings[/]"
    )
