"""What the CUDA engine promises, checked on a device by `tests/gpu.py`."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from holdfast.engine.cuda import CudaEngine, load_engine, module
from holdfast.engine.cuda.fused import FusedStep
from holdfast.engine.cuda.graphs import GraphPool
from holdfast.engine.cuda.weights import LARGEST, Matrix, rounded
from holdfast.engine.interface import Row
from holdfast.engine.sampling import Pick
from holdfast.engine.slab import Slab, SlabPool, SlabShape
from holdfast.engine.torch.weights import StateDictReader
from holdfast.engine.update import NewWeights, checked, write
from holdfast.generation import Sampled, SamplingParams
from holdfast.models import HFSource
from holdfast.models.architecture import from_hf_config
from tests import tiny
from tests.driving import Array, difference, forward, run_chunks
from tests.oracle import dense_logits

SHAPE = SlabShape(recent=60, max_pin=16, prefill_chunk=48, draft_length=7, rewind_tokens=64)
TOLERANCE = 5e-4
MANY = 64


def cuda_engine(
    family: str,
    dtype: str = "float32",
    *,
    kv_dtype: str = "auto",
    num_slabs: int = 2,
    deterministic: bool = False,
    shape: SlabShape = SHAPE,
    state: dict[str, torch.Tensor] | None = None,
) -> CudaEngine:
    model = _model(family)
    return CudaEngine(
        f"tiny-{family}",
        from_hf_config(model.config.to_dict()),
        StateDictReader(state or model.state_dict()),
        digest=family,
        num_slabs=num_slabs,
        shape=shape,
        dtype=dtype,
        kv_dtype=kv_dtype,
        deterministic=deterministic,
    )


def _model(family: str) -> Any:
    special = {"whole-groups": whole_groups_model, "large": large_model}
    return special[family]() if family in special else tiny.hf_model(family)


@cache
def whole_groups_model() -> Any:
    """Qwen3 whose matrices have multiples of 16 rows and columns, as fp8 needs them."""
    import transformers

    sizes = tiny.hf_model("qwen3").config.to_dict() | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    torch.manual_seed(8)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).eval()


@cache
def large_model() -> Any:
    """Qwen3 of sizes for which there are kernels in CUDA C++."""
    import transformers

    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = tiny.hf_model("qwen3").config.to_dict() | sizes | {"head_dim": 128, "max_position_embeddings": 32_768}
    torch.manual_seed(9)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def some_tokens(num: int, seed: int = 1) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, tiny.VOCABULARY, num).tolist()
    return ids


def the_cuda_engine_equals_the_dense_oracle() -> str:
    worst = 0.0
    for family in tiny.FAMILIES:
        for deterministic in (False, True) if family in ("qwen3", "mistral") else (False,):
            engine = cuda_engine(family, deterministic=deterministic)
            for sink, sizes in ((4, [48, 1, 17, 5]), (0, [1, 8, 30, 3]), (16, [33, 2, 1])):
                slab = SlabPool(2, SHAPE).acquire(sink)
                tokens = some_tokens(10 * slab.window.size)
                ours = run_chunks(engine, slab, tokens, sizes)
                state = tiny.hf_model(family).state_dict()
                truth = dense_logits(state, tiny.architecture(family), tokens, slab.window)
                worst = max(worst, difference(ours, truth.numpy()))
    assert worst <= TOLERANCE, worst
    return f"max |logit difference| {worst:.1e} in fp32, ten windows, every family, deterministic and not"


def rows_of_a_cuda_batch_keep_to_themselves() -> str:
    """Rows of many lengths, pins and histories in one forward, against each alone."""
    worst = 0.0
    for num_rows, most in ((3, 1), (5, 8), (11, 4), (40, 3), (3, 30)):
        engine, pool = cuda_engine("qwen3", num_slabs=num_rows), SlabPool(num_rows, SHAPE)
        lengths = np.random.default_rng(num_rows).integers(1, most + 1, num_rows).tolist()
        slabs = [pool.acquire(index % 17) for index in range(num_rows)]
        for index, slab in enumerate(slabs):
            run_chunks(engine, slab, some_tokens(20 + 7 * index, index), [48])
        parts = [(slab, some_tokens(num, 99)) for slab, num in zip(slabs, lengths, strict=True)]
        together = forward(engine, parts)
        for slab, num in zip(slabs, lengths, strict=True):
            slab.rewind(slab.length - num)
        for (slab, tokens), ours in zip(parts, together, strict=True):
            worst = max(worst, difference(ours, forward(engine, [(slab, tokens)])[0]))
    assert worst <= 1e-4, worst
    return f"max |logit difference| {worst:.1e} beside up to 39 others"


def cuda_dtypes_stay_near_fp32() -> str:
    said = []
    for dtype, kv_dtype, most in (
        ("bfloat16", "auto", 0.03),
        ("bfloat16", "fp8", 0.1),
        ("fp8", "auto", 0.2),
        ("fp8", "fp8", 0.2),
    ):
        for deterministic in (False, True):
            worst, flips, total = 0.0, 0, 0
            for family in ("whole-groups", *(tiny.FAMILIES if (dtype, kv_dtype) == ("bfloat16", "auto") else ())):
                tokens = some_tokens(400)
                exact = run_chunks(cuda_engine(family), SlabPool(2, SHAPE).acquire(4), tokens, [48])
                engine = cuda_engine(family, dtype, kv_dtype=kv_dtype, deterministic=deterministic)
                ours = run_chunks(engine, SlabPool(2, SHAPE).acquire(4), tokens, [48, 1, 6])
                worst = max(worst, _relative_difference(ours, exact))
                flips, total = flips + int((ours.argmax(-1) != exact.argmax(-1)).sum()), total + len(tokens)
            assert worst < most, (dtype, kv_dtype, worst)
            cache = f" with {kv_dtype} cache" if kv_dtype != "auto" else ""
            name = f"{dtype}{cache}{' deterministic' * deterministic}"
            said.append(f"{name} {worst:.4f}, {1000 * flips / total:.0f} flips")
    return "rms logit difference relative to their spread, and flips per 1,000: " + "; ".join(said)


def _relative_difference(ours: Array, exact: Array) -> float:
    """The root mean square of the differences, relative to the spread of the logits."""
    return float(np.sqrt(np.mean((ours - exact) ** 2)) / exact.std())


def fp8_weights_are_multiplied_as_they_are() -> str:
    """Against the dense oracle with the same rounded weights, where activations are not rounded to fp8."""
    state = dict(whole_groups_model().state_dict())
    for name, weight in state.items():
        if name.startswith("model.layers") and weight.dim() == 2:
            matrix = rounded(weight)
            assert matrix.scales is not None
            state[name] = matrix.values.float() * matrix.scales[:, None]
    slab = SlabPool(2, SHAPE).acquire(4)
    tokens = some_tokens(4 * slab.window.size)
    arch = from_hf_config(whole_groups_model().config.to_dict())
    truth = dense_logits(state, arch, tokens, slab.window).numpy()
    found = []
    for deterministic, sizes in ((True, [48, 1, 7]), (False, [1])):
        engine = cuda_engine("whole-groups", "fp8", deterministic=deterministic)
        found.append(_relative_difference(run_chunks(engine, slab, tokens, sizes), truth))
        slab.reset()
    assert max(found) < 0.03, found
    return f"rms logit difference {found[0]:.4f} of their spread, deterministic; {found[1]:.4f} in single tokens"


def kernels_in_cuda_cpp_compute_what_the_others_do() -> str:
    """Single tokens of one row and of several, over ten windows, against an engine that has Triton's kernels alone."""
    said = []
    for dtype, kv_dtype in (("bfloat16", "auto"), ("fp8", "auto"), ("bfloat16", "fp8")):
        fast, plain = (cuda_engine("large", dtype, kv_dtype=kv_dtype, num_slabs=5) for _ in range(2))
        assert (fast._decoder._fused is None) == (kv_dtype == "fp8")
        assert (fast._decoder._fp8_attention is None) == (kv_dtype != "fp8")
        plain._decoder._fused = plain._decoder._fp8_attention = None
        worst = 0.0
        for sink in (4, 0, 16):
            slab = SlabPool(2, SHAPE).acquire(sink)
            tokens = some_tokens(10 * slab.window.size)
            ours = run_chunks(fast, slab, tokens, [40, *[1] * 20])
            slab.reset()
            worst = max(worst, _relative_difference(ours, run_chunks(plain, slab, tokens, [40, *[1] * 20])))
        pool = SlabPool(5, SHAPE)
        slabs = [pool.acquire(index * 4) for index in range(5)]
        for index, slab in enumerate(slabs):
            for engine in (fast, plain):
                slab.reset()
                run_chunks(engine, slab, some_tokens(3 + 31 * index, index), [48])
        for step in range(40):
            parts = [(slab, some_tokens(1, 100 * step + index)) for index, slab in enumerate(slabs)]
            ours = np.concatenate(forward(fast, parts))
            for slab in slabs:
                slab.rewind(slab.length - 1)
            worst = max(worst, _relative_difference(ours, np.concatenate(forward(plain, parts))))
        assert worst < 0.03, (dtype, kv_dtype, worst)
        said.append(f"{dtype} {kv_dtype} {worst:.4f}")
    return "rms logit difference relative to their spread: " + ", ".join(said)


