"""Clients that remember every acknowledged turn, and compare them with what a server has on record after a crash.

Chats go over HTTP, raw tokens over gRPC. A turn in flight at the crash may be on record or not; every acknowledged turn
must be, exactly as the client received it.
"""

import contextlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import aiohttp
import grpc
import msgspec

from holdfast.bench.processes import RunningServer
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast_sdk import AsyncClient

_TIMEOUT_S = 120.0
_IDS = range(100, 5000)
_APPEND_EVERY = 4
_BROKEN_OFF = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)
_NOT_FROM_THE_SERVER = ("connection_failed", "cancelled", "unknown")  # error codes of the SDK itself

T = TypeVar("T")


class Token(NamedTuple):
    """One token of a history. Tokens that the client gave have no logprobs."""

    id: int
    logprob: float | None = None
    sampling_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class ChatExchange:
    """A question and the body of the response as the client received it; None while it waits for it."""

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
    """Given tokens and sampled ones; if the stream broke off, those that were received before."""

    given: tuple[int, ...]
    sampled: tuple[Token, ...] = ()

    @property
    def tokens(self) -> list[Token]:
        return [*(Token(id) for id in self.given), *self.sampled]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Acknowledged turns compared with the record. `has_more`: the turn in flight is on record too."""

    num_turns: int
    num_lost: int = 0
    num_altered: int = 0
    has_more: bool = False
    problem: str = ""


def compare_chat(
    turns: Sequence[ChatExchange], in_flight: ChatExchange | None, stored: dict[str, Any], samples: dict[str, Any]
) -> Comparison:
    """`stored` is the response to `GET /sessions/{id}`, `samples` the session's samples as JSON."""
    num_stored = len(stored["records"])
    num_found = min(num_stored, len(turns))
    wrong = [problem for number in range(num_found) if (problem := _chat_problem(turns[number], number, stored))]
    expected = [entry for turn in turns[:num_found] for entry in turn.sampled]
    if not wrong and _sampled_in(samples)[: len(expected)] != expected:
        wrong = ["the samples differ from what was sampled"]
    num_more = num_stored - len(turns)
    is_known = num_more <= 0 or (
        num_more == 1 and in_flight is not None and _content(stored["messages"], 2 * len(turns)) == in_flight.question
    )
    if not is_known:
        wrong.append(f"there are {num_more} unknown turns on record")
    lost = [f"only {num_found} of {len(turns)} turns are on record"] if num_found < len(turns) else []
    return Comparison(
        num_turns=len(turns),
        num_lost=len(turns) - num_found,
        num_altered=len(wrong),
        has_more=num_more > 0,
        problem=next(iter(wrong + lost), ""),
    )


def _chat_problem(turn: ChatExchange, number: int, stored: dict[str, Any]) -> str:
    """What is wrong with the record of an acknowledged turn; empty if nothing is."""
    assert turn.reply is not None
    messages = stored["messages"]
    if (_content(messages, 2 * number), _content(messages, 2 * number + 1)) != (turn.question, turn.text):
        return f"turn {number + 1}: the messages differ"
    if stored["records"][number]["response"] != json.loads(turn.reply):
        return f"turn {number + 1}: the recorded response differs"
    nodes = [node for node in stored["metadata"]["tree"] if node["is_current"]]
    before = sum(node["given_tokens"] + node["sampled_tokens"] for node in nodes[:number])
    start = before + nodes[number]["given_tokens"]
    ids = stored["metadata"]["accumulated_token_ids"][start : start + nodes[number]["sampled_tokens"]]
    return "" if ids == [id for _, id in turn.sampled] else f"turn {number + 1}: the token ids differ"


def _content(messages: Sequence[dict[str, Any]], index: int) -> str | None:
    return messages[index]["content"] if index < len(messages) else None


def _sampled_in(samples: dict[str, Any]) -> list[tuple[float, int]]:
    """Logprobs and ids of the sampled tokens, as a trainer reads them."""
    found = []
    for sample in samples["samples"]:
        mask = sample["loss_mask"]
        response = sample["tokens"][len(sample["tokens"]) - len(mask) :]
        triples = zip(mask, sample["rollout_log_probs"], response, strict=True)
        found += [(logprob, id) for is_sampled, logprob, id in triples if is_sampled]
    return found


