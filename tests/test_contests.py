"""The benches of the engine: what their gates hold against a report, and a contestant that does its turns."""

import dataclasses
from pathlib import Path

import pytest
import torch

from holdfast.bench import mismatch, speculation
from holdfast.bench.engine_speed import DECODE, PREFILL, Contestant, EngineTask
from holdfast.bench.report import Report, Results
from holdfast.cli import main
from holdfast.config import DEFAULT_MODEL, EngineConfig
from holdfast.generation import Sampled
from tests import tiny


def _report(**values: float) -> Report:
    results = Results("any", "", {})
    for name, value in values.items():
        results.figure(name, "times", value)
    return results.report


def _passed(gates: list[object]) -> dict[str, bool]:
    return {gate.name: gate.passed for gate in gates}  # type: ignore[attr-defined]


def test_a_slow_engine_fails_every_gate_and_absent_peers_are_not_judged() -> None:
    peers = ("int8_to_llama_q8_0", "int4_to_llama_file", "int4_to_llama_q4_0", "int8_to_llama_q8_0_long")
    names = ("batch_8_to_1", *peers, "grpc_to_engine", "http_to_engine", "grpc_hammered_to_not", "http_hammered_to_not")
    fast, slow = _report(**dict.fromkeys(names, 3.1)), _report(**dict.fromkeys(names, 0.5))
    assert _passed(DECODE.judge(fast)) == dict.fromkeys(names, True)
    assert _passed(DECODE.judge(slow)) == dict.fromkeys(names, False)
    assert list(_passed(DECODE.judge(_report(batch_8_to_1=4.0)))) == ["batch_8_to_1"]
    assert _passed(PREFILL.judge(_report(int8_to_llama_q8_0=2.0, int4_to_llama_q4_0=3.4))) == {
        "int8_to_llama_q8_0": False,
        "int4_to_llama_q4_0": True,
    }


def test_one_other_token_fails_speculation_and_so_does_nothing_compared() -> None:
    ratios = {f"repetitive_{t}_drafted_to_plain": 2.0 for t in ("0", "0.8")}
    ratios |= {f"prose_{t}_drafted_to_plain": 1.0 for t in ("0", "0.8")}
    same = "same_tokens_when_deterministic"
    for compared, different, expected in (([90], [0], True), ([90], [1], False), ([], [], False)):
        results = Results("any", "", {})
        for name, value in ratios.items():
            results.figure(name, "times", value)
        results.extend("compared", "tokens", compared)
        results.extend("different", "tokens", different)
        gates = _passed(speculation.judge(results.report))
        assert gates == dict.fromkeys(ratios, True) | {same: expected}
    assert not any(_passed(speculation.judge(Results("any", "", {}).report)).values())


@pytest.mark.parametrize("batch", [1, 2])
def test_a_contestant_stands_where_it_stood_before_its_turn(batch: int) -> None:
    contestant = Contestant(DEFAULT_MODEL, EngineConfig(device="cpu", recent=64, sessions=2))
    order = EngineTask("decode", 3, history=20, batch=batch)
    assert contestant.run(order) > 0
    ready = contestant._ready
    assert contestant.run(order) > 0
    assert contestant._ready is ready
    assert all(len(contestant._sequences.get(one).tokens) == 20 for one in ready[1])
    assert contestant.run(EngineTask("prefill", 12)) > 0
    assert contestant._ready == (0, [])


def test_logprobs_that_a_trainer_does_not_have_fail_the_mismatch() -> None:
    policy = tiny.hf_model("llama")
    prompt, tokens, temperature = [5, 6, 7], [8, 30, 9], 0.7
    with torch.no_grad():
        logits = policy(torch.tensor([prompt + tokens])).logits[0, 2:-1]
    raw, sampling = (
        torch.log_softmax(logits / t, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        for t in (1.0, temperature)
    )
    sampled = [
        Sampled(token=token, logprob=one, sampling_logprob=other + 1e-5)
        for token, one, other in zip(tokens, raw, sampling, strict=True)
    ]
    for moved, failed in ((1e-5, set()), (4e-4, {"float32_raw"})):
        sampled[1] = dataclasses.replace(sampled[1], logprob=raw[1] + moved)
        results = Results("any", "", {})
        mismatch.record("float32", policy, [mismatch.Continuation(prompt, temperature, sampled)], results)
        gates = _passed(mismatch.judge(results.report))
        assert {name for name, passed in gates.items() if not passed} == failed
        assert set(gates) == {"float32_raw", "float32_sampling", "control_without_temperature"}
    assert not any(_passed(mismatch.judge(Results("any", "", {}).report)).values())


@pytest.mark.slow
def test_the_default_model_samples_with_the_logprobs_of_its_trainer(tmp_path: Path) -> None:
    assert main(["bench", "mismatch", "--quick", "--output", str(tmp_path)]) == 0