def windows_larger_than_shared_memory_are_read_in_turns() -> str:
    """Single tokens that see more keys than the blocks of the step can hold at once, against Triton's kernels."""
    shape = SlabShape(recent=24_000, max_pin=16, prefill_chunk=48, rewind_tokens=64)
    said = []
    for dtype in ("bfloat16", "fp8"):
        engine = cuda_engine("large", dtype, shape=shape)
        fused = engine._decoder._fused
        assert fused is not None
        slab = SlabPool(2, shape).acquire(16)
        for length in (12_000, 24_010, 100_000):
            slab.reset()
            slab.adopt(length=length, lowest=max(16, length - shape.recent))
            with torch.inference_mode():
                engine._slabs.keys.normal_()
                engine._slabs.values.normal_()
            found = []
            for engine._decoder._fused in (fused, None):
                found.append(forward(engine, [(slab, [5])])[0])
                slab.rewind(length)
                engine._forwards.clear()
            worst = _relative_difference(*found)
            assert worst < 0.03, (dtype, length, worst)
            said.append(f"{dtype} {length:,}: {worst:.4f}")
    return "rms logit difference relative to their spread: " + ", ".join(said)


def kernels_that_do_not_work_here_are_not_used() -> str:
    """Nor are those that were not chosen. Nothing of one that cannot be compiled or is wrong stays in the slabs."""

    def wrong(self: FusedStep, x: object, rotations: object, places: object, logits: torch.Tensor) -> torch.Tensor:
        return logits.normal_()

    def missing() -> None:
        raise RuntimeError("NVRTC was not found")

    assert cuda_engine("large", "bfloat16")._decoder._fused is not None
    with mock.patch.dict(os.environ, {module.CHOICE: module.TRITON}):
        assert cuda_engine("large", "bfloat16")._decoder._fused is None
    for broken in (mock.patch.object(FusedStep, "forward", wrong), mock.patch.object(module, "_nvrtc", missing)):
        with broken:
            engine = cuda_engine("large", "bfloat16")
        assert engine._decoder._fused is None
        assert not bool(engine._slabs.keys.any() or engine._slabs.values.any())
    tokens = some_tokens(60)
    plain = run_chunks(engine, SlabPool(2, SHAPE).acquire(4), tokens, [40, *[1] * 20])
    fast = run_chunks(cuda_engine("large", "bfloat16"), SlabPool(2, SHAPE).acquire(4), tokens, [40, *[1] * 20])
    assert _relative_difference(fast, plain) < 0.03
    return "Triton's kernels compute in their place"


