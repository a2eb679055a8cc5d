"""The native engine beside the plain path: every build, every dtype, whatever the rows; drawing beside sampling.py."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.interface import Row
from holdfast.engine.native import library as native
from holdfast.engine.native.engine import NativeEngine, load_engine
from holdfast.engine.native.weights import WeightPacker, cache_directory, kind_of, packed_weights
from holdfast.engine.sampling import Pick, sample_rows
from holdfast.engine.slab import SlabPool, SlabShape
from holdfast.engine.weights import TensorFile, quantise
from holdfast.errors import ConfigError, ModelError, NonFiniteLogits
from holdfast.generation import Sampled, SamplingParams
from holdfast.models import GGUFSource, open_model
from tests import tiny
from tests.driving import difference, run_chunks
from tests.engine_cases import ROUNDED_ACTIVATIONS, native_engine, needs_native, rounded_state
from tests.oracle import dense_logits, weight_names

pytestmark = needs_native

SHAPE = SlabShape(recent=60, max_pin=16, prefill_chunk=48, draft_length=7, rewind_tokens=32)
CHUNKS = ([1], [48, 1, 17, 5], [8, 3])


def _tokens(num: int) -> list[int]:
    ids: list[int] = np.random.default_rng(1).integers(0, tiny.VOCABULARY, num).tolist()
    return ids


def _run(engine: NativeEngine, tokens: list[int], chunks: list[int]) -> np.ndarray:
    return run_chunks(engine, SlabPool(2, SHAPE).acquire(4), tokens, chunks)


_DECODERS_THAT_END_AT_ONCE = """
from holdfast.engine.native import library as native

library, model, slabs = native.library(), native.ModelStruct(), native.SlabsStruct()
for number in range(60_000):
    library.holdfast_free(library.holdfast_decoder(model, slabs, 2 + number % 3, False))
