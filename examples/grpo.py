"""A loop that learns: GRPO on the default model, with a tool and several turns, through sessions of a Holdfast server.

.venv/bin/python examples/grpo.py                     # about ten minutes on two cores
.venv/bin/python examples/grpo.py --device cuda       # server and trainer on one GPU

The model is asked for a price. It has to call the tool `lookup` with the right key, and then say the price that the
tool returned. One example in the prompt shows how, but the untrained model seldom follows it.

Each step samples a group of rollouts for each question, exports their token ids, loss masks and logprobs, makes one
gradient step on exactly these tokens, and sends the changed weights to the server. The trainer is plain torch: TRL's
GRPOTrainer takes ids and masks from a `rollout_func`, but recorded logprobs correct its loss only if vLLM generates.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from rich.progress import Progress
from safetensors.torch import save
from torch.nn.utils.rnn import pad_sequence

from holdfast.bench.mismatch import load_policy
from holdfast.bench.processes import serving
from holdfast.chats.samples.formats import decode
from holdfast.chats.samples.sample import Sample
from holdfast.config import DEFAULT_MODEL
from holdfast.models import open_model

TEMPLATE = Path(__file__).with_name("grpo.jinja")
ITEMS = ("milk", "rice", "salt", "soap", "tea", "wine", "corn", "fish", "beef", "cake", "coffee", "sugar", "honey")
TOOL: Any = {
    "type": "function",
    "function": {"name": "lookup", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}},
}
CALL: Any = {"id": "0", "type": "function", "function": {"name": "lookup", "arguments": '{"key": "bread"}'}}
EXAMPLE: list[Any] = [
    {"role": "user", "content": "Price of bread?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "0", "content": "37"},
    {"role": "assistant", "content": "37"},
]
BEGAN, CALLED, FOUND, SOLVED = (
    0.1,
    0.2,
    0.5,
    1.0,
)  # rewards: began a call, called the tool, with the right key, and told the price
CLIP = 0.2  # of the probability ratio


@dataclass(frozen=True, slots=True)
class Question:
    """What all rollouts of a group are asked, and what the tool answers."""

    number: int
    item: str
    price: str


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did. `mismatch`: how far the trainer's logprobs were from those on record, before the update."""

    weight_version: int
    reward: float
    solved: float  # share of the rollouts
    mismatch: float  # mean over the sampled tokens
    num_tokens: int  # sampled
    rollout_s: float
    train_s: float
    push_s: float


