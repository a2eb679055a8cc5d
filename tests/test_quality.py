"""`holdfast bench quality`: gates that can fail, the arithmetic, and a moment of the real thing."""

import contextlib
import math
from pathlib import Path

import pytest

from holdfast.bench import quality, recall_quality
from holdfast.bench.gates import share_at_least, stays_flat
from holdfast.bench.processes import RunningServer
from holdfast.bench.quality import facts, perplexities, recalls
from holdfast.bench.report import Report, Results, Series, read
from holdfast.bench.runner import Output, run
from holdfast.cli import main
from holdfast.config import EngineConfig
from holdfast.engine.slab import SlabPool, SlabShape
from holdfast.engine.torch import TorchEngine
from holdfast.errors import ConfigError
from holdfast.models import GGUFSource, ModelSource
from holdfast.testing.fake_engine import FakeEngine
from tests.serving import default_chat, serving_aside, wordy_engine

SHAPE = SlabShape(recent=16, max_pin=8, prefill_chunk=8, rewind_tokens=0)


def test_flat_means_no_higher_at_the_end() -> None:
    assert stays_flat("g", [90.0, 10.0, 10.0, 11.0, 12.0, 13.0, 13.0], 0.35).passed
    assert not stays_flat("g", [90.0, 10.0, 10.0, 11.0, 12.0, 14.0, 14.0], 0.35).passed
    assert stays_flat("g", [9.0, 20.0, 20.0, 8.0, 7.0, 6.0], 0.35).passed


@pytest.mark.parametrize("values", [[], [1.0] * 5, [0.0] * 9, [math.nan] * 9, [math.inf] * 9])
def test_what_has_no_course_is_not_flat(values: list[float]) -> None:
    assert not stays_flat("g", values, 0.35).passed


def test_a_share_of_none_is_a_result_and_nothing_measured_is_not() -> None:
    assert share_at_least("g", [1.0] * 4 + [0.0], 0.8).passed
    assert not share_at_least("g", [1.0] * 3 + [0.0] * 2, 0.8).passed
    assert not share_at_least("g", [0.0], 0.8).passed
    assert not share_at_least("g", [], 0.8).passed


def _measured(
    *,
    late: float = 10.0,
    times: float = 9.0,
    inside: float = 1.0,
    outside: float = 0.0,
    off: float = 20.0,
    bare: float = 2e6,
) -> Report:
    results = Results("quality", "", {"dtype": "float32"})
    results.extend("sink=4/perplexity", "", [10.0] * 6 + [late] * 3)
    results.extend("without_sinks:with/perplexity", "times", [1.0] * 6 + [times] * 3)
    for place, value in (("inside", inside), ("outside", outside), ("pinned", inside)):
        results.extend(f"{place}/recalled", "", [value] * 5)
    results.report.series["oracle/difference"] = Series("", [off] * 3)
    results.report.series["oracle_without_sinks/difference"] = Series("", [bare] * 3)
    return results.report


def _failed(report: Report) -> set[str]:
    return {gate.name for gate in quality.judge(report) if not gate.passed}


def test_quality_is_judged_by_all_that_can_go_wrong() -> None:
    assert not _failed(_measured())
    assert _failed(_measured(late=20.0)) == {"perplexity_is_flat"}
    assert _failed(_measured(times=1.1)) == {"control_without_sinks"}
    assert _failed(_measured(inside=0.0)) == {"recalled_inside", "recalled_pinned"}
    assert _failed(_measured(outside=1.0)) == {"control_recalled_outside"}
    assert _failed(_measured(off=501.0)) == {"agrees_with_the_oracle"}
    assert _failed(_measured(bare=1.0)) == {"control_oracle"}
    nothing = Report(scenario="quality", command="", started_at="", settings={"dtype": "float32"})
    assert len(_failed(nothing)) == 7


