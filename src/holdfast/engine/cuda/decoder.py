"""One forward on the device: how its rows lie in the kernels' inputs, and the kernels that run over them.

Knows weights, slabs and kernels; not sessions, graphs or sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from holdfast.engine.cuda.fp8_attention import Fp8Attention, can_attend
from holdfast.engine.cuda.fused import FusedStep, can_fuse
from holdfast.engine.cuda.kernels.attention import AttentionTile, Blocks, Splits, attend_split, attend_whole
from holdfast.engine.cuda.kernels.decode_attention import DecodeSettings, attend_decoded
from holdfast.engine.cuda.kernels.products import fixed_tile, tile_product, vector_product
from holdfast.engine.cuda.kernels.rows import add_norm, begin, gate, write_heads
from holdfast.engine.cuda.kernels.scales import Product, Rows, Scaled, new_rows, rounded_rows
from holdfast.engine.cuda.module import CPP, chosen_kernels
from holdfast.engine.cuda.slabs import CudaSlabs
from holdfast.engine.cuda.weights import FP8, CudaLayer, CudaWeights, Matrix
from holdfast.engine.interface import Row
from holdfast.engine.slab import SlabPool, SlabShape
from holdfast.engine.torch.trial import accepted
from holdfast.errors import InvalidArgument
from holdfast.models import Architecture

MOST_DECODED = 8  # the most tokens of a row that a decoding graph takes

_MOST_ROWS = 512  # the most rows of one token in one forward
_SOME_ROWS, _MANY_ROWS = 4, 8  # with more rows, splits can be longer
_PROMPT_ROWS = 64  # query rows of a block where there are enough blocks
_TOLERANCE = 0.1  # of the kernels in CUDA C++ beside Triton's; they differ by roundings to bfloat16
_PADDING = -1  # the slot of a token that belongs to no session


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The batches that one graph serves: up to `num_rows` rows of up to `num_tokens` tokens each."""

    num_rows: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Layout:
    """tokens: [(token id, position, slot, sink), tokens]; blocks: [(first, count), blocks]; wanted: token indices."""

    tokens: NDArray[np.int64]
    blocks: NDArray[np.int64]
    wanted: list[int]


class Inputs:
    """The inputs of a forward, in one tensor so that one copy is enough. A graph always reads the same one."""

    def __init__(self, num_tokens: int, num_blocks: int, block_size: int, device: torch.device) -> None:
        self._all = torch.zeros(4 * num_tokens + 2 * num_blocks, dtype=torch.int64, device=device)
        rows = self._all[: 4 * num_tokens].view(4, num_tokens)
        self.tokens, self.positions, self.slots, self.sinks = rows
        firsts, counts = self._all[4 * num_tokens :].view(2, num_blocks)
        self.blocks = Blocks(firsts, counts, block_size)

    @property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.positions, self.slots, self.sinks

    def fill(self, layout: Layout) -> None:
        """Copies from pageable memory: the bytes are taken before this returns, and nothing waits for the copy."""
        tokens = np.zeros((4, self.tokens.shape[0]), np.int64)
        tokens[2] = _PADDING
        tokens[:, : layout.tokens.shape[1]] = layout.tokens
        blocks = np.zeros((2, self.blocks.firsts.shape[0]), np.int64)
        blocks[:, : layout.blocks.shape[1]] = layout.blocks
        flat = np.concatenate([tokens.ravel(), blocks.ravel()])
        self._all.copy_(torch.from_numpy(flat), non_blocking=True)

    def fits(self, layout: Layout) -> bool:
        return int(layout.blocks.shape[1]) <= self.blocks.firsts.shape[0]


