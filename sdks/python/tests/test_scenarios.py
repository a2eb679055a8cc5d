"""The conformance scenarios against the fake server: scenarios, runner and fake agree about the contract."""

from typing import Any

import pytest

from scenarios import NAMES, load, run_scenario


@pytest.mark.parametrize("name", NAMES)
async def test_the_fake_server_passes(name: str, client: Any) -> None:
    await run_scenario(client, load(name))


def test_there_are_scenarios_with_names_of_their_own() -> None:
    names = [load(name)["name"] for name in NAMES]
    assert len(set(names)) == len(names) >= 12
    assert all(load(name).keys() == {"name", "why", "steps"} for name in NAMES)


@pytest.mark.parametrize(
    "step",
    [
        {"call": "model_info", "expect": {"vocabulary_size": 1}},
        {"call": "model_info", "expect": {"no_such_field": 1}},
        {"call": "model_info", "error": "session_busy"},
        {"call": "info", "session_id": "none", "error": "session_busy"},
        {"call": "info", "session_id": "none", "error": "session_not_found", "details": {"detail": "closed"}},
        {"call": "model_info", "expcet": {}},
    ],
)
async def test_the_runner_notices_what_differs(step: dict[str, Any], client: Any) -> None:
    with pytest.raises(AssertionError, match="step 1"):
        await run_scenario(client, {"name": "wrong", "steps": [step]})
