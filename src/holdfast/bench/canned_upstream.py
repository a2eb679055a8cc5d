"""An upstream in SGLang's format that has its replies ready: what it costs is a write. Run as a process of its own."""

import asyncio
import base64
import sys
from dataclasses import dataclass

import msgspec
import numpy as np

from holdfast.bench.processes import cpu_s, obey
from holdfast.bench.wire import first_message, response

MODEL = "canned"
TEXT = "The tide comes in twice a day, and whatever holds fast is still there when it leaves."


@dataclass(frozen=True, slots=True)
class Script:
    """What every chat is answered with."""

    num_tokens: int = 64
    payload_bytes: int = 0  # of routed experts, as base64 text; 0: none

    @property
    def token_ids(self) -> list[int]:
        return [1000 + index for index in range(self.num_tokens)]

    def reply(self, *, with_payload: bool = True) -> bytes:
        """The body of a reply; without its payload, what a client gets to see of it."""
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
        if with_payload and self.payload_bytes:
            meta["routed_experts"] = _base64(self.payload_bytes)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT, "reasoning_content": None, "tool_calls": None},
            "logprobs": None,
            "finish_reason": "length",
            "matched_stop": None,
            "meta_info": meta,
        }
        usage = {"prompt_tokens": 64, "completion_tokens": self.num_tokens, "total_tokens": 64 + self.num_tokens}
        head = {"id": "canned-1", "object": "chat.completion", "created": 1, "model": MODEL}
        return msgspec.json.encode(head | {"choices": [choice], "usage": usage})


def _base64(num_bytes: int) -> str:
    """Expert numbers as an MoE model of 128 experts has them: int32, most bits zero."""
    routing = np.random.default_rng(0).integers(0, 128, num_bytes * 3 // 16, dtype=np.int32)
    return base64.b64encode(routing.tobytes()).decode()


class _Upstream(asyncio.Protocol):
    def __init__(self, answers: dict[bytes, bytes]) -> None:
        self._answers = answers
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (found := first_message(self._buffer)) is not None:
            path = bytes(self._buffer[: self._buffer.index(b" HTTP/")]).partition(b" ")[2]
            del self._buffer[: found[1]]
            self._transport.write(self._answers.get(path) or response(b"{}", "404 Not Found"))


def _answers(script: Script) -> dict[bytes, bytes]:
    card = {"id": MODEL, "object": "model", "max_model_len": 1 << 20}
    two_best = {"text": "", "meta_info": {"output_top_logprobs": [[[-0.5, 1, None], [-1.5, 2, None]]]}}
    return {
        b"/v1/chat/completions": response(script.reply()),
        b"/v1/models": response(msgspec.json.encode({"object": "list", "data": [card]})),
        b"/generate": response(msgspec.json.encode(two_best)),
    }


async def _main(script: Script) -> None:
    answers = _answers(script)
    server = await asyncio.get_running_loop().create_server(lambda: _Upstream(answers), "127.0.0.1", 0)

    async def usage(line: bytes) -> float:
        return cpu_s()

    async with server:
        host, port = server.sockets[0].getsockname()
        await obey(f"{host}:{port}", usage)


if __name__ == "__main__":
    asyncio.run(_main(msgspec.json.decode(sys.argv[1], type=Script)))
