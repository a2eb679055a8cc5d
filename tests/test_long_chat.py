"""Two hundred turns through the openai package on one session: each costs its new tokens, and no more with time."""

import statistics

from openai import AsyncOpenAI

from holdfast.config import EngineConfig
from holdfast.engine.factory import build_engine
from holdfast.models import GGUFSource
from tests.serving import Server, default_chat, serving

TURNS = 200
PREFILLED = "holdfast_generate_prefill_tokens_sum"
FIRST_TOKEN = "holdfast_time_to_first_token_seconds_sum"  # as the session sees it: without client and door
CONFIG = EngineConfig(device="cpu", sessions=2, recent=128, max_pin=32, rewind_tokens=64)


async def test_two_hundred_turns_cost_their_new_tokens_and_stateless_ones_do_not(default_source: GGUFSource) -> None:
    engine = build_engine(default_source, CONFIG)
    async with (
        serving(engine, default_chat()) as server,
        AsyncOpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as stateless,
    ):
        session = (await stateless._client.post(f"http://{server.http}/sessions")).json()["session_id"]
        client = stateless.with_options(base_url=f"http://{server.http}/sessions/{session}/v1")
        messages: list[dict[str, str]] = [{"role": "system", "content": "Answer briefly."}]
        latencies, forwarded, history = [], [], 0
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"{turn}?"})
            before, waited = _total(server, PREFILLED), _total(server, FIRST_TOKEN)
            reply = await client.chat.completions.create(
                model="any", messages=messages, temperature=0, max_completion_tokens=1
            )
            latencies.append(_total(server, FIRST_TOKEN) - waited)
            usage = reply.usage
            new = usage.prompt_tokens - history + (turn > 0)  # what was appended, and the one that was pending
            assert _total(server, PREFILLED) - before == new
            assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - new
            forwarded.append(new)
            history = usage.total_tokens
            messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        view = (await stateless._client.get(f"http://{server.http}/sessions/{session}")).json()
        assert view["history_length"] == history > 10 * CONFIG.recent
        sink, dropped = view["window"]["sink"], view["dropped_tokens"]
        assert dropped == history - sink - CONFIG.recent
        assert view["dropped_range"] == [sink, sink + dropped]
        assert reply.usage.model_dump()["holdfast"]["dropped_tokens"] == dropped
        assert max(forwarded[1:]) - min(forwarded[1:]) <= 4  # the digits of the turn's number, a reply that was cut
        early, late = latencies[30:80], latencies[-50:]  # the window is full after about ten turns
        assert statistics.median(late) < 2 * statistics.median(early)
        costs = []
        for turns in (20, TURNS):
            reply = await stateless.chat.completions.create(
                model="any",
                messages=messages[: 2 * turns],
                max_completion_tokens=1,
                extra_body={"truncation": "auto"},
            )
            assert reply.usage.prompt_tokens_details.cached_tokens == 0
            costs.append(reply.usage.prompt_tokens)
        assert costs[1] > 8 * costs[0] > 8 * 10 * statistics.median(forwarded)


def _total(server: Server, name: str) -> float:
    """What a metric has summed up so far."""
    return server.metrics.registry.get_sample_value(name) or 0.0
