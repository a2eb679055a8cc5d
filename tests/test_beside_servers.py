"""`holdfast bench serve`: its client, its gates, and a short run beside a server that is not ours."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from holdfast.bench.beside_servers import SCENARIO, ServeSpeedSettings, judge
from holdfast.bench.chat_load import Talk, Turn, converse
from holdfast.bench.processes import ForeignServer, ProcessFailed
from holdfast.bench.report import Results
from holdfast.cli import main
from holdfast.errors import ConfigError

# A program with llama.cpp's flags that answers every chat with as many words as tokens were asked for.
FOREIGN = f"""#!{sys.executable}
import json, sys
from aiohttp import web

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert "--cache-ram" in flags and int(flags["--ctx-size"]) % int(flags["--parallel"]) == 0, flags

async def health(request):
    return web.Response()

async def chat(request):
    asked = await request.json()
    assert asked["ignore_eos"] and asked["id_slot"] < int(flags["--parallel"]), asked
    num, response = asked["max_tokens"], web.StreamResponse()
    await response.prepare(request)
    usage = {{"prompt_tokens": 7, "completion_tokens": num}}
    pieces = [{{"choices": [{{"delta": {{"content": "word "}}}}]}} for _ in range(num)]
    ends = [{{"choices": [{{"delta": {{}}, "finish_reason": "length"}}]}}, {{"choices": [], "usage": usage}}]
    for chunk in pieces + ends:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\\n\\n")
    await response.write(b"data: [DONE]\\n\\n")
    return response