def _asked(**changes: list[float]) -> Report:
    settings = {"questions": 5, "windows": "2", "pass_keys": 2, "search_tokens": "200000"}
    results = Results("quality", "", settings)
    values = {
        "in_view/answered": [1.0] * 5,
        "on/2/answered": [1.0] * 4 + [0.0],
        "off/2/answered": [0.0] * 5,
        "on/false": [1.0, 0.0],
        "off/false": [0.0, 1.0],
        "on/false_told": [1.0, 0.0],
        "off/false_told": [0.0, 1.0],
        "pass_keys_in_view/answered": [1.0, 0.0],
        "pass_keys_on/answered": [0.0, 1.0],
        "pass_keys/kv_live_bytes": [7.0, 7.0],
        "search/200000/ms": [1.0, 1.0, 9.0],
        "search/200000/found": [1.0],
    }
    for name, found in (values | changes).items():
        results.extend(name, "", found)
    return results.report


@pytest.mark.parametrize(
    ("gate", "name", "values"),
    [
        ("recall_in_view", "in_view/answered", [0.0, 0.0, 1.0]),
        ("recall_after_2_windows", "on/2/answered", [1.0, 1.0, 1.0, 0.0, 0.0]),
        ("control_without_recall_2", "off/2/answered", [1.0, 0.0]),
        ("recall_false", "on/false", [1.0, 1.0]),
        ("recall_false_told", "on/false_told", [1.0, 1.0]),
        ("pass_keys", "pass_keys_on/answered", [0.0, 0.0]),
        ("pass_keys_memory", "pass_keys/kv_live_bytes", [7.0, 8.0]),
        ("search_200000", "search/200000/ms", [6.0, 6.0, 1.0]),
        ("found_among_200000", "search/200000/found", [1.0, 0.0]),
    ],
)
def test_each_gate_of_recall_fails_alone_and_without_values(gate: str, name: str, values: list[float]) -> None:
    assert all(found.passed for found in recall_quality.judge(_asked()))
    assert [found.name for found in recall_quality.judge(_asked(**{name: values})) if not found.passed] == [gate]
    assert gate in [found.name for found in recall_quality.judge(_asked(**{name: []})) if not found.passed]


def test_what_was_told_is_no_false_memory_and_what_it_does_not_say_is_one() -> None:
    told = ["The password of the mill was changed twice last year."]
    assert not recall_quality.is_false(f' "{told[0]}" It is long.', told)
    assert not recall_quality.is_false("I'm sorry, you never told me.", told)
    assert recall_quality.is_false("The password of the mill is walnut.", told)
    assert recall_quality.is_false(f"The password is: {told[0]}", told)
    assert recall_quality.is_false(told[0], ())


def test_a_server_is_asked_for_what_it_was_told_with_recall_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results("quality", "", {})
    settings = quality.QualitySettings(questions=1, windows="1", pass_keys=1, history_tokens=700, served_recent=256)
    with serving_aside(wordy_engine(forward_s=0.0), default_chat(max_rollback=-1)) as server:
        running = RunningServer(http=f"http://{server.http}", grpc="", pid=0)
        monkeypatch.setattr(recall_quality, "_served", lambda settings: contextlib.nullcontext(running))
        recall_quality.measure(results, quality.long_text(), settings)
        recall_quality.measure_pass_keys(results, quality.long_text(), settings)
    series = results.report.series
    assert [num > 0 for num in series["recalled_tokens"].values] == [True, True, False]
    assert series["on/1/answered"].values == [0.0, 0.0]  # this model talks nonsense
    assert len(series["on/false"].values) == len(series["off/false"].values) == 1
    assert len(set(series["pass_keys/kv_live_bytes"].values)) == 1


def test_searches_of_a_long_history_are_timed() -> None:
    results = Results("quality", "", {})
    recall_quality.measure_search(results, quality.long_text()[:9000], default_chat().model.tokenizer, 3000)
    assert len(results.report.values("search/3000/ms")) == 40
    assert results.report.values("search/3000/found") == [1.0] * 10
    assert results.report.values("search/3000/index_s")[0] > 0


