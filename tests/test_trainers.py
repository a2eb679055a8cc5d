"""Samples in the layouts of trainers: every token, mask, logprob and expert is where the trainer's code looks for it,
and TRL's own trainer computes the loss that follows from the certified tokens."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import assume, given, settings

from holdfast.chats.samples.assembly import Options, assemble
from holdfast.chats.samples.certificate import problems
from holdfast.chats.samples.formats import decode, encode
from holdfast.chats.samples.sample import Export, Sample, meta_of
from holdfast.chats.samples.trainers import Layout, Trainer, convert, to_miles, to_skyrl, to_trl, to_verl
from holdfast.chats.tree import Tree
from holdfast.cli import main
from holdfast.engine.slab import SlabShape
from holdfast.engine.torch import TorchEngine
from holdfast.engine.torch.weights import StateDictReader
from holdfast.errors import SamplesUnusable
from holdfast.models.architecture import from_hf_config
from tests.effort import examples
from tests.serving import default_chat, serving
from tests.talking import chat_path, client_of, open_session
from tests.test_samples import SESSION, attach, example, trees

PLAIN = Layout(has_experts=False)


def parts(sample: Sample) -> tuple[list[int], list[int]]:
    start = len(sample.tokens) - len(sample.loss_mask)
    return sample.tokens[:start].tolist(), sample.tokens[start:].tolist()


@settings(max_examples=examples(40))
@given(trees())
def test_every_layout_has_the_tokens_masks_and_logprobs_of_the_samples(tree: Tree) -> None:
    samples = assemble(tree, Options(branch="all"), replace(SESSION, reward=0.5)).samples
    assume(samples)
    trl, skyrl, miles = to_trl(samples), to_skyrl(samples), to_miles(samples)
    batch, others = to_verl(samples, Layout(pad_token_id=9))
    width = batch["prompts"].shape[1]
    for index, sample in enumerate(samples):
        prompt, response = parts(sample)
        mask, logprobs = sample.loss_mask.tolist(), sample.rollout_log_probs.tolist()
        names = ("prompt_ids", "completion_ids", "env_mask", "logprobs")
        assert [trl[name][index] for name in names] == [prompt, response, mask, logprobs]
        names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
        assert [skyrl[name][index] for name in names] == [prompt, response, mask, logprobs]
        assert (skyrl["rewards"][index], skyrl["trajectory_ids"][index]["repetition_id"]) == (0.5, index)
        one = miles[index]
        assert (one["tokens"], one["loss_mask"], one["rollout_log_probs"]) == (prompt + response, mask, logprobs)
        assert (one["group_index"], one["index"], one["rollout_id"]) == (0, index, 0)
        is_present = batch["attention_mask"][index].astype(bool)
        assert batch["input_ids"][index][is_present].tolist() == prompt + response
        assert (batch["input_ids"][index][~is_present] == 9).all()
        assert batch["position_ids"][index][is_present].tolist() == list(range(len(sample.tokens)))
        assert batch["prompts"][index][width - len(prompt) :].tolist() == prompt
        assert batch["responses"][index][: len(response)].tolist() == response
        assert batch["response_mask"][index].tolist()[: len(mask)] == mask
        assert not batch["response_mask"][index][len(mask) :].any()
        assert batch["rollout_log_probs"][index][: len(mask)].tolist() == np.float32(logprobs).tolist()
        assert np.flatnonzero(batch["rm_scores"][index]).tolist() == [len(response) - 1]
        assert others["uid"][index] == "g"


def test_routed_experts_are_kept_where_a_trainer_has_a_place_for_them_and_refused_elsewhere() -> None:
    samples = tuple(replace(sample, reward=1.0, rollout_indexer_topk=None) for sample in example().samples)
    batch, _ = to_verl(samples, Layout(prompt_length=5, response_length=8))
    skyrl, miles = to_skyrl(samples), to_miles(samples)
    for index, sample in enumerate(samples):
        rows = sample.rollout_routed_experts
        assert rows is not None
        start = 5 - sample.response_start
        assert batch["routed_experts"].shape == (2, 13, 3, 2)
        assert batch["routed_experts"][index][start : start + len(rows)].tolist() == rows.tolist()
        assert not batch["routed_experts"][index][start + len(rows) :].any()
        assert skyrl["rollout_expert_indices"][index] == rows.tolist()
        assert miles[index]["rollout_routed_experts"] is rows
    with pytest.raises(SamplesUnusable, match="sample 0 has rollout_routed_experts, and TRL has no place"):
        to_trl(samples)
    assert to_trl(samples, PLAIN)["reward"] == [1.0, 1.0]
    assert (to_skyrl(samples, PLAIN)["rollout_expert_indices"], "routed_experts" in to_verl(samples, PLAIN)[0]) == (
        None,
        False,
    )
    for name, to in (("verl", to_verl), ("SkyRL", to_skyrl)):
        with pytest.raises(SamplesUnusable, match=f"rollout_indexer_topk, and {name} has no place"):
            to(example().samples)
    assert to_miles(example().samples, PLAIN)[0]["rollout_routed_experts"] is None


def test_what_cannot_be_told_is_refused_with_a_sentence() -> None:
    one, other = (replace(s, rollout_indexer_topk=None, rollout_routed_experts=None) for s in example().samples)
    assert (one.reward, other.reward) == (0.25, None)
    with pytest.raises(SamplesUnusable, match="sample 1 has no reward, and SkyRL needs one"):
        to_skyrl([one, other])
    with pytest.raises(SamplesUnusable, match="sample 1 has no rewards, but others have"):
        to_verl([one, other])
    assert "rm_scores" not in to_verl([other])[0]
    with pytest.raises(SamplesUnusable, match="the longest prompt has 3 tokens, more than 2"):
        to_verl([other], Layout(prompt_length=2))
    with pytest.raises(SamplesUnusable, match="no routed experts, but others have"):
        to_verl([replace(example().samples[0], rollout_indexer_topk=None), replace(one)])
    with pytest.raises(SamplesUnusable, match="no samples to convert"):
        convert([], Trainer.TRL)


def test_convert_writes_files_that_the_trainers_own_tools_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = Tree()
    first = attach(tree, tree.root, [1, 2], [3, 4], weight_versions=("3", "3"))
    attach(tree, first, [5], [6], weight_versions=("4", "4"), weight_spans=())
    export = assemble(tree, Options(), replace(SESSION, reward=1.0))
    source = tmp_path / "samples.safetensors"
    source.write_bytes(encode(export))
    for trainer in Trainer:
        assert main(["samples", "convert", str(source), "--to", trainer.value]) == 0
        assert "1 samples, 6 tokens, 3 of them trained" in capsys.readouterr().out
    trl = json.loads((tmp_path / "samples.trl.json").read_text())
    assert trl["format_version"] == 2
    assert {name: trl[name] for name in trl if name != "format_version"} == to_trl(export.samples)
    assert json.loads((tmp_path / "samples.skyrl.json").read_text())["stop_reasons"] == ["stop"]
    with safetensors.safe_open(tmp_path / "samples.verl.safetensors", "pt") as file:
        told = file.metadata()
        assert file.get_tensor("responses").tolist() == [[3, 4, 5, 6]]
        assert file.get_tensor("response_mask").tolist() == [[1, 1, 0, 1]]
    assert (told["format_version"], json.loads(told["non_tensor_batch"])["weight_versions"]) == ("2", [["3", "4"]])
    loaded = torch.load(tmp_path / "samples.miles.pt", weights_only=False)
    [sample] = loaded["samples"]
    assert (loaded["rollout_id"], sample["weight_versions"], sample["loss_mask"]) == (0, ["3", "4"], [1, 1, 0, 1])
    out = tmp_path / "spans.pt"
    command = ["samples", "convert", str(source), "--to", "miles", "--weight-versions", "spans", "--out", str(out)]
    assert main(command) == 0
    [sample] = torch.load(io.BytesIO(out.read_bytes()), weights_only=False)["samples"]
    assert [span["version"] for [span] in sample["weight_versions"]] == ["3", "4"]
    assert main(["samples", "convert", str(source), str(source), "--to", "trl"]) != 0  # each turn is trained once
    assert "turn 1 is already trained in sample 0" in capsys.readouterr().err
    tampered = replace(export.samples[0], tokens=export.samples[0].tokens + 1)
    source.write_bytes(encode(Export(samples=(tampered,))))
    assert main(["samples", "convert", str(source), "--to", "trl"]) != 0
    assert "turn 1 is not what was certified" in capsys.readouterr().err
    assert main(["samples", "convert", str(tmp_path / "none"), "--to", "trl"]) == 2


# TRL's own trainer

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"enum": ["sky", "sea"]}}, "required": ["at"]},
    },
}


def policy_of(vocab_size: int) -> Any:
    """A small random model with the default model's vocabulary."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(config).eval()


