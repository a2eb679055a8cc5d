"""Weights that change while an engine runs: written in place, checked first, and known for every token."""

import asyncio
import itertools
import json
import operator
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from holdfast.bench.machine import resident_bytes
from holdfast.bench.processes import serving as bench_serving
from holdfast.engine.interface import Engine
from holdfast.engine.native import NativeEngine
from holdfast.engine.native.weights import WeightPacker
from holdfast.engine.slab import SlabPool, SlabShape
from holdfast.engine.torch import TorchEngine
from holdfast.engine.torch.weights import StateDictReader
from holdfast.engine.update import checked, open_weights_at, write
from holdfast.engine.worker import Worker
from holdfast.errors import EngineDied, ModelError, SnapshotMismatch
from holdfast.generation import Sampled, SamplingParams, weight_spans
from holdfast.models import GGUFSource
from holdfast.models.architecture import from_hf_config
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc
from holdfast.serving.http import routes_weights
from holdfast.sessions.journal.base import TokensSampled
from holdfast.sessions.session_file import decode
from holdfast.testing.fake_engine import FakeEngine
from tests import tiny
from tests.driving import Array, run_chunks
from tests.effort import THOROUGH
from tests.engine_cases import HAS_MLX, HAS_NATIVE, random_tokens
from tests.serving import Server, SlowEngine, default_chat, serving, wordy_engine
from tests.talking import chat_path, client_of, eventually, open_session, refusal_of, said, until
from tests.test_relay import chatting
from tests.transferring import downloaded

SHAPE = SlabShape(recent=16, max_pin=4, prefill_chunk=8)
State = dict[str, torch.Tensor]


def _config(family: str) -> dict[str, Any]:
    return tiny.hf_model(family).config.to_dict() | (tiny.WHOLE_GROUPS if family == "qwen3" else {})


def _state(family: str, seed: int) -> State:
    """Random weights under the names and in the shapes of `transformers`."""
    import transformers

    kind = {"mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**_config(family)))
    state: State = {name: weight + torch.randn_like(weight) * 0.1 for name, weight in model.state_dict().items()}
    if "lm_head.weight" in state and _config(family)["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def _engine(kind: str, family: str, dtype: str, state: State) -> Engine:
    arch = from_hf_config(_config(family))
    facts: dict[str, Any] = {"digest": "d", "num_slabs": 2, "shape": SHAPE, "dtype": dtype}
    if kind == "native":
        return NativeEngine("tiny", arch, WeightPacker(tiny.StateWeights(state), arch, dtype).arrays(), **facts)
    if kind == "torch":
        return TorchEngine("tiny", arch, StateDictReader(state), **facts)
    from holdfast.engine.mlx import MLXEngine

    return MLXEngine("tiny", arch, tiny.StateWeights(state), **facts)


def _logits(engine: Engine) -> Array:
    return run_chunks(engine, SlabPool(2, SHAPE).acquire(4), random_tokens(40, tiny.VOCABULARY), [8, 1, 5])


def _saved(path: Path, state: State) -> Path:
    save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, path)
    return path


def _swap(engine: Engine, path: Path, version: str = "2", *, keeps_caches: bool = False) -> None:
    write(engine, checked(open_weights_at(path, engine), engine), version=version, keeps_caches=keeps_caches)


_NATIVE = [
    ("native", "mistral", "float32"),
    ("native", "qwen2", "bfloat16"),
    ("native", "qwen3", "int8"),
    ("native", "qwen3", "int4"),
]
_MLX = [("mlx", "qwen2", "float32"), ("mlx", "qwen3", "bfloat16")]
KINDS = [
    *(_NATIVE if HAS_NATIVE else ()),
    ("torch", "qwen2", "float32"),
    ("torch", "qwen2", "bfloat16"),
    *(_MLX if HAS_MLX else ()),
]


@pytest.mark.parametrize(("kind", "family", "dtype"), KINDS)
def test_swapped_weights_are_bit_for_bit_those_of_a_fresh_engine(
    kind: str, family: str, dtype: str, tmp_path: Path
) -> None:
    old, new = _state(family, 1), _state(family, 2)
    engine = _engine(kind, family, dtype, {name: tensor.clone() for name, tensor in old.items()})
    before = _logits(engine)
    some = [name for name in new if name.endswith(("q_proj.weight", "1.mlp.up_proj.weight", "k_proj.bias"))]
    part = {name: new[name].to(torch.bfloat16) for name in some}
    _swap(engine, _saved(tmp_path / "part.safetensors", part))
    fresh = _engine(kind, family, dtype, old | {name: tensor.float() for name, tensor in part.items()})
    assert np.array_equal(_logits(engine), _logits(fresh))
    assert not np.array_equal(_logits(engine), before)
    _swap(engine, _saved(tmp_path / "model.safetensors", new))
    assert np.array_equal(_logits(engine), _logits(_engine(kind, family, dtype, new)))
    _swap(engine, _saved(tmp_path / "old.safetensors", old))
    assert np.array_equal(_logits(engine), before)


WRONG: list[tuple[str, Callable[[State], object], str]] = [
    ("a name", lambda state: state.update({"model.layers.9.mlp.up_proj.weight": torch.ones(2)}), "model.layers.9.mlp"),
    ("a shape", lambda state: state.update({"model.norm.weight": torch.ones(7)}), "model.norm.weight has shape"),
    ("a nan", lambda state: state["model.layers.1.mlp.down_proj.weight"].fill_(torch.nan), "1.mlp.down_proj.weight"),
    ("a huge value", lambda state: state["model.layers.1.mlp.down_proj.weight"].fill_(1e7), "too large"),
    ("integers", lambda state: state.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}), "floating"),
    ("no tensors", lambda state: state.clear(), "no tensors"),
]


