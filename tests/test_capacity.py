"""`holdfast bench capacity`: gates that can fail, and a moment of the real thing."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from holdfast_sdk import HoldfastError as SdkError

from holdfast.bench import capacity
from holdfast.bench.gates import faster, within_budget
from holdfast.bench.report import Report, Results
from holdfast.cli import main

if TYPE_CHECKING:
    from holdfast_sdk import AsyncSession

    from holdfast.bench.agents import ServerClients

SETTINGS = {"sessions": 6, "slabs": 2, "snapshot_mb": 100, "disk_mb": 40}


def test_a_budget_counts_from_the_base() -> None:
    assert within_budget("g", [500.0, 560.0], 500.0, 60.0, "MiB").passed
    assert within_budget("g", [566.0], 500.0, 60.0, "MiB").passed
    assert not within_budget("g", [567.0], 500.0, 60.0, "MiB").passed


@pytest.mark.parametrize("values", [[], [0.0], [math.nan], [math.inf]])
def test_memory_that_was_not_measured_is_not_within_its_budget(values: list[float]) -> None:
    assert not within_budget("g", values, 0.0, 60.0, "MiB").passed
    assert not within_budget("g", [5.0], 0.0, 60.0, "MiB").passed


def test_faster_needs_both() -> None:
    assert faster("g", [1.0, 9.0, 1.0], [2.0]).passed
    assert not faster("g", [2.0], [2.0]).passed
    assert not faster("g", [], [2.0]).passed
    assert not faster("g", [1.0], []).passed
    assert not faster("g", [0.0], [2.0]).passed


def _measured(
    *, num_woken: int = 4, wrong: float = 0.0, rss: float = 560.0, disk: float = 40.0, snapshot_ms: float = 20.0
) -> Report:
    results = Results("capacity", "", SETTINGS)
    results.extend("base_rss", "MiB", [500.0])
    results.extend("rss", "MiB", [510.0, rss])
    results.extend("disk", "MiB", [disk])
    results.extend("wrong", "", [0.0, wrong])
    results.extend("snapshot/turn_ms", "ms", [snapshot_ms] * 2)
    results.extend("recomputed/turn_ms", "ms", [100.0] * (num_woken - 2))
    return results.report


class _FailingSession:
    history_length = 0

    async def turn(self, *tokens: object, **sampling: object) -> None:
        raise SdkError("gone", code="unavailable")


async def test_a_failed_turn_is_counted_and_many_in_a_row_end_the_run() -> None:
    results, session = Results("capacity", "", SETTINGS), cast("AsyncSession", _FailingSession())
    run = capacity._CapacityRun(
        settings=capacity.CapacitySettings(),
        results=results,
        pid=0,
        folder=Path(),
        clients=cast("ServerClients", None),
        vocabulary=range(100, 200),
    )
    assert [await run._turn(session) for _ in range(9)] == [None] * 9
    assert results.report.values("wrong") == [1.0] * 9
    with pytest.raises(SdkError):
        await run._turn(session)


def _failed(report: Report) -> set[str]:
    return {gate.name for gate in capacity.judge(report) if not gate.passed}


def test_capacity_is_judged_by_all_that_can_go_wrong() -> None:
    assert not _failed(_measured())
    assert _failed(_measured(num_woken=3)) == {"all_parked_sessions_woke"}
    assert _failed(_measured(wrong=1.0)) == {"every_turn_answered"}
    assert _failed(_measured(rss=640.0)) == {"memory_within_budget"}
    assert _failed(_measured(disk=50.0)) == {"disk_within_budget"}
    assert _failed(_measured(snapshot_ms=100.0)) == {"a_snapshot_wakes_faster"}
    assert len(_failed(Report(scenario="capacity", command="", started_at="", settings=SETTINGS))) == 5


def test_more_on_disk_than_there_is_in_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "capacity", "--snapshot-mb", "10", "--disk-mb", "11"]) == 2
    assert "--disk-mb 11 must not exceed --snapshot-mb 10" in capsys.readouterr().err


def test_parked_sessions_wake_from_snapshots_and_from_their_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = {"sessions": 7, "tokens": 60, "slabs": 2, "snapshot-mb": 4, "disk-mb": 2, "reply-tokens": 1}
    flags = [word for name, value in short.items() for word in (f"--{name}", str(value))]
    main(["bench", "capacity", *flags, "--json", "-", "--output", str(tmp_path)])
    report = json.loads(capsys.readouterr().out)
    gates = {gate["name"]: gate for gate in report["gates"]}
    for name in ("all_parked_sessions_woke", "every_turn_answered", "disk_within_budget"):
        assert gates[name]["passed"], gates[name]
    figures = report["figures"]
    assert figures["snapshot/woken"]["values"][0] > 0
    assert figures["recomputed/woken"]["values"][0] > 0
    assert figures["snapshot"]["values"][0] == pytest.approx(66 * 23_040 / 2**20, rel=0.05)