class Rollouts:
    """The server's side of the loop."""

    def __init__(self, client: httpx.Client, options: argparse.Namespace) -> None:
        self._client, self._options = client, options

    def sample(self, questions: Sequence[Question]) -> list[Sample]:
        """A group of samples for each question, one group after the other. All rollouts run at once."""
        tries = [(question, number) for question in questions for number in range(self._options.group_size)]
        with ThreadPoolExecutor(len(tries)) as pool:
            return list(pool.map(lambda one: self._roll_out(*one), tries))

    def push(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """Replace these weights of the server's model; all that is sampled afterwards is of this version."""
        headers = {"content-type": "application/octet-stream"}
        where = f"/control/weights?version={version}&caches=recompute"
        self._client.post(where, content=save(weights), headers=headers).raise_for_status()

    def _roll_out(self, question: Question, number: int) -> Sample:
        about = {"group": f"question {question.number}", "label": f"rollout {number}"}
        session = "/sessions/" + self._post("/sessions", about).json()["session_id"]
        seed = (self._options.seed << 32) + question.number * self._options.group_size + number
        reward = self._act(session, question, seed)
        self._post(f"{session}/reward", {"reward": reward})
        (sample,) = decode(self._post(f"{session}/samples", {}).content).samples
        self._client.delete(session).raise_for_status()
        return sample

    def _act(self, session: str, question: Question, seed: int) -> float:
        """Two turns of the model, with the tool's result in between; the reward."""
        messages = [*EXAMPLE, {"role": "user", "content": f"Price of {question.item}?"}]
        asked = self._reply(session, messages, seed)
        calls = asked.get("tool_calls") or []
        if not calls:
            return BEGAN if "<tool_call>" in (asked["content"] or "") else 0.0
        is_right = [json.loads(call["function"]["arguments"]) == {"key": question.item} for call in calls]
        results = [question.price if right else "unknown" for right in is_right]
        messages += [asked]
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        answer = self._reply(session, messages, seed)
        if is_right != [True]:
            return CALLED
        return SOLVED if answer["content"] == question.price else FOUND

    def _reply(self, session: str, messages: list[Any], seed: int) -> Any:
        body = {
            "model": "any",
            "messages": messages,
            "tools": [TOOL],
            "max_completion_tokens": 32,
            "temperature": self._options.temperature,
            "seed": seed,
        }
        return self._post(f"{session}/v1/chat/completions", body).json()["choices"][0]["message"]

    def _post(self, path: str, body: Any) -> httpx.Response:
        return self._client.post(path, json=body).raise_for_status()


class Trainer:
    """The policy in float32, of which Adam trains the last layers. `trained` are their weights by name."""

    def __init__(self, policy: Any, options: argparse.Namespace) -> None:
        self._policy, self._temperature = policy, options.temperature
        policy.requires_grad_(False)
        policy.model.layers[-options.layers :].requires_grad_(True)
        self.trained = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
        self._optimizer = torch.optim.Adam(self.trained.values(), lr=options.learning_rate)

    def step(self, samples: Sequence[Sample], advantages: Sequence[float]) -> float:
        """One step of GRPO's clipped loss; the mean difference of logprobs to those on record, before the step."""
        masks = [sample.loss_mask.astype(bool) for sample in samples]
        recorded = [sample.rollout_log_probs[mask] for sample, mask in zip(samples, masks, strict=True)]
        old = self._tensor(np.concatenate(recorded))
        advantage = self._tensor(np.repeat(advantages, [len(one) for one in recorded]))
        new = self.logprobs(samples)
        ratio = torch.exp(new - old)
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        self._optimizer.step()
        return float((new - old).abs().mean().detach())

    def logprobs(self, samples: Sequence[Sample]) -> torch.Tensor:
        """The policy's logprobs of all sampled tokens, at the temperature that they were sampled at.

        The tokens that all samples begin with are computed once.
        """
        start = min(sample.response_start for sample in samples) - 1
        differs = [np.flatnonzero(sample.tokens[:start] != samples[0].tokens[:start]) for sample in samples]
        num_common = min([start, *(int(found[0]) for found in differs if len(found))])
        rests = [torch.tensor(sample.tokens[num_common:]) for sample in samples]
        masks = [np.pad(s.loss_mask.astype(bool), (s.response_start - num_common, 0)) for s in samples]
        tokens = pad_sequence(rests, batch_first=True).to(self._policy.device)  # [samples, rest]
        is_sampled = pad_sequence([torch.tensor(mask) for mask in masks], batch_first=True).to(self._policy.device)
        decoder = self._policy.model
        shared = decoder(tokens.new_tensor(samples[0].tokens[None, :num_common]), use_cache=True).past_key_values
        shared.batch_repeat_interleave(len(samples))
        hidden = decoder(tokens, past_key_values=shared).last_hidden_state
        logits = self._policy.lm_head(hidden[:, :-1][is_sampled[:, 1:]])  # [sampled, vocabulary]
        chosen = tokens[:, 1:][is_sampled[:, 1:]]
        return torch.log_softmax(logits / self._temperature, -1).gather(1, chosen[:, None])[:, 0]

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._policy.device)


def advantages_of(rewards: Sequence[float], group_size: int) -> list[float]:
    """How much better than the mean of its group each rollout is, in standard deviations of the group."""
    groups = np.reshape(rewards, (-1, group_size))
    better = groups - groups.mean(1, keepdims=True)
    return [float(value) for value in (better / (groups.std(1, keepdims=True) + 1e-4)).ravel()]


