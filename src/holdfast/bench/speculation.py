"""What n-gram drafts save and cost: the same texts gone on with and without them, in turns, and whether they agree."""

import asyncio
import time
from dataclasses import dataclass

from holdfast.bench.gates import Gate, all_right, median_at_least
from holdfast.bench.page import Chart
from holdfast.bench.report import Report
from holdfast.bench.results import Results
from holdfast.bench.runner import Scenario
from holdfast.bench.transcripts import PROSE, REPETITIVE
from holdfast.chat.tokenizer import load_tokenizer
from holdfast.config import DEFAULT_MODEL, EngineConfig, option
from holdfast.engine.embedded import build_worker
from holdfast.engine.worker import Worker
from holdfast.generation import Done, Sampled, SamplingParams
from holdfast.models import open_model

SAVES, COSTS = 1.8, 0.97
TEMPERATURES = (0.0, 0.8)
Prompts = dict[str, dict[str, list[int]]]  # by kind, then by title

_KINDS = {"repetitive": REPETITIVE, "prose": PROSE}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    tokens: int = option(160, "tokens that follow each text", least=1)
    rounds: int = option(3, "how often each text has its turn, with another seed", least=1)
    proposer: str = option("ngram", "who drafts", choices=("ngram", "draft_model"))
    draft_model: str = option("", "the small model of draft_model")
    model: str = option(DEFAULT_MODEL, "the model")
    dtype: str = option("auto", "its weights")
    device: str = option("auto", "where to compute")


@dataclass(slots=True)
class _Continuation:
    """How one text went on."""

    tokens: list[int]
    duration_s: float
    done: Done


def measure(settings: SpeculationSettings, results: Results) -> None:
    asyncio.run(_measure(settings, results))


async def _measure(settings: SpeculationSettings, results: Results) -> None:
    results.step("loading")
    tokenizer = load_tokenizer(open_model(settings.model))
    prompts = {kind: {title: tokenizer.encode(text) for title, text in texts.items()} for kind, texts in _KINDS.items()}
    for is_deterministic in (False, True):
        worker = _worker(settings, is_deterministic=is_deterministic)
        try:
            for index in range(settings.rounds):
                if is_deterministic:
                    await _compare(settings, worker, prompts, index, results)
                else:
                    await _race(settings, worker, prompts, index, results)
                results.on_round()
        finally:
            worker.stop()


def _worker(settings: SpeculationSettings, *, is_deterministic: bool) -> Worker:
    config = EngineConfig(
        device=settings.device,
        dtype=settings.dtype,
        deterministic=is_deterministic,
        sessions=1,
        recent=512,
        proposer=settings.proposer,
        draft_model=settings.draft_model,
    )
    worker = build_worker(open_model(settings.model), config)
    worker.start()
    return worker


async def _race(settings: SpeculationSettings, worker: Worker, prompts: Prompts, index: int, results: Results) -> None:
    for kind, texts in prompts.items():
        for temperature in TEMPERATURES:
            name = f"{kind}_{temperature:g}"
            drafted: list[_Continuation] = []
            plain: list[_Continuation] = []
            for title, text in texts.items():
                results.step(f"round {index + 1}, {title} at {temperature:g}")
                ways = ((drafted, True), (plain, False))
                for found, is_on in ways if index % 2 else reversed(ways):
                    found.append(await _go_on(settings, worker, text, temperature, index, speculation=is_on))
            results.figure(f"{name}_drafted", "tokens/s", _speed(drafted), "higher")
            results.figure(f"{name}_plain", "tokens/s", _speed(plain), "higher")
            results.ratio(f"{name}_drafted_to_plain", f"{name}_drafted", f"{name}_plain", "higher")
            results.figure(f"{name}_accepted", "share", _share_accepted(drafted), "higher")
            results.figure(f"{name}_tokens_a_forward", "tokens", _tokens_a_forward(drafted), "higher")


async def _compare(
    settings: SpeculationSettings, worker: Worker, prompts: Prompts, index: int, results: Results
) -> None:
    """With deterministic kernels: not one token may differ."""
    results.step(f"round {index + 1}, the same tokens")
    for texts in prompts.values():
        for text in texts.values():
            for temperature in TEMPERATURES:
                with_drafts, without = [
                    await _go_on(settings, worker, text, temperature, index, speculation=is_on)
                    for is_on in (True, False)
                ]
                pairs = zip(with_drafts.tokens, without.tokens, strict=False)
                num_wrong = sum(one != other for one, other in pairs)
                num_wrong += abs(len(with_drafts.tokens) - len(without.tokens))
                results.extend("compared", "tokens", [len(without.tokens)])
                results.extend("different", "tokens", [num_wrong])
                results.extend("accepted_deterministic", "tokens", [with_drafts.done.num_accepted])


async def _go_on(
    settings: SpeculationSettings,
    worker: Worker,
    prompt: list[int],
    temperature: float,
    seed: int,
    *,
    speculation: bool,
) -> _Continuation:
    params = SamplingParams(seed=seed, max_tokens=settings.tokens, temperature=temperature, speculation=speculation)
    sequence = await worker.open()
    await worker.append(sequence, prompt)
    tokens, done = [], None
    started = time.perf_counter()
    async with worker.generate(sequence, params) as stream:
        async for batch in stream:
            tokens += [event.token for event in batch if isinstance(event, Sampled)]
            done = next((event for event in batch if isinstance(event, Done)), done)
    took = time.perf_counter() - started
    await worker.close(sequence)
    assert done is not None
    return _Continuation(tokens, took, done)


def _speed(went: list[_Continuation]) -> float:
    return sum(len(one.tokens) for one in went) / sum(one.duration_s for one in went)


def _share_accepted(went: list[_Continuation]) -> float:
    return sum(one.done.num_accepted for one in went) / max(1, sum(one.done.num_proposed for one in went))


def _tokens_a_forward(went: list[_Continuation]) -> float:
    num = sum(len(one.tokens) for one in went)
    return num / (num - sum(one.done.num_accepted for one in went))


def judge(report: Report) -> list[Gate]:
    bars = {
        f"{kind}_{temperature:g}_drafted_to_plain": bar
        for kind, bar in (("repetitive", SAVES), ("prose", COSTS))
        for temperature in TEMPERATURES
    }
    gates = [median_at_least(name, report.values(name), bar, "times") for name, bar in bars.items()]
    num_compared, num_different = (int(sum(report.values(name))) for name in ("compared", "different"))
    return [*gates, all_right("same_tokens_when_deterministic", num_compared, num_different)]


SCENARIO = Scenario(
    name="speculation",
    about="tokens a second with drafts and without, on repetitive texts and on prose; the same tokens either way",
    settings=SpeculationSettings,
    quick={"rounds": 1, "tokens": 64},
    num_rounds=lambda settings: 2 * settings.rounds,
    measure=measure,
    judge=judge,
    charts=lambda settings: [
        Chart(
            "drafted and plain",
            "bars",
            tuple(f"{k}_{t:g}_{w}" for k in _KINDS for t in TEMPERATURES for w in ("drafted", "plain")),
            "tokens/s",
        )
    ],
)
