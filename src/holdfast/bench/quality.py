"""Whether a bounded session still makes sense: perplexity of a long text, recall of facts, distance to the oracle; and
whether a server with --recall-tokens answers from what has left the window.

The controls must fail: reading without sinks, recalling a fact outside the window, and an oracle without sinks.
"""

import math
import pydoc_data.topics
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.bench import recall_quality
from holdfast.bench.gates import Gate, control, median_at_least, percentile_at_most, share_at_least, stays_flat
from holdfast.bench.report import Report, Results
from holdfast.bench.runner import Chart, Scenario
from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.config import DEFAULT_MODEL, EngineConfig, option
from holdfast.engine.interface import Engine
from holdfast.engine.slab import Slab, SlabPool
from holdfast.engine.weights import as_float32, open_weights
from holdfast.engine.window import Window
from holdfast.errors import ConfigError
from holdfast.models import ModelSource, open_model
from holdfast.testing.fake_engine import difference, forward, run_chunks
from holdfast.testing.oracle import dense_logits, weight_names

SINK = 4
FLATNESS = 0.35  # texts are not equally hard everywhere
CONTROL_TIMES = 1.5
RECALLED_SHARE = 0.8  # of the facts that the model can see
AGREEMENT = 500.0  # millionths of a logit

_MILLIONTHS = "millionths of a logit"
_PINNED = 64
_CHUNK = 160
_INSIDE, _OUTSIDE = 0.5, 1.5  # of the window between a fact and its question
_PLACES = ("harbour", "library", "station", "museum", "castle", "bakery", "garden", "theatre", "market", "bridge")
_WORDS = ("silver", "thunder", "orange", "winter", "dragon", "violet", "rocket", "pepper", "copper", "marble")