async def rollout(policy: Any) -> Export:
    """A session with a tool, two branches, and other weights for the second turn."""
    shape = SlabShape(recent=1024, max_pin=512, prefill_chunk=128, rewind_tokens=512)
    engine = TorchEngine(
        "policy",
        from_hf_config(policy.config.to_dict()),
        StateDictReader(policy.state_dict()),
        digest="policy",
        num_slabs=4,
        shape=shape,
    )
    options = {"tools": [TOOL], "max_tokens": 40}
    async with serving(engine, default_chat(), weight_version="1") as server, client_of(server) as client:
        session = await open_session(client, history="forest", group="task")
        messages: list[Any] = [{"role": "user", "content": "Look."}]

        async def turn(**more: Any) -> Any:
            reply = await client.post(chat_path(session), json={"messages": messages, **options, **more})
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"][0]["message"]

        message = await turn(seed=1, tool_choice="required", parallel_tool_calls=False)
        (call,) = message["tool_calls"]
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "It is blue."}]
        await client.put("/control/weight_version", json={"weight_version": "2"})
        await turn(seed=2, max_tokens=6)
        await turn(seed=3, max_tokens=9, temperature=0.7)
        for number, reward in ((2, 0.25), (3, 0.0)):
            await client.post(f"/sessions/{session}/reward", json={"reward": reward, "turn": number})
        reply = await client.post(f"/sessions/{session}/samples", json={"branch": "all"})
    export = decode(reply.content)
    assert problems(export) == []
    return export


