"""The short form of `python -m tests.fuzz`: bad requests and bad upstream replies, at a server in its own process."""

import pytest

from tests.effort import examples
from tests.fuzz.__main__ import run


@pytest.mark.parametrize(("what", "upstream"), [("requests", ""), ("replies", "sglang"), ("replies", "vllm")])
async def test_nothing_gives_way_under_bad_input(what: str, upstream: str) -> None:
    report = await run(what, upstream, count=examples(1200), seed=1, only="")
    assert report["wrong"] == []
