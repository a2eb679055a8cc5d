"""One forward on the device. Knows weights, slabs and kernels; not sessions, graphs or sampling."""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.engine.cuda.kernels.attending import DecodeSettings, attend_decoded, attend_split, attend_whole
from holdfast.engine.cuda.kernels.attention import AttentionTile, Splits
from holdfast.engine.cuda.kernels.heads import write_heads
from holdfast.engine.cuda.kernels.restoring import restore
from holdfast.engine.cuda.kernels.rows import add_norm, begin, gate
from holdfast.engine.cuda.kernels.tiles import fixed_tile, head_tile, tile_product
from holdfast.engine.cuda.kernels.vectors import vector_product
from holdfast.engine.cuda.layout import Inputs
from holdfast.engine.cuda.weights import CudaLayer, CudaWeights, Matrix
from holdfast.engine.slab import SlabShape
from holdfast.engine.torch.attention import SlabTensors
from holdfast.models import Architecture

MOST_DECODED = 8  # tokens of a row that one graph verifies

_INT8_TOKENS, _INT8_OUTPUTS = 64, 65536  # up to so many tokens, and from so many rows on, int8 is multiplied as it is
_MOST_ROWS = 512  # of single tokens, in one forward
_SOME_ROWS, _MANY_ROWS = 4, 8  # the more rows, the longer splits may be
_PROMPT_ROWS = 64  # query rows of a block when there are blocks enough


