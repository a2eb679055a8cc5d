"""Several steps of decoding without the host: forward, draw, feed back; the results are read once at the end."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from holdfast.engine.cuda.decoder import CudaDecoder
from holdfast.engine.cuda.graphs import GraphPool, RecordedGraph
from holdfast.engine.cuda.kernels.sampler import CHUNK, draw
from holdfast.engine.cuda.layout import Bucket, Inputs, lay_out
from holdfast.engine.interface import Row
from holdfast.engine.sampling import ROUNDING, Pick
from holdfast.errors import NonFiniteLogits
from holdfast.generation import Sampled

MOST_STEPS = 256  # between two reads

_LEAST_TEMPERATURE = 1e-6  # below, quotients leave the range of numbers


def can_burst(pick: Pick) -> bool:
    """Whether the device can draw this: nothing in it may depend on the tokens drawn before."""
    params = pick.params
    is_free = pick.allowed is None and params.constraint is None and not params.logit_bias
    is_unpunished = params.repetition_penalty == 1 and not (params.presence_penalty or params.frequency_penalty)
    is_warm = params.temperature == 0 or params.temperature >= _LEAST_TEMPERATURE
    return is_free and is_unpunished and is_warm and params.top_logprobs == 0


class Burst:
    """Decoding of up to `num_rows` rows, a token each, with their draws."""

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
        """The logits, with -inf where top-k, then top-p, say no. Of equal ones, the lowest ids stay."""
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
    """One row's steps: [steps, (token, logprob, sampling logprob, number of odd logits)]."""
    outcomes: list[Sampled | NonFiniteLogits] = []
    has_failed = False
    for step, (token, logprob, sampling_logprob, odd) in enumerate(steps.tolist()):
        has_failed |= odd > 0 or not math.isfinite(logprob)
        outcomes.append(
            NonFiniteLogits(f"the model's logits for position {position + step} are not finite")
            if has_failed
            else Sampled(token=int(token), logprob=logprob, sampling_logprob=sampling_logprob)
        )
    return outcomes