def lay_out(rows: Sequence[Row], vocab_size: int, block_size: int, bucket: Bucket | None = None) -> Layout:
    """Rows one after the other; in a bucket, each is padded to the bucket's number of tokens."""
    lengths = [len(row.tokens) for row in rows]
    total = len(rows) * bucket.num_tokens if bucket else sum(lengths)
    tokens = np.zeros((4, total), np.int64)
    tokens[2] = _PADDING
    blocks: list[tuple[int, int]] = []
    wanted: list[int] = []
    start = 0
    for (slab, ids, num_logits), length in zip(rows, lengths, strict=True):
        end = start + length
        tokens[0, start:end] = ids
        tokens[1, start:end] = np.arange(slab.length, slab.length + length)
        tokens[2, start:end] = slab.slot
        tokens[3, start:end] = slab.window.sink
        wanted.extend(range(end - num_logits, end))
        reserved = bucket.num_tokens if bucket else length
        offsets = range(0, reserved, block_size)
        blocks.extend((start + offset, max(0, min(block_size, length - offset))) for offset in offsets)
        start += reserved
    if tokens[0].min() < 0 or tokens[0].max() >= vocab_size:
        raise InvalidArgument(f"token ids must be between 0 and {vocab_size - 1}")
    return Layout(tokens, np.array(blocks, np.int64).T, wanted)


