"""The engine on MLX beside the one on torch: the same logits, the same tokens, one kind of snapshot.

What every engine promises is in test_engine_contract.py, which drives this one as well.
"""

import gc
import json
import math
import pydoc_data.topics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest
import torch

from holdfast.chat.tokenizer import load_tokenizer
from holdfast.config import EngineConfig
from holdfast.engine import factory
from holdfast.engine import snapshot as snapshots
from holdfast.engine.batch import rotary_tables
from holdfast.engine.interface import Engine, Row
from holdfast.engine.sequence import Sequence
from holdfast.engine.slab import SlabPool, SlabShape
from holdfast.engine.torch import TorchEngine
from holdfast.engine.torch import load_engine as load_torch
from holdfast.engine.window import Window
from holdfast.engine.worker import Worker
from holdfast.errors import ConfigError, ModelError
from holdfast.generation import SamplingParams
from holdfast.models import GGUFSource, HFSource, open_model
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc
from tests import tiny
from tests.conftest import SMALL
from tests.driving import difference, forward, run_chunks
from tests.engine_cases import mlx_engine, needs_native, random_tokens
from tests.oracle import dense_logits, weight_names
from tests.test_determinism import _generate
from tests.test_serve import start

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
from holdfast.engine.mlx import MLXEngine, load_engine  # noqa: E402

TOLERANCE = 5e-4
SHAPE = SlabShape(recent=20, max_pin=6, prefill_chunk=16, draft_length=4, rewind_tokens=10)
NARROW = SlabShape(recent=6, max_pin=4, prefill_chunk=16, rewind_tokens=4)  # the default model is slow here


@cache
def on_torch(family: str, dtype: str = "float32") -> TorchEngine:
    return tiny.engine(family, num_slabs=4, shape=SHAPE, dtype=dtype)


@cache
def on_mlx(family: str, dtype: str = "float32") -> Engine:
    return mlx_engine(family, num_slabs=4, shape=SHAPE, dtype=dtype)


@pytest.fixture(scope="module")
def default_on_mlx(default_source: GGUFSource) -> MLXEngine:
    return load_engine(default_source, num_slabs=2, shape=NARROW)


# Logits


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_are_those_of_torch_far_beyond_the_window(family: str) -> None:
    tokens = random_tokens(10 * 24, tiny.VOCABULARY)
    ours, theirs = (
        run_chunks(engine, SlabPool(4, SHAPE).acquire(4), tokens, [16, 1, 7, 1, 1])
        for engine in (on_mlx(family), on_torch(family))
    )
    print(f"\n{family}: max |logit difference| {difference(ours, theirs):.1e}")
    assert difference(ours, theirs) <= TOLERANCE


def test_rotations_are_exact_at_a_million_tokens() -> None:
    frequencies, position = tiny.architecture("llama").inverse_frequencies, 1_000_003
    tables = rotary_tables(frequencies, [0, position])
    for table, exact in zip(tables, (math.cos, math.sin), strict=True):
        assert table.shape == (2, 1, len(frequencies))
        assert table[1, 0] == pytest.approx([exact(position * frequency) for frequency in frequencies], abs=1e-7)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_bfloat16_stays_near_float32(family: str) -> None:
    tokens = random_tokens(100, tiny.VOCABULARY)
    exact, ours, theirs = (
        run_chunks(engine, SlabPool(4, SHAPE).acquire(4), tokens, [16])
        for engine in (on_torch(family), on_mlx(family, "bfloat16"), on_torch(family, "bfloat16"))
    )
    assert 0 < difference(ours, exact) < 2 * difference(theirs, exact)
    assert _has_float32_bits(ours)


def _has_float32_bits(logits: np.ndarray) -> bool:
    """Logits are never rounded below float32: near-ties decide tokens."""
    return bool((logits.view(np.uint32) & 0xFFFF).any())


def test_the_default_model_gives_the_logits_of_the_dense_oracle_and_of_torch(
    default_on_mlx: MLXEngine, default_source: GGUFSource
) -> None:
    _check_default(default_source, default_on_mlx, NARROW, 2)


