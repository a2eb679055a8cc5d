"""Bad replies of an upstream: wrong fields, wrong counts, wrong bytes, wrong HTTP, wrong streams.

Whatever it sends, nothing is recorded but what a second reading of its bytes, made here, finds to be right, and the
next good reply is recorded as if nothing had happened.
"""

import asyncio
import contextlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc

from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc
from holdfast.testing.fake_servers import FakeSGLang, FakeVLLM
from holdfast.testing.fake_upstream import DrawnToken, FakeModel, FakeRefusal, FakeUpstream, Handlers
from tests.fuzz.campaign import Campaign, ServerProcess, Wrong, check_refusal
from tests.fuzz.mutation import Mutator
from tests.fuzz.second_reading import NotRight, right_tokens
from tests.fuzz.wire import Closed, Connection
from tests.serving import default_chat

GOOD = "good"  # a session's label, which tells the upstream to behave
CASES_A_SESSION = 12
MAX_TOKENS = 6
MAX_TURNS = 4
TRIES = 5
STATUSES = (100, 101, 102, 199, 201, 202, 204, 206, 299, 300, 302, 304, 400, 401, 403, 404, 408, 413, 418, 422, 429,
            500, 502, 503, 504, 599, 600, 700, 999)  # fmt: skip
HEADERS = (
    "holdfast-recorded: true", "idempotent-replayed: true", "x-request-id: theirs", "retry-after: " + "9" * 30,
    "location: http://example.org", "content-encoding: gzip", "set-cookie: a=b", "connection: x-a", "x-a: \xff",
)  # fmt: skip
EXPLAINED = (502, 503, 504)
CHAT = "/v1/chat/completions"
NAME_TOKENS = 3  # the first tokens of a token session, by which the upstream knows it
OURS = ("holdfast-recorded", "idempotent-replayed")


class QuickModel(FakeModel):
    """Draws at random, in microseconds."""

    def draw(self, prompt: Sequence[int], options: Mapping[str, Any], max_tokens: int) -> list[DrawnToken]:
        number = random.Random(hash(tuple(prompt)))
        drawn = [
            DrawnToken(number.randrange(100, 40_000), -number.random(), [(7, -1.5), (8, -2.5)])
            for _ in range(min(max_tokens, 4))
        ]
        stops = set(options.get("stop_token_ids") or ())
        return [one for one in drawn if one.token not in stops]


