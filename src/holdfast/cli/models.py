"""`holdfast models`: list, pull, delete, verify and inspect models; how much memory a model and its sessions take."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from holdfast.cli.usage import is_agreed
from holdfast.config import DEFAULT_MODEL
from holdfast.engine.factory import DRAFT_PIN
from holdfast.engine.interface import ITEMSIZES, kv_bytes_per_position
from holdfast.engine.slab import SlabShape
from holdfast.errors import ModelError
from holdfast.models import BUNDLED, Architecture, hub, open_model, pull

WINDOWS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
RUNTIME_BYTES = 600_000_000  # interpreter, libraries, activations of one step
_INT8_WEIGHT_BYTES = 34 / 32  # including its share of the scale
_INT4_WEIGHT_BYTES = 20 / 32  # including its share of scale and offset
_MB = 1_000_000


def register(commands: Any) -> None:
    parser = commands.add_parser("models", description=__doc__)
    parser.set_defaults(run=_list)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    listing = actions.add_parser("list", help="list the bundled models, and those of the hub in its local cache")
    listing.set_defaults(run=_list)
    pulling = actions.add_parser(
        "pull",
        help="download a model to this machine, or bring it up to date",
        description="Download a bundled model, or one of the Hugging Face hub: its safetensors, tokenizer, template "
        "and config files, into the cache that all programs share (HF_HOME; HF_TOKEN for gated models).",
    )
    pulling.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=DEFAULT_MODEL,
        help="a bundled name, or ORG/NAME[@REVISION] on the hub (default: %(default)s)",
    )
    pulling.add_argument(
        "--tokenizer-only", action="store_true", help="no weights: for --backend sglang or vllm, which has them"
    )
    pulling.set_defaults(run=_pull)
    removing = actions.add_parser("rm", help="delete a model from the hub's local cache")
    removing.add_argument("model", metavar="ORG/NAME[@REVISION]", help="without a revision all of them are deleted")
    removing.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    removing.set_defaults(run=_remove)
    verifying = actions.add_parser("verify", help="check that a bundled model's file is the one that was published")
    verifying.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, choices=list(BUNDLED), help="default: %(default)s"
    )
    verifying.set_defaults(run=_verify)
    info = actions.add_parser("info", help="show a model's architecture and the memory of a session")
    info.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="as for serve (default: %(default)s)")
    info.set_defaults(run=_info)


def _list(arguments: argparse.Namespace) -> int:
    for model in BUNDLED.values():
        where = f"on this machine: {model.path}" if model.path else f"not here; run: holdfast models pull {model.name}"
        print(f"{model.name}\n  {model.description}, {model.license}\n  {where}")
    for cached in hub.cached_revisions():
        kind = "" if cached.has_weights else ", without weights"
        size = f"{cached.num_bytes / _MB:,.1f} MB"
        print(f"{cached.name}\n  {size}{kind}, commit {cached.commit[:12]}\n  in the local cache of the hub")
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    plan = hub.plan_removal(arguments.model)
    size = f"{plan.expected_freed_size:,} bytes"
    if not arguments.yes and not is_agreed(f"delete {arguments.model} ({size}) from the local cache?"):
        return 1
    plan.execute()
    print(f"deleted {arguments.model}: {size} freed")
    return 0


def _pull(arguments: argparse.Namespace) -> int:
    if arguments.model not in BUNDLED:
        on_hub = hub.parse_id(arguments.model)
        if on_hub is None:
            raise ModelError(f"no model {arguments.model!r} to pull: pass {', '.join(BUNDLED)} or ORG/NAME on the hub")
        print(hub.fetch(on_hub, tokenizer_only=arguments.tokenizer_only))
        return 0
    model = BUNDLED[arguments.model]
    console = Console(stderr=True)
    with console.status(f"pulling {model.name} ({model.description})"):
        path = pull(model)
    print(path)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    model = BUNDLED[arguments.model]
    path = open_model(model.name).path
    model.check_digest(path)
    print(f"{path}: ok, SHA-256 {model.sha256}")
    return 0


def _info(arguments: argparse.Namespace) -> int:
    source = open_model(arguments.model)
    arch = source.architecture
    per_token = kv_bytes_per_position(arch, "bfloat16")
    size = sum(file.stat().st_size for file in source.weight_files)
    for name, value in (
        ("name", source.name),
        ("path", source.path),
        ("family", arch.family),
        ("parameters", f"{arch.num_parameters / 1e6:,.0f} M in {arch.num_layers} layers"),
        ("weights on disk", f"{size / _MB:,.0f} MB"),
        ("vocabulary", f"{arch.vocab_size:,}"),
        ("context", f"{arch.context:,} tokens, the limit for sink + recent"),
        ("heads", f"{arch.num_heads} of {arch.head_dim}, sharing {arch.num_kv_heads} key heads"),
        ("cache per token", f"{per_token:,} bytes in bfloat16"),
        ("full window of 4 + 2048", f"{2052 * per_token / _MB:,.1f} MB in bfloat16"),
    ):
        print(f"{name:24} {value}")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The memory that one model needs, and the memory available for it (None: unknown).

    Weights are those of the draft model too. Its slabs have a place for each token of the window, and for few others.
    """

    weight_bytes: int
    token_bytes: int
    memory_bytes: int | None
    draft_token_bytes: int = 0

    def num_fitting(self, shape: SlabShape) -> int | None:
        """Slabs of `shape` that fit beside the weights."""
        if self.memory_bytes is None:
            return None
        return max(0, self.memory_bytes - self.weight_bytes - RUNTIME_BYTES) // self.slab_bytes(shape)

    def slab_bytes(self, shape: SlabShape) -> int:
        draft = replace(shape, max_pin=min(shape.max_pin, DRAFT_PIN), rewind_tokens=0)
        return shape.capacity * self.token_bytes + draft.capacity * self.draft_token_bytes


