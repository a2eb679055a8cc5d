"""One decoding step of one session in one launch, for models of sizes that `step.cu` can divide among its warps.

Knows weights, slabs and the layout of `step.cu`'s arguments; not graphs or sampling.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from holdfast.engine.cuda.kernels.attention import score_scale
from holdfast.engine.cuda.module import Kernel, Launch
from holdfast.engine.cuda.slabs import CudaSlabs
from holdfast.engine.cuda.weights import CudaWeights
from holdfast.engine.slab import SlabShape
from holdfast.models import Architecture

_SOURCE = Path(__file__).with_name("step.cu")
_THREADS = 17 * 32  # sixteen warps that multiply, one that streams
_COLUMNS, _FP8_COLUMNS = 512, 1024  # the sixteen warps multiply 64 bytes of a row each at a time
_SHARED_BYTES = 232_448  # of a block on Hopper
_FIXED_BYTES = 5120  # of them beside the stages, and beside what depends on the model
_ROWS = 16  # of a stage
_LEAST_STAGES = 3
_MOST_GROUP = 8  # heads that share a key: a tile of the tensor cores has no more
_IN_FLIGHT = 2  # stages: fewer do not keep the memory busy, more delay what the warps that multiply wait for
_MOST_STRETCHES = 64  # runs of at most a stage of neighbouring cells, in the keys that a block attends to
_HOPPER = (9, 0)


class _Step(ctypes.Structure):
    """`Step` in step.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "head", "norm", "rotations", "position", "slot", "sink", "x")),
        *((name, ctypes.c_void_p) for name in ("residual", "qkv", "parts", "tops", "norms", "mixed", "gated")),
        *((name, ctypes.c_void_p) for name in ("logits", "epoch")),
        ("capacity", ctypes.c_int),
        ("recent", ctypes.c_int),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


def can_fuse(arch: Architecture, weights: CudaWeights, slabs: CudaSlabs, shape: SlabShape) -> bool:
    """Whether `FusedStep` can compute this model: bfloat16 or fp8 weights of suitable sizes on Hopper."""
    device = weights.embedding.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _HOPPER:
        return False
    held = weights.head.values, weights.embedding, slabs.keys
    is_bfloat16 = all(tensor.dtype == torch.bfloat16 for tensor in held)
    columns = _FP8_COLUMNS if _is_fp8(weights) else _COLUMNS
    is_divisible = all(width % columns == 0 for width in _widths(arch)) and arch.head_dim in {64, 128}
    group, num_blocks = arch.num_heads // arch.num_kv_heads, _num_blocks(device)
    has_sizes = is_divisible and group <= _MOST_GROUP and arch.num_kv_heads <= num_blocks <= arch.hidden_size
    if not (is_bfloat16 and has_sizes and _num_stages(arch, num_blocks) >= _LEAST_STAGES):
        return False
    return shape.max_pin + shape.recent <= _most_keys(arch, num_blocks)


