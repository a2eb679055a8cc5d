"""How far the logprobs on record are from a trainer's own: by dtype, with and without --deterministic.

The trainer is transformers in float32 with the weights of the model's file, one forward over the whole history.
Histories fit into the window, so both attend to the same tokens. The control is a trainer that forgets the temperature.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.bench.gates import Gate, control, percentile_at_most
from holdfast.bench.quality import long_text
from holdfast.bench.report import Report, Results
from holdfast.bench.runner import Chart, Scenario
from holdfast.chat.tokenizer import load_tokenizer
from holdfast.config import DEFAULT_MODEL, EngineConfig, option
from holdfast.engine.factory import build_worker, device_of, has_exact_engine
from holdfast.engine.worker import Worker
from holdfast.generation import Sampled, SamplingParams
from holdfast.models import GGUFSource, ModelSource, open_model

LIMIT = 100.0  # millionths of a nat, for float32
TEMPERATURES = (1.0, 0.7)

_UNIT = "millionths of a nat"
_DTYPES = ("float32", "bfloat16", "int8")
_CONTROL = "control_without_temperature"


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchSettings:
    texts: int = option(6, "texts that are continued side by side, at each temperature", least=1)
    prompt: int = option(200, "tokens of each text", least=1)
    tokens: int = option(64, "tokens to sample after each text", least=1)
    rounds: int = option(4, "rounds, each with other texts and seeds", least=1)
    model: str = option(DEFAULT_MODEL, "model to measure")
    device: str = option("auto", "device to compute on, of the engine and of the trainer")


@dataclass(frozen=True, slots=True)
class Continuation:
    """What was sampled after a prompt, with both logprobs on record."""

    prompt: Sequence[int]
    temperature: float
    sampled: Sequence[Sampled]


def load_policy(source: ModelSource, device: str = "cpu") -> Any:
    """The model in transformers, float32, from the same file. Blocks for seconds."""
    import torch
    from transformers import AutoModelForCausalLM

    place, given = source.path, {}
    if isinstance(source, GGUFSource):
        place, given = source.path.parent, {"gguf_file": source.path.name}
    policy: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **given)
    return policy.to(device)


async def _measure(settings: MismatchSettings, results: Results) -> None:
    results.step("loading the trainer")
    source = open_model(settings.model)
    device = device_of(EngineConfig(device=settings.device))
    policy = load_policy(source, "cuda" if device == "cuda" else "cpu")
    tokens = load_tokenizer(source).encode(long_text())
    for name, config in contestants(source, settings):
        results.step(f"loading {name}")
        worker = build_worker(source, config)
        worker.start()
        try:
            for index in range(settings.rounds):
                results.step(f"{name}, round {index + 1}")
                starts = [(index * settings.texts + i) * settings.prompt for i in range(settings.texts)]
                prompts = [tokens[start : start + settings.prompt] for start in starts]
                found = await asyncio.gather(
                    *(_continue(worker, prompt, t, index, settings.tokens) for prompt in prompts for t in TEMPERATURES)
                )
                record(name, policy, found, results)
                results.on_round()
        finally:
            worker.stop()


def contestants(source: ModelSource, settings: MismatchSettings) -> Iterator[tuple[str, EngineConfig]]:
    """What this machine's engine can compute with."""
    is_exact = has_exact_engine(source, EngineConfig(device=settings.device))
    has_int8 = is_exact and device_of(EngineConfig(device=settings.device)) == "cpu"
    for dtype in _DTYPES if has_int8 else _DTYPES[:2]:
        for is_deterministic in (False, True) if is_exact else (False,):
            yield (
                f"{dtype}{'_deterministic' if is_deterministic else ''}",
                EngineConfig(
                    device=settings.device,
                    dtype=dtype,
                    deterministic=is_deterministic,
                    sessions=settings.texts * len(TEMPERATURES),
                    recent=settings.prompt + settings.tokens,
                    rewind_tokens=0,
                ),
            )


async def _continue(worker: Worker, prompt: list[int], temperature: float, seed: int, num: int) -> Continuation:
    params = SamplingParams(seed=seed, max_tokens=num, temperature=temperature)
    sequence = await worker.open()
    await worker.append(sequence, prompt)
    sampled: list[Sampled] = []
    async with worker.generate(sequence, params) as stream:
        async for batch in stream:
            sampled += [event for event in batch if isinstance(event, Sampled)]
    await worker.close(sequence)
    return Continuation(prompt, temperature, sampled)


def record(name: str, policy: Any, continuations: Sequence[Continuation], results: Results) -> None:
    """Adds mean and largest difference of this round, of both logprobs, and those of the control."""
    found: dict[str, list[NDArray[np.float64]]] = {"raw": [], "sampling": [], _CONTROL: []}
    for one in continuations:
        raw, tempered = _trainer_logprobs(policy, one)
        sampling = np.array([sampled.sampling_logprob for sampled in one.sampled])
        found["raw"].append(np.abs(np.array([sampled.logprob for sampled in one.sampled]) - raw))
        found["sampling"].append(np.abs(sampling - tempered))
        if one.temperature != 1:
            found[_CONTROL].append(np.abs(sampling - raw))
    for kind, differences in found.items():
        values = np.concatenate(differences) * 1e6
        results.figure(f"{name}/{kind}_mean", _UNIT, float(values.mean()), "lower")
        results.figure(f"{name}/{kind}_max", _UNIT, float(values.max()), "lower")


def _trainer_logprobs(policy: Any, one: Continuation) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of the sampled tokens, at temperature 1 and at that of the continuation."""
    import torch

    chosen = torch.tensor([sampled.token for sampled in one.sampled], device=policy.device)
    tokens = torch.cat([torch.tensor(one.prompt, device=policy.device), chosen])
    with torch.inference_mode():
        logits = policy(tokens[None], logits_to_keep=len(chosen) + 1).logits[0, :-1]  # [sampled, vocabulary]
        both = [torch.log_softmax(logits / temperature, -1) for temperature in (1.0, one.temperature)]
        raw, tempered = (found.gather(1, chosen[:, None])[:, 0].double().cpu().numpy() for found in both)
    return raw, tempered


def judge(report: Report) -> list[Gate]:
    def agrees(name: str, kind: str) -> Gate:
        return percentile_at_most(f"{name}_{kind}", report.values(f"{name}/{kind}_mean"), 100, LIMIT, _UNIT)

    measured = [name for name in ("float32", "float32_deterministic") if report.values(f"{name}/raw_mean")]
    name = measured[-1] if measured else "float32"
    gates = [agrees(one, kind) for one in measured or [name] for kind in ("raw", "sampling")]
    return [*gates, control(_CONTROL, agrees(name, _CONTROL), len(report.values(f"{name}/{_CONTROL}_mean")))]


def charts(settings: MismatchSettings) -> list[Chart]:
    ways = [f"{dtype}{end}" for dtype in _DTYPES for end in ("", "_deterministic")]
    return [
        Chart(f"{what} difference to the trainer", "bars", tuple(f"{way}/sampling_{what}" for way in ways), _UNIT, True)
        for what in ("mean", "max")
    ]


SCENARIO = Scenario(
    name="mismatch",
    about="logprobs on record compared with those of transformers in float32, by dtype",
    settings=MismatchSettings,
    quick={"rounds": 1, "texts": 2, "tokens": 16},
    quick_s=50,
    num_rounds=lambda settings: settings.rounds * 2 * len(_DTYPES),
    measure=lambda settings, results: asyncio.run(_measure(settings, results)),
    judge=judge,
    charts=charts,
    needs=lambda settings: ("torch", "transformers"),
)
