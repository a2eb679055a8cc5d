"""What a server acknowledged, and what it has after it was killed: turn by turn, bit for bit. Pure.

A turn that was in flight may be on record or not; all others must be there, exactly as the client got them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Token(NamedTuple):
    """One token of a history. Tokens that were given have no logprobs."""

    id: int
    logprob: float | None = None
    sampling_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class ChatExchange:
    """`reply` is the body as the client got it, or None where it was still waiting for it."""

    question: str
    reply: bytes | None = None

    @property
    def choice(self) -> dict[str, Any]:
        assert self.reply is not None
        choice: dict[str, Any] = json.loads(self.reply)["choices"][0]
        return choice

    @property
    def text(self) -> str:
        return str(self.choice["message"]["content"])

    @property
    def sampled(self) -> list[tuple[float, int]]:
        return [(entry[0], entry[1]) for entry in self.choice["meta_info"]["output_token_logprobs"]]


@dataclass(frozen=True, slots=True)
class TokenTurn:
    """Tokens that were given and tokens that were sampled, or as many of them as came before it broke off."""

    given: tuple[int, ...]
    sampled: tuple[Token, ...] = ()

    @property
    def tokens(self) -> list[Token]:
        return [*(Token(id) for id in self.given), *self.sampled]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Acknowledged turns beside what is on record. `has_more`: the turn in flight is on record too."""

    num_turns: int
    num_lost: int = 0
    num_altered: int = 0
    has_more: bool = False
    problem: str = ""


def compare_chat(
    turns: Sequence[ChatExchange], in_flight: ChatExchange | None, shown: dict[str, Any], samples: dict[str, Any]
) -> Comparison:
    """`shown` is what `GET /sessions/{id}` says, `samples` its samples as JSON."""
    num_stored = len(shown["records"])
    num_there = min(num_stored, len(turns))
    wrong = [number for number in range(num_there) if _chat_problem(turns[number], number, shown)]
    problem = _chat_problem(turns[wrong[0]], wrong[0], shown) if wrong else ""
    expected = [entry for turn in turns[:num_there] for entry in turn.sampled]
    if not wrong and _sampled_in(samples)[: len(expected)] != expected:
        wrong, problem = [num_there - 1], "the samples are not what was sampled"
    more = num_stored - len(turns)
    is_known = more <= 0 or (
        more == 1 and in_flight is not None and _content(shown["messages"], 2 * len(turns)) == in_flight.question
    )
    if not is_known:
        problem = problem or f"there are {more} turns on record that nobody waits for"
    if num_there < len(turns):
        problem = problem or f"{num_there} of {len(turns)} turns are on record"
    return Comparison(
        num_turns=len(turns),
        num_lost=len(turns) - num_there,
        num_altered=len(wrong) + (not is_known),
        has_more=more > 0,
        problem=problem,
    )


def _chat_problem(turn: ChatExchange, number: int, shown: dict[str, Any]) -> str:
    """What is wrong with the record of an acknowledged turn, if anything."""
    assert turn.reply is not None
    messages = shown["messages"]
    if (_content(messages, 2 * number), _content(messages, 2 * number + 1)) != (turn.question, turn.text):
        return f"turn {number + 1}: its messages are others"
    if shown["records"][number]["response"] != json.loads(turn.reply):
        return f"turn {number + 1}: its record is not the reply"
    sizes = [node for node in shown["metadata"]["tree"] if node["is_current"]]
    start = (
        sum(node["given_tokens"] + node["sampled_tokens"] for node in sizes[:number]) + sizes[number]["given_tokens"]
    )
    ids = shown["metadata"]["accumulated_token_ids"][start : start + sizes[number]["sampled_tokens"]]
    return "" if ids == [id for _, id in turn.sampled] else f"turn {number + 1}: its token ids are others"


def _content(messages: Sequence[dict[str, Any]], index: int) -> str | None:
    return messages[index]["content"] if index < len(messages) else None


def _sampled_in(samples: dict[str, Any]) -> list[tuple[float, int]]:
    """Logprobs and ids of what was sampled, as a trainer reads it."""
    found = []
    for sample in samples["samples"]:
        mask = sample["loss_mask"]
        response = sample["tokens"][len(sample["tokens"]) - len(mask) :]
        triples = zip(mask, sample["rollout_log_probs"], response, strict=True)
        found += [(logprob, id) for is_sampled, logprob, id in triples if is_sampled]
    return found


def compare_tokens(turns: Sequence[TokenTurn], in_flight: TokenTurn | None, stored: Sequence[Token]) -> Comparison:
    num_lost = num_altered = start = 0
    problem = ""
    for number, turn in enumerate(turns, 1):
        expected = turn.tokens
        found = list(stored[start : start + len(expected)])
        start += len(expected)
        if len(found) < len(expected):
            num_lost += 1
            problem = problem or f"turn {number} is not on record"
        elif found != expected:
            num_altered += 1
            problem = problem or f"turn {number}: its tokens are others"
    rest = list(stored[start:])
    if rest and not _begins(in_flight, rest):
        num_altered += 1
        problem = problem or f"{len(rest)} tokens on record that nobody waits for"
    return Comparison(
        num_turns=len(turns), num_lost=num_lost, num_altered=num_altered, has_more=bool(rest), problem=problem
    )


def _begins(in_flight: TokenTurn | None, rest: list[Token]) -> bool:
    """Whether what was given, and what was streamed before it broke off, begins `rest`."""
    return in_flight is not None and rest[: len(in_flight.tokens)] == in_flight.tokens