@pytest.mark.slow
def test_the_default_model_gives_them_with_a_larger_window_too(default_source: GGUFSource) -> None:
    _check_default(default_source, load_engine(default_source, num_slabs=1, shape=SMALL), SMALL, 4)


def _check_default(source: GGUFSource, engine: Engine, shape: SlabShape, sink: int) -> None:
    """At 1x, 2x and 10x the window. Real text: on random tokens in a tiny window float32 itself is off by 1e-3."""
    arch, sizes, window = source.architecture, [16, 1, 9], Window(sink=sink, recent=shape.recent)
    text = pydoc_data.topics.topics["context-managers"] + pydoc_data.topics.topics["exceptions"]
    tokens = load_tokenizer(source).encode(text)[: 10 * window.size]
    assert len(tokens) == 10 * window.size
    ours = run_chunks(engine, SlabPool(1, shape).acquire(sink), tokens, sizes)
    on_cpu = load_torch(source, num_slabs=1, shape=shape, device="cpu")
    theirs = run_chunks(on_cpu, SlabPool(1, shape).acquire(sink), tokens, sizes)
    state = {name: torch.from_numpy(source.file.tensor(name)) for name in weight_names(arch)}
    truth = dense_logits(state, arch, tokens, window, torch.float32).numpy()
    to_torch, to_truth = difference(ours, theirs), difference(ours, truth)
    print(f"\nmax |logit difference| {to_torch:.1e} to torch, {to_truth:.1e} to the dense oracle")
    assert max(to_torch, to_truth) <= TOLERANCE


# Tokens


async def _same_tokens(ours: Engine, theirs: Engine, prompt: list[int], params: SamplingParams) -> int | None:
    """Where the two part, which may only be at a near-tie."""
    drawn = []
    for engine in (ours, theirs):
        worker = Worker(engine)
        worker.start()
        drawn.append(await _generate(worker, prompt, [len(prompt)], params))
        worker.stop()
    assert len(drawn[0].tokens) == params.max_tokens
    pairs = enumerate(zip(drawn[0].tokens, drawn[1].tokens, strict=True))
    split = next((i for i, (one, other) in pairs if one != other), None)
    assert split is None or split in drawn[1].near_ties
    return split


@pytest.mark.parametrize("temperature", [0, 0.8])
async def test_the_same_seed_gives_the_tokens_of_torch(temperature: float) -> None:
    params = SamplingParams(seed=9, max_tokens=60, temperature=temperature, top_logprobs=20)
    splits = [
        await _same_tokens(on_mlx(family), on_torch(family), random_tokens(50, tiny.VOCABULARY), params)
        for family in tiny.FAMILIES
    ]
    parted = [split for split in splits if split is not None]
    print(f"\ntemperature {temperature}: {len(splits) - len(parted)} of {len(splits)} runs equal, parted at {parted}")
    assert len(parted) < len(splits)


async def test_the_same_seed_gives_the_tokens_of_torch_on_the_default_model(
    default_on_mlx: MLXEngine, default_source: GGUFSource
) -> None:
    params = SamplingParams(seed=4, max_tokens=16, temperature=0.7, top_logprobs=20)
    theirs = load_torch(default_source, num_slabs=1, shape=NARROW, device="cpu")
    assert await _same_tokens(default_on_mlx, theirs, [1, 9690, 198, 2683, 314], params) is None


# Snapshots


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "source", "target"), [("qwen3", on_torch, on_mlx), ("llama", on_mlx, on_torch)])
def test_a_snapshot_moves_between_torch_and_mlx(
    family: str, source: Callable[..., Engine], target: Callable[..., Engine], dtype: str
) -> None:
    taken_on, continued_on = source(family, dtype), target(family, dtype)
    assert taken_on.info == continued_on.info
    tokens = random_tokens(130, tiny.VOCABULARY)
    sequence = Sequence(1, SlabPool(4, SHAPE).acquire(4), tokens[:100])
    run_chunks(taken_on, sequence.slab, tokens[:100], [16])
    snapshot = snapshots.decode(snapshots.encode(snapshots.take(taken_on, sequence)))
    other = Sequence(2, SlabPool(4, SHAPE).acquire(4), tokens[:100])
    snapshots.check(continued_on, snapshot, other.tokens)
    snapshots.restore(continued_on, snapshot, other.slab)
    again = snapshots.take(continued_on, other)
    assert again.header == snapshot.header
    assert all((ours == theirs).all() for ours, theirs in zip(again.kv, snapshot.kv, strict=True))
    expected, continued = (
        run_chunks(engine, slab, tokens[100:], [7, 1])
        for engine, slab in ((taken_on, sequence.slab), (continued_on, other.slab))
    )
    assert difference(continued, expected) <= (TOLERANCE if dtype == "float32" else 1)