def compare_tokens(turns: Sequence[TokenTurn], in_flight: TokenTurn | None, stored: Sequence[Token]) -> Comparison:
    problems: list[str] = []
    num_lost = start = 0
    for number, turn in enumerate(turns, 1):
        expected = turn.tokens
        found = list(stored[start : start + len(expected)])
        start += len(expected)
        if len(found) < len(expected):
            num_lost += 1
            problems.append(f"turn {number} is not on record")
        elif found != expected:
            problems.append(f"turn {number}: the tokens differ")
    rest = list(stored[start:])
    # The record may hold more of the turn in flight than the client received, but it must begin with that.
    if rest and (in_flight is None or rest[: len(in_flight.tokens)] != in_flight.tokens):
        problems.append(f"{len(rest)} unknown tokens are on record")
    return Comparison(
        num_turns=len(turns),
        num_lost=num_lost,
        num_altered=len(problems) - num_lost,
        has_more=bool(rest),
        problem=problems[0] if problems else "",
    )


class ServerGone(HoldfastError):
    """The connection broke off before the server answered."""


class UnexpectedResponse(HoldfastError):
    """The server answered with an error."""


@dataclass(frozen=True, slots=True)
class ServerClients:
    http: aiohttp.ClientSession
    sdk: "AsyncClient"


@contextlib.asynccontextmanager
async def connected(server: RunningServer) -> AsyncIterator[ServerClients]:
    """Clients that send nothing twice by themselves: the bench counts every answer."""
    from holdfast_sdk import AsyncClient

    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(server.http, timeout=timeout) as http,
        AsyncClient(server.grpc, timeout_s=_TIMEOUT_S, retries=0) as sdk,
    ):
        yield ServerClients(http, sdk)


class Agent(ABC, Generic[T]):
    """A client with one session that it opens with its first turn. It goes on after the server was restarted."""

    def __init__(self, *, reply_tokens: int, seed: int) -> None:
        self.session_id = ""
        self._reply_tokens = reply_tokens
        self._random = random.Random(seed)
        self._turns: list[T] = []
        self._in_flight: T | None = None

    @property
    def num_turns(self) -> int:
        """How many turns were acknowledged."""
        return len(self._turns)

    @property
    def is_waiting(self) -> bool:
        """Whether a turn is in flight."""
        return self._in_flight is not None

    async def turn(self, clients: ServerClients) -> None:
        """Have one more turn. Raises ServerGone or UnexpectedResponse."""
        with _translated():
            if not self.session_id:
                self.session_id = await self._open(clients)
            await self._turn(clients)

    async def compare(self, clients: ServerClients) -> Comparison:
        """Compare the record with what was acknowledged. Raises ServerGone or UnexpectedResponse."""
        with _translated():
            return await self._compare(clients)

    @abstractmethod
    async def _open(self, clients: ServerClients) -> str: ...

    @abstractmethod
    async def _turn(self, clients: ServerClients) -> None: ...

    @abstractmethod
    async def _compare(self, clients: ServerClients) -> Comparison: ...


class ChatAgent(Agent[ChatExchange]):
    """Sends the whole conversation each time, and again with the same idempotency key if it got no response."""

    async def _open(self, clients: ServerClients) -> str:
        _, content = await _ask(clients, "POST", "/sessions", {})
        return str(msgspec.json.decode(content)["session_id"])

    async def _turn(self, clients: ServerClients) -> None:
        if self._in_flight is None:
            self._in_flight = ChatExchange(f"Question {self.num_turns}, {self._random.getrandbits(32):08x}?")
        reply, _ = await self._chat(clients, self.num_turns, self._in_flight.question)
        self._turns.append(ChatExchange(self._in_flight.question, reply))
        self._in_flight = None

    async def _compare(self, clients: ServerClients) -> Comparison:
        base = f"/sessions/{self.session_id}"
        _, stored = await _ask(clients, "GET", base)
        _, samples = await _ask(clients, "POST", f"{base}/samples", {"format": "json"})
        found = compare_chat(self._turns, self._in_flight, msgspec.json.decode(stored), msgspec.json.decode(samples))
        if not found.problem and self._turns and not found.has_more:
            last = self._turns[-1]
            again, is_replayed = await self._chat(clients, self.num_turns - 1, last.question)
            if again != last.reply or not is_replayed:
                problem = "the last response was not replayed as it was"
                return Comparison(num_turns=self.num_turns, num_altered=1, problem=problem)
        return found

    async def _chat(self, clients: ServerClients, number: int, question: str) -> tuple[bytes, bool]:
        """The response to turn `number`, counted from 0, and whether the server says that it is a replay."""
        messages = []
        for turn in self._turns[:number]:
            messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.text}]
        body = {
            "messages": [*messages, {"role": "user", "content": question}],
            "max_tokens": self._reply_tokens,
            "temperature": 1.0,
            "seed": number,
            "return_meta_info": True,
        }
        path = f"/sessions/{self.session_id}/v1/chat/completions"
        headers, content = await _ask(clients, "POST", path, body, key=f"turn-{number}")
        return content, headers.get("idempotent-replayed") == "true"


