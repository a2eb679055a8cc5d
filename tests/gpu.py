"""What needs a CUDA device. Runs without pytest: `make test-gpu`, or `PYTHONPATH=src:. python3 -m tests.gpu`.

A machine with a GPU may have nothing but torch, transformers, safetensors and numpy; this uses no more.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import numpy as np
import torch

from holdfast.engine.cuda.module import CHOICE, CPP
from holdfast.engine.interface import Engine
from holdfast.engine.slab import SlabPool, SlabShape
from holdfast.engine.torch import TorchEngine
from holdfast.engine.worker import Worker
from holdfast.generation import Sampled, SamplingParams
from tests import tiny
from tests.cuda_checks import CUDA_CHECKS, cuda_engine
from tests.driving import difference, run_chunks
from tests.oracle import dense_logits

SHAPE = SlabShape(recent=60, max_pin=16, prefill_chunk=48, draft_length=4, rewind_tokens=32)
TOLERANCE = 5e-4


def _engine(family: str, dtype: str = "float32", device: str = "cuda", num_slabs: int = 2) -> TorchEngine:
    return tiny.engine(family, num_slabs=num_slabs, shape=SHAPE, dtype=dtype, device=device)


def _tokens(num: int) -> list[int]:
    ids: list[int] = np.random.default_rng(1).integers(0, tiny.VOCABULARY, num).tolist()
    return ids


def logits_equal_the_dense_oracle() -> str:
    worst = 0.0
    for family in tiny.FAMILIES:
        engine = _engine(family)
        for windows in (1, 2, 10):
            slab = SlabPool(2, SHAPE).acquire(4)
            tokens = _tokens(windows * slab.window.size)
            ours = run_chunks(engine, slab, tokens, [48, 1, 17, 5])
            truth = dense_logits(tiny.hf_model(family).state_dict(), tiny.architecture(family), tokens, slab.window)
            worst = max(worst, difference(ours, truth.numpy()))
    assert worst <= TOLERANCE, worst
    return f"max |logit difference| {worst:.1e} in fp32 at 1x, 2x and 10x the window"


def bf16_stays_near_fp32() -> str:
    worst, flips, total = 0.0, 0, 0
    for family in tiny.FAMILIES:
        tokens = _tokens(400)
        exact = run_chunks(_engine(family), SlabPool(2, SHAPE).acquire(4), tokens, [48])
        ours = run_chunks(_engine(family, "bfloat16"), SlabPool(2, SHAPE).acquire(4), tokens, [48])
        worst = max(worst, difference(ours, exact))
        flips, total = flips + int((ours.argmax(-1) != exact.argmax(-1)).sum()), total + len(tokens)
    assert worst < 1, worst
    return f"max |logit difference| {worst:.3f}, {1000 * flips / total:.0f} flips per 1,000 tokens"


def slabs_take_the_memory_they_say() -> str:
    _engine("llama")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine = _engine("llama", num_slabs=2000)
    small = _engine("llama", num_slabs=1)
    held = torch.cuda.memory_allocated() - before
    expected = engine.kv_reserved_bytes + small.kv_reserved_bytes
    assert 0 <= held - expected < 4_000_000, (held, expected)
    return f"{engine.kv_reserved_bytes:,} bytes reserved, allocator agrees"


def _generate(engine: Engine, prompt: list[int], restore_from: Engine | None = None) -> list[int]:
    async def run() -> list[int]:
        worker = Worker(engine)
        worker.start()
        if restore_from is None:
            sequence = await worker.open()
            await worker.append(sequence, prompt)
        else:
            other = Worker(restore_from)
            other.start()
            source = await other.open()
            await other.append(source, prompt)
            sequence = await worker.restore(await other.snapshot(source), prompt)
            other.stop()
        params = SamplingParams(seed=9, max_tokens=60, temperature=0.8)
        async with worker.generate(sequence, params) as stream:
            tokens = [event.token async for batch in stream for event in batch if isinstance(event, Sampled)]
        worker.stop()
        return tokens

    return asyncio.run(run())


def the_cpu_and_the_gpu_draw_the_same_tokens() -> str:
    for family in tiny.FAMILIES:
        assert _generate(_engine(family), _tokens(100)) == _generate(_engine(family, device="cpu"), _tokens(100))
    return "60 seeded tokens after 100 of history, every family, fp32"


def a_snapshot_moves_between_cpu_and_gpu() -> str:
    cpu = _engine("qwen3", device="cpu")
    expected = _generate(cpu, _tokens(150))
    assert _generate(_engine("qwen3"), _tokens(150), restore_from=cpu) == expected
    assert _generate(cpu, _tokens(150), restore_from=_engine("qwen3")) == expected
    return "both ways, the same 60 tokens"


def the_cuda_engine_draws_the_tokens_of_the_cpu() -> str:
    for family in tiny.FAMILIES:
        expected = _generate(_engine(family, device="cpu"), _tokens(100))
        for deterministic in (False, True):
            engine = cuda_engine(family, shape=SHAPE, deterministic=deterministic)
            assert _generate(engine, _tokens(100)) == expected, (family, deterministic)
    return "60 seeded tokens after 100 of history, every family, fp32, deterministic and not"


def a_snapshot_moves_between_cpu_and_the_cuda_engine() -> str:
    cpu = _engine("qwen3", device="cpu")
    expected = _generate(cpu, _tokens(150))
    assert _generate(cuda_engine("qwen3", shape=SHAPE), _tokens(150), restore_from=cpu) == expected
    assert _generate(cpu, _tokens(150), restore_from=cuda_engine("qwen3", shape=SHAPE)) == expected
    return "both ways, the same 60 tokens"


def a_lost_device_is_noticed() -> str:
    """In a process of its own, which cannot use the device afterwards."""
    script = (
        "import torch\n"
        "from holdfast.engine.interface import Row\n"
        "from holdfast.engine.slab import SlabPool\n"
        "from tests import gpu\n"
        "engine = gpu._engine('llama')\n"
        "slab = SlabPool(2, gpu.SHAPE).acquire(4)\n"
        "try:\n"
        "    engine.read_logits(engine.forward([Row(slab, [10**6], 1)]))\n"
        "except Exception as exc:\n"
        "    print('fatal' if engine.is_fatal(exc) else 'not fatal', type(exc).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("fatal"), (done.stdout, done.stderr[-500:])
    return done.stdout.strip()


CHECKS: tuple[Callable[[], str], ...] = (
    logits_equal_the_dense_oracle,
    bf16_stays_near_fp32,
    slabs_take_the_memory_they_say,
    the_cpu_and_the_gpu_draw_the_same_tokens,
    a_snapshot_moves_between_cpu_and_gpu,
    a_lost_device_is_noticed,
    the_cuda_engine_draws_the_tokens_of_the_cpu,
    a_snapshot_moves_between_cpu_and_the_cuda_engine,
    *CUDA_CHECKS,
)


def _outcome(name: str) -> tuple[bool, str]:
    """Whether a check passes, and what it says."""
    (check,) = (check for check in CHECKS if check.__name__ == name)
    started = time.perf_counter()
    try:
        passes, said = True, f"ok    {name}: {check()}"
    except Exception:  # noqa: BLE001 - one failed check must not hide the next
        passes, said = False, f"FAIL  {name}\n{traceback.format_exc()}"
    return passes, f"{said} ({time.perf_counter() - started:.1f} s)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="checks that run at once")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    os.environ[CHOICE] = CPP  # where they fit; most checks have models that they do not fit
    failed = 0
    # Most of their time is compiling, which the other cores can do meanwhile.
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for outcome in as_completed([pool.submit(_outcome, check.__name__) for check in CHECKS]):
            passes, said = outcome.result()
            failed += not passes
            print(said, flush=True)
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
