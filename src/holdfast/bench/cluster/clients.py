"""Careful clients of a cluster: they send a turn again until it is answered, and log every attempt.

Chats go over HTTP, whole or streamed, with one conversation or several side by side; raw tokens go over gRPC. Each
client asks any member, and another one where the first does not answer.
"""

import asyncio
import hashlib
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from holdfast.bench.agents import Token
from holdfast.bench.cluster.history import Attempt, RecordedTurn
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast_sdk import AsyncClient

_IDS = range(100, 5000)  # of given tokens: the upstream samples lower ones, so that a history can be split into turns
_BLOCK = 8  # given tokens of a turn
_APPEND_EVERY = 4
_PAUSE_S = 0.1  # before a request is sent again
_AVOIDED_S = 0.5  # how long a client does not ask a member that said that it cannot
_SILENT_S = 5.0  # how long it does not ask one that did not answer
_MOVED_SHARE = 0.2  # of the turns go to another member than the one before
_GIVEN_UP_SHARE = 0.15  # of the failed attempts: the client asks for something else instead
_WORTH_A_RETRY = frozenset({408, 409, 421, 429})
_RETRIED_CODES = frozenset({"unknown", "connection_failed", "deadline_exceeded", "cancelled", "session_busy"})
_READ_S = 60.0
_SHOWN = 300


class TurnFailed(Exception):
    """An attempt without an answer. `is_final`: sending it again cannot help."""

    def __init__(self, error: str, *, is_final: bool = False, received: str = "") -> None:
        super().__init__(error)
        self.is_final = is_final
        self.received = received


class SessionStuck(HoldfastError):
    """A session whose next turn is refused, or not answered in time."""


@dataclass(frozen=True, slots=True)
class MemberAddress:
    name: str
    http: str  # a URL
    grpc: str  # HOST:PORT


@dataclass(frozen=True, slots=True)
class ClientSession:
    """A session that a client had. `is_chat`: it is read over HTTP, otherwise over gRPC."""

    session_id: str
    is_chat: bool


@dataclass(slots=True, kw_only=True)
class Playground:
    """What all clients share. `addresses` are those of the members that are meant to be there."""

    http: aiohttp.ClientSession
    addresses: Callable[[], Sequence[MemberAddress]]
    num_turns: int  # of a session, then it is left alone
    reply_tokens: int
    patience_s: float
    attempts: list[Attempt] = field(default_factory=list)
    sessions: list[ClientSession] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    ends_at: float = 0.0  # by `time.monotonic`: not to be waited for any longer; 0: clients go on


class ClusterClient(ABC):
    """One client, with one session after the other."""

    is_chat: bool

    def __init__(self, playground: Playground, seed: int) -> None:
        self._all = playground
        self._random = random.Random(seed)
        self._member = ""
        self._avoided: dict[str, float] = {}
        self._session_id = ""

    async def run(self) -> None:
        """Until the playground ends; a session that is stuck is left, and told there."""
        while not self._all.ends_at:
            self._session_id = ""
            try:
                await self._retried("opening a session", self._open)
                self._all.sessions.append(ClientSession(self._session_id, self.is_chat))
                await self._converse()
            except SessionStuck as exc:
                self._all.stuck.append(f"session {self._session_id}: {exc}")

    @abstractmethod
    async def _open(self, member: MemberAddress) -> str: ...

    @abstractmethod
    async def _converse(self) -> None:
        """Turns on the session until it has enough, or the playground ends."""

    def _pick(self) -> MemberAddress:
        """Mostly the member that answered last; never one that did not answer a moment ago, if there is another."""
        now = time.monotonic()
        everyone = list(self._all.addresses())
        willing = [one for one in everyone if self._avoided.get(one.name, 0.0) <= now] or everyone
        last = [one for one in willing if one.name == self._member]
        picked = last[0] if last and self._random.random() >= _MOVED_SHARE else self._random.choice(willing)
        self._member = picked.name
        return picked

    async def _attempted(self, send: Callable[[MemberAddress], Awaitable[Any]]) -> Any:
        """One request, with a limit to its time. Raises TurnFailed."""
        member = self._pick()
        try:
            async with asyncio.timeout(self._all.patience_s):
                return await send(member)
        except (aiohttp.ClientError, TimeoutError) as exc:
            self._avoid(member, _SILENT_S if isinstance(exc, TimeoutError) else _AVOIDED_S)
            raise TurnFailed(type(exc).__name__) from exc

    def _avoid(self, member: MemberAddress, how_long_s: float = _AVOIDED_S) -> None:
        self._avoided[member.name] = time.monotonic() + how_long_s

    async def _retried(self, what: str, send: Callable[[MemberAddress], Awaitable[Any]]) -> Any:
        """Until it is answered; for requests that may be sent any number of times."""
        while True:
            try:
                return await self._attempted(send)
            except TurnFailed as exc:
                await self._pause(what, exc)

    async def _pause(self, what: str, failure: TurnFailed) -> None:
        if failure.is_final or 0 < self._all.ends_at < time.monotonic():
            raise SessionStuck(f"{what}: {failure}") from failure
        await asyncio.sleep(_PAUSE_S * (0.5 + self._random.random()))

    async def _turn(
        self, conversation: str, position: int, turn: str, send: Callable[[MemberAddress], Awaitable[tuple[str, str]]]
    ) -> bool:
        """Ask for a turn until it is answered. Whether it was: false where the client gave it up."""
        while True:
            started = time.monotonic()
            log = Attempt(
                session_id=self._session_id,
                conversation=conversation,
                position=position,
                turn=turn,
                is_acknowledged=True,
                started_s=started,
            )
            try:
                content, member = await self._attempted(send)
            except TurnFailed as exc:
                self._note(log, is_acknowledged=False, content=exc.received, member=self._member, error=str(exc))
                await self._pause(f"turn {turn!r} at {position}", exc)
                if not self._all.ends_at and self._random.random() < _GIVEN_UP_SHARE:
                    return False
            else:
                self._note(log, content=content, member=member)
                return True

    def _note(self, log: Attempt, **outcome: Any) -> None:
        from dataclasses import replace

        self._all.attempts.append(replace(log, ended_s=time.monotonic(), **outcome))