# Memory and threads


def test_a_step_writes_in_place_and_a_fork_copies_once() -> None:
    shape = replace(SHAPE, rewind_tokens=50_000)
    engine = mlx_engine("llama", num_slabs=3, shape=shape)
    pool = SlabPool(3, shape)
    slab, fork = pool.acquire(4), pool.acquire(4)
    one_layer = engine.kv_reserved_bytes // (3 * 2 * engine.info.num_layers)
    forward(engine, [(slab, random_tokens(30, tiny.VOCABULARY))])
    gc.collect()
    before = mx.get_active_memory()
    for size in (1, 16, 1):
        mx.reset_peak_memory()
        forward(engine, [(slab, random_tokens(size, tiny.VOCABULARY)), (fork, [5])], num_logits=1)
        assert mx.get_peak_memory() - before < one_layer / 2
    engine.copy_slab(slab, fork)
    fork.length, fork.high = slab.length, slab.high
    engine.clear_slab(slab)
    assert abs(mx.get_active_memory() - before) < one_layer / 2
    mx.reset_peak_memory()
    forward(engine, [(fork, [7])])
    assert mx.get_peak_memory() - before < one_layer / 2


def test_nothing_is_left_to_the_thread_that_began_it() -> None:
    def elsewhere(action: Callable[..., Any], *arguments: Any) -> Any:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(action, *arguments).result()

    engine = elsewhere(lambda: mlx_engine("mistral", num_slabs=3, shape=SHAPE, dtype="bfloat16"))
    pool = SlabPool(3, SHAPE)
    slab, fork, other = (pool.acquire(4) for _ in range(3))
    rows = [Row(slab, random_tokens(15, tiny.VOCABULARY), 1)]
    logits = elsewhere(engine.forward, rows)
    assert np.isfinite(elsewhere(engine.read_logits, logits)).all()
    elsewhere(engine.copy_slab, slab, fork)
    kv = elsewhere(engine.read_slab, fork, [range(15)])
    elsewhere(engine.write_slab, other, [range(15)], kv)
    elsewhere(engine.clear_slab, fork)
    assert (engine.read_slab(other, [range(15)]).keys == kv.keys).all()
    assert not engine.read_slab(fork, [range(15)]).values.any()


def test_only_a_lost_device_is_fatal() -> None:
    is_fatal = on_mlx("llama").is_fatal
    assert is_fatal(RuntimeError("[METAL] Command buffer execution failed: Caused GPU Hang Error"))
    assert not is_fatal(RuntimeError("[metal::malloc] Attempting to allocate 8 bytes, more than the maximum"))
    assert not is_fatal(ValueError("[METAL] is no word of ours"))


# Models on disk