app = web.Application()
app.add_routes([web.get("/health", health), web.post("/v1/chat/completions", chat)])
web.run_app(app, host=flags["--host"], port=int(flags["--port"]))
"""


def _failed(ratios: dict[str, float], *, num_wrong: int = 0, other_prompt: int = 20) -> set[str]:
    results = Results("serve", "holdfast bench serve", {})
    results.count("answered", 40)
    results.count("wrong", num_wrong)
    for name, value in ratios.items():
        results.figure(f"{name}/last_first_token_ms_beside_ours", "times", value)
        results.count(f"{name}/first_prompt", other_prompt)
    for part in {name.partition("/")[2] for name in ratios}:
        results.count(f"holdfast/{part}/first_prompt", 20)
    return {gate.name for gate in judge(results.report) if not gate.passed}


def test_a_first_token_later_than_the_others_fails_and_with_many_clients_it_must_be_well_ahead() -> None:
    assert _failed({"llama_q8_0/short_1": 1.0, "llama_q8_0/long_16": 1.5, "stateless/long_16": 1.0}) == set()
    slow = {"llama_q8_0/short_1": 0.99, "llama_q8_0/long_16": 1.49, "vllm/long_4": 1.2}
    assert _failed(slow) == {"llama_q8_0/short_1", "llama_q8_0/long_16"}


def test_a_wrong_reply_and_another_prompt_fail() -> None:
    assert _failed({"vllm/long_1": 2.0}, num_wrong=1) == {"replies"}
    assert _failed({"vllm/long_1": 2.0}, other_prompt=21) == {"same_prompts"}
    assert _failed({}) == {"same_prompts"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"clients": "1,x"}, "clients must be numbers"),
        ({"clients": "0"}, "clients must be numbers"),
        ({"peers": "vllm"}, "peers must be NAME="),
        ({"peers": "holdfast=http://127.0.0.1:1"}, "peers must be NAME="),
        ({"short": 0, "long": 0}, "cannot both be 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServeSpeedSettings(**given)


def test_every_conversation_has_room_on_every_server() -> None:
    settings = ServeSpeedSettings()
    assert settings.context >= settings.turns * (settings.long + settings.reply_tokens)
    assert ServeSpeedSettings(**SCENARIO.quick).context < settings.context


async def _answers(*chunks: Any, status: int = 200) -> list[Turn]:
    """One client that asks twice, of a server with these chunks."""

    async def chat(request: web.Request) -> web.Response:
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        return web.Response(text=text, status=status)

    app = web.Application()
    app.router.add_post("/chat", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        talk = Talk(url=f"http://{host}:{port}/chat", system="", questions=["a", "b"], fields={"max_tokens": 2})
        return (await converse([talk])).turns[0]
    finally:
        await runner.cleanup()


def _said(*words: str, reason: str = "length", num: int = 2) -> list[Any]:
    pieces = [{"choices": [{"delta": {"content": word}}]} for word in words]
    end = {"choices": [{"delta": {}, "finish_reason": reason}]}
    usage = {"prompt_tokens": 9, "completion_tokens": num, "prompt_tokens_details": {"cached_tokens": 4}}
    return [*pieces, end, {"choices": [], "usage": usage}]


async def test_a_client_times_the_first_text_and_counts_tokens() -> None:
    first, second = await _answers({"choices": [{"delta": {"role": "assistant", "content": None}}]}, *_said("x", "y"))
    assert not first.wrong
    assert 0 < second.first_token_ms <= second.turn_ms
    assert (second.prompt_tokens, second.cached_tokens, second.reply_tokens) == (9, 4, 2)


@pytest.mark.parametrize(
    ("chunks", "status", "said"),
    [
        (_said("x", num=1), 200, "1 of 2 tokens"),
        (_said("x", "y", reason="stop"), 200, "finish_reason stop"),
        (_said(), 200, "without text"),
        (_said("x", "y")[:-1], 200, "without its usage"),
        ([], 503, "status 503"),
        (["not a chunk"], 200, "ValidationError"),
    ],
)
async def test_a_turn_that_is_wrong_says_why_and_is_the_last(chunks: list[Any], status: int, said: str) -> None:
    (turn,) = await _answers(*chunks, status=status)
    assert said in turn.wrong


async def test_a_server_that_is_gone_is_a_wrong_turn() -> None:
    talk = Talk(url="http://127.0.0.1:9/chat", system="", questions=["a"], fields={"max_tokens": 1})
    (turn,) = (await asyncio.wait_for(converse([talk]), 10)).turns[0]
    assert "Connect" in turn.wrong


def test_a_foreign_server_that_does_not_start_says_why() -> None:
    program = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with (
        ForeignServer("foreign", lambda host, port: program) as server,
        pytest.raises(ProcessFailed, match="no such model"),
    ):
        server.wait_until_healthy()


def test_the_bench_runs_beside_another_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, served = tmp_path / "llama-server", tmp_path / "q8_0.gguf"
    program.write_text(FOREIGN)
    program.chmod(0o755)
    served.touch()
    short = {"clients": "2", "turns": 3, "reply-tokens": 2, "short": 4, "long": 0, "rounds": 1, "stateless-clients": 2}
    short |= {"llama-server": program, "llama-files": served}
    flags = [word for name, value in short.items() for word in (f"--{name}", str(value))]
    main(["bench", "serve", *flags, "--json", "-", "--output", str(tmp_path)])
    report = json.loads(capsys.readouterr().out)
    gates = {gate["name"]: gate["passed"] for gate in report["gates"]}
    assert set(gates) == {"replies", "same_prompts", "stateless/short_2", "llama_q8_0/short_2"}
    assert gates["replies"], report["notes"]
    assert not gates["same_prompts"]  # the other server always says that a prompt has 7 tokens
    assert report["series"]["answered"]["values"] == [6.0] * 3
    prompts = [report["series"][f"{name}/short_2/first_prompt"]["values"] for name in ("holdfast", "stateless")]
    assert prompts[0] == prompts[1]
    figures = {name: figure["summary"]["median"] for name, figure in report["figures"].items()}
    assert figures["holdfast/short_2/cached_share"] > figures["stateless/short_2/cached_share"] == 0
    assert figures["holdfast/short_2/history"] == figures["stateless/short_2/history"] > 20
    for name in ("holdfast", "stateless", "llama_q8_0"):
        assert len(report["series"][f"{name}/short_2/first_token_ms_by_turn"]["values"]) == 3
        assert figures[f"{name}/short_2/tokens_per_s"] > 0
    assert figures["holdfast/2/memory"] > 100 > figures["llama_q8_0/2/memory"] > 0


def test_what_the_bench_needs_is_said_where_it_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--llama-server", str(tmp_path / "none"), "--output", str(tmp_path)]) == 2
    assert "pass llama.cpp's server with --llama-server PATH" in capsys.readouterr().err