"""


def test_threads_end_whenever_their_decoder_does() -> None:
    """In a process of its own: a thread that never ends is waited for in native code, which nothing here could stop."""
    subprocess.run([sys.executable, "-c", _DECODERS_THAT_END_AT_ONCE], check=True, timeout=60)


@pytest.mark.parametrize("variant", native.usable_variants())
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_build_agrees_with_the_oracle(variant: str, family: str) -> None:
    tokens = _tokens(300)
    window = SlabPool(2, SHAPE).acquire(4).window
    truth = dense_logits(tiny.hf_model(family).state_dict(), tiny.architecture(family), tokens, window).numpy()
    engine = native_engine(family, num_slabs=2, shape=SHAPE, variant=variant)
    for chunks in CHUNKS:
        assert difference(_run(engine, tokens, chunks), truth) <= 5e-4


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_builds_that_round_activations_have_the_same_bits(dtype: str) -> None:
    """VNNI, AVX-512 without it, AVX2: the sums of a group are exact. The portable build computes with floats."""
    tokens, arch, state = _tokens(200), tiny.architecture("whole"), rounded_state("whole", dtype)
    truth = dense_logits(state, arch, tokens, SlabPool(2, SHAPE).acquire(4).window).numpy()
    *rounding, portable = (
        _run(native_engine("whole", num_slabs=2, shape=SHAPE, dtype=dtype, variant=variant), tokens, [48, 1, 17, 5])
        for variant in sorted(native.usable_variants(), key=lambda name: name == "portable")
    )
    assert difference(portable, truth) <= 0.05  # the cache is bfloat16
    for logits in rounding:
        assert np.array_equal(logits, rounding[0])
        assert 0.05 < difference(logits, truth) <= ROUNDED_ACTIVATIONS[dtype]


@pytest.mark.parametrize("variant", [name for name in native.usable_variants() if name != "portable"])
@pytest.mark.parametrize(("dtype", "num_fine"), [("int8", 1), ("int4", 0)])
def test_large_groups_of_a_row_are_rounded_to_16_bits(variant: str, dtype: str, num_fine: int) -> None:
    """Seen in the first layer's values, which are products of the token's normalised embedding. Of two groups, the
    larger one is above the mean."""
    tokens, state = _tokens(40), {name: t.double().numpy() for name, t in rounded_state("whole", dtype).items()}
    x = state["model.embed_tokens.weight"][tokens]
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + tiny.architecture("whole").norm_epsilon)
    groups = (x * state["model.layers.0.input_layernorm.weight"]).reshape(len(tokens), -1, 32)
    largest = abs(groups).max(-1, keepdims=True)
    is_fine = (largest**2 > (largest**2).mean(1, keepdims=True)) & bool(num_fine)
    assert (is_fine.sum(1) == num_fine).all()
    step = largest / np.where(is_fine, 127 * 257, 127)
    rounded = (np.rint(groups / step) * step).reshape(x.shape)

    engine = native_engine("whole", num_slabs=2, shape=SHAPE, dtype=dtype, variant=variant)
    slab = SlabPool(2, SHAPE).acquire(4)
    run_chunks(engine, slab, tokens, [48])
    bits = engine.read_slab(slab, slab.intact()).values[0].astype(np.uint32) << 16  # [heads, tokens, dim]
    values = bits.view(np.float32).swapaxes(0, 1).reshape(len(tokens), -1)
    truth = rounded @ state["model.layers.0.self_attn.v_proj.weight"].T
    error = abs(values - truth) / abs(truth)
    assert np.quantile(error, 0.99) < 2**-8  # the cache is bfloat16


@pytest.mark.parametrize("variant", native.usable_variants())
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integers_have_the_same_bits_in_any_company(variant: str, dtype: str) -> None:
    """Without being told to be deterministic."""
    tokens = _tokens(220)
    plain, *others = (
        _run(native_engine("whole", num_slabs=2, shape=SHAPE, dtype=dtype, num_threads=2, variant=variant), tokens, n)
        for n in ([1], [48], [48, 1, 17, 5], [8, 3])
    )
    assert all(np.array_equal(other, plain) for other in others)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_value_that_is_not_finite_is_not_rounded_away(dtype: str) -> None:
    engine = native_engine("whole", num_slabs=1, shape=SHAPE, dtype=dtype)
    for bad in (np.nan, np.inf):
        engine.arrays["0.mlp_norm"][5] = bad
        assert not np.isfinite(_run(engine, _tokens(3), [3])).any()


@pytest.mark.parametrize("variant", native.usable_variants())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_in_any_company(variant: str, dtype: str) -> None:
    """Chunks, threads and neighbours: not one bit may differ."""
    options = {"num_slabs": 2, "shape": SHAPE, "dtype": dtype, "deterministic": True, "variant": variant}
    tokens = _tokens(220)
    plain = _run(native_engine("qwen3", num_threads=1, **options), tokens, [1])
    for threads, chunks in ((1, [48]), (2, [48, 1, 17, 5]), (3, [8, 3])):
        assert np.array_equal(_run(native_engine("qwen3", num_threads=threads, **options), tokens, chunks), plain)
    engine = native_engine("qwen3", num_threads=2, **options)
    pool = SlabPool(2, SHAPE)
    mine, other = pool.acquire(4), pool.acquire(9)
    for position, token in enumerate(tokens):
        for slab in (mine, other):
            slab.begin_write(1)
        logits = engine.forward([Row(other, [tokens[-position - 1]], 1), Row(mine, [token], 1)])
        assert np.array_equal(logits[1], plain[position])
        for slab in (mine, other):
            slab.end_write(1)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_the_default_model_has_the_same_bits_in_any_company(default_source: GGUFSource, dtype: str) -> None:
    shape = SlabShape(recent=96, max_pin=4, prefill_chunk=64, draft_length=7, rewind_tokens=0)
    is_told = dtype == "bfloat16"  # integers need not be told
    engine = load_engine(default_source, num_slabs=1, shape=shape, dtype=dtype, deterministic=is_told, num_threads=2)
    assert engine.info.row_invariant
    tokens: list[int] = np.random.default_rng(3).integers(0, 49_000, 140).tolist()
    plain, *others = (
        run_chunks(engine, SlabPool(1, shape).acquire(4), tokens, chunks) for chunks in ([1], [64, 7, 1], [8])
    )
    for other in others:
        assert np.array_equal(other, plain)


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [("bfloat16", 1e-3), ("int8", 4e-3), ("int4", 2e-2)],
)
def test_narrow_weights_stay_near_float32(default_source: GGUFSource, dtype: str, limit: float) -> None:
    """Kullback-Leibler divergence to float32 over random tokens."""
    shape = SlabShape(recent=256, max_pin=4, prefill_chunk=64, draft_length=0, rewind_tokens=0)
    tokens: list[int] = np.random.default_rng(3).integers(0, 49_000, 120).tolist()

    def logprobs(dtype: str) -> np.ndarray:
        engine = load_engine(default_source, num_slabs=1, shape=shape, dtype=dtype)
        logits = run_chunks(engine, SlabPool(1, shape).acquire(4), tokens, [60]).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))

    exact, ours = logprobs("float32"), logprobs(dtype)
    divergence = float((np.exp(exact) * (exact - ours)).sum(axis=1).mean())
    assert 0 <= divergence < limit


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**40),
    choice=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.0, 0.01, 0.3, 0.8, 1.0, 1.7, 5.0]),
    size=st.sampled_from([1, 5, 16, 97, 4096]),
)
@settings(deadline=None, max_examples=200)
def test_drawing_is_what_sampling_says(seed: int, position: int, choice: int, temperature: float, size: int) -> None:
    engine = native_engine("llama", num_slabs=1, shape=SHAPE)
    logits = np.random.default_rng(seed).normal(0, 4, (1, size)).astype(np.float32)
    pick = Pick(row=0, position=position, params=SamplingParams(seed=seed, choice=choice, temperature=temperature))
    (ours,), (plain,) = engine.sample(logits, [pick]), sample_rows(logits, [pick])
    assert isinstance(ours, Sampled)
    assert isinstance(plain, Sampled)
    assert ours.token == plain.token
    assert abs(ours.logprob - plain.logprob) < 2e-6
    assert abs(ours.sampling_logprob - plain.sampling_logprob) < 2e-5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 15, 96])
def test_what_is_not_finite_fails_its_own_row(value: float, index: int) -> None:
    engine = native_engine("llama", num_slabs=1, shape=SHAPE)
    logits = np.zeros((2, 97), np.float32)
    logits[0, index] = value
    picks = [Pick(row=row, position=3, params=SamplingParams(seed=1)) for row in (0, 1)]
    bad, good = engine.sample(logits, picks)
    assert isinstance(bad, NonFiniteLogits)
    assert isinstance(good, Sampled)


def test_the_first_of_equal_logits_wins() -> None:
    engine = native_engine("llama", num_slabs=1, shape=SHAPE)
    logits = np.zeros((1, 97), np.float32)
    logits[0, [40, 71]] = 2
    (drawn,) = engine.sample(logits, [Pick(row=0, position=0, params=SamplingParams(seed=1, temperature=0))])
    assert isinstance(drawn, Sampled)
    assert drawn.token == 40


def test_eight_bits_are_those_of_q8_0() -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize
    from gguf.quants import quantize as reference

    weight = np.random.default_rng(0).normal(0, 0.3, (6, 128)).astype(np.float32)
    weight[2, 32:64] = 0
    expected = dequantize(reference(weight, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    assert np.abs(quantise(weight).restored() - expected).max() == 0


def _mixed_gguf(path: Path) -> GGUFSource:
    """One layer, every matrix in another type: of those that are multiplied together, the widest counts."""
    import gguf
    from gguf import GGMLQuantizationType as Type

    random = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(512)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_context_length(512)
    writer.add_rope_freq_base(10000.0)
    shapes = {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256)}
    shapes |= {"ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512)}
    types = [Type.Q4_0, Type.Q4_0, Type.Q4_0, Type.Q4_1, Type.Q4_K, Type.Q4_0, Type.Q6_K]
    for (name, shape), kind in zip(shapes.items(), types, strict=True):
        weight = random.normal(0, 0.1, shape).astype(np.float32)
        if kind in (Type.Q4_0, Type.Q4_1):
            stored = gguf.quants.quantize(weight, kind)
        else:  # any bits are weights; only the half-precision scales must be sensible
            size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
            stored = random.integers(0, 256, (shape[0], shape[1] // size, num_bytes), np.uint8)
            at = slice(0, 4) if kind is Type.Q4_K else slice(208, 210)
            scales = random.uniform(2e-4, 4e-4, (*stored.shape[:2], 2 if kind is Type.Q4_K else 1))
            stored[:, :, at] = (scales if kind is Type.Q4_K else scales / 10).astype(np.float16).view(np.uint8)
            stored = stored.reshape(shape[0], -1)
        writer.add_tensor(f"blk.0.{name}.weight", stored, raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", random.uniform(0.5, 1.5, 256).astype(np.float32))
    writer.add_tensor("token_embd.weight", random.normal(0, 0.1, (97, 256)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_model(str(path))
    assert isinstance(source, GGUFSource)
    return source


def test_four_bits_of_a_file_are_taken_as_they_are(tmp_path: Path) -> None:
    source = _mixed_gguf(tmp_path / "mixed.gguf")
    file, arch = source.file, source.architecture
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"):
        stored, weight = file.four_bits(f"model.layers.0.{name}.weight"), file.tensor(f"model.layers.0.{name}.weight")
        assert stored is not None
        exact = name != "mlp.gate_proj"  # the scales of Q4_K are products, which are rounded to half precision
        assert np.abs(stored.restored() - weight).max() <= (0 if exact else 1e-3 * np.abs(weight).max())
    arrays = WeightPacker(file, arch, "int4").arrays()
    inputs = {"qkv": 256, "output": 256, "gate_up": 256, "down": 512}
    kinds = [kind_of(arrays[f"0.{name}"], size, "int4") for name, size in inputs.items()]
    assert kinds == ["int4", "int4_offset", "int4_offset", "int8"]
    assert kind_of(arrays["embedding"], 256, "int4") == "int8"
    state = {name: torch.from_numpy(file.tensor(name).copy()) for name in weight_names(arch)}
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"):
        state[name] = torch.from_numpy(quantise(state[name].numpy()).restored())
    tokens = _tokens(80)
    truth = dense_logits(state, arch, tokens, SlabPool(2, SHAPE).acquire(4).window).numpy()
    facts = {"digest": "", "num_slabs": 2, "shape": SHAPE, "dtype": "int4"}
    for variant, limit in (("portable", 0.05), (None, 0.3)):
        engine = NativeEngine("mixed", arch, arrays, variant=variant, **facts)
        assert difference(_run(engine, tokens, [48, 1, 17, 5]), truth) <= limit * truth.std()


def test_rows_of_broken_groups_are_refused() -> None:
    with pytest.raises(ModelError, match="whole groups of 32"):
        quantise(np.zeros((2, 40), np.float32))


def test_packed_weights_are_kept(default_source: GGUFSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    class Counting:
        num = 0

        def tensor(self, name: str) -> np.ndarray:
            self.num += 1
            return default_source.file.tensor(name)

    first, second = Counting(), Counting()
    packed = packed_weights(default_source, first, "int8")
    again = packed_weights(default_source, second, "int8")
    assert (first.num > 200, second.num) == (True, 0)
    assert packed.keys() == again.keys()
    assert all(np.array_equal(packed[name], again[name]) for name in packed)
    (kept,) = (cache_directory() / "weights").iterdir()
    os.truncate(kept, kept.stat().st_size - 1)
    with pytest.raises(ModelError, match="truncated"):
        TensorFile(kept)
    packed_weights(default_source, second, "int8")
    assert second.num == first.num
    with kept.open("r+b") as file:  # one wrong byte, where only the sum can tell
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    packed_weights(default_source, second, "int8")
    assert second.num == 2 * first.num


def test_an_unknown_build_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="there is no native build 'sse'"):
        native.library("sse")
    monkeypatch.setenv(native.CHOICE, "off")
    assert not native.is_available()