@dataclass(slots=True)
class Sent:
    """What the upstream sent last on behalf of a session: the prompt it had read, and the bytes of its reply."""

    prompt: list[int]
    raw: bytes
    hangs: bool = False

    @property
    def status(self) -> int:
        line = self.raw.partition(b"\r\n")[0].split(b" ")
        return int(line[1]) if len(line) > 1 and line[1].isdigit() else 0

    @property
    def body(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[2]


class LyingUpstream:
    """Answers requests as SGLang or vLLM would, then spoils the answer, unless the session's label says otherwise."""

    def __init__(self, kind: str, seed: int) -> None:
        tokenizer = default_chat().model.tokenizer
        model = QuickModel(
            vocab_size=tokenizer.inner.get_vocab_size(),
            decode=lambda ids: tokenizer.decode(list(ids), skip_special=True),
        )
        self.kind = kind
        self.fake: FakeUpstream = FakeSGLang(model) if kind == "sglang" else FakeVLLM(model)
        self.mutator = Mutator(seed)
        self.sent: dict[str, Sent] = {}
        self.good: set[str] = set()  # sessions to which the truth is told
        self.vocab_size = model.vocab_size

    async def __aenter__(self) -> "LyingUpstream":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 24)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *caught: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._answer(reader, writer):
                pass
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection can be used again."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split()
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        reply = _Reply(headers)
        routes: Handlers = self.fake._routes()
        handler = routes.get((method, path))
        try:
            if handler is None:
                reply.contents, reply.status = [{"detail": "Not Found"}], 404
            else:
                await handler(json.loads(body) if body else {}, reply)  # type: ignore[arg-type]
        except FakeRefusal as exc:
            reply.contents, reply.status = [{"error": {"message": str(exc)}}], 400
        session = headers.get("x-smg-routing-key", "") if path == CHAT else _name(_prompt(body))
        if session in self.good or self._is_probe(method, path, body):
            raw, keeps = reply.encoded(), True
        else:
            raw, keeps = self._spoilt(reply)
        self.sent[session] = Sent(_prompt(body), raw, hangs=not raw)
        if not raw:  # hangs
            await reader.read()
            return False
        writer.write(raw)
        await writer.drain()
        return keeps

    def _is_probe(self, method: str, path: str, body: bytes) -> bool:
        """Whether the backend asks for itself: a lie would only keep it from sending requests."""
        return (
            method == "GET" or path == "/tokenize" or _prompt(body) == [self.vocab_size // part for part in (7, 5, 3)]
        )

    def _spoilt(self, reply: "_Reply") -> tuple[bytes, bool]:
        """The bytes of a bad answer, none for one that never comes, and whether the connection stays open."""
        number = self.mutator.random
        chance = number.random()
        if chance < 0.0005:
            return b"", False
        if chance < 0.7:  # wrong values
            index = number.randrange(len(reply.contents))
            contents = [*reply.contents]
            contents[index] = self.mutator.mutated(contents[index])
            raw = reply.encoded([self.mutator.encoded(content) for content in contents])
        elif chance < 0.78 and reply.is_stream:
            raw = self._spoilt_stream(reply)
        elif chance < 0.85:
            return reply.encoded(status=number.choice(STATUSES)), False
        elif chance < 0.9:
            raw = reply.encoded(headers=number.choice(HEADERS))
        elif chance < 0.95:  # breaks off
            raw = reply.encoded()
            return raw[: number.randrange(1, len(raw))], False
        else:
            return self.mutator.spoilt(reply.encoded()), False
        return raw, True

    def _spoilt_stream(self, reply: "_Reply") -> bytes:
        """Events in a wrong order or number, or framed in another way."""
        number, events, body = self.mutator.random, [*reply.contents], reply.body(None)
        match number.randrange(5):
            case 0:
                number.shuffle(events)
            case 1:
                events = events[: number.randrange(len(events) + 1)]
            case 2:
                events += events[-number.randrange(1, 3) :]
            case 3:
                body = body.replace(b"\n", b"")
                return reply.head(len(body)) + body
            case _:
                body = body.replace(b"\n\n", b"\r\n: comment\r\n\r\n")
                return reply.head(len(body)) + body
        return reply.encoded([json.dumps(event).encode() for event in events])


class _Reply:
    """Takes what a fake's handler sends, for this module to write in its own way."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.request = SimpleNamespace(headers=headers)
        self.contents: list[Any] = []
        self.status = 200
        self.is_stream = False

    async def send(self, content: Any, *, status: int = 200) -> None:
        self.contents, self.status = [content], status

    async def stream(self, events: Sequence[Any], delay_s: float) -> None:
        self.contents, self.is_stream = list(events) or [{}], True

    def body(self, contents: Sequence[bytes] | None) -> bytes:
        encoded = contents if contents is not None else [json.dumps(content).encode() for content in self.contents]
        if not self.is_stream:
            return b"".join(encoded)
        return b"".join(b"data: " + event + b"\n\n" for event in [*encoded, b"[DONE]"])

    def head(self, num_bytes: int, *, status: int = 0, headers: str = "") -> bytes:
        kind = "text/event-stream" if self.is_stream else "application/json"
        lines = [f"HTTP/1.1 {status or self.status} X", f"content-type: {kind}", f"content-length: {num_bytes}"]
        return "\r\n".join([*lines, *([headers] if headers else []), "", ""]).encode("latin-1")

    def encoded(self, contents: Sequence[bytes] | None = None, *, status: int = 0, headers: str = "") -> bytes:
        body = self.body(contents)
        return self.head(len(body), status=status, headers=headers) + body


def _name(prompt: Sequence[int]) -> str:
    return str(list(prompt[:NAME_TOKENS]))


def _prompt(body: bytes) -> list[int]:
    """The prompt of a request, wherever it is in it."""
    with contextlib.suppress(ValueError, AttributeError):
        request = json.loads(body)
        transfer = request.get("kv_transfer_params") or {}
        for ids in (request.get("input_ids"), transfer.get("prompt_token_ids"), request.get("token_ids")):
            if isinstance(ids, list):
                return ids
        if isinstance(request.get("prompt"), list):
            return list(request["prompt"])
    return []


class BadReplies(Campaign):
    def __init__(self, server: ServerProcess, upstream: LyingUpstream, *, count: int, seed: int) -> None:
        super().__init__(server, count=count, seed=seed)
        self.upstream = upstream

    async def work(self, seed: int) -> None:
        number = random.Random(seed)
        http = Connection(self.server.addresses["http"])
        try:
            async with grpc.aio.insecure_channel(self.server.addresses["grpc"]) as channel:
                stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
                while self.num_left > 0:
                    try:
                        if number.random() < 0.7:
                            await _ChatSession(self, http, number).use()
                        else:
                            await _TokenSession(self, stub, number).use()
                    except (TimeoutError, Closed) as exc:
                        self.note_wrong(f"no answer: {type(exc).__name__} {exc}")
                        await http.close()
                    except Wrong as exc:
                        self.note_wrong(str(exc))
        finally:
            await http.close()

    async def settle(self) -> dict[str, Any]:
        http = Connection(self.server.addresses["http"])
        try:
            left = json.loads((await http.ask("GET", "/sessions")).body)["data"]
        finally:
            await http.close()
        if left:
            raise Wrong(f"{len(left)} sessions are left over: {left[:3]}")
        return await self.server.state()


class _ChatSession:
    """One chat session: some turns with bad replies, then a good one, then all of it compared."""

    def __init__(self, campaign: BadReplies, http: Connection, number: random.Random) -> None:
        self._campaign = campaign
        self._upstream = campaign.upstream
        self._http = http
        self._random = number
        self._messages: list[Any] = [{"role": "user", "content": "Hi"}]
        self._num_turns = 0
        self._ids: list[int] = []
        self._last = b""  # answer

    async def use(self) -> None:
        answer = await self._http.ask("POST", "/sessions", b"{}")
        session = json.loads(answer.body)["session_id"]
        for _ in range(CASES_A_SESSION):
            if self._num_turns >= MAX_TURNS or not self._campaign.take():
                break
            self._campaign.outcomes[await self._turn(session)] += 1
        self._upstream.good.add(session)
        try:
            for _ in range(TRIES):  # it may have closed a kept connection, which nobody can know before
                if (outcome := await self._turn(session)) != "502 refused":
                    break
            if outcome != "200 recorded":
                raise Wrong(f"a good reply was not recorded: {outcome} {self._last!r} for {self._messages}")
            await self._compare(session)
        finally:
            self._upstream.good.discard(session)
            self._upstream.sent.pop(session, None)
            await self._http.ask("DELETE", f"/sessions/{session}")

    async def _turn(self, session: str) -> str:
        is_stream = self._random.random() < 0.5
        body = {"messages": self._messages, "max_tokens": MAX_TOKENS, "stream": is_stream}
        path = f"/sessions/{session}/v1/chat/completions"
        answer = await self._http.ask("POST", path, json.dumps(body).encode())
        self._last = answer.body[:500]
        sent = self._upstream.sent.get(session)
        about = f"after {sent.raw[:1500] if sent else None!r}"
        error = b'data: {"error"' in answer.body if is_stream else False
        if answer.status != 200 or error:
            is_theirs = sent is not None and 400 <= answer.status == sent.status and sent.raw.endswith(answer.body)
            if not error and not is_theirs:
                check_refusal(answer, about, EXPLAINED)
            for secret in (self._upstream.url.encode(), b"Error(", b"Traceback", b" object at 0x"):
                if secret in answer.body and not is_theirs:
                    raise Wrong(f"the error shows {secret!r}: {answer.body[:500]!r} {about}")
            return f"{answer.status} refused"
        assert sent is not None
        try:
            tokens = right_tokens(self._upstream.kind, sent.status, sent.body, sent.prompt, self._upstream.vocab_size)
        except NotRight as exc:
            raise Wrong(f"recorded, though {exc}: {about}") from exc
        head = sent.raw.partition(b"\r\n\r\n")[0].lower()
        if any(f"\r\n{name}:".encode() in head and name in answer.headers for name in OURS):
            raise Wrong(f"the upstream's own headers reached the client as ours: {answer.headers}")
        self._ids = [*sent.prompt, *tokens]
        self._num_turns += 1
        self._messages = [*self._messages, _message(answer.body, is_stream), {"role": "user", "content": "More"}]
        return "200 recorded"

    async def _compare(self, session: str) -> None:
        shown = await self._http.ask("GET", f"/sessions/{session}")
        if shown.status != 200:
            raise Wrong(f"the session cannot be shown: {shown.status} {shown.body[:500]!r}")
        content = json.loads(shown.body)
        if content["turns"] != self._num_turns or content["metadata"]["accumulated_token_ids"] != self._ids:
            raise Wrong(f"on record are {content['turns']} turns, not {self._num_turns}, or other tokens")
        samples = await self._http.ask("POST", f"/sessions/{session}/samples", b'{"format": "json"}')
        if samples.status != 200:
            raise Wrong(f"there are no samples: {samples.status} {samples.body[:500]!r}")


class _TokenSession:
    """The same over gRPC, where the upstream streams."""

    def __init__(self, campaign: BadReplies, stub: Any, number: random.Random) -> None:
        self._campaign = campaign
        self._upstream = campaign.upstream
        self._stub = stub
        self._random = number
        self._name = ""

    async def use(self) -> None:
        start = [self._random.randrange(100, 40_000) for _ in range(NAME_TOKENS)]
        created = await self._stub.CreateSession(pb.CreateSessionRequest(token_ids=start))
        session, length, self._name = created.session_id, created.history_length, _name(start)
        try:
            for _ in range(CASES_A_SESSION):
                if not self._campaign.take():
                    break
                outcome, length = await self._turn(session, length)
                self._campaign.outcomes[outcome] += 1
            self._upstream.good.add(self._name)
            for _ in range(TRIES):
                outcome, length = await self._turn(session, length)
                if outcome != "UNAVAILABLE":
                    break
            if outcome != "done":
                raise Wrong(f"a good stream failed: {outcome}")
        finally:
            self._upstream.good.discard(self._name)
            self._upstream.sent.pop(self._name, None)
            await self._stub.CloseSession(pb.CloseSessionRequest(session_id=session))

    async def _turn(self, session: str, length: int) -> tuple[str, int]:
        options = pb.SamplingOptions(top_logprobs=self._random.randrange(3))
        request = pb.TurnRequest(session_id=session, token_ids=[8, 9], max_tokens=MAX_TOKENS, sampling=options)
        tokens: list[Any] = []
        outcome, wrong = "no end", ""
        try:
            async for event in self._stub.Turn(request, timeout=30):
                if event.WhichOneof("event") == "token":
                    tokens.append(event.token)
                elif event.WhichOneof("event") == "done":
                    outcome = "done"
        except grpc.aio.AioRpcError as exc:
            outcome = exc.code().name
            if exc.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
                wrong = f"{outcome} {exc.details()}"
            if self._upstream.url in (exc.details() or ""):
                wrong = f"the error shows the upstream's URL: {exc.details()}"
        sent = self._upstream.sent.get(self._name)  # none where the request never came
        about = f"after {sent.raw[:1500] if sent else None!r}"
        if wrong or (outcome == "DEADLINE_EXCEEDED" and not (sent and sent.hangs)):
            raise Wrong(f"{wrong or outcome}: {about}")
        if len(tokens) > MAX_TOKENS:
            raise Wrong(f"{len(tokens)} tokens came, {MAX_TOKENS} were asked for: {about}")
        for token in tokens:
            is_logprob = math.isfinite(token.logprob) and token.logprob <= 1e-4
            if not (0 <= token.token_id < self._upstream.vocab_size and is_logprob):
                raise Wrong(f"token {token} came: {about}")
        info = await self._stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session))
        if not length <= info.history_length <= length + 2 + len(tokens):
            raise Wrong(f"the history grew from {length} to {info.history_length} with {len(tokens)} tokens: {about}")
        if info.failure:
            raise Wrong(f"the session failed: {info.failure}: {about}")
        return outcome, info.history_length


def _message(body: bytes, is_stream: bool) -> Any:
    """The assistant's message in an answer, as a client would send it back."""
    merged: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    if is_stream:
        events = [json.loads(line[6:]) for line in body.decode().split("\n") if line.startswith("data: {")]
        parts = [choice["delta"] for event in events for choice in event["choices"]]
    else:
        parts = [json.loads(body)["choices"][0]["message"]]
    for part in parts:
        merged["content"] += part.get("content") or ""
        merged["reasoning_content"] += part.get("reasoning_content") or part.get("reasoning") or ""
        merged["tool_calls"] += [
            {k: v for k, v in call.items() if k != "index"} for call in part.get("tool_calls") or []
        ]
    return {"role": "assistant", **merged}
