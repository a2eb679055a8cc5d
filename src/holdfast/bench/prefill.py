"""How fast a prompt is read: our engine by dtype and length, beside llama.cpp with the same weights, in turns."""

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from holdfast.bench.contestant import EngineSetup, EngineTask
from holdfast.bench.contestants import NO_PEERS, contesting, find_peers, seconds, what_runs
from holdfast.bench.gates import Gate, median_at_least
from holdfast.bench.page import Chart
from holdfast.bench.report import Report
from holdfast.bench.results import Results
from holdfast.bench.runner import Scenario
from holdfast.config import DEFAULT_MODEL, option

_OURS = {
    "int8": EngineSetup("int8"),
    "bfloat16": EngineSetup("bfloat16"),
    "deterministic": EngineSetup("int8", deterministic=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSettings:
    tokens: int = option(512, "length of the prompt", least=1)
    rounds: int = option(8, "how often each has its turn", least=1)
    model: str = option(DEFAULT_MODEL, "the model; llama.cpp takes part where it is a GGUF file")
    llama_python: str = option("", "a Python that has llama_cpp, if this one has not")


def measure(settings: PrefillSettings, results: Results) -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        results.step("loading")
        peers = find_peers(settings.llama_python, settings.model, folder)
        if peers.files:
            results.report.versions["llama_cpp"] = what_runs(peers)
        else:
            results.report.notes.append(NO_PEERS)
        ours = {name: EngineSetup(setup.dtype, setup.deterministic, settings.model) for name, setup in _OURS.items()}
        children = stack.enter_context(contesting(ours, peers, settings.tokens + 8))
        order = EngineTask("prefill", settings.tokens)
        for child in children.values():
            seconds(child, order)
        for index in range(settings.rounds):
            for name, child in children.items():
                results.step(f"round {index + 1}, {name}")
                results.figure(name, "tokens/s", settings.tokens / seconds(child, order), "higher")
            for peer in peers.files:
                results.ratio(f"int8_to_{peer}", "int8", peer, "higher")
            results.on_round()


def judge(report: Report) -> list[Gate]:
    bars = {"int8_to_llama_q8_0": 3.0, "int8_to_llama_file": 3.0}
    return [
        median_at_least(name, report.values(name), bar, "times") for name, bar in bars.items() if report.values(name)
    ]


SCENARIO = Scenario(
    name="prefill",
    about="prompt tokens a second by dtype, beside llama.cpp where it is installed",
    settings=PrefillSettings,
    quick={"rounds": 3, "tokens": 256},
    num_rounds=lambda settings: settings.rounds,
    measure=measure,
    judge=judge,
    charts=lambda settings: [Chart("prompt", "bars", (*_OURS, "llama_q8_0", "llama_file"), "tokens/s")],
)