@pytest.mark.skipif(not HAS_NATIVE, reason="no native engine")
def test_weights_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    engine = _engine("native", "qwen3", "int8", _state("qwen3", 1))
    before = _logits(engine), engine.info
    for what, spoil, why in WRONG:
        state = _state("qwen3", 2)
        spoil(state)
        with pytest.raises(ModelError, match=why):
            _swap(engine, _saved(tmp_path / f"{what}.safetensors", state))
    (tmp_path / "cut").write_bytes((tmp_path / "a nan.safetensors").read_bytes()[:-1])
    for path, why in ((tmp_path / "cut", "truncated"), (tmp_path / "none", "cannot read"), (tmp_path, "more than one")):
        with pytest.raises(ModelError, match=why):
            _swap(engine, path)
    assert np.array_equal(_logits(engine), before[0])
    assert (engine.info, engine.weight_version) == (before[1], "")


def test_weights_that_change_while_they_are_read_end_the_engine(tmp_path: Path) -> None:
    engine = FakeEngine(num_slabs=1, shape=SHAPE)
    update = checked(open_weights_at(_weight(tmp_path, 1), engine), engine)
    _weight(tmp_path, 2).replace(tmp_path / "1.safetensors")
    with pytest.raises(EngineDied, match="weight changed while the weights were read"):
        write(engine, update, version="1", keeps_caches=False)


def test_a_head_that_is_tied_must_stay_so(tmp_path: Path) -> None:
    engine = _engine("torch", "qwen2", "float32", _state("qwen2", 1))
    state = _state("qwen2", 2)
    assert "lm_head.weight" in state  # it is taken where it is the same
    _swap(engine, _saved(tmp_path / "same.safetensors", state))
    with pytest.raises(ModelError, match=r"lm_head\.weight differs"):
        _swap(engine, _saved(tmp_path / "other.safetensors", state | {"lm_head.weight": state["lm_head.weight"] + 1}))


def _adapter(folder: Path, state: State, **config: Any) -> Path:
    """A LoRA adapter as PEFT writes it."""
    folder.mkdir()
    facts = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(facts | config))
    _saved(folder / "adapter_model.safetensors", {f"base_model.model.{name}": part for name, part in state.items()})
    return folder


def _parts(module: str, outputs: int, inputs: int, rank: int = 4) -> State:
    return {
        f"{module}.lora_A.weight": torch.randn(rank, inputs, generator=torch.manual_seed(3)),
        f"{module}.lora_B.weight": torch.randn(outputs, rank, generator=torch.manual_seed(4)) * 0.1,
    }


