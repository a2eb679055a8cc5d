"""Forwards as CUDA graphs: recorded once a bucket, replayed for the life of the engine."""

import gc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from holdfast.engine.cuda.decoder import MOST_DECODED, CudaDecoder
from holdfast.engine.cuda.layout import Bucket, Inputs, Layout, lay_out, num_blocks
from holdfast.engine.interface import Row

_MOST_TOKENS = 512  # of a decoding graph: all their logits are computed
_MOST_PROMPT = 1024  # tokens: beyond, launching kernels one by one costs nothing that shows
_PROMPTS = 8  # sessions whose prompts share a graph


class RecordedGraph:
    """Something that runs on the device alone, replayed from a graph where there are graphs."""

    def __init__(self, run: Callable[[], Tensor], pool: "GraphPool") -> None:
        self._run = run
        self._graph: torch.cuda.CUDAGraph | None = None
        if pool.can_record:
            self._graph, self._out = pool.record(run)

    def replay(self) -> Tensor:
        """Starts it and returns its result, which the next replay overwrites."""
        if self._graph is None:
            return self._run()
        self._graph.replay()
        return self._out


class GraphPool:
    """The memory that all graphs of an engine share: one runs at a time, and none reads what another left."""

    def __init__(self, device: torch.device) -> None:
        self.can_record = device.type == "cuda"  # elsewhere the kernels run in Triton's interpreter
        self._handle = torch.cuda.graph_pool_handle() if self.can_record else None

    def record(self, run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The first run compiles kernels, which no recording may do; nor may device memory be freed during one."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._handle):
                out = run()
        finally:
            gc.enable()
        return graph, out


class BucketForward:
    """The forward of one bucket: its inputs, and what is replayed over them."""

    def __init__(self, decoder: CudaDecoder, bucket: Bucket, pool: GraphPool, device: torch.device) -> None:
        self._vocab_size = decoder.arch.vocab_size
        self._bucket = bucket
        block_size = decoder.block_size(bucket.num_tokens)
        num_tokens = bucket.num_rows * bucket.num_tokens
        self.inputs = Inputs(num_tokens, num_blocks(bucket, block_size), block_size, device)
        self.inputs.slots.fill_(-1)  # until it is filled, it writes nowhere
        self._recording = RecordedGraph(lambda: decoder.forward(self.inputs), pool)

    def fill(self, rows: Sequence[Row]) -> list[int]:
        """Lay the rows out; returns the indices of the wanted logits."""
        layout = lay_out(rows, self._vocab_size, self.inputs.blocks.size, self._bucket)
        self.inputs.fill(layout)
        return layout.wanted

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """The wanted logits, in a tensor of the caller's own."""
        wanted = self.fill(rows)
        logits = self._recording.replay()
        return logits[torch.tensor(wanted, dtype=torch.int64).to(logits.device, non_blocking=True)]


class PromptForward:
    """The forward of prompts of up to `num_tokens` tokens together, from a few sessions; the head is not part of it."""

    def __init__(self, decoder: CudaDecoder, num_tokens: int, pool: GraphPool, device: torch.device) -> None:
        self._decoder = decoder
        block_size = decoder.block_size(MOST_DECODED + 1)
        self.inputs = Inputs(num_tokens, num_tokens // block_size + _PROMPTS, block_size, device)
        self.inputs.slots.fill_(-1)
        self._recording = RecordedGraph(lambda: decoder.hidden(self.inputs), pool)

    def forward(self, layout: Layout) -> Tensor:
        self.inputs.fill(layout)
        hidden = self._recording.replay()
        wanted = torch.tensor(layout.wanted, dtype=torch.int64)
        return self._decoder.logits(hidden[wanted.to(hidden.device, non_blocking=True)])


def prompt_bucket(num_tokens: int) -> int | None:
    """The tokens of the smallest prompt graph that takes `num_tokens`; None: run it without one."""
    bucket = rounded(num_tokens)
    return bucket if bucket <= _MOST_PROMPT else None


def bucket_for(rows: Sequence[Row]) -> Bucket | None:
    """The smallest bucket that takes `rows`; None where they are a prompt's."""
    longest = max(len(row.tokens) for row in rows)
    bucket = Bucket(num_rows=rounded(len(rows)), num_tokens=rounded(longest))
    is_small = longest <= MOST_DECODED and bucket.num_rows * bucket.num_tokens <= _MOST_TOKENS
    return bucket if is_small else None


def rounded(num: int) -> int:
    """The bucket for `num`: a power of two, or from 16 on what lies half-way to the next. Padding stays under half."""
    power = 1 << (num - 1).bit_length()
    return power * 3 // 4 if power >= 32 and num <= power * 3 // 4 else power
