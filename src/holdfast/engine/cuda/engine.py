"""The engine on CUDA."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.engine.cuda.decoder import MOST_DECODED, Bucket, CudaDecoder, Inputs, Layout, lay_out
from holdfast.engine.cuda.graphs import (
    BucketForward,
    Burst,
    GraphPool,
    PromptForward,
    bucket_for,
    can_burst,
    prompt_bucket,
    rounded,
)
from holdfast.engine.cuda.slabs import CudaSlabs, Fp8Slabs
from holdfast.engine.cuda.weights import load_cuda_weights, overwrite
from holdfast.engine.interface import Row, engine_info
from holdfast.engine.sampling import Pick
from holdfast.engine.slab import SlabShape
from holdfast.engine.torch.engine import DTYPES, TensorEngine, require_cuda
from holdfast.engine.torch.weights import TensorReader, from_numpy, tensor_places
from holdfast.engine.weights import decoder_shapes, open_weights
from holdfast.errors import InvalidArgument, NonFiniteLogits
from holdfast.generation import Sampled
from holdfast.models import Architecture, ModelSource

_MAX_BURST = 8  # reading the results costs little beside this many steps, and a new request waits no longer than them
_FP8_CAPABILITY = (8, 9)
_ROW_COST = 0.1  # eight tokens of a row take 1.7 times as long as one at 0.6B, 1.2 times at 8B


class CudaEngine(TensorEngine):
    """A decoder and its slabs on one CUDA device. Graphs are recorded when a bucket is first met."""

    _slabs: CudaSlabs

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
        kv_dtype: str = "auto",
        device: str = "cuda",
        deterministic: bool = False,
    ) -> None:
        info = engine_info(
            name,
            arch,
            digest=digest,
            dtype=dtype,
            shape=shape,
            kv_dtype=kv_dtype,
            row_invariant=deterministic,
            row_cost=_ROW_COST,
        )
        place = torch.device(device)
        if "fp8" in (info.dtype, info.kv_dtype):
            _require_fp8(place)
        with torch.inference_mode():
            weights = load_cuda_weights(reader, arch, dtype=dtype, device=place)
            super().__init__(info, shape=shape, num_slabs=num_slabs, device=place)
        self._shapes, self._places = decoder_shapes(arch), tensor_places(weights, arch)
        self._bias_dtype = torch.float32 if dtype == "float32" else torch.bfloat16  # to which biases are rounded
        self._decoder = CudaDecoder(arch, weights, self._slabs, shape, deterministic=deterministic)
        self._pool = GraphPool(self._device)
        self._forwards: dict[Bucket, BucketForward] = {}
        self._prompts: dict[int, PromptForward] = {}
        self._bursts: dict[tuple[int, bool], Burst] = {}

    def _new_slabs(self, cells: tuple[int, int, int, int, int]) -> CudaSlabs:
        if self.info.kv_dtype == "fp8":
            return Fp8Slabs(cells, self._device)
        return CudaSlabs(cells, DTYPES[self.info.kv_dtype], self._device)

    @property
    def weight_bytes_per_step(self) -> int:
        """The weights that one decoding step reads."""
        return self._decoder.weights.num_bytes_per_step

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @torch.inference_mode()
    def write_weight(self, name: str, tensor: NDArray[np.generic]) -> None:
        """At the same address, so that the graphs stay valid."""
        fresh = from_numpy(tensor)
        if name.endswith(".bias"):
            fresh = fresh.to(self._bias_dtype)
        for held, first in self._places[name]:
            overwrite(held, first, fresh)

    def warm_up(self, num_rows: Sequence[int] = (1,)) -> None:
        """Record the graphs of a prompt's chunk and of single-token steps with these numbers of rows.

        Otherwise the first request of such a size waits for the recording.
        """
        self._prompt_for(prompt_bucket(self.shape.prefill_chunk))
        for num in num_rows:
            self._forward_for(Bucket(num_rows=rounded(num), num_tokens=1))
            self._burst_for(rounded(num), is_filtered=False)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Tensor:
        bucket = bucket_for(rows)
        if bucket is not None:
            return self._forward_for(bucket).forward(rows)
        return self._forward_prompts(lay_out(rows, self.info.vocab_size, self._decoder.block_size(MOST_DECODED + 1)))

    def max_burst(self) -> int:
        return _MAX_BURST

    def can_burst(self, pick: Pick) -> bool:
        return can_burst(pick)

    @torch.inference_mode()
    def burst(
        self, rows: Sequence[Row], picks: Sequence[Pick], num_steps: int
    ) -> list[list[Sampled | NonFiniteLogits]]:
        """Decode `num_steps` tokens for every row, whose one token is given, without the host in between.

        `picks` are the first draws of the rows, in their order; each must pass `can_burst`. The caller has declared
        `num_steps` cells of every slab. Mutates cells, not `Slab`s.
        """
        bucket = bucket_for(rows)
        if bucket is None or bucket.num_tokens != 1:
            raise InvalidArgument("a burst needs a batch of rows with one token each")
        is_filtered = any(pick.params.top_k or pick.params.top_p < 1 for pick in picks)
        return self._burst_for(bucket.num_rows, is_filtered).run(rows, picks, num_steps)

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


def _require_fp8(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise InvalidArgument(f"fp8 needs a GPU of compute capability 8.9 or higher, and {name} has less; use bfloat16")


def load_engine(
    source: ModelSource,
    *,
    num_slabs: int,
    shape: SlabShape,
    dtype: str = "bfloat16",
    kv_dtype: str = "auto",
    deterministic: bool = False,
) -> CudaEngine:
    """The engine for a model on disk, ready for its first request. Blocks for seconds."""
    require_cuda()
    engine = CudaEngine(
        source.name,
        source.architecture,
        open_weights(source),
        digest=source.digest,
        num_slabs=num_slabs,
        shape=shape,
        dtype=dtype,
        kv_dtype=kv_dtype,
        deterministic=deterministic,
    )
    engine.warm_up()
    return engine
