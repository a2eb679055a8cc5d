"""A server with the real model, and sessions worth looking at: conversations, retries, edits, rewards."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

SYSTEM = "You are a patient guide at a lighthouse museum. Answer in two or three short sentences."
QUESTIONS = (
    "Who built the first lighthouse, and where did it stand?",
    "How did keepers make the light before electricity?",
    "What is a Fresnel lens, and why was it so important?",
    "My name is Ada, and my ship is called the Meridian. Please remember that.",
    "How far can a light of 40 metres height be seen at sea?",
    "Why do lighthouses have different patterns of flashes?",
    "Write a short poem of four lines about a keeper in a storm.",
    "What did a keeper do in a normal night?",
    "Name three famous lighthouses and one fact about each.",
    "Why were most lighthouses automated?",
    "What is a lightship?",
    "What was the name of my ship?",
)
PUZZLES = (
    "What is 17 + 26?",
    "A train leaves at 9:40 and arrives at 11:05. How long does it take?",
    "Is 91 a prime number?",
)


@contextmanager
def real_server(*flags: str) -> Iterator[tuple[str, int]]:
    """The HTTP address and the process id of `holdfast serve`."""
    addresses = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        server = subprocess.Popen([sys.executable, "-m", "holdfast.cli", "serve", *addresses, *flags], stderr=log)
        try:
            banner = ""
            while "Ctrl-C" not in banner:
                assert server.poll() is None, banner
                time.sleep(0.1)
                log.seek(0)
                banner = log.read()
            yield banner.partition("console  http://")[2].partition("/console")[0], server.pid
        finally:
            server.terminate()
            server.wait()


class Talker:
    """A client with a conversation of its own on one session."""

    def __init__(self, client: httpx.Client, **session: Any) -> None:
        self.client = client
        self.id = str(client.post("/sessions", json=session).raise_for_status().json()["session_id"])
        self.messages: list[dict[str, Any]] = []

    def say(self, text: str, **options: Any) -> None:
        self.messages.append({"role": "user", "content": text})
        self.reply(**options)

    def reply(self, **options: Any) -> None:
        """A reply to the messages as they are: a retry where the last one is a user's that was answered before."""
        body = {"messages": self.messages, "max_tokens": 72, "temperature": 0.7, "logprobs": True, "top_logprobs": 5}
        answer = self.client.post(f"/sessions/{self.id}/v1/chat/completions", json=body | options, timeout=120)
        self.messages.append(answer.raise_for_status().json()["choices"][0]["message"])

    def retry(self, **options: Any) -> None:
        self.messages.pop()
        self.reply(**options)

    def reward(self, value: float, turn: int | None = None) -> None:
        body = {"reward": value} | ({} if turn is None else {"turn": turn})
        self.client.post(f"/sessions/{self.id}/reward", json=body).raise_for_status()


def museum(client: httpx.Client) -> str:
    """A conversation that outgrows its window, with a retry and an edit on the way."""
    talker = Talker(client, label="Lighthouse guide", group="museum", metadata={"user": "ada"})
    talker.messages.append({"role": "system", "content": SYSTEM})
    for number, question in enumerate(QUESTIONS):
        talker.say(question, seed=number + 1)
    return talker.id


def branches(client: httpx.Client) -> str:
    """A tree: several replies to one message, some of them continued, with rewards."""
    talker = Talker(client, label="Puzzle rollouts, best of four", group="puzzles")
    talker.messages.append({"role": "system", "content": "Solve the puzzle. Think in short steps."})
    for number, puzzle in enumerate(PUZZLES):
        talker.say(puzzle, seed=number + 1, max_tokens=40)
        for attempt in range(3):
            talker.retry(seed=100 * number + attempt + 10, temperature=1.0, max_tokens=40)
        if number == 1:
            kept = list(talker.messages)
            talker.say("Are you sure?", seed=7, max_tokens=32)
            talker.say("Explain it to a child.", seed=8, max_tokens=32)
            talker.messages = kept
    talker.say("Thank you. Which of these was the hardest?", seed=3, max_tokens=40)
    for turn, value in ((1, 0.0), (2, 1.0), (4, -1.0), (5, 1.0), (9, -1.0), (11, 1.0)):
        talker.reward(value, turn)
    talker.reward(0.5)
    return talker.id


def others(client: httpx.Client, number: int = 40) -> None:
    """Other sessions, so that the list is one."""
    groups = ("rollouts 7", "rollouts 8", "support", "research", "")
    tasks = (
        "Fix the failing test",
        "Summarise the meeting",
        "Translate the letter",
        "Plan the trip",
        "Review the patch",
    )
    for index in range(number):
        talker = Talker(client, label=f"{tasks[index % 5]} {index // 5 + 1}", group=groups[index * 3 % 5])
        for turn in range(index % 3):
            talker.say(QUESTIONS[(index + turn) % len(QUESTIONS)], max_tokens=4, logprobs=False, top_logprobs=0)
        if index % 4 == 1 and index % 3:
            talker.reward((1.0, -1.0, 0.25)[index % 3])