@dataclass(frozen=True, slots=True)
class WindowRow:
    """How many sessions with a window of `recent` tokens fit."""

    recent: int
    slab_bytes: int
    num_fitting: int | None


def weight_bytes(arch: Architecture, dtype: str, device: str, *, is_native: bool = False) -> int:
    """Weights in memory. On torch and MLX the output head is float32, except on CUDA."""
    if dtype == "int8":
        return round(arch.num_parameters * _INT8_WEIGHT_BYTES)
    num_head = arch.vocab_size * arch.hidden_size
    if dtype == "fp8":  # embedding and head are bfloat16
        num_plain = num_head * (1 if arch.has_tied_embeddings else 2)
        return arch.num_parameters - num_plain + num_plain * ITEMSIZES["bfloat16"]
    if dtype == "int4":  # embedding and head have eight bits
        num_eight = num_head * (1 if arch.has_tied_embeddings else 2)
        return round(num_eight * _INT8_WEIGHT_BYTES + (arch.num_parameters - num_eight) * _INT4_WEIGHT_BYTES)
    plain = arch.num_parameters * ITEMSIZES[dtype]
    if dtype == "float32" or device == "cuda" or is_native:
        return plain
    # On torch a tied embedding stays beside its float32 copy; otherwise the head itself is wider.
    has_copy = arch.has_tied_embeddings and device == "cpu"
    return plain + num_head * (ITEMSIZES["float32"] - (0 if has_copy else ITEMSIZES[dtype]))


def window_table(
    sizes: Sizes, shape: SlabShape, context: int, windows: Sequence[int] = WINDOWS
) -> tuple[WindowRow, ...]:
    """The window of `shape` and those of `windows` that the model's context allows, all else as in `shape`."""
    shapes = [replace(shape, recent=recent) for recent in sorted({shape.recent, *windows})]
    return tuple(
        WindowRow(one.recent, sizes.slab_bytes(one), sizes.num_fitting(one))
        for one in shapes
        if one.max_pin + one.recent <= context
    )
