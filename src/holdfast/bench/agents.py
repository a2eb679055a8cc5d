"""Agents that remember every acknowledged turn: chats over HTTP, raw tokens over gRPC. They go on after a restart."""

import contextlib
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import msgspec

from holdfast.bench.server_process import ServerAddress
from holdfast.bench.turn_comparison import ChatExchange, Comparison, Token, TokenTurn, compare_chat, compare_tokens
from holdfast.errors import HoldfastError
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc

_TIMEOUT_S = 120.0
_IDS = range(100, 5000)
_APPEND_EVERY = 4
_BROKEN_OFF = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)


class ServerGone(HoldfastError):
    """The server went away in the middle."""


class UnexpectedResponse(HoldfastError):
    """The server answered, and not as it should."""


@dataclass(frozen=True, slots=True)
class ServerClients:
    http: aiohttp.ClientSession
    stub: Any


@contextlib.asynccontextmanager
async def connected(served: ServerAddress) -> AsyncIterator[ServerClients]:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(served.http, timeout=timeout) as http,
        grpc.aio.insecure_channel(served.grpc) as channel,
    ):
        yield ServerClients(http, rpc.RuntimeServiceStub(channel))  # type: ignore[no-untyped-call]


class Agent(ABC):
    """One session. `num_turns` were acknowledged; `is_waiting` while a turn is in flight."""

    session_id = ""

    def __init__(self, *, reply_tokens: int, seed: int) -> None:
        self._reply_tokens = reply_tokens
        self._random = random.Random(seed)

    @property
    @abstractmethod
    def num_turns(self) -> int: ...

    @property
    @abstractmethod
    def is_waiting(self) -> bool: ...

    async def turn(self, doors: ServerClients) -> None:
        """One more turn; opens a session first if there is none. Raises ServerGone or UnexpectedResponse."""
        with _translated():
            if not self.session_id:
                self.session_id = await self._open(doors)
            await self._turn(doors)

    async def compare(self, doors: ServerClients) -> Comparison:
        """What is on record beside what was acknowledged. Raises ServerGone or UnexpectedResponse."""
        with _translated():
            return await self._compare(doors)

    @abstractmethod
    async def _open(self, doors: ServerClients) -> str: ...

    @abstractmethod
    async def _turn(self, doors: ServerClients) -> None: ...

    @abstractmethod
    async def _compare(self, doors: ServerClients) -> Comparison: ...


