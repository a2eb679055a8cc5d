"""`holdfast models`: what can be loaded, what is here, and what a model is."""

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast.config import DEFAULT_MODEL
from holdfast.models import BUNDLED, open_model, pull

_MB = 1_000_000


def register(commands: Any) -> None:
    parser = commands.add_parser("models", help="list, pull and inspect models")
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="the bundled models, and which are on this machine")
    listing.set_defaults(run=_list)
    pulling = actions.add_parser("pull", help="put a bundled model on this machine")
    pulling.add_argument("model", nargs="?", default=DEFAULT_MODEL, choices=list(BUNDLED), help="default: %(default)s")
    pulling.set_defaults(run=_pull)
    info = actions.add_parser("info", help="what a model is and what its sessions cost")
    info.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="a bundled name, a GGUF file or a directory")
    info.set_defaults(run=_info)


def _list(arguments: argparse.Namespace) -> int:
    table = Table("model", "what", "license", "on this machine")
    for model in BUNDLED.values():
        table.add_row(model.name, model.description, model.license, str(model.path or "no: holdfast models pull"))
    Console().print(table)
    return 0


def _pull(arguments: argparse.Namespace) -> int:
    model = BUNDLED[arguments.model]
    console = Console(stderr=True)
    with console.status(f"pulling {model.name} ({model.description})"):
        path = pull(model)
    print(path)
    return 0


def _info(arguments: argparse.Namespace) -> int:
    source = open_model(arguments.model)
    arch = source.architecture
    per_token = arch.num_layers * 2 * arch.num_kv_heads * arch.head_dim * 2
    size = sum(file.stat().st_size for file in source.weight_files)
    table = Table(show_header=False, box=None)
    for name, value in (
        ("name", source.name),
        ("path", source.path),
        ("family", arch.family),
        ("parameters", f"{arch.num_parameters / 1e6:,.0f} M in {arch.num_layers} layers"),
        ("weights on disk", f"{size / _MB:,.0f} MB"),
        ("vocabulary", f"{arch.vocab_size:,}"),
        ("context", f"{arch.context:,} tokens: sink + recent may not exceed it"),
        ("heads", f"{arch.num_heads} of {arch.head_dim}, sharing {arch.num_kv_heads} key heads"),
        ("cache per token", f"{per_token:,} bytes in bfloat16"),
        ("a full window of 4 + 2048", f"{2052 * per_token / _MB:,.1f} MB in bfloat16"),
    ):
        table.add_row(f"[dim]{name}[/]", str(value))
    Console().print(table)
    return 0
