"""How many sessions fit in how much memory. Pure integers: looks at nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine.slab import SlabShape
from holdfast.models import Architecture

BYTES = {"float32": 4, "bfloat16": 2}  # of a value in the cache; int8 weights keep it in bfloat16
_EIGHT_BITS = 34 / 32  # bytes of a weight, its share of the scale included
WINDOWS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
RUNTIME_BYTES = 600_000_000  # interpreter, libraries, activations of one step


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What one model takes, and the memory that is there for it (None: not known)."""

    weight_bytes: int
    token_bytes: int
    memory_bytes: int | None

    def num_fitting(self, shape: SlabShape) -> int | None:
        """Slabs of `shape` that fit beside the weights."""
        if self.memory_bytes is None:
            return None
        return max(0, self.memory_bytes - self.weight_bytes - RUNTIME_BYTES) // self.slab_bytes(shape)

    def slab_bytes(self, shape: SlabShape) -> int:
        return shape.capacity * self.token_bytes


@dataclass(frozen=True, slots=True)
class WindowRow:
    """One line of the table of windows."""

    recent: int
    slab_bytes: int
    num_fitting: int | None


def token_bytes(arch: Architecture, dtype: str) -> int:
    """Keys and values of one token in all layers."""
    return arch.num_layers * 2 * arch.num_kv_heads * arch.head_dim * BYTES.get(dtype, BYTES["bfloat16"])


def weight_bytes(arch: Architecture, dtype: str, device: str, *, is_native: bool = False) -> int:
    """Weights in memory. On torch and MLX, except on CUDA, what makes logits is float32."""
    if dtype == "int8":
        return round(arch.num_parameters * _EIGHT_BITS)
    num_head = arch.vocab_size * arch.hidden_size
    plain = arch.num_parameters * BYTES[dtype]
    if dtype == "float32" or device == "cuda" or is_native:
        return plain
    # On torch a tied embedding stays beside its float32 copy; otherwise the head itself is wider.
    has_copy = arch.has_tied_embeddings and device == "cpu"
    return plain + num_head * (BYTES["float32"] - (0 if has_copy else BYTES[dtype]))


@dataclass(frozen=True, slots=True)
class SessionSizes:
    """What one session of a model takes. `windows` are full ones of so many recent tokens; None: beyond its context."""

    token_bytes: int
    windows: tuple[int | None, ...]
    slab_bytes: int
    snapshots_per_gb: int  # of a full window as in the shape


def session_sizes(arch: Architecture, dtype: str, shape: SlabShape, sink: int, windows: Sequence[int]) -> SessionSizes:
    each = token_bytes(arch, dtype)
    return SessionSizes(
        token_bytes=each,
        windows=tuple((sink + recent) * each if sink + recent <= arch.context else None for recent in windows),
        slab_bytes=shape.capacity * each,
        snapshots_per_gb=10**9 // ((sink + shape.recent) * each),
    )


def window_table(
    sizes: Sizes, shape: SlabShape, context: int, windows: Sequence[int] = WINDOWS
) -> tuple[WindowRow, ...]:
    """The window asked for and those of `windows` that the model's context allows, all else as in `shape`."""
    rows = []
    for recent in sorted({shape.recent, *windows}):
        if shape.max_pin + recent <= context:
            other = SlabShape(
                recent=recent,
                max_pin=shape.max_pin,
                prefill_chunk=shape.prefill_chunk,
                rewind_tokens=shape.rewind_tokens,
            )
            rows.append(WindowRow(recent, sizes.slab_bytes(other), sizes.num_fitting(other)))
    return tuple(rows)