def _hf_model(family: str) -> Any:
    """Sizes that groups of 32 and 64 divide."""
    import transformers

    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "tie_word_embeddings": family == "qwen2",
    }
    options: dict[str, Any] = {"head_dim": 16} if family == "qwen3" else {}
    torch.manual_seed(3)
    kind = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config = getattr(transformers, f"{kind}Config")(**sizes, **options)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    _hf_model(request.param).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rope_theta": 10000.0}))  # where mlx-lm looks for it
    return path


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_directory_gives_the_same_engine_on_both(family: str, tmp_path: Path) -> None:
    _hf_model(family).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="60KB")
    source = open_model(str(tmp_path))
    assert len(source.weight_files) > 1
    ours = load_engine(source, num_slabs=1, shape=SHAPE)
    theirs = load_torch(source, num_slabs=1, shape=SHAPE, device="cpu")
    assert ours.info == theirs.info
    tokens = random_tokens(60, 128)
    logits = [run_chunks(engine, SlabPool(1, SHAPE).acquire(2), tokens, [16]) for engine in (ours, theirs)]
    assert difference(*logits) <= TOLERANCE


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 64)])
def test_a_quantised_directory_is_computed_as_its_dequantised_weights(
    directory: Path, tmp_path: Path, bits: int, group_size: int
) -> None:
    stock = _quantise(directory, tmp_path, bits=bits, group_size=group_size)
    source = open_model(str(tmp_path))
    assert isinstance(source, HFSource)
    tokens, window = random_tokens(100, 128), Window(sink=2, recent=SHAPE.recent)
    exact, rounded = (
        run_chunks(
            load_engine(source, num_slabs=1, shape=SHAPE, dtype=dtype), SlabPool(1, SHAPE).acquire(2), tokens, [16, 1]
        )
        for dtype in ("float32", "bfloat16")
    )
    truth = dense_logits(_dequantised(source), source.architecture, tokens, window).numpy()
    theirs = np.array(stock(mx.array([tokens[: window.size]]))[0])
    print(f"\n{difference(exact, truth):.1e} to the oracle, {difference(exact[: window.size], theirs):.1e} to mlx-lm")
    assert difference(exact, truth) <= TOLERANCE
    assert difference(exact[: window.size], theirs) <= TOLERANCE
    assert 0 < float(np.abs(rounded - truth).mean()) < 0.05 * float(truth.std())
    assert _has_float32_bits(rounded)


def _quantise(directory: Path, target: Path, *, bits: int, group_size: int) -> Any:
    """What `mlx_lm.convert -q` writes, the attention values a little finer; returns mlx-lm's own model."""
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed")

    def mixed(path: str, _: Any) -> bool | dict[str, int]:
        return {"bits": 8, "group_size": 32} if "v_proj" in path else True

    model, config = utils.load_model(directory)
    model, config = utils.quantize_model(model, config, group_size, bits, quant_predicate=mixed)
    utils.save_model(target, model)
    utils.save_config(config, target / "config.json")
    return model


def _dequantised(source: HFSource) -> dict[str, torch.Tensor]:
    """Plain weights, from the formula: every packed number times its group's scale, plus the group's bias."""
    stored = {name: array for path in source.weight_files for name, array in mx.load(str(path)).items()}
    state = {}
    for name in weight_names(source.architecture):
        stem = name.removesuffix(".weight")
        weight = stored[name]
        if f"{stem}.scales" in stored:
            scales, biases = (np.array(stored[f"{stem}.{part}"].astype(mx.float32)) for part in ("scales", "biases"))
            words = np.array(weight)
            width = source.architecture.mlp_size if "down_proj" in stem else source.architecture.hidden_size
            bits = words.shape[-1] * 32 // width
            numbers = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & np.uint32(2**bits - 1)
            groups = numbers.reshape(*scales.shape, -1).astype(np.float64)
            state[name] = torch.from_numpy((groups * scales[..., None] + biases[..., None]).reshape(len(words), -1))
        else:
            state[name] = torch.from_numpy(np.array(weight.astype(mx.float32)))
    return state


def test_torch_refuses_a_directory_that_is_quantised_for_mlx(directory: Path, tmp_path: Path) -> None:
    _quantise(directory, tmp_path, bits=4, group_size=64)
    with pytest.raises(ModelError, match="quantised for MLX; use --device mlx"):
        load_torch(open_model(str(tmp_path)), num_slabs=1, shape=SHAPE, device="cpu")


def test_a_damaged_or_incomplete_directory_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _hf_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole, state = file.read_bytes(), load_file(file)

    def refused() -> str:
        with pytest.raises(ModelError) as caught:
            load_engine(open_model(str(tmp_path)), num_slabs=1, shape=SHAPE)
        return str(caught.value)

    file.write_bytes(whole[:-1000])
    assert "truncated or damaged" in refused()
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**state, name: state[name][:-1].contiguous()}, file)
    assert refused() == f"tensor {name} has shape (127, 64), expected (128, 64)"
    save_file({key: tensor for key, tensor in state.items() if key != name}, file)
    assert f"lacks the tensor {name}" in refused()