class TokenAgent(Agent[TokenTurn]):
    """Appends tokens and samples; every fourth turn only appends."""

    async def _open(self, clients: ServerClients) -> str:
        return (await clients.sdk.create_session()).id

    async def _turn(self, clients: ServerClients) -> None:
        given = tuple(self._random.choices(_IDS, k=8))
        length = sum(len(turn.tokens) for turn in self._turns)
        self._in_flight = TokenTurn(given)
        if self.num_turns % _APPEND_EVERY == _APPEND_EVERY - 1:
            await clients.sdk.session(self.session_id).append(given, expected_history_length=length)
        else:
            await self._sample(clients, given, length)
        self._turns.append(self._in_flight)
        self._in_flight = None

    async def _sample(self, clients: ServerClients, given: tuple[int, ...], length: int) -> None:
        from holdfast_sdk import HoldfastError as SdkError

        generation = await clients.sdk.session(self.session_id).turn(
            given,
            max_tokens=self._reply_tokens,
            expected_history_length=length,
            timeout_s=_TIMEOUT_S,
            seed=self.num_turns,
            temperature=1.0,
        )
        sampled: tuple[Token, ...] = ()
        try:
            async for token in generation:
                sampled += (Token(token.id, token.logprob, token.sampling_logprob),)
                self._in_flight = TokenTurn(given, sampled)
        except SdkError:
            if not generation.is_done:  # the last event acknowledges the turn, even if the connection breaks off then
                raise

    async def _compare(self, clients: ServerClients) -> Comparison:
        stored: list[Token] = []
        async for chunk in clients.sdk.session(self.session_id).history():
            if chunk.kind == "SAMPLED":
                columns = zip(chunk.token_ids, chunk.logprobs, chunk.sampling_logprobs, strict=True)
                stored += [Token(*column) for column in columns]
            else:
                stored += [Token(id) for id in chunk.token_ids]
        found = compare_tokens(self._turns, self._in_flight, stored)
        if not found.problem:
            rest = stored[sum(len(turn.tokens) for turn in self._turns) :]
            if rest and self._in_flight is not None:  # the turn in flight is on record: from now on it must stay
                given = self._in_flight.given
                self._turns.append(TokenTurn(given, tuple(rest[len(given) :])))
            self._in_flight = None
        return found


async def _ask(
    clients: ServerClients, method: str, path: str, body: dict[str, Any] | None = None, *, key: str = ""
) -> tuple[Any, bytes]:
    """Headers and body of the response, whose status must be 200."""
    headers = {"content-type": "application/json"} if body is not None else {}
    headers |= {"idempotency-key": key} if key else {}
    data = None if body is None else msgspec.json.encode(body)
    async with clients.http.request(method, path, data=data, headers=headers) as reply:
        content = await reply.read()
        if reply.status != 200:
            raise UnexpectedResponse(f"status {reply.status}: {content[:300]!r}")
        return reply.headers, content


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    from holdfast_sdk import HoldfastError as SdkError

    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise ServerGone(f"{type(exc).__name__}: {exc}") from exc
    except SdkError as exc:
        if exc.grpc_status in _BROKEN_OFF and exc.code in _NOT_FROM_THE_SERVER:
            raise ServerGone(str(exc)) from exc
        raise UnexpectedResponse(f"{exc.code}: {exc}") from exc