def learn(rollouts: Rollouts, trainer: Trainer, options: argparse.Namespace) -> Iterator[Step]:
    """Makes the steps one by one; after step n the server has weights of version n."""
    chance = random.Random(options.seed)
    rollouts.push(trainer.trained, 0)
    for version in range(options.steps):
        times = [time.perf_counter()]
        numbers = range(version * options.groups, (version + 1) * options.groups)
        samples = rollouts.sample([Question(n, chance.choice(ITEMS), str(chance.randint(11, 99))) for n in numbers])
        if wrong := {one for sample in samples for one in sample.weight_versions} - {str(version)}:
            raise RuntimeError(f"the server has weights of version {version}, but sampled with {wrong}")
        times.append(time.perf_counter())
        rewards = [sample.reward or 0.0 for sample in samples]
        mismatch = trainer.step(samples, advantages_of(rewards, options.group_size))
        times.append(time.perf_counter())
        rollouts.push(trainer.trained, version + 1)
        times.append(time.perf_counter())
        yield Step(
            version,
            statistics.fmean(rewards),
            rewards.count(SOLVED) / len(rewards),
            mismatch,
            sum(int(sample.loss_mask.sum()) for sample in samples),
            *(round(end - start, 2) for start, end in itertools.pairwise(times)),
        )


def plot(runs: dict[str, list[float]], path: Path) -> None:
    """The mean reward of each step, and its mean over five steps, for each run."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, rewards in runs.items():
        smooth = [statistics.fmean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
        (line,) = axes.plot(range(1, len(rewards) + 1), smooth, label=name)
        axes.plot(range(1, len(rewards) + 1), rewards, color=line.get_color(), alpha=0.3, linewidth=1)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.03))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=110)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(flag: str, default: Any, about: str) -> None:
        parser.add_argument(flag, type=type(default), default=default, help=f"{about} (default: {default})")

    add("--steps", 30, "gradient steps")
    add("--seed", 0, "of the questions and of sampling")
    add("--groups", 2, "questions in each step")
    add("--group-size", 8, "rollouts of each question")
    add("--temperature", 1.0, "of sampling and of the policy")
    add("--layers", 10, "last layers that are trained; the others stay as they are")
    add("--learning-rate", 1e-4, "of Adam")
    add("--device", "cpu", "cpu or cuda, for the server and the trainer")
    add("--dtype", "float32", "of the server: float32, bfloat16 or int8; the trainer has float32")
    add("--model", DEFAULT_MODEL, "model to train, with ChatML's control tokens")
    add("--out", Path("grpo.json"), "file for the figures of each step; the plot has the same name, with .png")
    about = f"use this server; start it with --chat-template {TEMPLATE.name} (default: a server of its own)"
    parser.add_argument("--server", metavar="URL", help=about)
    parser.add_argument("--plot", nargs="+", type=Path, metavar="FILE", help="only draw the rewards of earlier runs")
    options = parser.parse_args(arguments)
    if min(options.steps, options.groups, options.group_size, options.layers) < 1:
        parser.error("--steps, --groups, --group-size and --layers must be 1 or more")
    return options


def run(options: argparse.Namespace) -> None:
    """All steps; what is known is in the file after each of them."""
    num_sessions = options.groups * options.group_size
    flags = {
        "--device": options.device,
        "--dtype": options.dtype,
        "--sessions": num_sessions,
        "--max-concurrent": num_sessions,
        "--recent": 512,
        "--rewind-tokens": 64,
        "--chat-template": TEMPLATE,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    report: dict[str, Any] = {"settings": {name: str(value) for name, value in vars(options).items()}, "steps": []}
    trainer = Trainer(load_policy(open_model(options.model), options.device), options)
    with (
        Progress() as progress,
        nullcontext() if options.server else serving(options.model, *words) as server,
        httpx.Client(base_url=options.server or server.http, timeout=600) as client,
    ):
        steps = learn(Rollouts(client, options), trainer, options)
        for step in progress.track(steps, total=options.steps, description="learning"):
            report["steps"].append(asdict(step))
            options.out.write_text(json.dumps(report, indent=1))
            about = f"reward {step.reward:.2f}, solved {step.solved:.0%}, mismatch {step.mismatch:.1e}"
            took = f"{step.rollout_s:.1f} s rollouts, {step.train_s:.1f} s training, {step.push_s:.1f} s weights"
            line = f"step {step.weight_version + 1}: {about}; {took}"
            progress.console.print(line, highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    if not options.plot:
        run(options)
    reports = [json.loads(path.read_text()) for path in options.plot or [options.out]]
    rewards = {f"seed {one['settings']['seed']}": [step["reward"] for step in one["steps"]] for one in reports}
    plot(rewards, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
