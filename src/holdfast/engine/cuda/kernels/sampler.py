"""Sampling on the device: the same draws as `sampling.py` makes on the host, from the same noise, in float64.

Three small kernels over chunks of the vocabulary: statistics of the logits, the best candidate of each chunk, and the
winner, which becomes the row's next token without the host.
"""

import triton
import triton.language as tl
from torch import Tensor

from holdfast.engine.cuda.kernels.launch import blocks, overlapped, power_of_two, take_turn
from holdfast.engine.sampling import ROUNDING

CHUNK = 4096

_ROUNDING = tl.constexpr(ROUNDING)


@triton.jit
def _survey(logits_ptr, top_ptr, sum_ptr, odd_ptr, V, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr):
    take_turn()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits_ptr + row * V + at, mask=at < V, other=float("-inf"))
    top = tl.max(logit, axis=0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    out = row * NUM_CHUNKS + chunk
    tl.store(top_ptr + out, top)
    tl.store(sum_ptr + out, tl.sum(tl.exp(logit - safe).to(tl.float64), axis=0))
    tl.store(odd_ptr + out, tl.sum(((logit - logit != 0) & (at < V)).to(tl.int32), axis=0))


@triton.jit
def _noise(seed, position, choice, token):
    """The Gumbel noise of `sampling.py`: four neighbouring tokens share one Philox block."""
    block = (token >> 2).to(tl.uint32)
    zero = block * 0
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(seed, block, low, high, zero + choice.to(tl.uint32), 10)
    lane = token & 3
    bits = tl.where(lane == 0, r0, tl.where(lane == 1, r1, tl.where(lane == 2, r2, r3)))
    uniform = ((bits >> 9).to(tl.float64) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -tl.log(-tl.log(uniform))


@triton.jit
def _contest(
    candidates_ptr,
    top_ptr,
    ints_ptr,
    floats_ptr,
    best_ptr,
    winner_ptr,
    mass_ptr,
    V,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
):
    take_turn()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    chunks = tl.arange(0, CHUNKS_BLOCK)
    top = tl.max(
        tl.load(top_ptr + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=float("-inf")), axis=0
    ).to(tl.float64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(candidates_ptr + row * V + token, mask=token < V, other=float("-inf")).to(tl.float64)
    temperature, least = tl.load(floats_ptr + row * 2), tl.load(floats_ptr + row * 2 + 1)
    score = logit - top
    mass = score * 0
    if temperature > 0:
        seed, position = tl.load(ints_ptr + row * 3), tl.load(ints_ptr + row * 3 + 1)
        scaled = score / temperature
        scaled = tl.where(scaled >= least - _ROUNDING, scaled, float("-inf"))
        mass = tl.exp(scaled)
        score = scaled + _noise(seed, position, tl.load(ints_ptr + row * 3 + 2), token)
    best = tl.max(score, axis=0)
    out = row * NUM_CHUNKS + chunk
    tl.store(best_ptr + out, best)
    tl.store(winner_ptr + out, tl.min(tl.where(score == best, token, 2147483647), axis=0))
    tl.store(mass_ptr + out, tl.sum(mass, axis=0))


@triton.jit
def _settle(
    logits_ptr,
    top_ptr,
    sum_ptr,
    odd_ptr,
    best_ptr,
    winner_ptr,
    mass_ptr,
    ints_ptr,
    floats_ptr,
    tokens_ptr,
    positions_ptr,
    steps_ptr,
    out_ptr,
    num_rows,
    V,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
):
    take_turn()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_BLOCK)
    at, is_chunk = row * NUM_CHUNKS + chunk, chunk < NUM_CHUNKS
    tops = tl.load(top_ptr + at, mask=is_chunk, other=float("-inf")).to(tl.float64)
    top = tl.max(tops, axis=0)
    sums = tl.load(sum_ptr + at, mask=is_chunk, other=0)
    norm = top + tl.log(tl.sum(sums * tl.exp(tops - top), axis=0))
    best = tl.load(best_ptr + at, mask=is_chunk, other=float("-inf"))
    winners = tl.load(winner_ptr + at, mask=is_chunk, other=2147483647)
    token = tl.min(tl.where(best == tl.max(best, axis=0), winners, 2147483647), axis=0)
    token = tl.maximum(tl.minimum(token, V - 1), 0).to(tl.int64)  # a row of NaNs has no winner
    logit = tl.load(logits_ptr + row * V + token).to(tl.float64)
    temperature = tl.load(floats_ptr + row * 2)
    sampling_logprob = norm * 0
    if temperature > 0:
        mass = tl.sum(tl.load(mass_ptr + at, mask=is_chunk, other=0), axis=0)
        sampling_logprob = (logit - top) / temperature - tl.log(mass)
    odd = tl.sum(tl.load(odd_ptr + at, mask=is_chunk, other=0), axis=0)
    step = tl.load(steps_ptr + row)
    out = out_ptr + (step * num_rows + row) * 4
    tl.store(out, token.to(tl.float64))
    tl.store(out + 1, logit - norm)
    tl.store(out + 2, sampling_logprob)
    tl.store(out + 3, odd.to(tl.float64))
    tl.store(steps_ptr + row, step + 1)
    tl.store(tokens_ptr + row, token)
    tl.store(positions_ptr + row, tl.load(positions_ptr + row) + 1)
    tl.store(ints_ptr + row * 3 + 1, tl.load(ints_ptr + row * 3 + 1) + 1)


def draw(
    logits: Tensor,
    candidates: Tensor,
    scratch: tuple[Tensor, ...],
    params: tuple[Tensor, Tensor],
    sequence: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
) -> None:
    """One token per row from logits [rows, vocabulary]; `candidates` are the logits with -inf for excluded tokens.

    params: [rows, (seed, position, choice)] and [rows, (temperature, log of min_p)]. sequence: the rows' next token,
    its position, and the number of steps done; all three advance by one step, as do the positions in `params`.
    out: [steps, rows, (token, logprob, sampling logprob, number of logits that are not finite)].
    """
    num_rows, vocabulary = logits.shape
    tops, sums, odd, best, winner, mass = scratch
    num_chunks = blocks(vocabulary, CHUNK)
    sizes = {"NUM_CHUNKS": num_chunks, "CHUNKS_BLOCK": power_of_two(num_chunks)}
    grid = (num_chunks, num_rows)
    _survey[grid](logits, tops, sums, odd, vocabulary, CHUNK=CHUNK, NUM_CHUNKS=num_chunks, **overlapped(4))
    _contest[grid](candidates, tops, *params, best, winner, mass, vocabulary, CHUNK=CHUNK, **sizes, **overlapped(8))
    _settle[(num_rows,)](logits, *scratch, *params, *sequence, out, num_rows, vocabulary, **sizes, **overlapped(1))
