"""Conversations of several clients at once over HTTP, streamed: how long each turn took. This module is also a program.

It is the same for every server: each request holds the whole conversation so far, as OpenAI clients send it.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from holdfast.bench.machine import own_cpu_s
from holdfast.bench.processes import obey

_TURN_TIMEOUT_S = 300.0
_DATA, _END = b"data: ", b"[DONE]"
_REFUSED = 400  # and above: a status that is no success
_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """One client's conversation. `url`: where its requests go. `fields`: what they hold besides messages."""

    url: str
    system: str
    questions: Sequence[str]
    fields: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class Turn:
    """One turn as its client saw it; `wrong` says why it does not count. Times are from when the request was sent."""

    first_token_ms: float = 0.0
    turn_ms: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reply_tokens: int = 0
    wrong: str = ""


@dataclass(slots=True, kw_only=True)
class TalkResult:
    """`turns`: for each client, in the order of the talks. A client stops at the first turn that is wrong."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    turns: list[list[Turn]] = field(default_factory=list)


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: dict[str, Any] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


async def converse(talks: Sequence[Talk]) -> TalkResult:
    """All talks at once, each turn as soon as the one before has ended.

    Each turn has a connection of its own: llama.cpp's server closes one after a stream.
    """
    started, used_s = time.perf_counter(), own_cpu_s()
    timeout = aiohttp.ClientTimeout(total=_TURN_TIMEOUT_S)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
    ) as http:
        turns = await asyncio.gather(*(_talk(http, talk) for talk in talks))
    return TalkResult(wall_s=time.perf_counter() - started, cpu_s=own_cpu_s() - used_s, turns=list(turns))


async def _talk(http: aiohttp.ClientSession, talk: Talk) -> list[Turn]:
    messages = [{"role": "system", "content": talk.system}]
    turns: list[Turn] = []
    for question in talk.questions:
        messages.append({"role": "user", "content": question})
        body = {**talk.fields, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        turn, text = Turn(), ""
        try:
            text = await _ask(http, talk.url, msgspec.json.encode(body), turn)
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as exc:
            turn.wrong = f"{type(exc).__name__}: {exc}"
        turns.append(turn)
        if turn.wrong:
            break
        messages.append({"role": "assistant", "content": text})
    return turns


async def _ask(http: aiohttp.ClientSession, url: str, body: bytes, turn: Turn) -> str:
    """The text of the reply; `turn` gets what was measured."""
    pieces: list[str] = []
    reason, usage, started = None, None, time.perf_counter()
    async with http.post(url, data=body, headers={"content-type": "application/json"}) as response:
        if response.status >= _REFUSED:
            turn.wrong = f"status {response.status}: {(await response.text())[:_SHOWN]}"
            return ""
        async for line in response.content:
            if not line.startswith(_DATA) or line.startswith(_END, len(_DATA)):
                continue
            chunk = msgspec.json.decode(line[len(_DATA) :], type=_Chunk)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                if choice.delta.content:
                    turn.first_token_ms = turn.first_token_ms or (time.perf_counter() - started) * 1000
                    pieces.append(choice.delta.content)
    turn.turn_ms = (time.perf_counter() - started) * 1000
    if usage is None:
        turn.wrong = "the stream ended without its usage"
        return ""
    turn.prompt_tokens, turn.reply_tokens = usage.prompt_tokens, usage.completion_tokens
    turn.cached_tokens = (usage.prompt_tokens_details or {}).get("cached_tokens") or 0
    turn.wrong = _problem(turn, reason, msgspec.json.decode(body)["max_tokens"])
    return "".join(pieces)


def _problem(turn: Turn, reason: str | None, num_asked: int) -> str:
    if turn.reply_tokens != num_asked or reason != "length":
        return f"{turn.reply_tokens} of {num_asked} tokens, finish_reason {reason}"
    return "" if turn.first_token_ms else "a reply without text"


async def _run(line: bytes) -> TalkResult:
    return await converse(msgspec.json.decode(line, type=list[Talk]))


if __name__ == "__main__":
    asyncio.run(obey("ready", _run))
