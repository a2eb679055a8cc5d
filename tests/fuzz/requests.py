"""Bad requests at both endpoints: wrong fields, wrong bytes, wrong paths, wrong HTTP, wrong protocol buffers."""

import json
import random
from typing import Any
from urllib.parse import quote

import grpc
from google.protobuf.message import Message

from holdfast.serving.grpc.gen import runtime_pb2 as pb
from tests.fuzz.campaign import Campaign, Wrong, check_refusal
from tests.fuzz.mutation import ODD, Mutator
from tests.fuzz.server import NUM_SLABS
from tests.fuzz.wire import Answer, Closed, Connection

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "description": "at", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
RICH: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief.", "name": "me"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "seen"},
    ],
    "model": "test", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 1.5}, "seed": 1,
    "stop": ["x", "y"], "stop_token_ids": [7], "user": "me", "truncation": "auto", "stream": False,
    "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2, "tools": [TOOL],
    "tool_choice": "auto", "parallel_tool_calls": False, "metadata": {"a": "b"},
    "chat_template_kwargs": {"enable_thinking": False}, "return_meta_info": True,
}  # fmt: skip
NOISY: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "refusal": None, "thinking_blocks": [{"a": 1}], "tool_calls": [CALL | {"extra": {}}]},
        {"role": "function", "name": "look", "content": "seen", "provider_specific_fields": None},
    ],
    "max_completion_tokens": 4, "seed": 1, "reasoning_effort": "high", "verbosity": "low", "store": True,
    "service_tier": "flex", "modalities": ["text"], "prompt_cache_key": "k", "safety_identifier": "s", "wishes": 3,
    "tools": [TOOL | {"cache_control": {}}, {"type": "custom", "custom": {"name": "run"}}, {"type": "web_search"}],
    "tool_choice": {"type": "custom", "custom": {"name": "run"}}, "stream_options": {"include_obfuscation": True},
}  # fmt: skip
BRIEF: dict[str, Any] = {"messages": HI, "max_tokens": 2, "stream": True, "seed": 1}
COMPLETION: dict[str, Any] = {"prompt": ["hi", "you"], "max_tokens": 2, "n": 2, "logprobs": 1, "stop": "x"}
SAMPLE: dict[str, Any] = {
    "response": "hi", "response_length": 2, "status": "completed", "weight_versions": ["1"], "reward": 0.5,
    "metadata": {}, "nulls": [], "session_id": "s", "group": "", "label": "", "branch": 1, "num_left_out": 0,
    "logprob_kind": "raw", "turns": [{"number": 1, "start": 0, "sampled_start": 1, "end": 3, "finish_reason": "stop"}],
    "certificate": None, "tokens": [1, 2, 3], "loss_mask": [1, 1], "rollout_log_probs": [-0.5, -1.0], "logprobs": None,
    "sampling_logprobs": None, "rollout_routed_experts": None, "rollout_indexer_topk": None,
}  # fmt: skip
QUERIES = (
    *("", "?", "?page_size=x", "?state=live&state=x", "?q=%ff", "?q=" + "l" * 5000, "?turn=1&start=0&limit=5"),
    *("?turn=-1", "?start=1e9", "?limit=10001", "?turn=" + "9" * 400),
)
BODIES: list[tuple[str, Any]] = [
    (CHAT, RICH),
    (CHAT, BRIEF),
    (CHAT, NOISY),
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2, "stream": True}),
    ("/sessions", {"group": "g", "label": "l", "metadata": {"a": "b"}, "pin_tokens": 4, "history": "forest"}),
    ("/sessions/{}" + CHAT, RICH),
    ("/sessions/{}" + CHAT, BRIEF),
    ("/sessions/{}" + CHAT, NOISY),
    ("/sessions/{}/fork", {"label": "l", "turn": 1}),
    ("/samples/verify", {"format_version": 2, "samples": [SAMPLE], "session_metadata": {}, "empty_reason": None}),
    ("/sessions/{}/reward", {"reward": 1.0, "turn": 1}),
    (
        "/sessions/{}/samples",
        {"branch": "all", "format": "json", "max_seq_len": 100, "weight_versions": "spans", "metadata": {"a": 1}},
    ),
    ("/sessions/purge", {"session_ids": ["s"], "older_than_s": 1e9, "dry_run": True}),
    ("/control/weight_version", {"weight_version": "1"}),
    ("/control/weights", {"path": "/nowhere", "version": "1", "caches": "keep"}),
]
MESSAGE: dict[str, Any] = {
    "model": "m", "max_tokens": 2, "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "x"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "so"},
            {"type": "tool_use", "id": "c", "name": "look", "input": {"at": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "seen"}]},
    ],
    "tools": [{"name": "look", "description": "at", "input_schema": {"type": "object"}}, {"type": "x", "name": "y"}],
    "tool_choice": {"type": "auto"}, "stop_sequences": ["x"], "thinking": {"type": "enabled"}, "temperature": 0.5,
    "top_p": 0.9, "top_k": 5, "metadata": {"user_id": "u"}, "output_config": {"effort": "low"}, "stream": True,
    "thread": {"type": "create", "previous_message_id": "msg_1"},
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "model": "m", "max_output_tokens": 2, "instructions": "Be brief.", "store": True, "stream": True,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "namespace": "n", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "seen"}]},
    ],
    "tools": [
        {"type": "function", "name": "look", "parameters": {"type": "object"}}, {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "look"}]}, {"type": "web_search"},
    ],
    "tool_choice": "auto", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}, "metadata": {"a": "b"},
    "truncation": "auto", "parallel_tool_calls": True, "conversation": None, "previous_response_id": None,
}  # fmt: skip
for _base in ("", "/sessions/{}"):
    BODIES += [
        (f"{_base}/v1/messages?beta=true", MESSAGE),
        (f"{_base}/v1/messages", {"messages": HI, "max_tokens": 2, "system": "x"}),
        (f"{_base}/v1/messages/count_tokens", MESSAGE),
        (f"{_base}/v1/responses", RESPONSE),
        (f"{_base}/v1/responses", {"input": "hi", "max_output_tokens": 2, "previous_response_id": "resp_1"}),
        (f"{_base}/v1/conversations", {"items": HI, "metadata": {"a": "b"}}),
    ]
