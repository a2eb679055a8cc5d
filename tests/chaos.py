"""Agents at work while their upstream is killed and started again, and whether every trajectory is right in the end.

    python -m tests.chaos PORT      a fake vLLM in a process that can be killed

`python -m tests.vllm chaos` does it with a real vLLM.
"""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from holdfast.chat.chat_model import ChatModel
from holdfast.chats.samples.certificate import problems
from holdfast.chats.samples.formats import decode
from holdfast.testing.fake_servers import FakeVLLM
from holdfast.testing.fake_upstream import FakeModel

TOPICS = ("rivers", "bread", "the moon", "chess", "bees", "glass", "bridges", "rain")


class UpstreamProcess:
    """A server that can be killed, with all processes that it started. Its port stays the same."""

    def __init__(self, command: Sequence[str], url: str, *, log: Path | None = None, env: Any = None) -> None:
        self._command = list(command)
        self._log = log
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self.url = url

    def start(self) -> None:
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(self._log.open("ab")) if self._log else subprocess.DEVNULL
            self._process = subprocess.Popen(
                self._command, stdout=out, stderr=out, env=self._env, start_new_session=True
            )

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    async def up(self, timeout_s: float) -> None:
        headers = {"accept-encoding": "identity"}  # the fake is strict
        async with asyncio.timeout(timeout_s), httpx.AsyncClient(verify=False, headers=headers) as http:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"{self.url}/v1/models")).status_code == 200:
                        return
                if self._process is not None and self._process.poll() is not None:
                    raise RuntimeError("the upstream ended by itself; its log says why")
                await asyncio.sleep(0.1)


