"""What a session costs, by formula, by tensor and by what the process really holds."""

import gc
import subprocess
import sys

import psutil
import pytest

from holdfast.engine.slab import SlabShape
from holdfast.engine.torch import TorchEngine, load_engine
from holdfast.engine.worker import Worker
from holdfast.errors import InvalidArgument
from holdfast.models import GGUFSource
from tests import tiny
from tests.conftest import SMALL


def _resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


_MEASURE = """
import sys, psutil
from holdfast.engine.slab import SlabShape
from tests import tiny
from tests.conftest import SMALL
shape = SlabShape(recent=400, max_pin=100, prefill_chunk=64, rewind_tokens=100)
tiny.engine("llama", num_slabs=1, shape=shape, dtype=sys.argv[1])
before = psutil.Process().memory_info().rss
engine = tiny.engine("llama", num_slabs=2000, shape=shape, dtype=sys.argv[1])
print(shape.capacity, engine.kv_reserved_bytes, psutil.Process().memory_info().rss - before)
"""


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_reserved_bytes_are_the_formula_and_what_the_process_holds(dtype: str, itemsize: int) -> None:
    """In a process of its own: an allocator that kept older memory would hide the growth."""
    done = subprocess.run([sys.executable, "-c", _MEASURE, dtype], capture_output=True, text=True, check=True)
    capacity, reserved, held = map(int, done.stdout.split())
    arch = tiny.architecture("llama")
    formula = 2000 * capacity * arch.num_layers * 2 * arch.num_kv_heads * arch.head_dim * itemsize
    assert reserved == formula
    assert held == pytest.approx(formula, rel=0.03)


async def test_live_bytes_grow_to_the_window_and_stay(default_engine: TorchEngine) -> None:
    worker = Worker(default_engine)
    worker.start()
    sequence = await worker.open(sink=4)
    live: list[int] = []
    for _ in range(6):
        await worker.append(sequence, [7] * 25)
        live.append(worker.info(sequence).kv_live_bytes)
    info = default_engine.info
    per_position = 30 * 2 * 3 * 64 * 4  # layers, keys and values, key heads, head size, float32
    assert info.kv_bytes_per_position == per_position
    assert live == [min(computed, 64) * per_position for computed in (24, 49, 74, 99, 124, 149)]
    assert worker.info(sequence).kv_reserved_bytes * 4 == default_engine.kv_reserved_bytes
    worker.stop()


async def test_200_sessions_opened_and_closed_leave_no_growth() -> None:
    engine = tiny.engine("qwen3", num_slabs=4, shape=SMALL)
    worker = Worker(engine)
    worker.start()

    async def life() -> None:
        sequence = await worker.open()
        await worker.append(sequence, [5] * 60)
        await worker.close(sequence)

    for _ in range(20):
        await life()
    before = _resident()
    for _ in range(200):
        await life()
    growth = _resident() - before
    assert worker.num_free_slabs == engine.num_slabs
    assert growth < 8_000_000
    worker.stop()


def test_a_window_beyond_the_trained_context_is_refused(default_source: GGUFSource) -> None:
    with pytest.raises(InvalidArgument, match=r"context of 8192; lower recent to 7680"):
        load_engine(default_source, num_slabs=1, shape=SlabShape(recent=8192), device="cpu")