GRAMMAR = BRIEF | {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
}
PUTS = ("/control/weight_version",)
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "X")
PARTS = ("v1", "sessions", "tokens", "samples", "verify",
         "chat", "completions", "models", "fork", "export", "..", ".", "", "%00", "%", "a" * 300, "é",
         "messages", "count_tokens", "responses", "input_items", "conversations", "resp_1")  # fmt: skip
HEADERS = (
    "content-type: text/plain", "content-type: application/json; charset=utf-16", "accept-encoding: br",
    "idempotency-key: " + "k" * 5000, "x-stainless-retry-count: " + "9" * 50, "x-request-id: {}",
    "authorization: Bearer \xff", "authorization: Basic x", "range: bytes=0-1", "expect: 100-continue",
    "content-encoding: gzip", "cookie: " + "c" * 9000, "accept: text/event-stream", "x-api-key: \xff",
    "holdfast-session: fuzz", "holdfast-session: " + "n" * 300, "thread-id: \xff\xfe", "anthropic-version: 0",
)  # fmt: skip
WRONG_HEADERS = (
    b"transfer-encoding: identity", b"transfer-encoding: chunked", b"x-request-id: \x01", b"content-length: 5", b"a",
    b":", b"content-length: -1", b"host: example.org", b"x: " + b"y" * 70_000, 
    b"connection: upgrade\r\nupgrade: websocket",
)  # fmt: skip
RPCS: list[tuple[str, Message]] = [
    ("CreateSession", pb.CreateSessionRequest(client_label="l", token_ids=[1, 2], metadata={"a": "b"}, pin_tokens=1)),
    ("GetModelInfo", pb.GetModelInfoRequest()),
    ("AppendTokens", pb.AppendTokensRequest(session_id="{}", token_ids=[1, 2], expected_history_length=3)),
    ("ForkSession", pb.ForkSessionRequest(session_id="{}", at_position=1, client_label="l")),
    ("RewindSession", pb.RewindSessionRequest(session_id="{}", to_position=1)),
    ("GetSessionInfo", pb.GetSessionInfoRequest(session_id="{}")),
    ("ListSessions", pb.ListSessionsRequest(page_size=3, page_token="x", client_label="l")),
    ("CloseSession", pb.CloseSessionRequest(session_id="other")),
]
STREAMS: list[tuple[str, Message]] = [
    ("Generate", pb.GenerateRequest(session_id="{}", max_tokens=2, sampling=pb.SamplingOptions(seed=1, top_p=0.5))),
    ("Turn", pb.TurnRequest(session_id="{}", token_ids=[1, 2], max_tokens=2, expected_history_length=0)),
    ("GetHistory", pb.GetHistoryRequest(session_id="{}", from_position=0, to_position=1)),
    ("SearchHistory", pb.SearchHistoryRequest(session_id="{}", query="hi", limit=4, include_in_view=True)),
    ("SearchHistory", pb.SearchHistoryRequest(session_id="{}", query_token_ids=[5, 6])),
    ("ExportSession", pb.ExportSessionRequest(session_id="{}", without_snapshot=True)),
]
NEVER = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
CASES_A_SESSION = 60


