"""Forwards as CUDA graphs: recorded once for each bucket, replayed for the life of the engine.

A burst is such a graph that also draws the tokens: several steps of decoding without the host, whose results are read
once at the end.
"""

import gc
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from holdfast.engine.cuda.decoder import MOST_DECODED, Bucket, CudaDecoder, Inputs, Layout, lay_out, num_blocks
from holdfast.engine.cuda.kernels.sampler import CHUNK, draw
from holdfast.engine.interface import Row
from holdfast.engine.sampling import ROUNDING, Pick, not_finite
from holdfast.errors import NonFiniteLogits
from holdfast.generation import Sampled

MOST_STEPS = 256  # of a burst between two reads

_LEAST_TEMPERATURE = 1e-6  # below this, quotients leave the range of float64
_MOST_TOKENS = 512  # of a decoding graph, which computes the logits of all its tokens
_MOST_PROMPT = 1024  # tokens of a prompt graph; with more, the cost of launching the kernels one by one does not matter
_PROMPTS = 8  # sessions whose prompts can share a graph


class RecordedGraph:
    """Work that runs on the device alone, replayed from a graph where the device has graphs."""

    def __init__(self, run: Callable[[], Tensor], pool: "GraphPool") -> None:
        self._run = run
        self._graph: torch.cuda.CUDAGraph | None = None
        if pool.can_record:
            self._graph, self._out = pool.record(run)

    def replay(self) -> Tensor:
        """Start the work and return its result, which the next replay overwrites."""
        if self._graph is None:
            return self._run()
        self._graph.replay()
        return self._out