class ChatAgent(Agent):
    """Sends the whole conversation each time, and again with the same key where it got no reply."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._turns: list[ChatExchange] = []
        self._in_flight: ChatExchange | None = None

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def is_waiting(self) -> bool:
        return self._in_flight is not None

    async def _open(self, doors: ServerClients) -> str:
        status, _, content = await _ask(doors, "POST", "/sessions", b"{}")
        return str(_json_of(status, content)["session_id"])

    async def _turn(self, doors: ServerClients) -> None:
        if self._in_flight is None:
            self._in_flight = ChatExchange(f"Question {self.num_turns}, {self._random.getrandbits(32):08x}?")
        reply, _ = await self._chat(doors, self.num_turns, self._in_flight.question)
        self._turns.append(ChatExchange(self._in_flight.question, reply))
        self._in_flight = None

    async def _compare(self, doors: ServerClients) -> Comparison:
        base = f"/sessions/{self.session_id}"
        shown = _json_of(*(await _ask(doors, "GET", base))[::2])
        samples = _json_of(*(await _ask(doors, "POST", f"{base}/samples", b'{"format": "json"}'))[::2])
        found = compare_chat(self._turns, self._in_flight, shown, samples)
        if not found.problem and self._turns and not found.has_more:
            last = self._turns[-1]
            again, is_replayed = await self._chat(doors, self.num_turns - 1, last.question)
            if again != last.reply or not is_replayed:
                return Comparison(num_turns=self.num_turns, num_altered=1, problem="the last reply comes back changed")
        return found

    async def _chat(self, doors: ServerClients, number: int, question: str) -> tuple[bytes, bool]:
        """The reply to the turn `number`, counted from 0, and whether the server says that it has sent it before."""
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
        status, headers, content = await _ask(doors, "POST", path, msgspec.json.encode(body), key=f"turn-{number}")
        _json_of(status, content)
        return content, headers.get("idempotent-replayed") == "true"


class TokenAgent(Agent):
    """Gives tokens and samples; now and then it only gives."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._turns: list[TokenTurn] = []
        self._in_flight: TokenTurn | None = None

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def is_waiting(self) -> bool:
        return self._in_flight is not None

    async def _open(self, doors: ServerClients) -> str:
        return str((await doors.stub.CreateSession(pb.CreateSessionRequest())).session_id)

    async def _turn(self, doors: ServerClients) -> None:
        given = tuple(self._random.choices(_IDS, k=8))
        length = sum(len(turn.tokens) for turn in self._turns)
        self._in_flight = TokenTurn(given)
        target: dict[str, Any] = {"session_id": self.session_id, "token_ids": given, "expected_history_length": length}
        if self.num_turns % _APPEND_EVERY == _APPEND_EVERY - 1:
            await doors.stub.AppendTokens(pb.AppendTokensRequest(**target))
        else:
            sampling = pb.SamplingOptions(seed=self.num_turns, temperature=1.0)
            request = pb.TurnRequest(**target, max_tokens=self._reply_tokens, sampling=sampling)
            await self._stream(doors.stub.Turn(request), given)
        self._turns.append(self._in_flight)
        self._in_flight = None

    async def _stream(self, call: Any, given: tuple[int, ...]) -> None:
        async for event in call:
            if event.HasField("done"):
                return
            if event.HasField("token"):
                token = Token(event.token.token_id, event.token.logprob, event.token.sampling_logprob)
                assert self._in_flight is not None
                self._in_flight = TokenTurn(given, (*self._in_flight.sampled, token))
        raise UnexpectedResponse("a stream ended without done")

    async def _compare(self, doors: ServerClients) -> Comparison:
        stored: list[Token] = []
        async for chunk in doors.stub.GetHistory(pb.GetHistoryRequest(session_id=self.session_id)):
            if chunk.kind == pb.SPAN_KIND_SAMPLED:
                columns = zip(chunk.token_ids, chunk.logprobs, chunk.sampling_logprobs, strict=True)
                stored += [Token(*column) for column in columns]
            else:
                stored += [Token(id) for id in chunk.token_ids]
        found = compare_tokens(self._turns, self._in_flight, stored)
        if not found.problem:
            self._take_over(stored[sum(len(turn.tokens) for turn in self._turns) :])
        return found

    def _take_over(self, rest: list[Token]) -> None:
        """The turn in flight, where it is on record: from now on it must stay."""
        if rest:
            assert self._in_flight is not None
            given = self._in_flight.given
            self._turns.append(TokenTurn(given, tuple(rest[len(given) :])))
        self._in_flight = None


async def _ask(
    doors: ServerClients, method: str, path: str, body: bytes | None = None, *, key: str = ""
) -> tuple[int, Any, bytes]:
    headers = {"content-type": "application/json"} if body is not None else {}
    headers |= {"idempotency-key": key} if key else {}
    async with doors.http.request(method, path, data=body, headers=headers) as reply:
        return reply.status, reply.headers, await reply.read()


def _json_of(status: int, content: bytes) -> dict[str, Any]:
    if status != 200:
        raise UnexpectedResponse(f"status {status}: {content[:300]!r}")
    decoded: dict[str, Any] = msgspec.json.decode(content)
    return decoded


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise ServerGone(f"{type(exc).__name__}: {exc}") from exc
    except grpc.aio.AioRpcError as exc:
        if exc.code() in _BROKEN_OFF and not exc.trailing_metadata():  # which every answer of the server's has
            raise ServerGone(str(exc.details())) from exc
        raise UnexpectedResponse(f"{exc.code().name}: {exc.details()}") from exc