def _num_blocks(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _num_splits(arch: Architecture, num_blocks: int) -> int:
    """Blocks that share the keys of a group of heads: a power of two."""
    return min(32, 1 << ((num_blocks // arch.num_kv_heads).bit_length() - 1))


def _most_keys(arch: Architecture, num_blocks: int) -> int:
    """How many keys a token may see. In a split up to three runs are cut short: first, last sinks, end of the ring."""
    stage_bytes, key_bytes = _ROWS * (2 * _stage_columns(arch) + 64), 4 * arch.head_dim + 16
    return _num_splits(arch, num_blocks) * (_MOST_STRETCHES - 3) * (stage_bytes // key_bytes // _ROWS * _ROWS)


def _num_stages(arch: Architecture, num_blocks: int) -> int:
    """As many as fit beside the rest of the shared memory."""
    group = arch.num_heads // arch.num_kv_heads
    vectors = max(4 * max(_widths(arch)), 17 * 4 * group * arch.head_dim)
    heads = 4 * group * arch.head_dim + 16 * arch.head_dim + 17 * 8 * group
    residual, layers = 4 * (arch.hidden_size // num_blocks), 120 * arch.num_layers
    free = _SHARED_BYTES - _FIXED_BYTES - vectors - heads - residual - layers
    return min(16, free // (_ROWS * (2 * _stage_columns(arch) + 64)))


def _stage_columns(arch: Architecture) -> int:
    return 1024 if all(width % 1024 == 0 for width in _widths(arch)) else 512


def _widths(arch: Architecture) -> tuple[int, ...]:
    """The numbers of columns of all matrices."""
    return arch.hidden_size, arch.num_heads * arch.head_dim, arch.mlp_size


def _is_fp8(weights: CudaWeights) -> bool:
    return weights.layers[0].qkv.scales is not None


class FusedStep:
    """The forward of one token. Its scratch memory is its own, so that one runs at a time, as in all of the engine."""

    def __init__(
        self, arch: Architecture, weights: CudaWeights, slabs: CudaSlabs, recent: int, device: torch.device
    ) -> None:
        self._arch = arch
        self._weights = weights
        self._blocks = _num_blocks(device)
        splits = _num_splits(arch, self._blocks)
        group = arch.num_heads // arch.num_kv_heads
        self._kernel = Kernel(
            _SOURCE,
            "decode_step",
            {
                "HIDDEN": arch.hidden_size,
                "MLP": arch.mlp_size,
                "HEADS": arch.num_heads,
                "KV_HEADS": arch.num_kv_heads,
                "DIM": arch.head_dim,
                "NUM_LAYERS": arch.num_layers,
                "VOCAB": arch.vocab_size,
                "HAS_NORM": int(arch.has_qk_norm),
                "HAS_BIAS": int(arch.has_qkv_bias),
                "BLOCKS": self._blocks,
                "SPLITS": splits,
                "LONGEST": max(_widths(arch)),
                "COLUMNS": _stage_columns(arch),
                "STAGES": _num_stages(arch, self._blocks),
                "FP8_COLUMNS": 2048 if all(width % 2048 == 0 for width in _widths(arch)) else _stage_columns(arch),
                "FP8": int(_is_fp8(weights)),
                "IN_FLIGHT": _IN_FLIGHT,
                "SHARED_BYTES": _SHARED_BYTES,
            },
            device,
            threads=_THREADS,
            shared_bytes=_SHARED_BYTES,
            launch=Launch.TOGETHER,
        )

        def scratch(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        parts = arch.num_kv_heads, splits, group
        queries = arch.num_heads * arch.head_dim
        self._scratch = {  # numbers with stamps
            "residual": scratch(arch.hidden_size),
            "qkv": scratch(queries + 2 * arch.num_kv_heads * arch.head_dim),
            "parts": scratch(*parts, arch.head_dim),
            "tops": scratch(*parts),
            "norms": scratch(*parts),
            "mixed": scratch(queries),
            "gated": scratch(arch.mlp_size),
            "epoch": scratch(1),
        }
        self._layers = torch.tensor(
            [_addresses(weights, slabs, index) for index in range(arch.num_layers)], dtype=torch.int64, device=device
        )
        self._step = _Step(
            layers=self._layers.data_ptr(),
            head=weights.head.values.data_ptr(),
            norm=weights.norm.data_ptr(),
            capacity=slabs.keys.shape[3],
            recent=recent,
            epsilon=arch.norm_epsilon,
            scale=score_scale(arch.head_dim),
            **{name: tensor.data_ptr() for name, tensor in self._scratch.items()},
        )

    def forward(self, x: Tensor, rotations: Tensor, places: tuple[Tensor, Tensor, Tensor], logits: Tensor) -> Tensor:
        """The logits [1, vocabulary] of the token whose embedding is x. Mutates the slab's cells."""
        step = self._step
        step.x, step.rotations, step.logits = x.data_ptr(), rotations.data_ptr(), logits.data_ptr()
        step.position, step.slot, step.sink = (place.data_ptr() for place in places)
        self._kernel.launch((self._blocks, 1, 1), step)
        return logits


def _addresses(weights: CudaWeights, slabs: CudaSlabs, index: int) -> list[int]:
    """`Layer` in step.cu."""
    layer = weights.layers[index]
    tensors = (
        layer.qkv.values,
        layer.qkv_bias,
        layer.query_norm,
        layer.key_norm,
        layer.output.values,
        layer.gate_up.values,
        layer.down.values,
        layer.attention_norm,
        layer.mlp_norm,
        slabs.keys[index],
        slabs.values[index],
        *(matrix.scales for matrix in layer.matrices),
    )
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
