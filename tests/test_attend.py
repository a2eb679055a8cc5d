"""Attention over an fp8 cache in CUDA C++ (attend.cu), on an emulator of blocks and warps."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import holdfast.engine
from holdfast.engine.native.build import compiler
from tests.emulated_cuda import EmulatedKernel, structure

SOURCE = Path(holdfast.engine.__file__).parent / "cuda" / "attend.cu"
HEADS, KV_HEADS, DIM = 8, 2, 128
GROUP = HEADS // KV_HEADS
CAPACITY, RECENT = 150, 120
NUM_THREADS = 128
NAN_BYTES = (0x7F, 0xFF)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> EmulatedKernel:
    if (found := compiler()) is None:
        pytest.skip("no C++ compiler")
    macros = {"HEADS": HEADS, "KV_HEADS": KV_HEADS}
    return EmulatedKernel(SOURCE, macros, compiler=found, folder=tmp_path_factory.mktemp("attend"))


@dataclass(frozen=True, slots=True)
class Inputs:
    """keys, values: bytes [slabs, kv_heads, capacity, dim]; their scales: bfloat16 [slabs, kv_heads, capacity]."""

    query: Tensor  # bfloat16 [rows, heads, dim]
    sink_query: Tensor
    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor
    positions: Tensor
    slots: Tensor
    sinks: Tensor


def some_inputs() -> Inputs:
    """Rows whose windows are full, begin anew in the ring, are shorter than a tile, and have no session."""
    torch.manual_seed(1)
    num_rows, num_slabs = 4, 3
    queries = torch.randn(2, num_rows, HEADS, DIM).bfloat16()
    cache = torch.randn(2, num_slabs, KV_HEADS, CAPACITY, DIM).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = 2.0 ** torch.randint(-3, 2, (2, num_slabs, KV_HEADS, CAPACITY))
    return Inputs(
        *queries,
        *cache,
        *scales.bfloat16(),
        positions=torch.tensor([140, 400, 9, 0]),
        slots=torch.tensor([2, 0, 1, -1]),
        sinks=torch.tensor([4, 20, 16, 4]),
    )


def cells(inputs: Inputs, row: int) -> tuple[list[int], list[int]]:
    """The cells that a row sees: those of sinks, and those of recent keys."""
    position, sink = int(inputs.positions[row]), int(inputs.sinks[row])
    recent = range(max(sink, position - RECENT + 1), position + 1)
    return list(range(min(sink, position + 1))), [sink + (at - sink) % (CAPACITY - sink) for at in recent]


def attended(kernel: EmulatedKernel, inputs: Inputs, *, num_parts: int, seed: int = 0) -> Tensor:
    """What the kernel computes [rows, heads, dim]; rows without a session stay zero."""
    num_rows = len(inputs.positions)
    parts = num_rows, KV_HEADS, num_parts, GROUP
    mixed, tops, norms = torch.full((*parts, DIM), math.nan), torch.full(parts, math.nan), torch.full(parts, math.nan)
    done = torch.zeros(num_rows, KV_HEADS, dtype=torch.int32)
    out = torch.zeros(num_rows, HEADS, DIM, dtype=torch.bfloat16)
    tensors = (
        *(inputs.query, inputs.sink_query, inputs.keys, inputs.values, inputs.key_scales, inputs.value_scales),
        *(inputs.positions, inputs.slots, inputs.sinks, mixed, tops, norms, done, out),
    )
    addresses = (tensor.data_ptr() for tensor in tensors)
    argument = structure(SOURCE, "Attention")(*addresses, CAPACITY, RECENT, math.log2(math.e) / math.sqrt(DIM))
    kernel.launch((num_parts, KV_HEADS, num_rows), argument, num_threads=NUM_THREADS, seed=seed)
    assert not done.any()
    return out


def expected(inputs: Inputs) -> Tensor:
    """The same in float64."""
    out = torch.zeros(len(inputs.positions), HEADS, DIM, dtype=torch.float64)
    for row, slot in enumerate(inputs.slots.tolist()):
        if slot < 0:
            continue
        sinks, recent = cells(inputs, row)

        def of(cache: Tensor, scales: Tensor, slot: int = slot, seen: list[int] = sinks + recent) -> Tensor:
            numbers = cache[slot][:, seen].view(torch.float8_e4m3fn).double() * scales[slot][:, seen, None].double()
            return numbers.repeat_interleave(GROUP, dim=0)

        keys, values = of(inputs.keys, inputs.key_scales), of(inputs.values, inputs.value_scales)
        is_sink = (torch.arange(keys.shape[1]) < len(sinks))[None, :]
        scores = torch.where(
            is_sink,
            torch.einsum("hd,hkd->hk", inputs.sink_query[row].double(), keys),
            torch.einsum("hd,hkd->hk", inputs.query[row].double(), keys),
        )
        out[row] = torch.einsum("hk,hkd->hd", (scores / math.sqrt(DIM)).softmax(-1), values)
    return out


@pytest.mark.parametrize("num_parts", [1, 3, 9])
def test_the_kernel_computes_attention_in_any_number_of_parts(kernel: EmulatedKernel, num_parts: int) -> None:
    inputs = some_inputs()
    found = attended(kernel, inputs, num_parts=num_parts, seed=num_parts)
    truth = expected(inputs)
    assert (found.double() - truth).abs().max() < 0.02 * truth.abs().max()


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("byte", NAN_BYTES)
@pytest.mark.parametrize("of", ["keys", "values"])
@pytest.mark.parametrize("number", [0, 10, 60, -1])
def test_a_nan_in_the_cache_is_a_nan_in_the_result(
    kernel: EmulatedKernel, of: str, byte: int, number: int, num_parts: int
) -> None:
    """For the heads that read it, and for no others."""
    inputs, row, head = some_inputs(), 1, 1
    plain = attended(kernel, inputs, num_parts=num_parts)
    sinks, recent = cells(inputs, row)
    cache = getattr(inputs, of).clone()
    cache[inputs.slots[row], head, (sinks + recent)[number], 77] = byte
    found = attended(kernel, replace(inputs, **{of: cache}), num_parts=num_parts)
    theirs = slice(head * GROUP, (head + 1) * GROUP)
    assert found[row, theirs].isnan().any(dim=-1).all()
    found[row, theirs] = plain[row, theirs]
    assert torch.equal(found, plain)


def test_a_nan_in_a_cell_that_is_out_of_view_changes_nothing(kernel: EmulatedKernel) -> None:
    inputs, row = some_inputs(), 0
    plain = attended(kernel, inputs, num_parts=3)
    sinks, recent = cells(inputs, row)
    unseen = [cell for cell in range(CAPACITY) if cell not in sinks + recent]
    keys, values = inputs.keys.clone(), inputs.values.clone()
    for cache in (keys, values):
        cache[inputs.slots[row], :, unseen] = NAN_BYTES[0]
    assert unseen
    assert torch.equal(attended(kernel, replace(inputs, keys=keys, values=values), num_parts=3), plain)


def test_the_largest_and_smallest_numbers_of_fp8_are_read_as_they_are(kernel: EmulatedKernel) -> None:
    inputs = some_inputs()
    values = inputs.values.clone()
    values[..., :4] = torch.tensor([0x7E, 0xFE, 0x01, 0x81], dtype=torch.uint8)  # 448 and 2^-9, with both signs
    changed = replace(inputs, values=values)
    found, truth = attended(kernel, changed, num_parts=3).double(), expected(changed)
    near = (found - truth).abs() <= 0.02 * truth.abs()
    assert near[..., :4].all()
