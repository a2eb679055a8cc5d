"""The loop that learns, examples/grpo.py: its trainer on a tiny model, and two steps of the whole."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.chats.samples.sample import Sample
from tests import tiny
from tests.documents import ROOT


def _grpo() -> Any:
    spec = importlib.util.spec_from_file_location("grpo", ROOT / "examples/grpo.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def _sample(tokens: list[int], mask: list[int]) -> Sample:
    return Sample(
        session_id="s",
        branch=0,
        status="completed",
        num_left_out=0,
        turns=(),
        tokens=np.array(tokens),
        loss_mask=np.array(mask, np.uint8),
        rollout_log_probs=np.zeros(len(mask)),
    )


def _plain_logprobs(policy: Any, sample: Sample, temperature: float) -> list[float]:
    with torch.no_grad():
        logprobs = torch.log_softmax(policy(torch.tensor(sample.tokens)[None]).logits[0] / temperature, -1)
    sampled = np.flatnonzero(sample.loss_mask) + sample.response_start
    return [float(logprobs[at - 1, sample.tokens[at]]) for at in sampled]


def test_the_trainer_of_the_loop_prefers_what_was_rewarded() -> None:
    grpo = _grpo()
    policy = tiny.hf_model("llama").__class__(tiny.hf_model("llama").config)  # its own copy: this one is trained
    options = argparse.Namespace(temperature=0.7, layers=2, learning_rate=1e-2)
    trainer = grpo.Trainer(policy, options)
    samples = [_sample([5, 6, 7, 8, 9, 30, 31], [1, 1, 0, 1]), _sample([5, 6, 7, 40], [1])]
    before = [_plain_logprobs(policy, sample, 0.7) for sample in samples]
    np.testing.assert_allclose(trainer.logprobs(samples).detach(), np.concatenate(before), atol=1e-5)
    for sample, logprobs in zip(samples, before, strict=True):
        sample.rollout_log_probs[sample.loss_mask.astype(bool)] = logprobs
    assert trainer.step(samples, grpo.advantages_of([1.0, 0.0], 2)) < 1e-5
    after = [_plain_logprobs(policy, sample, 0.7) for sample in samples]
    assert sum(after[0]) > sum(before[0])
    assert after[1] < before[1]
    assert {name.split(".")[2] for name in trainer.trained} == {"1", "2"}


def test_a_group_whose_rewards_are_equal_has_no_advantages() -> None:
    assert _grpo().advantages_of([0.5, 0.5, 1.0, 0.0], 2) == pytest.approx([0.0, 0.0, 1.0, -1.0], abs=1e-3)


@pytest.mark.slow
def test_the_loop_samples_each_step_with_the_weights_of_the_step_before(tmp_path: Path) -> None:
    out = tmp_path / "grpo.json"
    _grpo().main(["--steps", "2", "--groups", "1", "--group-size", "4", "--layers", "1", "--out", str(out)])
    steps = json.loads(out.read_text())["steps"]
    assert [step["weight_version"] for step in steps] == [0, 1]  # those that the samples name
    assert all(step["mismatch"] < 1e-4 and step["num_tokens"] > 0 for step in steps)
    assert out.with_suffix(".png").stat().st_size > 1000
