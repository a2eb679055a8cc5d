"""`holdfast samples`: check, show and convert files of exported samples; needs no server."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.chats.samples.certificate import problems, problems_of
from holdfast.chats.samples.formats import decode
from holdfast.chats.samples.sample import Export, Sample
from holdfast.chats.samples.trainers import Layout, Trainer, convert
from holdfast.errors import ConfigError, SamplesUnusable, Unimplemented

_SUFFIXES = {Trainer.TRL: "json", Trainer.SKYRL: "json", Trainer.VERL: "safetensors", Trainer.MILES: "pt"}


def register(commands: Any) -> None:
    parser = commands.add_parser("samples", description=__doc__)
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    verify = actions.add_parser(
        "verify", help="check certificates and loss masks; exits with 1 if a file has a problem"
    )
    verify.add_argument("files", nargs="+", type=Path, metavar="FILE", help="safetensors, JSON or Parquet")
    verify.set_defaults(run=_verify)
    show = actions.add_parser("show", help="show the samples in a file")
    show.add_argument("file", type=Path, metavar="FILE", help="safetensors, JSON or Parquet")
    show.set_defaults(run=_show)
    convert = actions.add_parser("convert", help="write samples in the layout of a trainer")
    convert.add_argument("files", nargs="+", type=Path, metavar="FILE", help="safetensors, JSON or Parquet")
    convert.add_argument("--to", required=True, choices=[one.value for one in Trainer], help="the trainer")
    convert.add_argument(
        "--out", type=Path, metavar="FILE", help="default: beside the first FILE, named for the trainer"
    )
    convert.add_argument("--without-experts", action="store_true", help="leave out routed experts and indexer choices")
    convert.add_argument(
        "--weight-versions", choices=("names", "spans"), default="names", help="how miles is told weight versions"
    )
    convert.add_argument("--pad-token-id", type=int, default=0, metavar="ID", help="what verl's arrays are padded with")
    for name in ("prompt", "response"):
        about = f"tokens to which verl's {name}s are padded; default: the longest"
        convert.add_argument(f"--{name}-length", type=int, metavar="TOKENS", help=about)
    convert.set_defaults(run=_convert)


def _verify(arguments: argparse.Namespace) -> int:
    is_valid = True
    for path in arguments.files:
        try:
            export = decode(path.read_bytes())
            found = problems(export)
        except (OSError, SamplesUnusable, Unimplemented) as exc:
            found = [exc.strerror or str(exc) if isinstance(exc, OSError) else str(exc)]
        for problem in found:
            print(f"{path}: {problem}")
        if not found:
            print(f"{path}: ok: {_counts(export)}")
        is_valid &= not found
    return 0 if is_valid else 1


def _show(arguments: argparse.Namespace) -> int:
    try:
        export = decode(arguments.file.read_bytes())
    except OSError as exc:
        raise ConfigError(f"{arguments.file}: {exc.strerror or exc}") from exc
    table = Table(box=None)
    for name in ("sample", "turns", "tokens", "trained", "reward"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("weights", "status", "certificate"):
        table.add_column(name, overflow="fold", no_wrap=name != "weights")
    for index, sample in enumerate(export.samples):
        table.add_row(str(index), *_row(sample))
    console = Console()
    for line in dict.fromkeys(_origin(sample) for sample in export.samples):
        console.print(line, soft_wrap=True, highlight=False)
    console.print(table)
    console.print(_counts(export), highlight=False)
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    trainer, samples = Trainer(arguments.to), list[Sample]()
    for path in arguments.files:
        try:
            samples += decode(path.read_bytes()).samples
        except OSError as exc:
            raise ConfigError(f"{path}: {exc.strerror or exc}") from exc
    if samples and (found := problems(Export(samples=tuple(samples)))):
        raise SamplesUnusable(found[0], reason="certificate")
    layout = Layout(
        has_experts=not arguments.without_experts,
        has_version_spans=arguments.weight_versions == "spans",
        pad_token_id=arguments.pad_token_id,
        prompt_length=arguments.prompt_length,
        response_length=arguments.response_length,
    )
    content = convert(samples, trainer, layout)
    out = arguments.out or arguments.files[0].with_suffix(f".{trainer}.{_SUFFIXES[trainer]}")
    try:
        out.write_bytes(content)
    except OSError as exc:
        raise ConfigError(f"{out}: {exc.strerror or exc}") from exc
    print(f"{out}: {_counts(Export(samples=tuple(samples)))}")
    return 0


def _row(sample: Sample) -> list[str]:
    low, high = sample.weight_versions
    return [
        f"{len(sample.turns)}" + (f" of {len(sample.turns) + sample.num_left_out}" if sample.num_left_out else ""),
        f"{len(sample.tokens):,}",
        f"{_num_trained(sample):,}",
        "" if sample.reward is None else f"{sample.reward:g}",
        escape(low if low == high else f"{low} to {high}"),
        sample.status.value,
        "[red]broken[/]" if problems_of(sample) else "holds",
    ]


def _origin(sample: Sample) -> str:
    said = {"session": sample.session_id, "group": sample.group, "label": sample.label}
    return ", ".join(f"{name} {escape(value)}" for name, value in said.items() if value)


def _counts(export: Export) -> str:
    if export.empty_reason:
        return f"no samples: {export.empty_reason.value}"
    num_tokens = sum(len(sample.tokens) for sample in export.samples)
    num_trained = sum(map(_num_trained, export.samples))
    return f"{len(export.samples)} samples, {num_tokens:,} tokens, {num_trained:,} of them trained"


def _num_trained(sample: Sample) -> int:
    return sum(turn.num_trained for turn in sample.turns)