class GraphPool:
    """The memory that all graphs of an engine share: one runs at a time, and none reads what another wrote."""

    def __init__(self, device: torch.device) -> None:
        self.can_record = device.type == "cuda"  # on a CPU the kernels run in Triton's interpreter
        self._handle = torch.cuda.graph_pool_handle() if self.can_record else None

    def record(self, run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Run once to compile the kernels, then record: a recording must neither compile nor free device memory."""
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
    """The forward of one bucket: its inputs and the graph over them."""

    def __init__(self, decoder: CudaDecoder, bucket: Bucket, pool: GraphPool, device: torch.device) -> None:
        self._vocab_size = decoder.arch.vocab_size
        self._bucket = bucket
        block_size = decoder.block_size(bucket.num_tokens)
        num_tokens = bucket.num_rows * bucket.num_tokens
        self.inputs = Inputs(num_tokens, num_blocks(bucket, block_size), block_size, device)
        self.inputs.slots.fill_(-1)  # until it is filled, it writes to no slab
        self._recording = RecordedGraph(lambda: decoder.forward(self.inputs), pool)

    def fill(self, rows: Sequence[Row]) -> list[int]:
        """Copy the rows to the device; returns the indices of the wanted logits."""
        layout = lay_out(rows, self._vocab_size, self.inputs.blocks.size, self._bucket)
        self.inputs.fill(layout)
        return layout.wanted

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """The wanted logits, in a tensor that later replays do not overwrite."""
        wanted = self.fill(rows)
        logits = self._recording.replay()
        return logits[torch.tensor(wanted, dtype=torch.int64).to(logits.device, non_blocking=True)]


class PromptForward:
    """The forward of prompts of a few sessions with up to `num_tokens` tokens in total, without the head."""

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
    """The size of the smallest prompt graph for `num_tokens`; None: they run without a graph."""
    bucket = rounded(num_tokens)
    return bucket if bucket <= _MOST_PROMPT else None


def bucket_for(rows: Sequence[Row]) -> Bucket | None:
    """The smallest bucket for `rows`; None where they are too long, as a prompt's are."""
    longest = max(len(row.tokens) for row in rows)
    bucket = Bucket(num_rows=rounded(len(rows)), num_tokens=rounded(longest))
    is_small = longest <= MOST_DECODED and bucket.num_rows * bucket.num_tokens <= _MOST_TOKENS
    return bucket if is_small else None


def rounded(num: int) -> int:
    """The bucket size for `num`: a power of two, or from 16 on also half-way to the next. Less than half is padding."""
    power = 1 << (num - 1).bit_length()
    return power * 3 // 4 if power >= 32 and num <= power * 3 // 4 else power


def can_burst(pick: Pick) -> bool:
    """Whether the device can draw this token: the draw must not depend on the tokens drawn before."""
    params = pick.params
    is_free = pick.allowed is None and params.constraint is None and not params.logit_bias
    has_no_penalty = params.repetition_penalty == 1 and not (params.presence_penalty or params.frequency_penalty)
    is_drawable = params.temperature == 0 or params.temperature >= _LEAST_TEMPERATURE
    return is_free and has_no_penalty and is_drawable and params.top_logprobs == 0


class Burst:
    """Decoding steps of up to `num_rows` rows of one token each, with their draws."""

    def __init__(
        self, decoder: CudaDecoder, num_rows: int, *, is_filtered: bool, pool: GraphPool, device: torch.device
    ) -> None:
        self._vocab_size = decoder.arch.vocab_size
        self._bucket = Bucket(num_rows=num_rows, num_tokens=1)
        self._decoder = decoder
        self._is_filtered = is_filtered
        self._inputs = Inputs(num_rows, num_rows, decoder.block_size(1), device)
        self._inputs.slots.fill_(-1)
        num_chunks = -(-self._vocab_size // CHUNK)

        def scratch(dtype: torch.dtype) -> Tensor:
            return torch.empty(num_rows, num_chunks, dtype=dtype, device=device)

        double, integer = torch.float64, torch.int32
        self._scratch = tuple(map(scratch, (torch.float32, double, integer, double, integer, double)))
        self._ints = torch.zeros(num_rows, 3, dtype=torch.int64, device=device)  # seed, position, choice
        self._floats = torch.zeros(num_rows, 2, dtype=double, device=device)  # temperature, log of min_p
        self._top_k = torch.ones(num_rows, dtype=torch.int64, device=device)
        self._top_p = torch.ones(num_rows, dtype=double, device=device)
        self._steps = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._out = torch.zeros(MOST_STEPS, num_rows, 4, dtype=double, device=device)
        self._recording = RecordedGraph(self._step, pool)

    def run(self, rows: Sequence[Row], picks: Sequence[Pick], num_steps: int) -> list[list[Sampled | NonFiniteLogits]]:
        """`num_steps` outcomes for each row."""
        self._fill(rows, picks)
        read: list[np.ndarray] = []
        for start in range(0, num_steps, MOST_STEPS):
            steps = min(MOST_STEPS, num_steps - start)
            self._steps.zero_()
            for _ in range(steps):
                self._recording.replay()
            read.append(self._out[:steps].cpu().numpy())
        steps_done = np.concatenate(read)
        return [_outcomes(steps_done[:, row], pick.position) for row, pick in enumerate(picks)]

    def _fill(self, rows: Sequence[Row], picks: Sequence[Pick]) -> None:
        self._inputs.fill(lay_out(rows, self._vocab_size, self._inputs.blocks.size, self._bucket))
        num = len(picks)
        ints = np.array([(p.params.seed, p.position, p.params.choice) for p in picks], np.uint64).view(np.int64)
        least = [math.log(p.params.min_p) if p.params.min_p > 0 else -math.inf for p in picks]
        floats = np.array([(p.params.temperature, low) for p, low in zip(picks, least, strict=True)], np.float64)
        self._ints[:num].copy_(torch.from_numpy(ints), non_blocking=True)
        self._floats[:num].copy_(torch.from_numpy(floats), non_blocking=True)
        if self._is_filtered:
            top_k = np.array([p.params.top_k or self._vocab_size for p in picks], np.int64)
            top_p = np.array([p.params.top_p for p in picks], np.float64)
            self._top_k[:num].copy_(torch.from_numpy(top_k), non_blocking=True)
            self._top_p[:num].copy_(torch.from_numpy(top_p), non_blocking=True)

    def _step(self) -> Tensor:
        logits = self._decoder.forward(self._inputs)
        candidates = self._survivors(logits) if self._is_filtered else logits
        sequence = self._inputs.tokens, self._inputs.positions, self._steps
        draw(logits, candidates, self._scratch, (self._ints, self._floats), sequence, self._out)
        return self._out

    def _survivors(self, logits: Tensor) -> Tensor:
        """The logits, with -inf for tokens that top-k, then top-p, exclude. Of equal logits, the lowest ids stay."""
        ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
        temperature = self._floats[:, :1].clamp(min=_LEAST_TEMPERATURE)
        mass = ((ordered.double() - ordered[:, :1].double()) / temperature).exp()
        rank = torch.arange(self._vocab_size, device=logits.device)
        is_kept = rank < self._top_k[:, None]
        mass = mass * is_kept
        reached = mass.cumsum(dim=-1) / mass.sum(dim=-1, keepdim=True)
        before = torch.nn.functional.pad(reached[:, :-1], (1, 0))
        top_p = self._top_p[:, None]
        is_kept &= (top_p >= 1) | (before < top_p - ROUNDING) | (rank == 0)
        return torch.full_like(logits, -math.inf).scatter_(1, ids, ordered.masked_fill(~is_kept, -math.inf))


def _outcomes(steps: np.ndarray, position: int) -> list[Sampled | NonFiniteLogits]:
    """One row's steps: [steps, (token, logprob, sampling logprob, number of logits that are not finite)]."""
    outcomes: list[Sampled | NonFiniteLogits] = []
    has_failed = False
    for step, (token, logprob, sampling_logprob, odd) in enumerate(steps.tolist()):
        has_failed |= odd > 0 or not math.isfinite(logprob)
        outcomes.append(
            not_finite(position + step)
            if has_failed
            else Sampled(token=int(token), logprob=logprob, sampling_logprob=sampling_logprob)
        )
    return outcomes