def fp8_weights_are_the_nearest_ones() -> str:
    weight = torch.randn(304, 256, device="cuda")
    weight[3] = 0
    weight[4] *= 1e-3
    matrix = rounded(weight)
    assert matrix.scales is not None
    restored = matrix.values.float() * matrix.scales[:, None]
    largest = weight.abs().amax(dim=1, keepdim=True)
    # Four significant bits; below 2^-6 of the range's unit the steps have one size.
    step = torch.maximum(weight.abs() / 16, largest / LARGEST * 2**-10)
    assert bool(((restored - weight).abs() <= step * 1.0001).all())
    assert bool((restored[3] == 0).all())
    assert bool((matrix.values.float().abs().amax(dim=1)[4:] == LARGEST).all())
    return "within half a step of each, and every row uses the whole range"


def an_fp8_cache_keeps_what_was_written() -> str:
    """Prompts and single tokens write the same cells; a snapshot holds them bit for bit."""
    engine, pool = cuda_engine("whole-groups", "bfloat16", kv_dtype="fp8", deterministic=True), SlabPool(2, SHAPE)
    assert engine.kv_reserved_bytes == 2 * SHAPE.capacity * engine.info.kv_bytes_per_position
    tokens = some_tokens(150)
    first, second = pool.acquire(4), pool.acquire(4)
    run_chunks(engine, first, tokens, [48])
    run_chunks(engine, second, tokens, [1, 7])
    kept = engine.read_slab(first, first.intact())
    for ours, theirs in zip(kept, engine.read_slab(second, second.intact()), strict=True):
        assert np.array_equal(ours, theirs)
    engine.clear_slab(second)
    engine.write_slab(second, second.intact(), kept)
    more = some_tokens(30, 5)
    assert np.array_equal(run_chunks(engine, first, more, [5]), run_chunks(engine, second, more, [5]))
    return f"{engine.info.kv_bytes_per_position} bytes a position"


