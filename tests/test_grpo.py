"""The loop that learns, examples/grpo.py: its trainer on a tiny model, and two steps of the whole."""

import argparse
import copy
import importlib.util
import json
import sys
from collections.abc import Sequence
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


def _plain_logprobs(policy: Any, samples: Sequence[Sample], temperature: float) -> list[torch.Tensor]:
    """Those of the sampled tokens, each sample computed alone."""
    found = []
    for sample in samples:
        tokens = torch.tensor(sample.tokens)
        logprobs = torch.log_softmax(policy(tokens[None]).logits[0] / temperature, -1)
        sampled = torch.tensor(np.flatnonzero(sample.loss_mask) + sample.response_start)
        found.append(logprobs[sampled - 1, tokens[sampled]])
    return found


def test_the_trainer_of_the_loop_prefers_what_was_rewarded() -> None:
    grpo = _grpo()
    policy = copy.deepcopy(tiny.hf_model("llama"))
    trainer = grpo.Trainer(policy, argparse.Namespace(temperature=0.7, layers=2, learning_rate=1e-2))
    samples = [_sample([5, 6, 7, 8, 9, 30, 31], [1, 1, 0, 1]), _sample([5, 6, 7, 40], [1])]
    before = _plain_logprobs(policy, samples, 0.7)
    together, trained = trainer.logprobs(samples), list(trainer.trained.values())
    torch.testing.assert_close(together, torch.cat(before))
    torch.testing.assert_close(
        torch.autograd.grad(together.sum(), trained), torch.autograd.grad(torch.cat(before).sum(), trained)
    )
    for sample, logprobs in zip(samples, before, strict=True):
        sample.rollout_log_probs[sample.loss_mask.astype(bool)] = logprobs.detach()
    assert trainer.step(samples, grpo.advantages_of([1.0, 0.0], 2)) < 1e-5
    after = _plain_logprobs(policy, samples, 0.7)
    assert after[0].sum() > before[0].sum()
    assert after[1].sum() < before[1].sum()
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