def test_perplexities_come_chunk_by_chunk_for_each_number_of_sinks() -> None:
    engine = FakeEngine(num_slabs=2, shape=SHAPE)
    tokens = [index * 7 % engine.info.vocab_size for index in range(41)]
    found = list(perplexities(engine, tokens, (4, 0), 8))
    assert len(found) == 5
    assert found[0][4] == pytest.approx(found[0][0])  # nothing has left the window yet
    assert all(1 < value < 10 * engine.info.vocab_size for chunk in found for value in chunk.values())


def test_facts_are_different_and_their_questions_end_where_the_answer_begins() -> None:
    tokenizer = default_chat().model.tokenizer
    found = facts(tokenizer, 12)
    assert len({tuple(fact.statement) for fact in found}) == 12
    for fact in found:
        asked = fact.question + fact.answer
        assert fact.statement[: len(asked)] == asked
    assert tokenizer.decode(found[0].answer).startswith(" ")


def test_a_model_that_knows_nothing_recalls_nothing() -> None:
    engine = FakeEngine(num_slabs=1, shape=SlabShape(recent=64, max_pin=8, prefill_chunk=32, rewind_tokens=0))
    fact = facts(default_chat().model.tokenizer, 1)[0]
    small = type(fact)(
        *([id % engine.info.vocab_size for id in part] for part in (fact.statement, fact.question, fact.answer))
    )
    assert not recalls(engine, SlabPool(1, engine.shape).acquire(4), small, list(range(40)), chunk=32)


def test_a_text_that_is_missing_or_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        quality._text(quality.QualitySettings(text=str(tmp_path / "missing")))
    (tmp_path / "short").write_text("Hello.", encoding="utf-8")
    assert main(["bench", "quality", "--text", str(tmp_path / "short"), "--output", str(tmp_path)]) == 2
    assert len(quality.long_text()) > 400_000


def test_a_model_that_knows_nothing_fails_the_bench(tmp_path: Path) -> None:
    def build(source: ModelSource, config: EngineConfig) -> FakeEngine:
        shape = SlabShape(recent=config.recent, max_pin=config.max_pin, prefill_chunk=config.prefill_chunk)
        return FakeEngine(num_slabs=config.sessions, shape=shape, vocab_size=source.architecture.vocab_size)

    settings = quality.QualitySettings(
        tokens=1600, facts=1, dtype="bfloat16", questions=0, search_tokens=""
    )  # no oracle
    assert run(quality.scenario(build), settings, Output(tmp_path)) == 1
    (path,) = tmp_path.glob("*.json")
    report = read(path)
    assert len(report.values("sink=4/perplexity")) == 10
    failed = {gate.name for gate in report.gates if not gate.passed}
    assert failed >= {"recalled_inside", "recalled_pinned", "control_without_sinks"}


def test_the_default_model_recalls_what_it_sees_and_what_is_pinned(
    default_engine: TorchEngine, default_source: GGUFSource
) -> None:
    tokenizer = default_chat().model.tokenizer
    filler = tokenizer.encode(quality.long_text()[:2000])
    pool = SlabPool(default_engine.num_slabs, default_engine.shape)
    near, pinned = pool.acquire(4), pool.acquire(default_engine.shape.max_pin)
    for fact in facts(tokenizer, 2):
        assert recalls(default_engine, near, fact, filler[:20], chunk=40)
        assert not recalls(default_engine, near, fact, filler[:100], chunk=40)
        assert recalls(default_engine, pinned, fact, filler[:100], chunk=40)


def test_the_default_model_agrees_with_the_oracle_and_not_with_one_without_sinks(
    default_engine: TorchEngine, default_source: GGUFSource
) -> None:
    tokens = default_chat().model.tokenizer.encode(quality.long_text()[:2000])
    results = Results("quality", "", {"dtype": "float32"})
    settings = quality.QualitySettings(recent=default_engine.shape.recent, oracle_windows=1)
    quality.agree(default_engine, default_source, tokens, settings, results)
    gates = {gate.name: gate for gate in quality.judge(results.report)}
    assert gates["agrees_with_the_oracle"].passed, gates["agrees_with_the_oracle"].reason
    assert gates["control_oracle"].passed, gates["control_oracle"].reason