Build = Callable[[ModelSource, EngineConfig], Engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class QualitySettings:
    text: str = option("", "file with the long text; empty: Python's own documentation")
    tokens: int = option(12_800, "tokens of the text to read", least=10 * _CHUNK)
    recent: int = option(160, "window, without the sinks", least=_CHUNK)
    facts: int = option(20, "facts to recall", least=1)
    oracle_windows: int = option(3, "length, in windows, of the text to compare with the oracle", least=1)
    questions: int = option(40, "facts that a server is asked for once they have left its window; 0: none", least=0)
    windows: str = option("2,10,100", "how many windows ago these facts were told, separated by commas")
    pass_keys: int = option(0, "keys told in the course of a long history that the server is asked for; 0: none")
    history_tokens: int = option(200_000, "length of that history", least=1)
    search_tokens: str = option("200000", "lengths of histories that are searched, separated by commas")
    served_recent: int = option(256, "window of the server that is asked", least=128)
    dtype: str = option("float32", "weights and cache; only float32 is compared with the oracle")
    device: str = option("auto", "device to compute on")
    model: str = option(DEFAULT_MODEL, "model to measure")


def long_text() -> str:
    """English text that every machine has."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def scenario(build: Build) -> Scenario:
    """The scenario for engines that `build` makes."""
    return Scenario(
        name="quality",
        about="perplexity by position with and without sinks, recall inside and outside the window, oracle agreement",
        settings=QualitySettings,
        quick={"tokens": 10 * _CHUNK, "facts": 5, "oracle_windows": 1, "questions": 12, "windows": "2,10"},
        quick_s=100,
        num_rounds=lambda settings: 4,
        measure=partial(_measure, build),
        judge=judge,
        charts=charts,
    )


def _measure(build: Build, settings: QualitySettings, results: Results) -> None:
    results.step("loading the model")
    source = open_model(settings.model)
    tokenizer = load_tokenizer(source)
    tokens = tokenizer.encode(_text(settings))
    if len(tokens) <= settings.tokens:
        raise ConfigError(f"the text has {len(tokens)} tokens, more than {settings.tokens} are needed")
    config = EngineConfig(
        device=settings.device,
        dtype=settings.dtype,
        sessions=3,
        sink=SINK,
        recent=settings.recent,
        max_pin=_PINNED,
        prefill_chunk=_CHUNK,
        rewind_tokens=0,
    )
    engine = build(source, config)
    _read(engine, tokens[: settings.tokens + 1], results)
    results.on_round()
    _recall(engine, tokenizer, tokens, settings, results)
    results.on_round()
    if settings.dtype == "float32":
        agree(engine, source, tokens, settings, results)
    else:
        results.note(f"{settings.dtype} is not compared with the oracle: only float32 is expected to agree")
    results.on_round()
    if settings.questions:
        recall_quality.measure(results, _text(settings), settings)
    if settings.pass_keys:
        recall_quality.measure_pass_keys(results, _text(settings), settings)
    for num_tokens in recall_quality.numbers(settings.search_tokens):
        recall_quality.measure_search(results, _text(settings), tokenizer, num_tokens)
    results.on_round()


def _text(settings: QualitySettings) -> str:
    if not settings.text:
        return long_text()
    try:
        return Path(settings.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read {settings.text} as text: {exc}") from exc


def _read(engine: Engine, tokens: list[int], results: Results) -> None:
    num_read = 0
    for found in perplexities(engine, tokens, (SINK, 0), _CHUNK):
        num_read += _CHUNK
        results.step(f"reading, {num_read} of {len(tokens) - 1} tokens")
        for sink, perplexity in found.items():
            results.count(f"sink={sink}/perplexity", perplexity)
        results.extend("without_sinks:with/perplexity", "times", [found[0] / found[SINK]])
    for sink in (SINK, 0):
        for value in results.report.values(f"sink={sink}/perplexity"):
            results.figure(f"sink={sink}/perplexity_by_chunk", "", value, "lower")


def perplexities(engine: Engine, tokens: Sequence[int], sinks: Sequence[int], chunk: int) -> Iterator[dict[int, float]]:
    """The perplexity of each next `chunk` tokens, by number of sinks; each number of sinks has a slab of its own."""
    pool = SlabPool(engine.num_slabs, engine.shape)
    slabs = [pool.acquire(sink) for sink in sinks]
    for start in range(0, len(tokens) - chunk, chunk):
        part, targets = tokens[start : start + chunk], tokens[start + 1 : start + chunk + 1]
        found = forward(engine, [(slab, part) for slab in slabs])
        rows = np.arange(len(targets))
        yield {
            sink: math.exp(-log_softmax(logits)[rows, list(targets)].mean())
            for sink, logits in zip(sinks, found, strict=True)
        }


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-softmax of each row."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    normed: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normed


@dataclass(frozen=True, slots=True)
class Fact:
    """A statement, and its beginning as a question: the model is to continue with `answer`."""

    statement: list[int]
    question: list[int]
    answer: list[int]


def facts(tokenizer: Tokenizer, num: int, seed: int = 0) -> list[Fact]:
    """Different facts that cannot be guessed."""
    chance = random.Random(seed)
    found = []
    for number in range(num):
        place, words = _PLACES[number % len(_PLACES)], chance.sample(_WORDS, 2)
        question = tokenizer.encode(f" The secret password of the {place} is")
        answer = tokenizer.encode(f" {words[0]} {words[1]}")
        end = tokenizer.encode(". Remember it well.")
        found.append(Fact(question + answer + end, question, answer))
    return found


def recalls(engine: Engine, slab: Slab, fact: Fact, filler: Sequence[int], *, chunk: int) -> bool:
    """Whether the most likely answer is right, after the statement and `filler`. Resets the slab."""
    slab.reset()
    read = [*fact.statement, *filler]
    for start in range(0, len(read), chunk):
        forward(engine, [(slab, read[start : start + chunk])], num_logits=0)
    (logits,) = forward(engine, [(slab, [*fact.question, *fact.answer])], num_logits=len(fact.answer) + 1)
    return bool((logits[:-1].argmax(-1) == fact.answer).all())


def _recall(
    engine: Engine, tokenizer: Tokenizer, tokens: list[int], settings: QualitySettings, results: Results
) -> None:
    pool = SlabPool(engine.num_slabs, engine.shape)
    places = {
        "inside": (pool.acquire(SINK), round(_INSIDE * settings.recent)),
        "outside": (pool.acquire(SINK), round(_OUTSIDE * settings.recent)),
        "pinned": (pool.acquire(_PINNED), round(_OUTSIDE * settings.recent) + _PINNED),
    }
    for number, fact in enumerate(facts(tokenizer, settings.facts)):
        results.step(f"fact {number + 1} of {settings.facts}")
        for place, (slab, num_filler) in places.items():
            start = number * num_filler % (len(tokens) - num_filler)
            filler = tokens[start : start + num_filler]
            results.count(f"{place}/recalled", recalls(engine, slab, fact, filler, chunk=_CHUNK))
    for place in places:
        values = results.report.values(f"{place}/recalled")
        results.figure(f"{place}/recalled_share", "", sum(values) / len(values))


def agree(engine: Engine, source: ModelSource, tokens: list[int], settings: QualitySettings, results: Results) -> None:
    """Record how far the engine's logits are from the oracle's at every position, and from one without sinks."""
    results.step("comparing with the oracle")
    window = Window(sink=SINK, recent=settings.recent)
    read = tokens[: settings.oracle_windows * window.size + _CHUNK // 2]
    slab = SlabPool(engine.num_slabs, engine.shape).acquire(SINK)
    ours = run_chunks(engine, slab, read, [engine.shape.prefill_chunk - 3, 1, 17])
    weights = _weights(source)
    for name, seen in (("oracle", window), ("oracle_without_sinks", Window(sink=0, recent=settings.recent))):
        truth = dense_logits(weights, source.architecture, read, seen, np.float32)
        differences = [difference(ours[at : at + 1], truth[at : at + 1]) * 1e6 for at in range(len(read))]
        results.extend(f"{name}/difference", _MILLIONTHS, differences)
        results.figure(f"{name}/difference_most", _MILLIONTHS, max(differences), "lower")


def _weights(source: ModelSource) -> Mapping[str, NDArray[np.float32]]:
    names = weight_names(source.architecture)
    weights = open_weights(source)
    return {name: as_float32(weights.tensor(name)) for name in names}


def judge(report: Report) -> list[Gate]:
    def flat(sink: int) -> Gate:
        return stays_flat("perplexity_is_flat", report.values(f"sink={sink}/perplexity"), FLATNESS)

    def recalled(place: str) -> Gate:
        return share_at_least(f"recalled_{place}", report.values(f"{place}/recalled"), RECALLED_SHARE)

    def agrees(name: str) -> Gate:
        values = report.values(f"{name}/difference")
        return percentile_at_most("agrees_with_the_oracle", values, 100, AGREEMENT, _MILLIONTHS)

    times = report.values("without_sinks:with/perplexity")
    gates = [
        flat(SINK),
        median_at_least("control_without_sinks", times[-(len(times) // 3) :], CONTROL_TIMES, "times the perplexity"),
        recalled("inside"),
        recalled("pinned"),
        control("control_recalled_outside", recalled("outside"), len(report.values("outside/recalled"))),
    ]
    gates += recall_quality.judge(report)
    if report.settings.get("dtype") == "float32":
        without = report.values("oracle_without_sinks/difference")
        gates += [agrees("oracle"), control("control_oracle", agrees("oracle_without_sinks"), len(without))]
    return gates


def charts(settings: QualitySettings) -> list[Chart]:
    perplexity = (f"sink={SINK}/perplexity", "sink=0/perplexity")
    distance = ("oracle/difference", "oracle_without_sinks/difference")
    return [
        Chart(f"perplexity of each {_CHUNK} tokens", "course", perplexity, "perplexity", is_log=True),
        Chart("difference to the oracle by position", "course", distance, _MILLIONTHS, is_log=True),
    ]
