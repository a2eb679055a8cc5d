"""A fake upstream server on a real socket, and the fake model behind it. What SGLang and vLLM have in common.

The fakes follow the documented wire format, reject with 400 what the real servers reject or what lacks a field that
we must set, and misbehave when told to:

    async with FakeSGLang() as upstream:
        upstream.faults.append(Fault(edit=lambda reply: reply["choices"].clear()))
        ...  # upstream.url, upstream.requests
"""

import asyncio
import base64
import hashlib
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
from aiohttp import web

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DrawnToken:
    token: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest first


@dataclass(slots=True)
class FakeModel:
    """A language model whose next-token distribution is a hash of the whole prompt.

    `scripted` replies come first, one list of token ids each; after them tokens are drawn.
    """

    name: str = "fake-model"
    vocab_size: int = 64
    eos_token_id: int | None = 2
    context: int = 4096
    logprob_kind: str = "raw"
    decode: Callable[[Sequence[int]], str] = lambda ids: "".join(f"<{i}>" for i in ids)
    encode: Callable[[str], list[int]] | None = None  # without it, the server has no /tokenize
    scripted: deque[list[int]] = field(default_factory=deque)

    def draw(self, prompt: Sequence[int], options: Mapping[str, Any], max_tokens: int) -> list[DrawnToken]:
        """Up to `max_tokens`, ending with the first that stops."""
        script = self.scripted.popleft() if self.scripted else None
        stops = set(options.get("stop_token_ids") or ())
        if not options.get("ignore_eos") and self.eos_token_id is not None:
            stops.add(self.eos_token_id)
        drawn: list[DrawnToken] = []
        for index in range(len(script) if script is not None else max_tokens):
            history = [*prompt, *(d.token for d in drawn)]
            drawn.append(self._draw(history, options, script[index] if script is not None else None))
            if script is None and drawn[-1].token in stops:
                break
        return drawn

    def _draw(self, history: Sequence[int], options: Mapping[str, Any], forced: int | None) -> DrawnToken:
        digest = hashlib.blake2b(np.asarray(history, np.int64).tobytes(), digest_size=8).digest()
        source = np.random.Generator(np.random.PCG64(int.from_bytes(digest)))
        logits = source.standard_normal(self.vocab_size) * 2
        temperature = options.get("temperature")
        temperature = 1.0 if temperature is None else temperature
        cooled = logits / (temperature or 1.0)
        raw, sampling = (x - np.log(np.exp(x - x.max()).sum()) - x.max() for x in (logits, cooled))
        seed = options.get("seed", options.get("sampling_seed")) or 0
        noise = np.random.Generator(np.random.PCG64([seed, len(history)])).gumbel(size=self.vocab_size)
        token = int(np.argmax(cooled + noise * (temperature > 0))) if forced is None else forced
        returned = raw if self.logprob_kind == "raw" else sampling
        best = np.argsort(-returned)[:20]
        return DrawnToken(token, float(returned[token]), [(int(i), float(returned[i])) for i in best])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong with one reply. The fakes take the next fault from their queue."""

    edit: Callable[[Json], Any] | None = None  # changes the reply in place; its result, if any, is sent instead
    body: bytes | None = None  # sent instead of the reply
    status: int = 0  # sent instead of the reply's own
    headers: Mapping[str, str] = field(default_factory=dict)
    is_hanging: bool = False  # never replies
    drops: str = ""  # closes the connection "before" the reply, or in its "middle"
    ends_after: int | None = None  # a stream ends, cleanly, after this many events


@dataclass(frozen=True, slots=True)
class Seen:
    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Json:
        content: Json = json.loads(self.body)
        return content


class FakeRefusal(Exception):
    """A request that the real server would reject."""


def need(condition: object, why: str) -> None:
    if not condition:
        raise FakeRefusal(why)


def flat_rows(num_rows: int, width: int = 6) -> str:
    """Routed experts as SGLang sends them."""
    return base64.b64encode(np.arange(num_rows * width, dtype=np.int32).tobytes()).decode()


class FakeUpstream(ABC):
    """A server on a free port of 127.0.0.1, or on `port`, for as long as the context lasts.

    `routed_experts`: what it sends where they are requested, or a function from the number of rows to that.
    `is_routed`: a router is in front of it, which does not send all of our headers.
    """

    is_routed = False
    health_status = 200

    def __init__(
        self,
        model: FakeModel | None = None,
        *,
        key: str = "",
        delay_s: float = 0.0,
        routed_experts: Any = None,
        port: int = 0,
    ) -> None:
        self.model = model or FakeModel()
        self.key = key
        self.delay_s = delay_s  # before each sampled token
        self.routed_experts = routed_experts
        self.faults: deque[Fault] = deque()
        self.requests: list[Seen] = []
        self.num_running = 0
        self.most_running = 0  # at the same time
        self.num_left = 0  # clients that disconnected before they had their reply
        self.port = port
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    def chats(self) -> list[Seen]:
        return [seen for seen in self.requests if seen.path == "/v1/chat/completions"]

    def _routes(self) -> "Handlers":
        return {
            ("POST", "/v1/chat/completions"): self._chat,
            ("GET", "/v1/models"): self._models,
            ("POST", "/tokenize"): self._tokenize,
            ("GET", "/health"): self._health,
        }

    @abstractmethod
    async def _chat(self, request: Json, reply: "FakeReply") -> None: ...

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append(
            Seen(request.method, request.path, request.rel_url.raw_query_string, dict(request.headers), body)
        )
        is_faulty = self.faults and request.path != "/health"
        reply = FakeReply(request, self.faults.popleft() if is_faulty else Fault())
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
                return web.json_response({"error": {"message": "no valid key"}}, status=401)
            encoding = request.headers.get("accept-encoding")
            need(encoding == "identity" or self.is_routed, "accept-encoding must be identity")
            handler = self._routes().get((request.method, request.path))
            if handler is None:
                return web.json_response({"detail": "Not Found"}, status=404)
            await handler(_object(body) if body else {}, reply)
        except FakeRefusal as exc:
            return web.json_response({"error": {"message": str(exc), "code": 400}}, status=400)
        except (asyncio.CancelledError, ConnectionError):
            self.num_left += 1
            raise
        finally:
            self.num_running -= 1
        return reply.response

    async def _draw(self, prompt: list[int], options: Mapping[str, Any], max_tokens: int) -> list[DrawnToken]:
        drawn = self.model.draw(prompt, options, max_tokens)
        await asyncio.sleep(self.delay_s * len(drawn))
        return drawn

    def _text(self, drawn: Sequence[DrawnToken]) -> str:
        return self.model.decode([d.token for d in drawn if d.token != self.model.eos_token_id])

    def _experts(self, num_rows: int) -> Any:
        return self.routed_experts(num_rows) if callable(self.routed_experts) else self.routed_experts

    def _check_prompt(self, ids: Any) -> list[int]:
        need(isinstance(ids, list) and ids, "the prompt must be a list of token ids")
        need(
            all(type(i) is int and 0 <= i < self.model.vocab_size for i in ids),
            "the prompt has an id outside the vocabulary",
        )
        return list(ids)

    async def _models(self, request: Json, reply: "FakeReply") -> None:
        card = {"id": self.model.name, "object": "model", "max_model_len": self.model.context}
        await reply.send({"object": "list", "data": [card]})

    async def _tokenize(self, request: Json, reply: "FakeReply") -> None:
        need(isinstance(request.get("prompt"), str), "prompt must be a string")
        encode = self.model.encode
        await reply.send({"tokens": encode(request["prompt"])} if encode else {}, status=200 if encode else 404)

    async def _health(self, request: Json, reply: "FakeReply") -> None:
        await reply.send({}, status=self.health_status)

    def _check_chat(self, request: Json, reply: "FakeReply") -> int:
        messages = request.get("messages")
        need(isinstance(messages, list) and messages, "messages must be a list")
        need(
            all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages or []), "a message has no role"
        )
        need(request.get("model") in (None, self.model.name), "no such model")
        need("stream" not in request and "stream_options" not in request, "stream fields do not belong upstream")
        need(request.get("n", 1) == 1, "n must be 1")
        need(request.get("logprobs") is True, "logprobs must be true")
        need(reply.request.headers.get("x-smg-routing-key"), "the routing key is missing")
        max_tokens = request.get("max_completion_tokens") or request.get("max_tokens") or 16
        need(type(max_tokens) is int and max_tokens > 0, "max_tokens must be 1 or more")
        return int(max_tokens)


class FakeReply:
    """Sends a handler's reply, changed by the fault if there is one."""

    def __init__(self, request: web.Request, fault: Fault) -> None:
        self.request = request
        self.fault = fault
        self.response: web.StreamResponse

    async def send(self, content: Json, *, status: int = 200) -> None:
        fault = self.fault
        if fault.is_hanging:
            await asyncio.Event().wait()
        if fault.drops == "before":
            self._cut_off()
        sent: Any = content
        if fault.edit is not None and (edited := fault.edit(content)) is not None:
            sent = edited
        body = json.dumps(sent).encode() if fault.body is None else fault.body
        headers = {"content-type": "application/json", "set-cookie": "upstream=1", **fault.headers}
        if fault.drops == "middle":
            self.response = web.StreamResponse(headers={**headers, "content-length": str(len(body))})
            await self.response.prepare(self.request)
            await self.response.write(body[: len(body) // 2])
            self._cut_off()
        self.response = web.Response(status=fault.status or status, body=body, headers=headers)

    async def stream(self, events: Sequence[Json], delay_s: float) -> None:
        fault = self.fault
        if fault.status or fault.body is not None or fault.drops == "before":
            await self.send({"error": {"message": "refused"}})
            return
        self.response = web.StreamResponse(headers={"content-type": "text/event-stream", **fault.headers})
        await self.response.prepare(self.request)
        for index, event in enumerate(events):
            if fault.is_hanging and index == (fault.ends_after or 0):
                await asyncio.Event().wait()
            if fault.drops == "middle" and index == (fault.ends_after or 1):
                self._cut_off()
            if not fault.is_hanging and not fault.drops and index == fault.ends_after:
                return
            await asyncio.sleep(delay_s)
            edited = fault.edit(event) if fault.edit else None
            await self.response.write(b"data: " + json.dumps(edited or event).encode() + b"\n\n")
        await self.response.write(b"data: [DONE]\n\n")

    def _cut_off(self) -> None:
        if self.request.transport is not None:
            self.request.transport.abort()
        raise ConnectionResetError("the fault drops the connection")


Handlers = dict[tuple[str, str], Callable[[Json, FakeReply], Awaitable[None]]]


def _object(body: bytes) -> Json:
    try:
        content = json.loads(body)
    except ValueError as exc:
        raise FakeRefusal(f"not JSON: {exc}") from exc
    need(isinstance(content, dict), "the body must be an object")
    return dict(content)
