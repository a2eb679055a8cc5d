"""An upstream in SGLang's format whose replies depend on the whole prompt, some of them large. A process.

Two sessions, or two turns, never get the same reply, so that whatever is mixed up shows.
"""

import asyncio
import base64
import random
import sys
from typing import Any

from aiohttp import web

from holdfast.bench.processes import obey
from holdfast.testing.fake_model import FakeModel
from holdfast.testing.fake_sglang import FakeSGLang
from holdfast.testing.fake_upstream import Fault, Json

LARGE_BYTES = 100_000  # beyond what a journal keeps in its database
_LARGE_EVERY = 8


class PromptedUpstream(FakeSGLang):
    """Every eighth chat, by the length of its prompt, has a payload."""

    def __init__(self, *, delay_s: float) -> None:
        super().__init__(FakeModel(context=1 << 20), delay_s=delay_s)
        self._payload = base64.b64encode(random.Random(0).randbytes(LARGE_BYTES * 3 // 4)).decode()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.clear()
        self.faults.append(Fault(edit=self._weigh))
        return await super()._answer(request)

    def _check_prompt(self, ids: Any) -> list[int]:
        return list(ids)  # prompts are of a larger vocabulary than what is drawn, which is small to be fast

    def _weigh(self, reply: Json) -> None:
        if "choices" in reply and reply["usage"]["prompt_tokens"] % _LARGE_EVERY == 0:
            reply["choices"][0]["meta_info"]["routed_experts"] = self._payload


async def _main(delay_s: float) -> None:
    async with PromptedUpstream(delay_s=delay_s) as upstream:

        async def nothing(line: bytes) -> None:
            return None

        await obey(upstream.url, nothing)


if __name__ == "__main__":
    asyncio.run(_main(float(sys.argv[1])))