class BadRequests(Campaign):
    """`only`: bodies for paths that contain this text, and nothing else; empty: everything."""

    only = ""

    async def work(self, seed: int) -> None:
        http = Connection(self.server.addresses["http"])
        try:
            async with grpc.aio.insecure_channel(self.server.addresses["grpc"]) as channel:
                worker = _Worker(self, Mutator(seed), http, channel)
                while self.num_left > 0:
                    await worker.use_session()
        finally:
            await http.close()

    async def settle(self) -> dict[str, Any]:
        """A good request of each kind still works, and every session can be closed."""
        http = Connection(self.server.addresses["http"])
        try:
            token = ""
            while True:
                page = json.loads((await http.ask("GET", f"/sessions?page_token={quote(token)}")).body)
                for view in page["data"]:
                    closed = await http.ask("DELETE", f"/sessions/{view['session_id']}")
                    if closed.status not in (204, 404):
                        raise Wrong(f"a session cannot be closed: {closed.status} {closed.body[:300]!r}")
                if not (token := page["next_page_token"]):
                    break
            body = json.dumps({"messages": HI, "max_tokens": 2, "n": NUM_SLABS}).encode()
            if (answer := await http.ask("POST", CHAT, body)).status != 200:
                raise Wrong(f"a good request was refused: {answer.status} {answer.body[:300]!r}")
        finally:
            await http.close()
        state = await self.server.state()
        if state["free_slabs"] != NUM_SLABS:
            raise Wrong(f"{NUM_SLABS - state['free_slabs']} slabs were lost")
        return state