class ChatClient(ClusterClient):
    """Sends the whole conversation each time, and again with the same key where there was no answer."""

    is_chat = True

    def __init__(self, playground: Playground, seed: int, *, num_conversations: int, is_streaming: bool) -> None:
        super().__init__(playground, seed)
        self._num_conversations = num_conversations
        self._is_streaming = is_streaming

    async def _open(self, member: MemberAddress) -> str:
        history = "forest" if self._num_conversations > 1 else "strict"
        _, content = await self._post(member, "/sessions", {"history": history})
        self._session_id = str(msgspec.json.decode(content)["session_id"])
        return self._session_id

    async def _converse(self) -> None:
        async with together() as conversations:
            for number in range(self._num_conversations):
                conversations.create_task(self._conversation(f"You are helper {number} of {self._session_id}."))

    async def _conversation(self, system: str) -> None:
        messages = [{"role": "system", "content": system}]
        position = 0
        while position < self._all.num_turns and (not self._all.ends_at or position == 0):
            question = f"Question {position}, {self._random.getrandbits(48):012x}?"
            asked = [*messages, {"role": "user", "content": question}]
            texts: list[str] = []

            async def send(
                member: MemberAddress,
                asked: list[dict[str, str]] = asked,
                key: str = question,
                texts: list[str] = texts,
                seed: int = position,
            ) -> tuple[str, str]:
                content, text, answered = await self._chat(member, asked, key, seed)
                texts[:] = [text]
                return content, answered

            if await self._turn(system, position, question, send):
                messages = [*asked, {"role": "assistant", "content": texts[0]}]
                position += 1

    async def _chat(
        self, member: MemberAddress, asked: list[dict[str, str]], key: str, seed: int
    ) -> tuple[str, str, str]:
        """What the attempt's log says of the reply, the text, and who answered."""
        body = {
            "messages": asked,
            "max_tokens": self._all.reply_tokens,
            "temperature": 1.0,
            "seed": seed,
            "return_meta_info": True,
            "stream": self._is_streaming,
        }
        path = f"/sessions/{self._session_id}/v1/chat/completions"
        answered, content = await self._post(member, path, body, key=key)
        past = digest_of_past(asked)
        if not self._is_streaming:
            return whole_content(past, content), _text_of(content), answered
        text, finish = _streamed(content)
        return stream_content(past, text, finish), text, answered

    async def _post(
        self, member: MemberAddress, path: str, body: dict[str, Any], *, key: str = ""
    ) -> tuple[str, bytes]:
        """The name of the member that answered, and the body of its response."""
        headers = {"content-type": "application/json"} | ({"idempotency-key": key} if key else {})
        async with self._all.http.post(member.http + path, data=msgspec.json.encode(body), headers=headers) as reply:
            content = await reply.read()
            if reply.status >= 500:
                self._avoid(member)
            if reply.status != 200:
                is_final = 400 <= reply.status < 500 and reply.status not in _WORTH_A_RETRY
                raise TurnFailed(f"{reply.status} {_code_of(content)}", is_final=is_final)
            return reply.headers.get("holdfast-member", member.name), content