def num_blocks(bucket: Bucket, block_size: int) -> int:
    return bucket.num_rows * -(-bucket.num_tokens // block_size)


class CudaDecoder:
    """A Llama-style decoder over slabs. The residual is float32, products have the embedding's dtype.

    Where layers have fp8 weights, products of several tokens round the activations to fp8, too. Those of one token do
    not, and deterministic ones do not, either.
    """

    def __init__(
        self, arch: Architecture, weights: CudaWeights, slabs: CudaSlabs, shape: SlabShape, *, deterministic: bool
    ) -> None:
        self.arch = arch
        self.weights = weights
        self._slabs = slabs
        self._recent = shape.recent
        self._deterministic = deterministic
        self._dtype = weights.embedding.dtype
        self._device = weights.embedding.device
        self._is_fp8 = weights.layers[0].qkv.scales is not None
        self._row_dtype = FP8 if self._is_fp8 and not deterministic else self._dtype  # of what layers multiply
        self._one = torch.ones((), dtype=torch.float32, device=self._device)
        self._frequencies = torch.tensor(arch.inverse_frequencies, dtype=torch.float64, device=self._device)
        self._max_pin = shape.max_pin
        self._tile = AttentionTile(32, 128, 4, 2) if self._dtype == torch.float32 else AttentionTile(64, 128, 4, 2)
        self._splits = Splits.of(shape.max_pin, shape.recent, _PROMPT_ROWS, self._tile.split)
        self._done = torch.zeros(_MOST_ROWS, arch.num_kv_heads, dtype=torch.int32, device=self._device)
        self._fused: FusedStep | None = None
        self._fp8_attention: Fp8Attention | None = None
        if chosen_kernels() == CPP and not deterministic:
            self._try_faster_kernels(shape)

    def _try_faster_kernels(self, shape: SlabShape) -> None:
        """Use the kernels in CUDA C++ that fit this model, can be built here and compute what Triton's do.

        Mutates cells of the first slab, and clears them.
        """
        arch, weights, slabs, device = self.arch, self.weights, self._slabs, self._device

        def with_step(fused: FusedStep | None) -> Tensor:
            self._fused = fused
            return self._sample_logits(shape)

        def with_attention(attention: Fp8Attention | None) -> Tensor:
            self._fp8_attention = attention
            return self._sample_logits(shape)

        if can_fuse(arch, weights, slabs, shape):
            self._fused = accepted(
                "the kernel for a whole decoding step (step.cu)",
                lambda: FusedStep(arch, weights, slabs, shape.recent, device),
                with_step,
                tolerance=_TOLERANCE,
            )
        if can_attend(arch, self._dtype, slabs):
            self._fp8_attention = accepted(
                "the kernel for attention over an fp8 cache (attend.cu)",
                lambda: Fp8Attention(arch, shape.recent, device),
                with_attention,
                tolerance=_TOLERANCE,
            )

    @torch.inference_mode()
    def _sample_logits(self, shape: SlabShape) -> Tensor:
        """The logits of a few single tokens, before the window is full and where the ring of cells begins anew."""
        slab = SlabPool(1, shape).acquire(min(2, shape.max_pin, shape.recent))
        inputs = Inputs(1, 1, self.block_size(1), self._device)
        around = slab.window.sink + 2 * slab.ring
        logits = []
        try:
            for position in (*range(4), *range(around - 2, around + 2)):
                slab.length = position
                row = Row(slab, [(1 + position) % self.arch.vocab_size], 1)
                inputs.fill(lay_out([row], self.arch.vocab_size, self.block_size(1)))
                logits.append(self.forward(inputs))
            return torch.cat(logits)
        finally:
            self._slabs.clear(slab)

    @property
    def _group(self) -> int:
        return self.arch.num_heads // self.arch.num_kv_heads

    def block_size(self, num_tokens: int) -> int:
        """How many queries of a row are computed together, for rows of up to `num_tokens`."""
        if self._deterministic:
            return max(1, 16 // self._group)
        return num_tokens if num_tokens <= MOST_DECODED else max(1, _PROMPT_ROWS // self._group)

    def forward(self, inputs: Inputs) -> Tensor:
        """float32 logits of all tokens. Mutates the slabs' cells."""
        if inputs.tokens.shape[0] == 1 and not self._deterministic:
            return self._forward_one(inputs)
        return self.logits(self.hidden(inputs))

    def hidden(self, inputs: Inputs) -> Tensor:
        """The input of the head for all tokens: a kernel for each operation, cuBLAS for the products. Mutates cells."""
        x, rotations = self._begin(inputs)
        epsilon, layers = self.arch.norm_epsilon, self.weights.layers
        norms = [layer.attention_norm for layer in layers[1:]] + [self.weights.norm]
        num_tokens, hidden = x.shape
        h = add_norm(x, None, layers[0].attention_norm, self._rows(num_tokens, hidden), epsilon)
        for index, (layer, next_norm) in enumerate(zip(layers, norms, strict=True)):
            mixed = self._attend(index, layer, self._product(h, layer.qkv), inputs, rotations)
            mixed_rows = rounded_rows(mixed) if self._row_dtype == FP8 else mixed
            h = add_norm(
                x, self._product(mixed_rows, layer.output), layer.mlp_norm, self._rows(num_tokens, hidden), epsilon
            )
            gated = gate(self._product(h, layer.gate_up), self._rows(num_tokens, self.arch.mlp_size))
            is_last = layer is layers[-1]
            rows = self._empty(num_tokens, hidden) if is_last else self._rows(num_tokens, hidden)
            h = add_norm(x, self._product(gated, layer.down), next_norm, rows, epsilon)
        assert isinstance(h, Tensor)  # for the head, which is never fp8
        return h

    def logits(self, hidden: Tensor) -> Tensor:
        """In float32: rounded logits could change the chosen token."""
        if hidden.shape[0] == 0:
            return self._empty(0, self.arch.vocab_size, dtype=torch.float32)
        return self._linear(hidden, self.weights.head, torch.float32)

    def _product(self, x: Rows, matrix: Matrix) -> Product:
        """x @ matrix^T, perhaps without its scales."""
        if not isinstance(x, Scaled):
            return Product(self._linear(x, matrix, self._dtype))
        one = self._one  # the library multiplies fastest by one scale for all
        sums = torch._scaled_mm(x.values, matrix.values.T, one, one, out_dtype=self._dtype, use_fast_accum=False)
        return Product(sums, x.scales, matrix.scales)

    def _forward_one(self, inputs: Inputs) -> Tensor:
        """One token: in one launch where that is possible; otherwise a layer is five kernels or six."""
        x, rotations = self._begin(inputs)
        logits = self._empty(1, self.arch.vocab_size, dtype=torch.float32)
        if self._fused is not None:
            return self._fused.forward(x, rotations, inputs.places, logits)
        epsilon = self.arch.norm_epsilon
        for index, layer in enumerate(self.weights.layers):
            qkv = self._empty(1, layer.qkv.num_outputs, dtype=torch.float32)
            vector_product(x, layer.qkv, qkv, norm=layer.attention_norm, epsilon=epsilon)
            mixed = self._attend(index, layer, Product(qkv), inputs, rotations)
            vector_product(mixed, layer.output, x, is_added=True)
            gated = self._empty(1, self.arch.mlp_size)
            vector_product(x, layer.gate_up, gated, norm=layer.mlp_norm, epsilon=epsilon, is_gated=True)
            vector_product(gated, layer.down, x, is_added=True)
        return vector_product(x, self.weights.head, logits, norm=self.weights.norm, epsilon=epsilon)

    def _begin(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The residual [tokens, hidden] and the rotary tables [tokens, 4, dim / 2]."""
        num_tokens = inputs.tokens.shape[0]
        x = self._empty(num_tokens, self.arch.hidden_size, dtype=torch.float32)
        rotations = self._empty(num_tokens, 4, self.arch.head_dim // 2, dtype=torch.float32)
        ids = inputs.tokens, inputs.positions, inputs.sinks
        begin(*ids, self.weights.embedding, self._frequencies, x, rotations, self._recent)
        return x, rotations

    def _attend(self, index: int, layer: CudaLayer, qkv: Product, inputs: Inputs, rotations: Tensor) -> Tensor:
        arch, num_tokens = self.arch, qkv.values.shape[0]
        cache = self._slabs.layer(index)
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = layer.query_norm, layer.key_norm
        places = inputs.places
        is_decoding = inputs.blocks.size == 1 and num_tokens <= _MOST_ROWS and not self._deterministic
        if is_decoding and self._fp8_attention is None:
            settings = self._decode_settings(num_tokens)
            return attend_decoded(qkv, layer.qkv_bias, norms, rotations, places, cache, self._done, settings)
        query, sink_query = self._empty(2, num_tokens, arch.num_heads, arch.head_dim)
        queries = query, sink_query
        write_heads(qkv, layer.qkv_bias, norms, rotations, places, queries, cache, arch.norm_epsilon)
        if is_decoding and self._fp8_attention is not None:
            return self._fp8_attention.attend(queries, cache, places, self._done)
        if self._deterministic or inputs.blocks.size <= MOST_DECODED:
            return attend_split(queries, cache, places, inputs.blocks, self._splits, self._recent, self._tile)
        return attend_whole(queries, cache, places, inputs.blocks, self._recent, self._tile)

    def _decode_settings(self, num_rows: int) -> DecodeSettings:
        """Few rows: short splits, loaded at once. Many rows: long splits, streamed."""
        if self._dtype == torch.float32:
            tile = AttentionTile(32, 32, 4, 1) if num_rows < _MANY_ROWS else AttentionTile(32, 128, 4, 2)
        elif num_rows < _SOME_ROWS:
            tile = AttentionTile(64, 64, 4, 1) if self._group <= 2 else AttentionTile(128, 128, 4, 1)
        elif num_rows < _MANY_ROWS:
            tile = AttentionTile(64, 256, 4, 2)
        else:
            tile = AttentionTile(32, 512, 2, 3)
        splits = Splits.of(self._max_pin, self._recent, 1, tile.split)
        return DecodeSettings(self._recent, self.arch.norm_epsilon, tile, splits, self._dtype)

    def _linear(self, x: Tensor, matrix: Matrix, dtype: torch.dtype) -> Tensor:
        """x @ matrix^T in `dtype`."""
        if self._deterministic:
            out = self._empty(x.shape[0], matrix.num_outputs, dtype=dtype)
            return tile_product(x, matrix, out, fixed_tile(matrix))
        return F.linear(x, matrix.values) if x.dtype == dtype else torch.mm(x, matrix.values.T, out_dtype=dtype)

    def _rows(self, num_rows: int, num_columns: int) -> Rows:
        """Memory for what a layer multiplies next."""
        return new_rows(num_rows, num_columns, self._row_dtype, self._device)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