class _Worker:
    def __init__(self, campaign: BadRequests, mutator: Mutator, http: Connection, channel: grpc.aio.Channel) -> None:
        self._campaign = campaign
        self._mutator = mutator
        self._random: random.Random = mutator.random
        self._http = http
        self._channel = channel
        self._session = ""
        self._about = ""  # the last request

    async def use_session(self) -> None:
        """Some cases on one session, which must be as it was but for what was accepted, and then be closed."""
        created = await self._http.ask("POST", "/sessions", self._random.choice((b"{}", b'{"history": "forest"}')))
        if created.status != 200:
            self._campaign.note_wrong(f"a session was refused: {created.status} {created.body[:300]!r}")
            return
        self._session = json.loads(created.body)["session_id"]
        for _ in range(CASES_A_SESSION):
            if not self._campaign.take():
                break
            try:
                self._campaign.outcomes[await self._case()] += 1
            except Wrong as exc:
                self._campaign.note_wrong(str(exc))
            except (TimeoutError, Closed) as exc:
                self._campaign.note_wrong(f"{self._about[:600]}: {type(exc).__name__} {exc}")
                await self._http.close()
        shown = await self._http.ask("GET", f"/sessions/{self._session}")
        if shown.status != 200:
            self._campaign.note_wrong(f"the session cannot be shown: {shown.status} {shown.body[:300]!r}")
        await self._http.ask("DELETE", f"/sessions/{self._session}")

    async def _case(self) -> str:
        chance, only = self._random.random(), self._campaign.only
        if chance < 0.003 and only in CHAT:
            return await self._post(CHAT, GRAMMAR)
        if chance < 0.75 or only:
            return await self._post(*self._random.choice([body for body in BODIES if only in body[0]]))
        if chance < 0.85:
            return await self._anything()
        if chance < 0.90:
            return await self._raw()
        if chance < 0.91:
            return await self._import()
        return await self._call(*self._random.choice(RPCS)) if chance < 0.97 else await self._stream()

    async def _post(self, path: str, good: Any) -> str:
        value = _brief(self._mutator.mutated(good))
        body = self._mutator.encoded(value)
        headers = self._random.choice(HEADERS) + "\r\n" if self._random.random() < 0.05 else ""
        method = "PUT" if path in PUTS else "POST"
        self._about = f"{method} {path} {headers[:100]} {body!r}"
        return await self._judge(await self._http.ask(method, path.format(self._session), body, headers), path)

    async def _anything(self) -> str:
        method = self._random.choice(METHODS)
        parts = [self._random.choice((*PARTS, self._session)) for _ in range(self._random.randrange(5))]
        path = "/" + quote("/".join(parts), safe="/%.") + self._random.choice(QUERIES)
        if path.partition("?")[0].rstrip("/").endswith(self._session) and method == "DELETE":
            method = "GET"
        headers = self._random.choice(HEADERS) + "\r\n"
        self._about = f"{method} {path} {headers[:100]}"
        answer = await self._http.ask(method, path, b"", headers)
        if answer.status < 400 or method == "HEAD":
            return str(answer.status)
        return await self._judge(answer, path)

    async def _raw(self) -> str:
        """Bytes that are hardly HTTP: an answer, or a closed connection."""
        good = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n{{}}".encode()
        raw = self._mutator.spoilt(good) if self._random.random() < 0.8 else self._random.randbytes(200)
        if self._random.random() < 0.3:
            raw = raw.replace(b"host:", self._random.choice(WRONG_HEADERS) + b"\r\nhost:", 1)
        self._about = repr(raw)
        connection = Connection(self._campaign.server.addresses["http"])
        try:
            answer = await connection.half_closed(raw)
        except Closed:
            return "closed"
        finally:
            await connection.close()
        if answer.status >= 500:
            raise Wrong(f"{raw!r}: {answer.status}")
        return str(answer.status)

    async def _import(self) -> str:
        self._about = "a spoilt session file"
        exported = await self._http.ask("GET", f"/sessions/{self._session}/export?snapshot=false")
        if exported.status != 200:
            return await self._judge(exported)
        answer = await self._http.ask("POST", "/sessions/import", self._mutator.spoilt(exported.body))
        return "import " + await self._judge(answer)

    async def _call(self, name: str, good: Message) -> str:
        call = self._channel.unary_unary(f"/holdfast.v1.RuntimeService/{name}")
        try:
            answer = await call(self._message(good), timeout=30)
        except grpc.aio.AioRpcError as exc:
            return self._code(name, exc)
        if name in ("CreateSession", "ForkSession"):
            made = pb.CreateSessionResponse.FromString(answer).session_id
            await self._http.ask("DELETE", f"/sessions/{made}")
        return "OK"

    async def _stream(self) -> str:
        name, good = self._random.choice(STREAMS)
        call = self._channel.unary_stream(f"/holdfast.v1.RuntimeService/{name}")
        try:
            async for _ in call(self._message(good), timeout=30):
                pass
        except grpc.aio.AioRpcError as exc:
            return self._code(name, exc)
        return "OK"

    def _message(self, good: Message) -> bytes:
        """A message with one field set to something odd, sometimes with wrong bytes."""
        message = type(good)()
        message.CopyFrom(good)
        fields = [field for field in message.DESCRIPTOR.fields if field.name != "session_id"]
        if fields:
            name = self._random.choice(fields).name
            try:
                odd = self._random.choice((*ODD, [-1], [2**31 - 1], [0] * 300, "x" * 5000))
                if isinstance(odd, list):
                    getattr(message, name).extend(odd)
                else:
                    setattr(message, name, odd)
            except (TypeError, ValueError, AttributeError, OverflowError):
                message.ClearField(name)
        if hasattr(message, "session_id") and message.session_id == "{}":
            message.session_id = self._session
        if type(getattr(message, "max_tokens", None)) is int:
            message.max_tokens = min(message.max_tokens, 4)
        content: bytes = message.SerializeToString()
        return content

    def _code(self, name: str, exc: grpc.aio.AioRpcError) -> str:
        if exc.code() in NEVER:
            raise Wrong(f"{name}: {exc.code().name} {exc.details()}")
        if exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise Wrong(f"{name}: no answer")
        return exc.code().name

    async def _judge(self, answer: Answer, path: str = "") -> str:
        if answer.status >= 400:
            check_refusal(answer, self._about[:600], path=path)
        elif answer.body.startswith(b'{"session_id":'):
            made = json.loads(answer.body)["session_id"]
            if made != self._session:
                await self._http.ask("DELETE", f"/sessions/{made}")
        return str(answer.status)


def _brief(body: Any) -> Any:
    """As it is, but never asking for so much that it would take long."""
    if isinstance(body, dict):
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if type(body.get(field)) is int:
                body[field] = min(body[field], 3)
        if "messages" in body or "prompt" in body:
            body.setdefault("max_tokens", 3)
            if body["max_tokens"] is None:
                body["max_tokens"] = 3
        if "input" in body and body.get("max_output_tokens") is None:
            body["max_output_tokens"] = 3
    return body