def deterministic_logits_are_bitwise_the_same() -> str:
    """One history, in single tokens, drafts, chunks, and among many neighbours."""
    for family, dtypes in (("qwen3", ("float32", "bfloat16")), ("mistral", ("float32",)), ("whole-groups", ("fp8",))):
        for dtype in dtypes:
            engine = cuda_engine(family, dtype, num_slabs=MANY, deterministic=True)
            assert engine.info.row_invariant
            tokens = some_tokens(200)
            slab = SlabPool(MANY, SHAPE).acquire(4)
            truth = run_chunks(engine, slab, tokens, [1])
            for sizes in ([48], [8], [3, 20, 1, 7], [2, 5]):
                slab.reset()
                assert np.array_equal(run_chunks(engine, slab, tokens, sizes), truth), (family, dtype, sizes)
            for num_rows, num_tokens in ((8, 1), (MANY, 1), (8, 8), (5, 3), (3, 40)):
                ours = _beside_others(engine, tokens, num_rows, num_tokens)
                assert np.array_equal(ours, truth), (family, dtype, num_rows, num_tokens)
    return "n of 1, 2, 5, 8, 20, 48; batches of 1, 3, 5, 8, 64; fp32, bf16, fp8"


def _beside_others(engine: CudaEngine, tokens: list[int], num_rows: int, num_tokens: int) -> Array:
    """All logits of `tokens`, its row in the middle of a batch whose other rows are something else."""
    pool = SlabPool(MANY, SHAPE)
    slabs = [pool.acquire(4) for _ in range(num_rows)]
    out = []
    for start in range(0, len(tokens), num_tokens):
        mine = tokens[start : start + num_tokens]
        parts = [(slab, some_tokens(len(mine), start + index)) for index, slab in enumerate(slabs)]
        parts[num_rows // 2] = (slabs[num_rows // 2], mine)
        out.append(forward(engine, parts)[num_rows // 2])
    return np.concatenate(out)


_PARAMS = (
    SamplingParams(seed=9, temperature=0.8),
    SamplingParams(seed=2**63 + 5, temperature=1.3, top_k=20, top_p=0.9, choice=3),
    SamplingParams(seed=1, temperature=0.0),
    SamplingParams(seed=2, temperature=0.7, min_p=0.1),
    SamplingParams(seed=3, temperature=1.0, top_p=0.5),
    SamplingParams(seed=4, temperature=2.0, top_k=5),
)


def a_burst_draws_what_single_steps_draw() -> str:
    worst = 0.0
    for params, deterministic in ((_PARAMS, False), ((_PARAMS[0], _PARAMS[2], _PARAMS[3]), False), (_PARAMS[:2], True)):
        engine = cuda_engine("qwen3", num_slabs=len(params), deterministic=deterministic)
        pool = SlabPool(len(params), SHAPE)
        slabs = [pool.acquire(4) for _ in params]
        for index, slab in enumerate(slabs):
            run_chunks(engine, slab, some_tokens(50 + index, index), [48])
        singly = _step_by_step(engine, slabs, params, 40)
        for slab in slabs:
            slab.rewind(slab.length - 40)
            slab.begin_write(40)
        at_once = engine.burst([Row(slab, [5], 1) for slab in slabs], _picks(slabs, params), 40)
        for ours, theirs in zip(at_once, singly, strict=True):
            assert [s.token for s in ours if isinstance(s, Sampled)] == [s.token for s in theirs]
            for a, b in zip(ours, theirs, strict=True):
                assert isinstance(a, Sampled)
                worst = max(worst, abs(a.logprob - b.logprob), abs(a.sampling_logprob - b.sampling_logprob))
    assert worst < 1e-4, worst
    return f"40 tokens a row, greedy and all filters, across evictions; logprobs within {worst:.1e}"


def _picks(slabs: Sequence[Slab], params: Sequence[SamplingParams]) -> list[Pick]:
    return [
        Pick(row=index, position=slab.length + 1, params=param)
        for index, (slab, param) in enumerate(zip(slabs, params, strict=True))
    ]


def _step_by_step(
    engine: CudaEngine, slabs: Sequence[Slab], params: Sequence[SamplingParams], num: int
) -> list[list[Sampled]]:
    tokens = [5] * len(slabs)
    drawn: list[list[Sampled]] = [[] for _ in slabs]
    for _ in range(num):
        for slab in slabs:
            slab.begin_write(1)
        rows = [Row(slab, [token], 1) for slab, token in zip(slabs, tokens, strict=True)]
        outcomes = engine.sample(engine.forward(rows), _picks(slabs, params))
        for slab, own, outcome in zip(slabs, drawn, outcomes, strict=True):
            assert isinstance(outcome, Sampled)
            own.append(outcome)
            slab.end_write(1)
        tokens = [own[-1].token for own in drawn]
    return drawn


def a_warm_engine_answers_at_once_and_the_same() -> str:
    """After `warm_up`, and after `load_engine`, which calls it: no first request of a warmed size records a graph."""
    for deterministic in (False, True):
        cold, warm = (cuda_engine("qwen3", num_slabs=3, deterministic=deterministic) for _ in range(2))
        warm.warm_up((1, 3))
        for num_rows in (1, 3):
            assert _first_request(warm, num_rows, may_record=False) == _first_request(cold, num_rows), num_rows
    with tempfile.TemporaryDirectory() as folder:
        tiny.hf_model("qwen3").save_pretrained(folder)
        loaded = load_engine(HFSource("tiny", Path(folder)), num_slabs=3, shape=SHAPE, dtype="float32")
    assert _first_request(loaded, 1, may_record=False) == _first_request(cuda_engine("qwen3"), 1)
    return "a prompt's chunk, a step and a burst of 1 and 3 rows, the same tokens as without it"


def _first_request(engine: CudaEngine, num_rows: int, *, may_record: bool = True) -> list[list[int]]:
    """What each row draws: two chunks of prompt, then three single steps, then eight in a burst."""
    params = [SamplingParams(seed=index, temperature=0.8) for index in range(num_rows)]
    pool = SlabPool(num_rows, SHAPE)
    slabs = [pool.acquire(4) for _ in params]
    with mock.patch.object(GraphPool, "record", GraphPool.record if may_record else _refuse_to_record):
        for index, slab in enumerate(slabs):
            run_chunks(engine, slab, some_tokens(2 * SHAPE.prefill_chunk, index), [SHAPE.prefill_chunk])
        singly = _step_by_step(engine, slabs, params, 3)
        for slab in slabs:
            slab.begin_write(8)
        rows = [Row(slab, [own[-1].token], 1) for slab, own in zip(slabs, singly, strict=True)]
        at_once = engine.burst(rows, _picks(slabs, params), 8)
    both = [[*own, *rest] for own, rest in zip(singly, at_once, strict=True)]
    return [[one.token for one in row if isinstance(one, Sampled)] for row in both]


def _refuse_to_record(*_: object) -> None:
    raise AssertionError("a graph was recorded for a size that was warmed up")


def positions_of_millions_are_exact() -> str:
    """A history that is three million tokens old, against the same cells on the CPU."""
    engine, plain = cuda_engine("qwen3"), tiny.engine("qwen3", num_slabs=2, shape=SHAPE)
    slab = SlabPool(2, SHAPE).acquire(4)
    start = 3_000_000
    run_chunks(engine, slab, some_tokens(slab.capacity), [40])
    kept = slab.intact()
    kv = engine.read_slab(slab, kept)
    slab.adopt(length=start, lowest=start - len(kept[1]))
    moved = slab.intact()
    engine.write_slab(slab, moved, kv)
    plain.write_slab(slab, moved, kv)
    ours = forward(engine, [(slab, some_tokens(20))])[0]
    slab.rewind(start)
    worst = difference(ours, forward(plain, [(slab, some_tokens(20))])[0])
    assert worst <= TOLERANCE, worst
    return f"max |logit difference| {worst:.1e} at position 3,000,000"


def cuda_slabs_take_the_memory_they_say() -> str:
    cuda_engine("llama")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine = cuda_engine("llama", "bfloat16", num_slabs=2000)
    held = torch.cuda.memory_allocated() - before
    info = engine.info
    assert engine.kv_reserved_bytes == 2000 * SHAPE.capacity * info.kv_bytes_per_position
    assert 0 <= held - engine.kv_reserved_bytes < 4_000_000, (held, engine.kv_reserved_bytes)
    slab = SlabPool(2000, SHAPE).acquire(4)
    run_chunks(engine, slab, some_tokens(400), [48, 1, 8])
    torch.cuda.synchronize()
    settled = torch.cuda.memory_allocated()
    run_chunks(engine, slab, some_tokens(2000), [48, 1, 8])
    grown = torch.cuda.memory_allocated() - settled
    assert grown == 0, grown
    return f"{engine.kv_reserved_bytes:,} bytes reserved, allocator agrees, nothing grows"


def swapped_cuda_weights_are_those_of_a_fresh_engine() -> str:
    """Bit for bit, at the addresses that the graphs were recorded with, and in no more memory after many swaps."""
    cases = (("qwen2", "float32"), ("qwen2", "bfloat16"), ("mistral", "bfloat16"), ("whole-groups", "fp8"))
    for family, dtype in cases:
        old = _model(family).state_dict()
        new = {name: tensor * 1.1 + 0.01 for name, tensor in old.items()}
        engine = cuda_engine(family, dtype, deterministic=True)
        _logits_by_graphs(engine)
        addresses = [tensor.data_ptr() for tensor in _held(engine)]
        fresh = cuda_engine(family, dtype, deterministic=True, state=new)
        swap(engine, new)
        for ours, theirs in zip(_held(engine), _held(fresh), strict=True):
            assert torch.equal(ours, theirs), (family, dtype)
        assert addresses == [tensor.data_ptr() for tensor in _held(engine)]
        assert difference(_logits_by_graphs(engine), _logits_by_graphs(fresh)) == 0, (family, dtype)
        allocated = torch.cuda.memory_allocated()
        for index in range(20):
            swap(engine, old if index % 2 == 0 else new)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == allocated, (family, dtype)
        assert difference(_logits_by_graphs(engine), _logits_by_graphs(fresh)) == 0, (family, dtype)
    return "fp32, bf16, fp8: the same bits and addresses, no memory after 20 more swaps"


def swap(engine: CudaEngine, state: dict[str, torch.Tensor]) -> None:
    weights = NewWeights(tiny.StateWeights(state), list(state))
    write(engine, checked(weights, engine), version="2", keeps_caches=False)


def _held(engine: CudaEngine) -> list[torch.Tensor]:
    """All tensors of the engine's weights, in an order that depends on nothing."""
    weights = engine._decoder.weights
    layers = [getattr(layer, field.name) for layer in weights.layers for field in fields(layer)]
    found: list[torch.Tensor] = []
    for part in (weights.embedding, weights.norm, weights.head, *layers):
        tensors = (part.values, part.scales) if isinstance(part, Matrix) else (part,)
        found += [tensor for tensor in tensors if tensor is not None]
    return found


def _logits_by_graphs(engine: CudaEngine) -> Array:
    """Prompts, rows of a few tokens and single ones, so that every kind of graph is replayed."""
    return run_chunks(engine, SlabPool(2, SHAPE).acquire(4), some_tokens(200), [48, 1, 8, 1, 3])


CUDA_CHECKS = (
    the_cuda_engine_equals_the_dense_oracle,
    rows_of_a_cuda_batch_keep_to_themselves,
    cuda_dtypes_stay_near_fp32,
    fp8_weights_are_the_nearest_ones,
    fp8_weights_are_multiplied_as_they_are,
    kernels_in_cuda_cpp_compute_what_the_others_do,
    windows_larger_than_shared_memory_are_read_in_turns,
    kernels_that_do_not_work_here_are_not_used,
    an_fp8_cache_keeps_what_was_written,
    deterministic_logits_are_bitwise_the_same,
    a_burst_draws_what_single_steps_draw,
    a_warm_engine_answers_at_once_and_the_same,
    positions_of_millions_are_exact,
    cuda_slabs_take_the_memory_they_say,
    swapped_cuda_weights_are_those_of_a_fresh_engine,
)
