"""The engine protocol on CUDA."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.engine.cuda.burst import Burst, can_burst
from holdfast.engine.cuda.decoder import MOST_DECODED, CudaDecoder
from holdfast.engine.cuda.graphs import BucketForward, GraphPool, PromptForward, bucket_for, prompt_bucket, rounded
from holdfast.engine.cuda.layout import Bucket, Inputs, Layout, lay_out
from holdfast.engine.cuda.weights import load_cuda_weights
from holdfast.engine.description import engine_info
from holdfast.engine.interface import EngineInfo, KeysValues, Row
from holdfast.engine.sampling import Pick, sample_rows
from holdfast.engine.slab import Slab, SlabShape
from holdfast.engine.torch.attention import SlabTensors
from holdfast.engine.torch.weights import TensorReader, reader_for
from holdfast.errors import InvalidArgument, NonFiniteLogits
from holdfast.generation import Sampled
from holdfast.models import Architecture, ModelSource

_MAX_BURST = 8  # reading the results costs a small part of that many steps, and nobody new waits longer
_ROW_COST = 0.1  # eight tokens of a row take 1.7 times as long as one at 0.6B, 1.2 times at 8B


class CudaEngine:
    """A decoder and its slabs on one CUDA device. Graphs are recorded when a bucket is first met."""

    def __init__(
        self,
        name: str,
        arch: Architecture,
        reader: TensorReader,
        *,
        digest: str,
        num_slabs: int,
        shape: SlabShape,
        dtype: str = "bfloat16",
        device: str = "cuda",
        deterministic: bool = False,
    ) -> None:
        info = engine_info(name, arch, digest=digest, dtype=dtype, shape=shape, row_invariant=deterministic)
        self._info = dataclasses.replace(info, row_cost=_ROW_COST)
        self._device = torch.device(device)
        self._shape = shape
        self._num_slabs = num_slabs
        with torch.inference_mode():
            weights = load_cuda_weights(reader, arch, dtype=dtype, device=self._device)
            cells = (arch.num_layers, num_slabs, arch.num_kv_heads, shape.capacity, arch.head_dim)
            kv_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
            self._slabs = SlabTensors(cells, kv_dtype, self._device)
        self._decoder = CudaDecoder(arch, weights, self._slabs, shape, deterministic=deterministic)
        self._pool = GraphPool(self._device)
        self._forwards: dict[Bucket, BucketForward] = {}
        self._prompts: dict[int, PromptForward] = {}
        self._bursts: dict[tuple[int, bool], Burst] = {}

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def shape(self) -> SlabShape:
        return self._shape

    @property
    def num_slabs(self) -> int:
        return self._num_slabs

    @property
    def kv_reserved_bytes(self) -> int:
        return self._slabs.num_bytes

    @property
    def weight_bytes_per_step(self) -> int:
        """What one decode step has to read of the weights."""
        return self._decoder.weights.num_bytes_per_step

    def warm_up(self, num_rows: Sequence[int] = (1,)) -> None:
        """Record the graphs of a prompt's chunk, and of single-token steps for these numbers of rows, so that no
        request waits for them."""
        self._prompt_for(prompt_bucket(self._shape.prefill_chunk))
        for num in num_rows:
            self._forward_for(Bucket(num_rows=rounded(num), num_tokens=1))
            self._burst_for(rounded(num), is_filtered=False)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Tensor:
        bucket = bucket_for(rows)
        if bucket is not None:
            return self._forward_for(bucket).forward(rows)
        return self._forward_prompts(lay_out(rows, self._info.vocab_size, self._decoder.block_size(MOST_DECODED + 1)))

    def max_burst(self) -> int:
        return _MAX_BURST

    def can_burst(self, pick: Pick) -> bool:
        return can_burst(pick)

    @torch.inference_mode()
    def burst(
        self, rows: Sequence[Row], picks: Sequence[Pick], num_steps: int
    ) -> list[list[Sampled | NonFiniteLogits]]:
        """Decode `num_steps` tokens for every row, one token each given, with no word to the host in between.

        `picks` are the rows' first draws, in their order; each must pass `can_burst`. The caller has declared
        `num_steps` cells of every slab. Mutates cells, not `Slab`s.
        """
        bucket = bucket_for(rows)
        if bucket is None or bucket.num_tokens != 1:
            raise InvalidArgument("a burst takes a batch of rows of one token each")
        is_filtered = any(pick.params.top_k or pick.params.top_p < 1 for pick in picks)
        return self._burst_for(bucket.num_rows, is_filtered).run(rows, picks, num_steps)

    def read_logits(self, logits: Tensor) -> NDArray[np.float32]:
        array: NDArray[np.float32] = logits.float().cpu().numpy()
        return array

    def sample(self, logits: Tensor, picks: Sequence[Pick]) -> list[Sampled | NonFiniteLogits]:
        return sample_rows(self.read_logits(logits), picks)

    @torch.inference_mode()
    def copy_slab(self, source: Slab, target: Slab) -> None:
        self._slabs.copy(source, target)

    @torch.inference_mode()
    def read_slab(self, slab: Slab, positions: Sequence[range]) -> KeysValues:
        return self._slabs.read(slab, positions)

    @torch.inference_mode()
    def write_slab(self, slab: Slab, positions: Sequence[range], kv: KeysValues) -> None:
        self._slabs.write(slab, positions, kv)

    def is_fatal(self, error: Exception) -> bool:
        return isinstance(error, torch.AcceleratorError)  # a CUDA context does not recover; running out of memory does

    @torch.inference_mode()
    def clear_slab(self, slab: Slab) -> None:
        self._slabs.clear(slab)

    def _forward_prompts(self, layout: Layout) -> Tensor:
        num_tokens, num_blocks = layout.tokens.shape[1], layout.blocks.shape[1]
        prompt = self._prompt_for(prompt_bucket(num_tokens))
        if prompt is not None and prompt.inputs.fits(layout):
            return prompt.forward(layout)
        inputs = Inputs(num_tokens, num_blocks, self._decoder.block_size(MOST_DECODED + 1), self._device)
        inputs.fill(layout)
        wanted = torch.tensor(layout.wanted, dtype=torch.int64).to(self._device, non_blocking=True)
        return self._decoder.logits(self._decoder.hidden(inputs)[wanted])

    @torch.inference_mode()
    def _prompt_for(self, bucket: int | None) -> PromptForward | None:
        if bucket is not None and bucket not in self._prompts:
            self._prompts[bucket] = PromptForward(self._decoder, bucket, self._pool, self._device)
        return None if bucket is None else self._prompts[bucket]

    @torch.inference_mode()
    def _forward_for(self, bucket: Bucket) -> BucketForward:
        if bucket not in self._forwards:
            self._forwards[bucket] = BucketForward(self._decoder, bucket, self._pool, self._device)
        return self._forwards[bucket]

    @torch.inference_mode()
    def _burst_for(self, num_rows: int, is_filtered: bool) -> Burst:
        key = num_rows, is_filtered
        if key not in self._bursts:
            self._bursts[key] = Burst(
                self._decoder, num_rows, is_filtered=is_filtered, pool=self._pool, device=self._device
            )
        return self._bursts[key]


def load_engine(
    source: ModelSource,
    *,
    num_slabs: int,
    shape: SlabShape,
    dtype: str = "bfloat16",
    device: str = "cuda",
    deterministic: bool = False,
) -> CudaEngine:
    """The engine for a model on disk, ready for its first request. Blocks for seconds."""
    if not torch.cuda.is_available():
        raise InvalidArgument("device cuda was asked for, but torch sees no CUDA device; use --device cpu")
    engine = CudaEngine(
        source.name,
        source.architecture,
        reader_for(source),
        digest=source.digest,
        num_slabs=num_slabs,
        shape=shape,
        dtype=dtype,
        device="cuda" if device == "auto" else device,
        deterministic=deterministic,
    )
    engine.warm_up()
    return engine