# Which device


def _asked(device: str, monkeypatch: pytest.MonkeyPatch, *, mac: bool, mlx: bool) -> object:
    """What would be loaded, by whom."""
    monkeypatch.setattr(factory, "_is_apple_silicon", lambda: mac)
    monkeypatch.setattr(factory, "_has_mlx", lambda: mlx)
    for kind in ("native", "mlx"):
        engine = SimpleNamespace(kind=kind)
        monkeypatch.setattr(f"holdfast.engine.{kind}.load_engine", lambda *_, engine=engine, **__: engine)
    found: Any = factory.build_engine(open_model(), EngineConfig(device=device))
    return found.kind


@needs_native
def test_auto_is_mlx_on_a_mac_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _asked("auto", monkeypatch, mac=True, mlx=True) == "mlx"
    assert _asked("auto", monkeypatch, mac=True, mlx=False) == "native"
    assert _asked("auto", monkeypatch, mac=False, mlx=True) == "native"
    assert _asked("cpu", monkeypatch, mac=True, mlx=True) == "native"
    assert _asked("mlx", monkeypatch, mac=False, mlx=True) == "mlx"


def test_a_missing_mlx_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "holdfast.engine.mlx", None)
    with pytest.raises(ConfigError, match=r"device mlx needs MLX; to install it, run: .*\[mlx\]'"):
        factory.build_engine(open_model(), EngineConfig(device="mlx"))


# The whole server


def test_a_hundred_turns_over_grpc_take_the_memory_of_one_window(tmp_path: Path) -> None:
    model = _hf_model("qwen3")
    model.save_pretrained(tmp_path)
    arch = open_model(str(tmp_path)).architecture
    server = start(str(tmp_path), "--device", "mlx", "--dtype", "bfloat16", "--prefill-chunk", "32")
    per_position = arch.num_layers * 2 * arch.num_kv_heads * arch.head_dim * 2
    process, resident = psutil.Process(server.process.pid), []
    with grpc.insecure_channel(server.grpc) as channel:
        stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
        session = stub.CreateSession(pb.CreateSessionRequest()).session_id
        for turn in range(100):
            given = random_tokens(7, 128, seed=turn)
            request = pb.TurnRequest(session_id=session, token_ids=given, max_tokens=5)
            done = list(stub.Turn(request))[-1].done
            assert done.prefill_tokens == 7 + (turn > 0)  # what is new, and the token that was pending
            info = stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session))
            assert info.history_length == done.history_length
            computed = info.history_length - 1
            assert info.kv_live_bytes == min(computed, 4 + 64) * per_position
            assert info.inv1_violations == info.inv2_violations == 0
            resident.append(process.memory_info().rss)
    assert server.stop() == 0
    assert done.dropped_token_count == done.history_length - 68
    print(f"\nresident after 20 turns {resident[20] / 1e6:.0f} MB, after 100 {resident[-1] / 1e6:.0f} MB")
    assert resident[-1] - resident[20] < 16_000_000


def test_both_doors_answer_from_the_default_model() -> None:
    server = start("--device", "mlx")
    try:
        with grpc.insecure_channel(server.grpc) as channel:
            stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
            session = stub.CreateSession(pb.CreateSessionRequest(token_ids=[1, 9690, 198])).session_id
            events = list(stub.Turn(pb.TurnRequest(session_id=session, token_ids=[2683, 314], max_tokens=3)))
            assert events[-1].done.generated_token_count == 3
            info = stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session))
            assert info.kv_live_bytes == 7 * 30 * 2 * 3 * 64 * 2  # layers, keys and values, key heads, size, bfloat16
        chat = {
            "model": "smollm2-135m-instruct",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 8,
            "temperature": 0,
        }
        answer = httpx.post(f"http://{server.http}/v1/chat/completions", json=chat, timeout=60).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
    finally:
        assert server.stop() == 0
