"""Two upstreams in SGLang's format, each a process: one with a fixed reply, one whose replies depend on the prompt.

The HTTP of the first one, like that of `load.py`, is raw bytes on a socket, so that it is not what is measured.
"""

import asyncio
import base64
import functools
import random
import sys
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from holdfast.bench.machine import own_cpu_s
from holdfast.bench.processes import obey
from holdfast.testing.fake_servers import FakeSGLang
from holdfast.testing.fake_upstream import FakeModel, Fault, Json

MODEL = "canned"
TEXT = "The tide comes in twice a day, and whatever holds fast is still there when it leaves."
JSON_HEADER = "content-type: application/json\r\n"
TYPICAL_ROWS = 140  # positions that a turn computes: a question, its frame and the reply
LARGE_BYTES = 100_000  # more than the journal stores in its database
_LARGE_EVERY = 8


def response(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\n{JSON_HEADER}content-length: {len(body)}\r\n\r\n".encode() + body


def first_message(buffer: bytearray) -> tuple[int, int] | None:
    """Where the body of the first HTTP message begins and ends; None if the message is not complete yet."""
    start = buffer.find(b"\r\n\r\n") + 4
    if start < 4:
        return None
    head = bytes(buffer[:start]).lower()
    _, _, length = head.partition(b"\r\ncontent-length:")
    end = start + int(length.partition(b"\r\n")[0] or 0)
    return (start, end) if len(buffer) >= end else None


@dataclass(frozen=True, slots=True)
class Script:
    """The reply to every chat."""

    num_tokens: int = 64
    payload_bytes: int = 0  # of routed experts for a typical turn, as base64 text; 0: none

    @property
    def token_ids(self) -> list[int]:
        return [1000 + index for index in range(self.num_tokens)]

    def reply(self, num_rows: int = 0) -> bytes:
        """The body of a reply, with so many rows of payload. A client of ours gets it without."""
        meta = {
            "id": "canned-1",
            "finish_reason": {"type": "length", "length": self.num_tokens},
            "completion_tokens": self.num_tokens,
            "cached_tokens": 0,
            "weight_version": "1",
            "output_token_logprobs": [
                [-0.0625 * (index % 32), token, None] for index, token in enumerate(self.token_ids)
            ],
        }
        if num_rows and self.payload_bytes:
            # Expert numbers as a model with 128 experts has them: int32, most bits zero.
            shape = num_rows, max(1, self.payload_bytes * 3 // 16 // TYPICAL_ROWS)
            routing = np.random.default_rng(0).integers(0, 128, shape, dtype=np.int32)
            meta["routed_experts"] = base64.b64encode(routing.tobytes()).decode()
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT, "reasoning_content": None, "tool_calls": None},
            "logprobs": None,
            "finish_reason": "length",
            "matched_stop": None,
            "meta_info": meta,
        }
        usage = {"completion_tokens": self.num_tokens}
        head = {"id": "canned-1", "object": "chat.completion", "created": 1, "model": MODEL}
        return msgspec.json.encode(head | {"choices": [choice], "usage": usage})

    def response_to(self, request: bytes) -> bytes:
        """The HTTP response to a chat, with a row for each position that it asks for. The probe asks for one token."""
        script = replace(self, num_tokens=1) if b'"max_tokens":1,' in request else self
        ids = request.partition(b'"input_ids":[')[2].partition(b"]")[0]
        start = request.partition(b'"routed_experts_start_len":')[2].partition(b",")[0].rstrip(b"}") or b"0"
        return _canned(script, ids.count(b",") + script.num_tokens - int(start) if ids else TYPICAL_ROWS)

    def responses(self) -> dict[bytes, bytes]:
        """Whole HTTP responses by path, but for chats."""
        card = {"id": MODEL, "object": "model", "max_model_len": 1 << 20}
        top_two = {"text": "", "meta_info": {"output_top_logprobs": [[[-0.5, 1, None], [-1.5, 2, None]]]}}
        return {
            b"/v1/models": response(msgspec.json.encode({"object": "list", "data": [card]})),
            b"/generate": response(msgspec.json.encode(top_two)),
        }


@functools.cache
def _canned(script: Script, num_rows: int) -> bytes:
    return response(script.reply(num_rows))


class _CannedConnection(asyncio.Protocol):
    """Answers each request with a response that is ready: one write."""

    def __init__(self, script: Script, responses: dict[bytes, bytes]) -> None:
        self._script = script
        self._responses = responses
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (found := first_message(self._buffer)) is not None:
            path = bytes(self._buffer[: self._buffer.index(b" HTTP/")]).partition(b" ")[2]
            body = bytes(self._buffer[slice(*found)])
            del self._buffer[: found[1]]
            if path == b"/v1/chat/completions":
                self._transport.write(self._script.response_to(body))
            else:
                self._transport.write(self._responses.get(path) or response(b"{}", "404 Not Found"))


class PromptedUpstream(FakeSGLang):
    """Replies are drawn from the whole prompt: no two sessions or turns get the same one, so a mix-up is noticed.

    Every eighth chat, by the length of its prompt, has a large payload.
    """

    def __init__(self, *, delay_s: float) -> None:
        super().__init__(FakeModel(context=1 << 20), delay_s=delay_s)
        self._payload = base64.b64encode(random.Random(0).randbytes(LARGE_BYTES * 3 // 4)).decode()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.clear()
        self.faults.append(Fault(edit=self._add_payload))
        return await super()._answer(request)

    def _check_prompt(self, ids: Any) -> list[int]:
        return list(ids)  # prompts use a larger vocabulary than the replies, whose vocabulary is small to be fast

    def _add_payload(self, reply: Json) -> None:
        if "choices" in reply and reply["usage"]["prompt_tokens"] % _LARGE_EVERY == 0:
            reply["choices"][0]["meta_info"]["routed_experts"] = self._payload


async def _cpu_s(line: bytes) -> float:
    return own_cpu_s()


async def _serve_canned(script: Script) -> None:
    responses = script.responses()
    server = await asyncio.get_running_loop().create_server(
        lambda: _CannedConnection(script, responses), "127.0.0.1", 0
    )
    async with server:
        host, port = server.sockets[0].getsockname()
        await obey(f"http://{host}:{port}", _cpu_s)


async def _serve_prompted(delay_s: float) -> None:
    async with PromptedUpstream(delay_s=delay_s) as upstream:
        await obey(upstream.url, _cpu_s)


if __name__ == "__main__":
    if sys.argv[1] == "canned":
        asyncio.run(_serve_canned(msgspec.json.decode(sys.argv[2], type=Script)))
    else:
        asyncio.run(_serve_prompted(float(sys.argv[2])))