def test_an_adapter_is_merged_into_the_model_that_was_loaded(tmp_path: Path) -> None:
    state = _state("qwen3", 1)
    query, up = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
    parts = {name: _parts(name, *state[f"{name}.weight"].shape) for name in (query, up)}
    engine = _engine("torch", "qwen3", "float32", state)
    engine.base_weights = lambda: tiny.StateWeights(state)
    for is_stabilised, scale in ((False, 8 / 4), (True, 8 / 2)):
        path = _adapter(tmp_path / f"a{scale}", parts[query] | parts[up], use_rslora=is_stabilised)
        _swap(engine, _saved(tmp_path / "part.safetensors", {"model.norm.weight": torch.ones(64)}))
        _swap(engine, path)
        merged = {
            f"{name}.weight": state[f"{name}.weight"]
            + scale * part[f"{name}.lora_B.weight"] @ part[f"{name}.lora_A.weight"]
            for name, part in parts.items()
        }
        fresh = _engine("torch", "qwen3", "float32", state | merged)
        np.testing.assert_allclose(_logits(engine), _logits(fresh), rtol=1e-4, atol=1e-4)
    before = _logits(engine)
    for number, (config, more, why) in enumerate(
        (
            ({"use_dora": True}, {}, "use_dora"),
            ({"bias": "all"}, {}, "bias"),
            ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
            ({"init_lora_weights": "pissa"}, {}, "init_lora_weights"),
            ({"peft_type": "IA3"}, {}, "IA3"),
            ({"lora_alpha": None}, {}, "lora_alpha|readable"),
            ({}, {f"{up}.lora_magnitude_vector": torch.ones(2)}, "lora_magnitude_vector"),
            ({}, _parts("model.layers.7.mlp.up_proj", 8, 8), r"layers\.7\.mlp\.up_proj\.weight"),
            ({}, _parts(up, 96, 32), r"do not fit model\.layers\.1\.mlp\.up_proj\.weight"),
        )
    ):
        with pytest.raises(ModelError, match=why):
            _swap(engine, _adapter(tmp_path / f"wrong{number}", parts[query] | more, **config))
    assert np.array_equal(_logits(engine), before)


def _weight(folder: Path, number: int) -> Path:
    """The weights of a fake engine."""
    return _saved(folder / f"{number}.safetensors", {"weight": torch.tensor([float(number)])})


async def test_running_generations_go_on_with_new_weights_and_computed_caches(tmp_path: Path) -> None:
    """What comes after the swap is what a sequence with that history samples that never knew the old weights."""
    engine = FakeEngine(num_slabs=3, shape=SHAPE)
    worker = Worker(engine)
    worker.start()
    params = SamplingParams(seed=3, max_tokens=2000)  # more than a run may be ahead of its reader
    sequence, tokens = await worker.open(sink=2), list[Sampled]()
    update = checked(open_weights_at(_weight(tmp_path, 5), engine), engine)
    async with worker.generate(sequence, params, random_tokens(30, 64)) as stream:
        async for batch in stream:
            tokens += [event for event in batch if isinstance(event, Sampled)]
            if len(tokens) >= 20 and not engine.weight:
                await worker.load_weights(update, version="5", keeps_caches=False)
    assert [version for version, _ in weight_spans(tokens)] == ["", "5"]
    num_old = weight_spans(tokens)[0][1]
    fresh = await worker.open(sink=2)
    history = random_tokens(30, 64) + [token.token for token in tokens[:num_old]]
    again = [event async for event in _sampled(worker, fresh, replace(params, max_tokens=2000 - num_old), history)]
    assert again == tokens[num_old:]
    worker.stop()


async def _sampled(worker: Worker, sequence: int, params: SamplingParams, tokens: list[int]) -> AsyncIterator[Sampled]:
    async with worker.generate(sequence, params, tokens) as stream:
        async for batch in stream:
            for event in batch:
                if isinstance(event, Sampled):
                    yield event