class CudaDecoder:
    """Llama-shaped decoder over slabs. The residual is float32; products take the weights' type."""

    def __init__(
        self, arch: Architecture, weights: CudaWeights, slabs: SlabTensors, shape: SlabShape, *, deterministic: bool
    ) -> None:
        self.arch = arch
        self.weights = weights
        self._slabs = slabs
        self._recent = shape.recent
        self._deterministic = deterministic
        self._dtype = weights.embedding.dtype
        self._device = weights.embedding.device
        self._frequencies = torch.tensor(arch.inverse_frequencies, dtype=torch.float64, device=self._device)
        self._max_pin = shape.max_pin
        self._tile = AttentionTile(32, 128, 4, 2) if self._dtype == torch.float32 else AttentionTile(64, 128, 4, 2)
        self._splits = Splits.of(shape.max_pin, shape.recent, _PROMPT_ROWS, self._tile.split)
        self._done = torch.zeros(_MOST_ROWS, arch.num_kv_heads, dtype=torch.int32, device=self._device)

    @property
    def _group(self) -> int:
        return self.arch.num_heads // self.arch.num_kv_heads

    def block_size(self, num_tokens: int) -> int:
        """How many queries of a row are attended to together, for rows of up to `num_tokens`."""
        if self._deterministic:
            return max(1, 16 // self._group)
        return num_tokens if num_tokens <= MOST_DECODED else max(1, _PROMPT_ROWS // self._group)

    def forward(self, inputs: Inputs) -> Tensor:
        """float32 logits of all tokens. Mutates the slabs' cells."""
        if inputs.tokens.shape[0] == 1 and not self._deterministic:
            return self._forward_one(inputs)
        return self.logits(self.hidden(inputs))

    def hidden(self, inputs: Inputs) -> Tensor:
        """What the head reads, for all tokens: one kernel a step, libraries for the products. Mutates cells."""
        x, rotations = self._begin(inputs)
        epsilon, layers = self.arch.norm_epsilon, self.weights.layers
        norms = [layer.attention_norm for layer in layers[1:]] + [self.weights.norm]
        h = add_norm(x, None, layers[0].attention_norm, self._like(x), epsilon)
        for index, (layer, next_norm) in enumerate(zip(layers, norms, strict=True)):
            mixed = self._attend(index, layer, self._linear(h, layer.qkv), inputs, rotations)
            h = add_norm(x, self._linear(mixed, layer.output), layer.mlp_norm, self._like(x), epsilon)
            gated = gate(self._linear(h, layer.gate_up), self._empty(x.shape[0], self.arch.mlp_size))
            h = add_norm(x, self._linear(gated, layer.down), next_norm, self._like(x), epsilon)
        return h

    def logits(self, hidden: Tensor) -> Tensor:
        """float32: near-ties decide tokens."""
        if hidden.shape[0] == 0:
            return self._empty(0, self.arch.vocab_size, dtype=torch.float32)
        return self._linear(hidden, self.weights.head, torch.float32)

    def _forward_one(self, inputs: Inputs) -> Tensor:
        """One token: norms, gates and additions are part of the products, five kernels a layer."""
        x, rotations = self._begin(inputs)
        epsilon = self.arch.norm_epsilon
        for index, layer in enumerate(self.weights.layers):
            qkv = self._empty(1, layer.qkv.num_outputs, dtype=torch.float32)
            vector_product(x, layer.qkv, qkv, norm=layer.attention_norm, epsilon=epsilon)
            mixed = self._attend(index, layer, qkv, inputs, rotations)
            vector_product(mixed, layer.output, x, is_added=True)
            gated = self._empty(1, self.arch.mlp_size)
            vector_product(x, layer.gate_up, gated, norm=layer.mlp_norm, epsilon=epsilon, is_gated=True)
            vector_product(gated, layer.down, x, is_added=True)
        logits = self._empty(1, self.arch.vocab_size, dtype=torch.float32)
        return vector_product(x, self.weights.head, logits, norm=self.weights.norm, epsilon=epsilon)

    def _begin(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The residual [tokens, hidden] and the rotary tables [tokens, 4, dim / 2]."""
        num_tokens = inputs.tokens.shape[0]
        x = self._empty(num_tokens, self.arch.hidden_size, dtype=torch.float32)
        rotations = self._empty(num_tokens, 4, self.arch.head_dim // 2, dtype=torch.float32)
        ids = inputs.tokens, inputs.positions, inputs.sinks
        begin(*ids, self.weights.embedding, self._frequencies, x, rotations, self._recent)
        return x, rotations

    def _attend(self, index: int, layer: CudaLayer, qkv: Tensor, inputs: Inputs, rotations: Tensor) -> Tensor:
        arch, num_tokens = self.arch, qkv.shape[0]
        cache = self._slabs.keys[index], self._slabs.values[index]
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = layer.query_norm, layer.key_norm
        places = inputs.places
        if inputs.blocks.size == 1 and num_tokens <= _MOST_ROWS and not self._deterministic:
            window = self._window(num_tokens)
            return attend_decoded(qkv, layer.qkv_bias, norms, rotations, places, cache, self._done, window)
        query, sink_query = self._empty(2, num_tokens, arch.num_heads, arch.head_dim)
        queries = query, sink_query
        write_heads(qkv, layer.qkv_bias, norms, rotations, places, queries, cache, arch.norm_epsilon)
        if self._deterministic or inputs.blocks.size <= MOST_DECODED:
            return attend_split(queries, cache, places, inputs.blocks, self._splits, self._recent, self._tile)
        return attend_whole(queries, cache, places, inputs.blocks, self._recent, self._tile)

    def _window(self, num_rows: int) -> DecodeSettings:
        """Few rows: short splits, fetched at once. Many: long ones, streamed."""
        if self._dtype == torch.float32:
            tile = AttentionTile(32, 32, 4, 1) if num_rows < _MANY_ROWS else AttentionTile(32, 128, 4, 2)
        elif num_rows < _SOME_ROWS:
            tile = AttentionTile(64, 64, 4, 1) if self._group <= 2 else AttentionTile(128, 128, 4, 1)
        elif num_rows < _MANY_ROWS:
            tile = AttentionTile(64, 256, 4, 2)
        else:
            tile = AttentionTile(32, 512, 2, 3)
        splits = Splits.of(self._max_pin, self._recent, 1, tile.split)
        return DecodeSettings(self._recent, self.arch.norm_epsilon, tile, splits)

    def _linear(self, x: Tensor, matrix: Matrix, dtype: torch.dtype | None = None) -> Tensor:
        """x @ matrix^T in `dtype`, the activations' own by default."""
        dtype = dtype or self._dtype
        if self._deterministic:
            out = self._empty(x.shape[0], matrix.num_outputs, dtype=dtype)
            return tile_product(x, matrix, out, fixed_tile(matrix))
        weight = matrix.values
        if matrix.scales is not None:
            if matrix.num_outputs >= _INT8_OUTPUTS and x.shape[0] <= _INT8_TOKENS:
                out = self._empty(x.shape[0], matrix.num_outputs, dtype=dtype)
                return tile_product(x, matrix, out, head_tile(x.shape[0]))
            weight = restore(matrix.values, matrix.scales, torch.empty_like(matrix.values, dtype=self._dtype))
        return F.linear(x, weight) if x.dtype == dtype else torch.mm(x, weight.T, out_dtype=dtype)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def _like(self, x: Tensor) -> Tensor:
        return torch.empty_like(x, dtype=self._dtype)
