"""Runs conformance scenarios (../conformance/README.md) with either client; the same steps mean the same in both."""

import json
import math
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from both import each, every, settled
from holdfast_sdk import AsyncClient, Client, HoldfastError

FOLDER = Path(__file__).resolve().parents[2] / "conformance" / "scenarios"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
STEP_KEYS = {"call", "as", "session", "session_id", "with", "after", "expect", "error", "details", "save_tokens"}
STEP_KEYS |= {"save_file", "file", "cut"}
# What the SDK calls otherwise than the proto.
RENAMED = {"client_label": "label", "from_position": "start", "to_position": "end"}
BACK = {"start": "from_position", "end": "to_position"}

BY_CODE = {cls.code: cls for cls in HoldfastError.__subclasses__()}


def load(name: str) -> Mapping[str, Any]:
    scenario: Mapping[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return scenario


async def run_scenario(client: Client | AsyncClient, scenario: Mapping[str, Any]) -> None:
    runner = Runner(client)
    try:
        for number, step in enumerate(scenario["steps"], 1):
            try:
                await runner.step(step)
            except (HoldfastError, AssertionError, pytest.fail.Exception) as exc:
                raise AssertionError(f"{scenario['name']}: step {number}, {json.dumps(step)}: {exc!r}") from exc
    finally:
        await runner.close()


class Runner:
    def __init__(self, client: Any) -> None:
        self._client = client
        self._sessions: dict[str, Any] = {}
        self._saved: dict[str, list[int]] = {}
        self._files: dict[str, bytes] = {}

    async def step(self, step: Mapping[str, Any]) -> None:
        assert step.keys() <= STEP_KEYS, f"unknown keys {step.keys() - STEP_KEYS}"
        if "error" in step:
            with pytest.raises(BY_CODE[step["error"]]) as caught:
                await self._call(step)
            assert caught.value.code == step["error"]
            assert_subset(step.get("details", {}), caught.value.details)
            return
        assert "details" not in step, "details belong to an error"
        result = await self._call(step)
        if name := step.get("save_tokens"):
            self._saved[name] = result["token_ids"]
        expected = dict(step.get("expect", {}))
        if same := expected.pop("same_tokens_as", None):
            assert result["token_ids"] == self._saved[same]
        if minimum := expected.pop("min_length", None):
            assert len(result["token_ids"]) >= minimum
        assert_subset(expected, result)

    async def close(self) -> None:
        """The server has few places: what a scenario left open is closed."""
        for session in self._sessions.values():
            with suppress(HoldfastError):
                await settled(session.close())

    async def _call(self, step: Mapping[str, Any]) -> dict[str, Any]:
        call, given = step["call"], dict(step.get("with", {}))
        if call == "create_session":
            return await self._adopt(step["as"], self._client.create_session(**renamed(given)))
        if call == "model_info":
            return fields_of(await settled(self._client.model_info()))
        if call == "import":
            data = self._files[step["file"]]
            return await self._adopt(
                step.get("as", ""), self._client.import_session([data[: len(data) - step.get("cut", 0)]])
            )
        if call == "list_sessions":
            return {"sessions": [fields_of(info) for info in await every(self._client.list_sessions(**renamed(given)))]}
        return await self._call_session(call, given, step)

    async def _call_session(self, call: str, given: dict[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
        made_up = step.get("session_id")
        session = self._sessions[step["session"]] if made_up is None else self._client.session(made_up)
        if call == "fork":
            return await self._adopt(step["as"], session.fork(**renamed(given)))
        if call in ("generate", "turn", "generate_and_leave"):
            return await self._generate(session, given, leave_after=step.get("after", -1))
        if call == "export":
            options = {"with_snapshot": not given.get("without_snapshot", False)}
            self._files[step["save_file"]] = b"".join(await every(session.export(**options)))
            return {}
        if call == "history":
            return history_result(await every(session.history(**renamed(given))))
        if call == "search":
            query = given.pop("query_token_ids", None) or given.pop("query")
            found = [asdict(passage) for passage in await settled(session.search(query, **given))]
            return {"passages": [{BACK.get(name, name): value for name, value in one.items()} for one in found]}
        methods = {"append": session.append, "rewind": session.rewind, "info": session.info, "close": session.close}
        return fields_of(await settled(methods[call](**given)))

    async def _adopt(self, name: str, session: Any) -> dict[str, Any]:
        self._sessions[name] = await settled(session)
        return fields_of(self._sessions[name].origin)

    async def _generate(self, session: Any, given: dict[str, Any], leave_after: int) -> dict[str, Any]:
        if "logit_bias" in given:  # JSON has no integer keys
            given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
        method = session.turn if "token_ids" in given else session.generate
        generation = await settled(method(**given))
        tokens: list[Any] = []
        async with aclosing(each(generation)) as stream:
            async for token in stream:
                tokens.append(token)
                if len(tokens) == leave_after:
                    break
        logprobs = [logprob for token in tokens for logprob in (token.logprob, token.sampling_logprob)]
        return {
            **(fields_of(generation.done) if generation.is_done else {}),
            "token_ids": generation.tokens,
            "num_tokens": len(generation.tokens),
            "truncated": [[dropped.start, dropped.stop] for dropped in generation.truncated],
            "all_logprobs_finite": all(map(math.isfinite, logprobs)),
        }


def history_result(chunks: list[Any]) -> dict[str, Any]:
    """Neighbouring chunks of one kind count as one: how long spans are cut is the server's affair."""
    kinds = [chunk.kind.name for chunk in chunks]
    sampled = [chunk for chunk in chunks if chunk.kind.name == "SAMPLED"]
    assert all(len(chunk.logprobs) == len(chunk.sampling_logprobs) == len(chunk.token_ids) for chunk in sampled)
    assert all(not chunk.logprobs for chunk in chunks if chunk not in sampled)
    return {
        "token_ids": [token for chunk in chunks for token in chunk.token_ids],
        "kinds": [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before],
        "all_logprobs_finite": all(math.isfinite(logprob) for chunk in sampled for logprob in chunk.logprobs),
    }


def assert_subset(expected: Any, actual: Any) -> None:
    """Objects need the named fields only; lists need the same length; everything else must be equal."""
    if isinstance(expected, Mapping):
        for name, value in expected.items():
            assert name in actual, f"no field {name} in {actual}"
            assert_subset(value, actual[name])
    elif isinstance(expected, list):
        assert len(expected) == len(actual), f"expected {expected}, got {actual}"
        for one, other in zip(expected, actual, strict=True):
            assert_subset(one, other)
    else:
        assert expected == actual, f"expected {expected}, got {actual}"


def fields_of(result: Any) -> dict[str, Any]:
    """A result by the proto's field names."""
    assert is_dataclass(result)
    assert not isinstance(result, type)
    return {"client_label" if name == "label" else name: value for name, value in asdict(result).items()}


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """A request's fields as the SDK's arguments."""
    return {RENAMED.get(name, name): value for name, value in given.items()}