async def test_snapshots_fit_earlier_weights_only_where_caches_are_kept(tmp_path: Path) -> None:
    engine = FakeEngine(num_slabs=4, shape=SHAPE)
    worker = Worker(engine)
    worker.start()
    history = random_tokens(30, 64)
    sequence = await worker.open(sink=2)
    await worker.append(sequence, history)
    taken = await worker.snapshot(sequence)

    async def swap(number: int, *, keeps_caches: bool) -> str:
        update = checked(open_weights_at(_weight(tmp_path, number), engine), engine)
        await worker.load_weights(update, version=str(number), keeps_caches=keeps_caches)
        return engine.info.fingerprint

    kept = await swap(1, keeps_caches=True)
    await worker.close(await worker.restore(taken, history))
    computed = await swap(1, keeps_caches=False)
    with pytest.raises(SnapshotMismatch, match="model"):
        await worker.restore(taken, history)
    assert worker.info(sequence).computed_length == 0
    assert len({"fake", kept, computed, await swap(2, keeps_caches=False)}) == 4
    assert await swap(1, keeps_caches=False) == computed  # the same weights have the same fingerprint again
    worker.stop()


# Over both endpoints

BASE, MIXED = 2000, 1000


class TellingEngine(SlowEngine):
    """A fake whose tokens tell the weights that sampled them, and whether all keys that they saw are of these."""

    def _logits(self, seen: Iterable[tuple[int, int]]) -> Array:
        of_others = any(value // (1 << 16) != self.weight for _, value in seen)
        logits = np.zeros(self.info.vocab_size, np.float32)
        logits[BASE + self.weight + of_others * MIXED] = 100
        return logits


def _telling_engine() -> TellingEngine:
    shape = SlabShape(recent=64, max_pin=48, prefill_chunk=64, rewind_tokens=32)
    return TellingEngine(num_slabs=6, shape=shape, forward_s=0, vocab_size=wordy_engine().info.vocab_size)


async def test_weights_change_under_load_and_every_token_has_the_right_version(tmp_path: Path) -> None:
    """Streamed and whole chats, and gRPC; more sessions than slabs; by path and by upload, caches kept or not."""
    num_swaps, options = 50 if THOROUGH else 4, {"max_parked": 8, "data_dir": str(tmp_path / "data")}
    async with (
        serving(_telling_engine(), default_chat(), weight_version="0", **options) as server,
        client_of(server) as client,
    ):
        chats = [await open_session(client) for _ in range(8)]
        created = [await server.stub.CreateSession(pb.CreateSessionRequest(token_ids=[1, 2, 3])) for _ in range(2)]
        is_over, num_turns = asyncio.Event(), 0

        async def chat(sessions: Sequence[str], *, is_streamed: bool) -> None:
            nonlocal num_turns
            for number, session in enumerate(itertools.cycle(sessions)):
                if is_over.is_set() and number >= len(sessions):
                    return
                body = said("Hi", max_tokens=24, stream=is_streamed, temperature=1)
                response = await client.post(chat_path(session), json=body)
                assert response.status_code == 200, response.text
                assert not is_streamed or "[DONE]" in response.text
                num_turns += 1

        async def generate(session: str) -> None:
            nonlocal num_turns
            while not is_over.is_set():
                request = pb.TurnRequest(session_id=session, token_ids=[4, 5], max_tokens=24)
                events = [event async for event in server.stub.Turn(request)]
                assert events[-1].done.generated_token_count == 24
                num_turns += 1

        async with asyncio.TaskGroup() as group:
            for index in range(4):
                group.create_task(chat(chats[index::4], is_streamed=bool(index % 2)))
            for one in created:
                group.create_task(generate(one.session_id))
            for number in range(1, num_swaps + 1):
                before = num_turns
                await until(lambda: num_turns > before)  # noqa: B023 - it is over when the next one begins
                response = await _loaded(client, _weight(tmp_path, number), number)
                assert response.status_code == 200, response.text
                assert response.json()["num_tensors"] == 1
            is_over.set()
        ids = (*chats, *(one.session_id for one in created))
        request = pb.GetHistoryRequest(session_id=ids[-1])
        chunks = [chunk async for chunk in server.stub.GetHistory(request) if chunk.kind == pb.SPAN_KIND_SAMPLED]
        files = [decode(await downloaded(client, session, snapshot="false")) for session in ids]
    for file in files:
        for turn in file.turns:
            versions = turn.facts.weight_versions
            _check_versions(turn.sampled, turn.facts.weight_spans or ((versions[0], len(turn.sampled)),))
            assert versions == (str(_told(turn.sampled[0])), str(_told(turn.sampled[-1])))
        spans = [span for span in file.spans if isinstance(span, TokensSampled)]
        for span in spans:
            _check_versions(span.tokens, [(span.weight_version, len(span.tokens))])
        assert file.turns or len({span.weight_version for span in spans}) > 2
    assert [chunk.weight_version for chunk in chunks] == [span.weight_version for span in spans]
    async with serving(_telling_engine(), default_chat(), **options) as server, client_of(server) as client:
        for session, file in zip(ids, files, strict=True):
            assert decode(await downloaded(client, session, snapshot="false")).spans == file.spans
            if file.turns:
                response = await client.post(chat_path(session), json=said("Hi", temperature=1))
                (token, *_) = decode(await downloaded(client, session, snapshot="false")).turns[-1].sampled
                assert (response.status_code, token) == (200, BASE)  # no key of the weights before the restart


@pytest.mark.skipif(not THOROUGH, reason="50 times the weights of the real model take minutes")
@pytest.mark.timeout(3600)
async def test_memory_does_not_grow_with_the_number_of_swaps_under_load(default_source: GGUFSource) -> None:
    with bench_serving("--recent", "256", "--sessions", "4", "--weight-version", "0") as server:
        async with (
            httpx.AsyncClient(base_url=server.http, timeout=600) as client,
            grpc.aio.insecure_channel(server.grpc) as channel,
            asyncio.TaskGroup() as group,
        ):
            stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
            is_over, turns = asyncio.Event(), [0, 0]

            async def chat(session: str) -> None:
                while not is_over.is_set():
                    response = await client.post(chat_path(session), json=said("Hi", max_tokens=8))
                    assert response.status_code == 200, response.text
                    turns[0] += 1

            async def generate() -> None:
                created = await stub.CreateSession(pb.CreateSessionRequest(token_ids=[1]))
                while not is_over.is_set():
                    request = pb.TurnRequest(session_id=created.session_id, token_ids=[2, 3], max_tokens=8)
                    events = [event async for event in stub.Turn(request)]
                    assert events[-1].HasField("done")
                    turns[1] += 1

            for _ in range(2):
                group.create_task(chat(await open_session(client)))
                group.create_task(generate())
            held = []
            for number in range(1, 51):
                before = [*turns]
                wanted = {"path": str(default_source.path), "version": str(number)}
                wanted["caches"] = "keep" if number % 2 else "recompute"
                response = await client.post("/control/weights", json=wanted)
                assert response.status_code == 200, response.text
                await until(lambda: all(map(operator.gt, turns, before)), 600)  # noqa: B023 - it is over by then
                held.append(resident_bytes(server.pid) / 2**20)
                print(f"after swap {number}: {held[-1]:.0f} MiB, {turns} turns", flush=True)
            is_over.set()
    assert max(held[25:]) < 1.05 * max(held[5:25])


@pytest.mark.parametrize("caches", ["keep", "recompute"])
async def test_a_turn_tells_how_much_of_its_history_was_computed_again(tmp_path: Path, caches: str) -> None:
    async with serving(_telling_engine(), default_chat()) as server, client_of(server) as client:
        session = await open_session(client)
        first = (await client.post(chat_path(session), json=said("Hi"))).json()
        wanted = {"path": str(_weight(tmp_path, 1)), "version": "1", "caches": caches}
        assert (await client.post("/control/weights", json=wanted)).status_code == 200
        texts = ["Hi", first["choices"][0]["message"]["content"], "More"]
        usage = (await client.post(chat_path(session), json=said(*texts))).json()["usage"]
        is_kept = caches == "keep"
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == is_kept
        assert usage["holdfast"]["recomputed_tokens"] == (0 if is_kept else first["usage"]["total_tokens"] - 1)
        assert is_kept or usage["holdfast"]["prefilled_tokens"] == usage["prompt_tokens"]


async def _loaded(client: httpx.AsyncClient, path: Path, number: int) -> httpx.Response:
    """By path and by upload in turns, and after two that compute the caches again two that keep them."""
    wanted = {"version": str(number), "caches": "keep" if number % 4 > 1 else "recompute"}
    if number % 2:
        return await client.post("/control/weights", json={"path": str(path), **wanted})
    headers = {"content-type": "application/octet-stream"}
    content = await asyncio.to_thread(path.read_bytes)
    return await client.post("/control/weights", params=wanted, content=content, headers=headers)


def _told(token: int) -> int:
    """The version that a token tells."""
    return (token - BASE) % MIXED


def _check_versions(tokens: Iterable[int], spans: Sequence[tuple[str, int]]) -> None:
    versions = [int(version) for version, num in spans for _ in range(num)]
    for token, version in zip(tokens, versions, strict=True):
        assert _told(token) == version
        assert token < BASE + MIXED or version % 4 > 1  # computed again: no key of other weights was seen


async def test_requests_that_cannot_be_carried_out_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may not, asks for what does not fit, sends too much, stalls, leaves, or comes second."""
    (tmp_path / "keys").write_text("ann:a\nadmin:b\n")
    (tmp_path / "uploads").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "uploads"))
    monkeypatch.setattr(routes_weights, "_HEADER_BYTES", 1000)
    options = {"keys_file": str(tmp_path / "keys"), "connection_timeout_s": 1}
    file, query = {"content-type": "application/octet-stream"}, {"version": "2"}
    path = str(_saved(tmp_path / "other.safetensors", {"model.norm.weight": torch.ones(3)}))
    async with serving(_telling_engine(), default_chat(), **options) as server, client_of(server, "b") as admin:

        async def refused(**request: Any) -> tuple[int, str]:
            return refusal_of(await admin.post("/control/weights", **request))

        async with client_of(server, "a") as ann:
            response = await ann.post("/control/weights", json={"path": path, "version": "2"})
            assert refusal_of(response) == (403, "forbidden")
        wrong = await admin.post("/control/weights", json={"path": path, "version": "2"})
        assert refusal_of(wrong) == (400, "invalid_argument")
        assert "model.norm.weight" in wrong.text
        for body in ({"path": path}, {"version": "2"}, {"path": path, "version": "2", "caches": "drop"}):
            assert await refused(json=body) == (400, "invalid_argument")
        assert await refused(content=b"", headers=file) == (400, "invalid_argument")  # no version
        assert await refused(params=query, content=b"{}", headers=file) == (400, "invalid_argument")
        assert await refused(params=query, content=b"x" * 2000, headers=file) == (413, "payload_too_large")
        reader, writer = await _begun_upload(server)
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 20)
        writer.close()
        _, writer = await _begun_upload(server)
        busy = (409, "weights_busy")
        await eventually(lambda: refused(json={"path": path, "version": "2"}), lambda answer: answer == busy)
        writer.close()  # the client leaves
        await eventually(lambda: refused(json={"path": path, "version": "2"}), lambda answer: answer[0] == 400)
        assert not [*(tmp_path / "uploads").glob("holdfast-weights-*")]
        engine = server.worker.engine
        assert (engine.weight_version, engine.info.fingerprint) == ("", "fake")


async def _begun_upload(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """An upload of which one byte of a hundred is sent."""
    reader, writer = await asyncio.open_connection(*server.http.split(":"))
    head = "POST /control/weights?version=2 HTTP/1.1\r\nhost: a\r\nauthorization: Bearer b\r\ncontent-length: 100\r\n"
    writer.write(f"{head}content-type: application/octet-stream\r\n\r\nx".encode())
    await writer.drain()
    return reader, writer


async def test_an_upstream_server_has_weights_of_its_own() -> None:
    async with chatting() as (relay, _):
        response = await relay.http.post("/control/weights", json={"path": "/w", "version": "2"})
        assert refusal_of(response) == (501, "unimplemented")
        assert "PUT /control/weight_version" in response.text