class TokenClient(ClusterClient):
    """Appends tokens and samples, at the length that it knows; every fourth turn only appends."""

    is_chat = False

    def __init__(self, playground: Playground, seed: int) -> None:
        super().__init__(playground, seed)
        self._length = 0
        self._sdks: dict[str, AsyncClient] = {}

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            await self._close_all()

    async def _close_all(self) -> None:
        while self._sdks:
            await self._sdks.popitem()[1].close()

    async def _open(self, member: MemberAddress) -> str:
        async with self._calling(member) as sdk:
            self._session_id = (await sdk.create_session()).id
        self._length = 0
        return self._session_id

    async def _converse(self) -> None:
        for number in range(self._all.num_turns):
            if self._all.ends_at and number:
                return
            await self._one_turn(number)

    async def _one_turn(self, number: int) -> None:
        given = self._random.choices(_IDS, k=_BLOCK)
        before = self._length

        async def send(member: MemberAddress) -> tuple[str, str]:
            async with self._calling(member) as sdk:
                if number % _APPEND_EVERY == _APPEND_EVERY - 1:
                    await sdk.session(self._session_id).append(given, expected_history_length=before)
                    return token_content(_given(given)), member.name
                return await self._sample(sdk, given), member.name

        try:
            if await self._turn("", before, turn_name(given), send):
                self._length += len(self._all.attempts[-1].content.split())
        except _HistoryMoved:
            await self._retried("reading the history", self._catch_up)

    async def _sample(self, sdk: "AsyncClient", given: list[int]) -> str:
        from holdfast_sdk import HoldfastError as SdkError

        generation = await sdk.session(self._session_id).turn(
            given,
            max_tokens=self._all.reply_tokens,
            expected_history_length=self._length,
            timeout_s=self._all.patience_s,
            seed=self._length,
            temperature=1.0,
        )
        tokens = _given(given)
        try:
            async for token in generation:
                tokens.append(Token(token.id, token.logprob, token.sampling_logprob))
        except SdkError as exc:
            if not generation.is_done:  # the last event acknowledges the turn, even if the connection breaks off then
                exc.add_note(token_content(tokens))
                raise
        return token_content(tokens)

    async def _catch_up(self, member: MemberAddress) -> None:
        """Read what is on record beyond the length that was known: turns whose answers did not arrive."""
        started = time.monotonic()
        async with self._calling(member) as sdk:
            turns = split_turns(await read_tokens(sdk, self._session_id, self._length), self._length)
        for one in turns:
            log = Attempt(
                session_id=self._session_id,
                position=one.position,
                turn=one.turn,
                is_acknowledged=True,
                started_s=started,
            )
            self._note(log, content=one.contents[0], member=member.name)
            self._length += len(one.contents[0].split())

    @asynccontextmanager
    async def _calling(self, member: MemberAddress) -> "AsyncIterator[AsyncClient]":
        """The client of a member. After a failure all are made anew: a channel whose connection broke, perhaps long
        ago, may fail at once though its member is back."""
        from holdfast_sdk import AsyncClient
        from holdfast_sdk import HoldfastError as SdkError

        if member.grpc not in self._sdks:
            self._sdks[member.grpc] = AsyncClient(member.grpc, timeout_s=self._all.patience_s, retries=0)
        try:
            yield self._sdks[member.grpc]
        except SdkError as exc:
            if exc.code == "history_conflict":
                raise _HistoryMoved from exc
            status = exc.grpc_status.name if exc.grpc_status else ""
            is_worth_it = exc.code in _RETRIED_CODES or status in ("UNAVAILABLE", "RESOURCE_EXHAUSTED")
            if status in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"):
                self._avoid(member, _SILENT_S if status == "DEADLINE_EXCEEDED" else _AVOIDED_S)
                await self._close_all()
            received = "".join(getattr(exc, "__notes__", ()))
            raise TurnFailed(f"{status} {exc.code}", is_final=not is_worth_it, received=received) from exc


class _HistoryMoved(Exception):
    """The history is longer than the client knew."""


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first failure, where it is one of ours, is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except* HoldfastError as exc:
        raise exc.exceptions[0] from None


# What a log and the record say of one turn


def digest_of_past(messages: Sequence[dict[str, Any]]) -> str:
    pairs = [[message["role"], message["content"]] for message in messages]
    return hashlib.blake2b(msgspec.json.encode(pairs), digest_size=8).hexdigest()


