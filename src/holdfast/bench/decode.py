"""How fast one token follows another: our engine by dtype, batch and history, beside llama.cpp with the same weights.

All contestants are loaded at once and take turns, so what slows the machine down slows all of them.
"""

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from holdfast.bench.contestant import EngineSetup, EngineTask
from holdfast.bench.contestants import NO_PEERS, contesting, find_peers, seconds, what_runs
from holdfast.bench.divergence import divergence
from holdfast.bench.gates import Gate, median_at_least
from holdfast.bench.hammer import hammered_share
from holdfast.bench.page import Chart
from holdfast.bench.processes import Child
from holdfast.bench.report import Report
from holdfast.bench.results import Results
from holdfast.bench.runner import Scenario
from holdfast.config import DEFAULT_MODEL, option

BATCHES = (2, 4, 8)
_DTYPES = ("int8", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    tokens: int = option(48, "tokens that each contestant decodes in its turn", least=1)
    history: int = option(512, "tokens before them", least=1)
    long: int = option(4096, "and in a long history; 0: not tried")
    rounds: int = option(8, "how often each has its turn", least=1)
    model: str = option(DEFAULT_MODEL, "the model; llama.cpp takes part where it is a GGUF file")
    llama_python: str = option("", "a Python that has llama_cpp, if this one has not")
    hammer_s: float = option(8.0, "how long a client hammers the HTTP door while a stream decodes; 0: not tried")


def measure(settings: DecodeSettings, results: Results) -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        results.step("loading")
        peers = find_peers(settings.llama_python, settings.model, folder)
        if peers.files:
            results.report.versions["llama_cpp"] = what_runs(peers)
        else:
            results.report.notes.append(NO_PEERS)
        ours = {dtype: EngineSetup(dtype, model=settings.model) for dtype in _DTYPES}
        longest = max(settings.history, settings.long) + settings.tokens + 8
        children = stack.enter_context(contesting(ours, peers, longest))
        for name, child in children.items():
            results.step(f"warming up {name}")
            seconds(child, EngineTask("decode", settings.tokens, settings.history))
        for index in range(settings.rounds):
            results.step(f"round {index + 1}")
            _round(settings, children, results)
            results.on_round()
    if settings.long:
        _long(settings, results)
    results.step("divergence")
    for dtype, value in divergence(settings.model, _DTYPES).items():
        results.figure(f"kl_{dtype}", "nats", value, "lower")
    if settings.hammer_s:
        results.step("a client hammers the HTTP door")
        for quiet, hammered in hammered_share(settings.model, settings.hammer_s):
            results.figure("served_alone", "tokens/s", quiet, "higher")
            results.figure("served_hammered", "tokens/s", hammered, "higher")
            results.ratio("hammered_to_alone", "served_hammered", "served_alone", "higher")
    results.on_round()


def _round(settings: DecodeSettings, children: dict[str, Child], results: Results) -> None:
    order = EngineTask("decode", settings.tokens, settings.history)
    for name, child in children.items():
        results.figure(name, "tokens/s", settings.tokens / seconds(child, order), "higher")
    for batch in BATCHES:
        order = EngineTask("decode", settings.tokens // 2 or 1, settings.history, batch)
        speed = order.tokens * batch / seconds(children["int8"], order)
        results.figure(f"int8_batch_{batch}", "tokens/s", speed, "higher")
        results.ratio(f"batch_{batch}_to_1", f"int8_batch_{batch}", "int8", "higher")
    for peer in ("llama_q8_0", "llama_file"):
        for dtype in _DTYPES:
            results.ratio(f"{dtype}_to_{peer}", dtype, peer, "higher")


def _long(settings: DecodeSettings, results: Results) -> None:
    """The long history by itself: filling it takes longer than all the rest."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers = find_peers(settings.llama_python, settings.model, folder)
        peers.files.pop("llama_file", None)
        ours = {"int8": EngineSetup("int8", model=settings.model, recent=settings.long, sessions=1)}
        children = stack.enter_context(contesting(ours, peers, settings.long + settings.tokens + 8))
        order = EngineTask("decode", settings.tokens // 2 or 1, settings.long)
        for name, child in children.items():
            results.step(f"{settings.long} tokens of history, {name}")
            seconds(child, order)
        for index in range(settings.rounds):
            results.step(f"{settings.long} tokens of history, round {index + 1}")
            for name, child in children.items():
                results.figure(f"{name}_long", "tokens/s", order.tokens / seconds(child, order), "higher")
            results.ratio("int8_to_llama_q8_0_long", "int8_long", "llama_q8_0_long", "higher")
            results.on_round()


def judge(report: Report) -> list[Gate]:
    """What is asked of this machine's kind; where no peer took part, only our own ratios."""
    bars = {"batch_8_to_1": 3.0, "int8_to_llama_q8_0": 1.3, "int8_to_llama_file": 1.0}
    bars |= {"int8_to_llama_q8_0_long": 1.0, "hammered_to_alone": 0.6}
    return [
        median_at_least(name, report.values(name), bar, "times") for name, bar in bars.items() if report.values(name)
    ]


SCENARIO = Scenario(
    name="decode",
    about="tokens a second by dtype, batch and history, beside llama.cpp where it is installed",
    settings=DecodeSettings,
    quick={"rounds": 2, "tokens": 16, "long": 0, "hammer_s": 1.0},
    num_rounds=lambda settings: settings.rounds * (2 if settings.long else 1) + 1,
    measure=measure,
    judge=judge,
    charts=lambda settings: [
        Chart("one stream", "bars", ("int8", "bfloat16", "llama_q8_0", "llama_file"), "tokens/s"),
        Chart("several streams", "bars", ("int8", *(f"int8_batch_{batch}" for batch in BATCHES)), "tokens/s"),
        Chart("a long history", "bars", ("int8_long", "llama_q8_0_long"), "tokens/s"),
    ],
)