def loss_by_hand(policy: Any, samples: Sequence[Sample]) -> float:
    """CISPO's loss of a group, from the tokens that the certificates cover, one sample at a time."""
    rewards = np.array([sample.reward for sample in samples])
    advantages = rewards - rewards.mean()
    loss, num_trained = 0.0, 0
    for sample, advantage in zip(samples, advantages, strict=True):
        tokens, start = torch.tensor(sample.tokens), sample.response_start
        with torch.no_grad():
            logits = policy(tokens[None]).logits[0, start - 1 : -1].double()
        logprobs = torch.log_softmax(logits, -1).gather(1, tokens[start:, None])[:, 0].numpy()
        assert sample.certificate is not None
        assert sample.certificate.num_trained == sample.loss_mask.sum()
        loss -= float((sample.loss_mask * advantage * logprobs).sum())
        num_trained += sample.certificate.num_trained
    return loss / num_trained


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")
async def test_one_step_of_trls_trainer_has_the_loss_that_the_certified_tokens_give(tmp_path: Path) -> None:
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = default_chat().model.tokenizer
    policy = policy_of(tokenizer.inner.get_vocab_size())
    samples = (await rollout(policy)).samples
    one, other = samples
    assert [turn.masked for turn in other.turns] == ["shared", ""]
    assert 0 in one.loss_mask  # the tool's answer, between two sampled turns
    assert [meta_of(sample).weight_versions for sample in samples] == [["1", "2"]] * 2
    expected = loss_by_hand(policy, samples)
    losses: list[float] = []

    class Watched(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            losses.append(float(loss.detach()))
            return loss

    config = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        num_generations=2,
        max_steps=1,
        beta=0.0,
        loss_type="cispo",
        epsilon_high=5.0,
        scale_rewards="none",
        learning_rate=0.1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_dropout=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = Watched(
        model=policy,
        reward_funcs=lambda prompts, completions, reward, **_: reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "Look."}]),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.inner, eos_token="<|im_end|>", pad_token="<|im_end|>"
        ),
        rollout_func=lambda prompts, trainer: to_trl(samples),
    )
    before = policy.lm_head.weight.detach().clone()
    trainer.train()
    assert losses == pytest.approx([expected], abs=1e-6)
    assert not torch.equal(before, policy.lm_head.weight)