def whole_content(past: str, body: bytes) -> str:
    return f"{past} whole {hashlib.blake2b(body, digest_size=16).hexdigest()} {_text_of(body)}"


def stream_content(past: str, text: str, finish: str) -> str:
    return f"{past} stream {finish} {text}"


def turn_name(given: Sequence[int]) -> str:
    return "-".join(map(str, given))


def token_content(tokens: Sequence[Token]) -> str:
    """A word for each token, with its logprobs bit for bit."""
    return " ".join(
        str(token.id) if token.logprob is None else f"{token.id}:{token.logprob!r}:{token.sampling_logprob!r}"
        for token in tokens
    )


def _given(ids: Sequence[int]) -> list[Token]:
    return [Token(id) for id in ids]


def split_turns(tokens: Sequence[Token], start: int) -> list[RecordedTurn]:
    """The turns of a history from position `start` on: each begins with a block of given tokens."""
    found: list[RecordedTurn] = []
    begin = 0
    while begin < len(tokens):
        end = begin + _BLOCK
        while end < len(tokens) and tokens[end].logprob is not None:
            end += 1
        part = tokens[begin:end]
        name = turn_name([token.id for token in part[:_BLOCK]])
        found.append(RecordedTurn(position=start + begin, turn=name, contents=(token_content(part),)))
        begin = end
    return found


# The record at the end


class _ShownRecord(msgspec.Struct):
    request: dict[str, Any]
    response: msgspec.Raw


class _ShownSession(msgspec.Struct):
    records: list[_ShownRecord]


async def read_record(
    session: ClientSession, http: aiohttp.ClientSession, sdk: "AsyncClient", base: str
) -> list[RecordedTurn] | None:
    """All turns of a session, branches included, in the order in which they are on record; None: there is no such
    session. Raises SessionStuck where it cannot be read."""
    from holdfast_sdk import HoldfastError as SdkError
    from holdfast_sdk import SessionNotFound

    if not session.is_chat:
        try:
            return split_turns(await read_tokens(sdk, session.session_id), 0)
        except SessionNotFound:
            return None
        except SdkError as exc:
            raise SessionStuck(f"it cannot be read: {exc.code}: {exc}") from exc
    timeout = aiohttp.ClientTimeout(total=_READ_S)
    async with http.get(f"{base}/sessions/{session.session_id}?branches=all", timeout=timeout) as reply:
        content = await reply.read()
        if reply.status == 404:
            return None
        if reply.status != 200:
            raise SessionStuck(f"it cannot be read: {reply.status} {content[:_SHOWN]!r}")
        shown = msgspec.json.decode(content, type=_ShownSession)
    return [_recorded(one) for one in shown.records]


def _recorded(one: _ShownRecord) -> RecordedTurn:
    messages = one.request["messages"]
    past, body = digest_of_past(messages), bytes(one.response)
    choice = msgspec.json.decode(body)["choices"][0]
    return RecordedTurn(
        conversation=messages[0]["content"],
        position=sum(message["role"] == "user" for message in messages) - 1,
        turn=messages[-1]["content"],
        contents=(whole_content(past, body), stream_content(past, _text_of(body), choice["finish_reason"])),
    )


async def read_tokens(sdk: "AsyncClient", session_id: str, start: int = 0) -> list[Token]:
    tokens: list[Token] = []
    async for chunk in sdk.session(session_id).history(start):
        if chunk.kind == "SAMPLED":
            tokens += map(Token, chunk.token_ids, chunk.logprobs, chunk.sampling_logprobs)
        else:
            tokens += _given(chunk.token_ids)
    return tokens


def _text_of(body: bytes) -> str:
    return str(msgspec.json.decode(body)["choices"][0]["message"]["content"])


def _code_of(content: bytes) -> str:
    try:
        return str(msgspec.json.decode(content)["error"]["code"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "without a code"


def _streamed(content: bytes) -> tuple[str, str]:
    """The text of a stream and why it ended. Raises TurnFailed unless the stream is whole."""
    events = [line.removeprefix(b"data: ") for line in content.splitlines() if line.startswith(b"data: ")]
    if events[-1:] != [b"[DONE]"]:
        raise TurnFailed(f"the stream broke off after {len(events)} events")
    text, finish = "", ""
    for event in events[:-1]:
        chunk = msgspec.json.decode(event)
        if "error" in chunk:
            raise TurnFailed(f"stream {chunk['error'].get('code')}")
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
    return text, finish