@dataclass
class Agent:
    """What one agent asked and was told: `replies` are the bodies of the 200s that it got, one for each question."""

    index: int
    session: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    replies: list[dict[str, Any]] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    async def work(self, http: httpx.AsyncClient, num_turns: int, max_tokens: int) -> None:
        self.session = (await http.post("/sessions", json={})).json()["session_id"]
        for turn in range(num_turns):
            topic = TOPICS[(self.index + turn) % len(TOPICS)]
            self.messages.append({"role": "user", "content": f"Question {turn} of {self.index}: what about {topic}?"})
            # Without a seed: with one, vLLM 0.32 on a CPU dies of a prompt that is prefilled in two steps.
            body = {"messages": self.messages, "max_tokens": max_tokens, "temperature": 0.8}
            reply = await self._until_answered(http, body)
            self.replies.append(reply)
            self.messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})

    async def _until_answered(self, http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
        while True:
            answer = await http.post(f"/sessions/{self.session}/v1/chat/completions", json=body)
            if answer.status_code == 200:
                reply: dict[str, Any] = answer.json()
                return reply
            code = answer.json()["error"]["code"]
            assert answer.status_code in (502, 503), answer.text
            self.refused[f"{answer.status_code} {code}"] += 1
            await asyncio.sleep(0.2)


@dataclass(frozen=True)
class Report:
    num_turns: int
    num_sampled: int
    refused: dict[str, int]  # what agents were told in place of a reply, and sent their request again
    gaps_s: list[float]  # from each kill until the server answered again
    waited_s: list[float]  # from each kill until an agent had a reply again
    total_s: float
    problems: list[str]


async def chaos(
    http: httpx.AsyncClient,
    upstream: UpstreamProcess,
    *,
    num_agents: int,
    num_turns: int,
    num_kills: int,
    max_tokens: int,
    seed: int = 1,
    start_s: float = 600.0,
    chat: ChatModel | None = None,
) -> Report:
    """Let the agents work, kill the upstream (which must be up) at random moments, and check what is on record."""
    agents, started = [Agent(index) for index in range(num_agents)], time.monotonic()
    num_done: Callable[[], int] = lambda: sum(len(agent.replies) for agent in agents)  # noqa: E731
    moments = sorted(random.Random(seed).sample(range(num_agents, num_agents * num_turns - num_agents), num_kills))
    gaps, waited = [], []
    async with asyncio.TaskGroup() as group:
        for agent in agents:
            group.create_task(agent.work(http, num_turns, max_tokens))
        for moment in moments:
            while num_done() < moment:
                await asyncio.sleep(0.01)
            upstream.kill()
            killed = time.monotonic()
            upstream.start()
            await upstream.up(start_s)
            gaps.append(time.monotonic() - killed)
            before = num_done()  # replies that were on their way when it was killed are there by now
            while num_done() == before:
                await asyncio.sleep(0.01)
            waited.append(time.monotonic() - killed)
    total_s = time.monotonic() - started
    found = [
        f"session {agent.session}: {problem}" for agent in agents for problem in await _problems(http, agent, chat)
    ]
    return Report(
        num_turns=num_done(),
        num_sampled=sum(len(_sampled(reply)) for agent in agents for reply in agent.replies),
        refused=dict(sum((agent.refused for agent in agents), Counter())),
        gaps_s=gaps,
        waited_s=waited,
        total_s=total_s,
        problems=found,
    )


async def _problems(http: httpx.AsyncClient, agent: Agent, chat: ChatModel | None) -> list[str]:
    """Whatever is on record and not what the agent saw: one turn for each reply, and one chain of tokens."""
    shown = (await http.get(f"/sessions/{agent.session}?branches=all")).json()
    records, ids = shown["records"], shown["metadata"]["accumulated_token_ids"]
    found = []
    if (len(records), shown["turns"], shown["branches"]) != (len(agent.replies), len(agent.replies), 0):
        found.append(f"{len(records)} turns, {shown['branches']} branches on record for {len(agent.replies)} replies")
    if shown["messages"] != agent.messages:
        found.append("the messages on record are not the agent's")
    if [record["response"] for record in records] != agent.replies:
        found.append("the responses on record are not those that the agent got")
    path: list[int] = []
    for record, reply in zip(records, agent.replies, strict=False):
        prompt = reply["prompt_token_ids"]  # as the upstream read it
        if prompt[: len(path)] != path or len(prompt) <= len(path) or prompt != record["request"]["input_ids"]:
            found.append("a prompt does not continue what was sampled")
        path = prompt + _sampled(reply)
    if path != ids:
        found.append("the tokens on record are not the prompts and replies")
    if chat is not None:
        found += _misrendered(agent, path, len(_sampled(agent.replies[-1])), chat)
    content = (await http.post(f"/sessions/{agent.session}/samples", json={})).content
    export = decode(content)
    found += problems(export)
    if [list(sample.tokens) for sample in export.samples] != [path]:
        found.append("the sample's tokens are not those on record")
    logprobs = [entry["logprob"] for reply in agent.replies for entry in reply["choices"][0]["logprobs"]["content"]]
    trained = [float(p) for one in export.samples for p in one.rollout_log_probs[one.loss_mask != 0]]
    if not np.allclose(trained, logprobs, atol=1e-6):
        found.append("the sample's logprobs are not those of the replies")
    return found


def _misrendered(agent: Agent, path: list[int], num_last: int, chat: ChatModel) -> list[str]:
    """The prompt of the last turn must be what the template makes of its messages, as text."""
    fresh = chat.continuation.first(list(agent.messages[:-1])).ids  # type: ignore[arg-type]
    texts = [chat.tokenizer.decode(ids) for ids in (path[:-num_last], fresh)]
    is_whole = "\ufffd" not in texts[0]  # a reply that ends within a character cannot be compared as text
    return ["the prompt is not what a fresh rendering says"] if is_whole and texts[0] != texts[1] else []


def _sampled(reply: dict[str, Any]) -> list[int]:
    tokens: list[int] = reply["choices"][0]["token_ids"]
    return tokens


async def _fake(port: int) -> None:
    model = FakeModel(vocab_size=49152)
    async with FakeVLLM(model, port=port, delay_s=0.01):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_fake(int(sys.argv[1])))
