"""`python -m tests.agents.memory`: mini-swe-agent takes 200 steps on a window of 2,048 tokens, and at step 180 its
model needs a file name that a command printed at step 3. The scripted model knows only what its prompt says.

Needs mini-swe-agent: `python -m tests.agents install mini-swe-agent`.
"""

import argparse
import asyncio
import json
import re
import shutil
from dataclasses import replace
from typing import Any

import aiohttp
import openai

from holdfast.testing.fake_upstream import FakeReply, Json
from tests.agents.__main__ import AGENTS
from tests.agents.agent import agents_folder
from tests.agents.model import Call, Reply, ScriptedModel
from tests.agents.runner import _json, _place, _ran
from tests.agents.server import HoldfastServer
from tests.agents.text_scripts import SUBMIT

NAME = "ledger-7f3a91.csv"
SHOWN_AT, NEEDED_AT = 3, 180
_TOPICS = (
    "invoices",
    "contracts",
    "photos",
    "salaries",
    "recipes",
    "maps",
    "letters",
    "songs",
    "timetables",
    "receipts",
)
_PARTS = ("parser", "cache", "scheduler", "tokenizer", "journal", "window", "router", "sampler")


class ForgetfulModel(ScriptedModel):
    """Decides by its prompt alone: the last step that is in it, and at step 180 whether the name is."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(self._next)
        self.num_steps = num_steps
        self.prompts: list[str] = []

    async def _chat(self, request: Json, reply: FakeReply) -> None:
        if reply.request.headers.get("x-smg-routing-key") != "holdfast-probe":
            self.prompts.append(self._tokenizer.decode(request["input_ids"]))
        await super()._chat(request, reply)

    def _next(self, messages: list[Json], tools: list[Json]) -> Reply:
        prompt = self.prompts[-1]
        step = max((int(number) for number in re.findall(r"step (\d+) is done", prompt)), default=0) + 1
        part = _PARTS[step % len(_PARTS)]
        done = f"step {step} is done"
        if step > self.num_steps:
            command = SUBMIT
        elif step == SHOWN_AT:
            command = f"echo The invoices of all customers are in {NAME}. && echo {done}"
        elif step == NEEDED_AT - 1:
            command = f"echo {done} && echo Next: which file has the invoices of the customers?"
        elif step == NEEDED_AT:
            found = re.search(r"ledger-\w+\.csv", prompt)
            command = f"echo {found[0] if found else 'nobody knows'} > answer.txt && echo {done}"
        else:
            command = f"echo The tests of the {part} pass, {7 * step} of them, in {step + 3} seconds. && echo {done}"
        return Reply(content=f"Let me do step {step}.", calls=[Call("bash", {"command": command})])


async def run(num_steps: int, budget: int, recall_tokens: int) -> dict[str, Any]:
    agent = AGENTS["mini-swe-agent"]
    folder = agents_folder() / "runs" / f"memory-{recall_tokens}"
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("home", "work", "data"):
        (folder / name).mkdir(parents=True)
    options = [f"--context-budget={budget}", f"--recall-tokens={recall_tokens}"]
    async with (
        ForgetfulModel(num_steps) as model,
        HoldfastServer(["--upstream", model.url, *options], folder) as server,
        aiohttp.ClientSession() as client,
    ):
        session = (await _json(client, "POST", f"{server.url}/sessions", {}))["session_id"]
        url = f"{server.url}/sessions/{session}"
        place = _place(agent, folder, url=url, server=server.url, scenario="chat:steps", slow_s=0)
        (command, *_) = agent.commands(place)
        ran = await _ran(replace(command, writes=None), place, folder, 1200)
        state = await _json(client, "GET", f"{url}?payloads=false")
        samples = await _json(client, "POST", f"{url}/samples", {"format": "json"})
        (folder / "samples.json").write_text(json.dumps(samples))
    needed = next(prompt for prompt in model.prompts if f"step {NEEDED_AT - 1} is done" in prompt)
    return {
        "budget": budget,
        "recall_tokens": recall_tokens,
        "exit": ran.detail,
        "turns": state["turns"],
        "history": state["history_length"],
        "dropped": state["dropped_tokens"],
        "longest_prompt": max(len(one["input_ids"]) for one in model.exchanges),
        "name_in_prompt": NAME in needed,
        "answer": (folder / "work/answer.txt").read_text().strip(),
        "samples": len(samples["samples"]),
        "trained_turns": sum(len(one["turns"]) for one in samples["samples"]),
        "mismatches": len(samples["session_metadata"]["tito_session_mismatch"]),
        "prompt": needed[-1200:],
    }


async def run_on_engine(window: int) -> dict[str, Any]:
    """The default model on our engine, driven by OpenAI's client: ten names from step 3 on, each asked for at step 180,
    in a fork with recall and in one without. The model's answers count."""
    folder = agents_folder() / "runs" / "memory-engine"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "data").mkdir(parents=True)
    server = HoldfastServer([], folder)
    argv = ["serve", "--recent", str(window), "--grpc=127.0.0.1:0", "--http=127.0.0.1:0", "--sessions=4"]
    server._argv = [*argv, "--data-dir", str(folder / "data")]
    async with server, aiohttp.ClientSession() as client:
        session = (await _json(client, "POST", f"{server.url}/sessions", {}))["session_id"]
        messages: list[Any] = [{"role": "system", "content": "You answer questions about a project in few words."}]
        names = {topic: f"{topic[:4]}-{index * 7919 % 1000:03}.csv" for index, topic in enumerate(_TOPICS, 1)}
        for step in range(1, NEEDED_AT):
            said = f"Note {step}: the tests of the {_PARTS[step % 8]} pass, {7 * step} of them, in {step + 3} seconds."
            if SHOWN_AT <= step < SHOWN_AT + len(_TOPICS):
                topic = _TOPICS[step - SHOWN_AT]
                said = f"Note {step}: the {topic} are in the file {names[topic]}."
            messages.append({"role": "user", "content": said})
            messages.append(await _answer(server.url, session, messages, max_tokens=4))
        state = await _json(client, "GET", f"{server.url}/sessions/{session}?records=false")
        told: dict[str, Any] = {"history": state["history_length"], "dropped": state["dropped_tokens"], "answers": []}
        for topic, name in names.items():
            asked = {"role": "user", "content": f"In which file are the {topic}? Answer with the name of the file."}
            row = {"name": name}
            for recall in (False, {"tokens": 256}):
                fork = (await _json(client, "POST", f"{server.url}/sessions/{session}/fork", {}))["session_id"]
                fields = {"max_tokens": 32, "recall": recall}
                reply = await _answer(server.url, fork, [*messages, asked], **fields)
                row["with recall" if recall else "without"] = reply["content"]
                async with client.delete(f"{server.url}/sessions/{fork}"):
                    pass
            told["answers"].append(row)
            print(json.dumps(row), flush=True)
    for kind in ("with recall", "without"):
        told[kind] = sum(row["name"] in row[kind] for row in told["answers"])
    return told


async def _answer(url: str, session: str, messages: list[Any], *, max_tokens: int, recall: Any = None) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{url}/sessions/{session}/v1", api_key="none") as api:
        fields = {} if recall is None else {"recall": recall}
        done = await api.chat.completions.create(
            model="default", messages=messages, max_tokens=max_tokens, temperature=0, extra_body=fields
        )
    return {"role": "assistant", "content": done.choices[0].message.content}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.agents.memory", description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--budget", type=int, default=2048, help="tokens, of the prompt or of our engine's window")
    parser.add_argument("--engine", action="store_true", help="our engine and the default model, no agent program")
    arguments = parser.parse_args()
    if arguments.engine:
        told = asyncio.run(run_on_engine(arguments.budget))
        print(json.dumps({name: value for name, value in told.items() if name != "answers"}))
        return
    for recall_tokens in (256, 0):
        print(json.dumps(asyncio.run(run(arguments.steps, arguments.budget, recall_tokens)), indent=1), flush=True)


if __name__ == "__main__":
    main()
