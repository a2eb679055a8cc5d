"""The server under test, in a process of its own: `python -m tests.fuzz.server embedded|sglang|vllm [URL]`.

Prints its addresses as a line of JSON; for each line on stdin it prints what it holds; at the end of stdin it stops.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.backends.sglang import SGLangBackend
from holdfast.backends.vllm import VLLMBackend
from holdfast.engine.interface import Row
from tests.relaying import relaying
from tests.serving import SlowEngine, default_chat, serving, wordy_engine

NUM_SLABS = 64
UPSTREAM_TIMEOUT_S = 8.0  # more than a busy machine takes for an answer
BACKENDS = {"sglang": SGLangBackend, "vllm": VLLMBackend}


class BriefEngine(SlowEngine):
    """A fake that talks nonsense and likes to come to an end."""

    def __init__(self, num_slabs: int = 8) -> None:
        wordy = wordy_engine()
        super().__init__(num_slabs=num_slabs, shape=wordy.shape, forward_s=0, vocab_size=wordy.info.vocab_size)
        self._ends = sorted(default_chat().model.continuation.stop_token_ids)

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        logits = super().forward(rows)
        logits[:, self._ends] += 14
        return logits


class _Errors(logging.Handler):
    """The log's errors, the first few as text."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.num = 0
        self.shown: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.num += 1
        if len(self.shown) < 5:
            self.shown.append(logging.Formatter().format(record)[-3000:])


async def _lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


async def main(kind: str, url: str = "") -> None:
    errors = _Errors()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger().addHandler(errors)
    lines = await _lines()
    if kind == "embedded":
        rules = {"unknown_fields": os.environ.get("HOLDFAST_UNKNOWN_FIELDS", "ignore"), "max_parked": 1000}
        async with serving(BriefEngine(NUM_SLABS), default_chat(), queue_max_wait_s=20, **rules) as server:
            _say({"http": server.http, "grpc": server.address})
            while await lines.readline():
                _say({"free_slabs": server.worker.num_free_slabs, **_held(errors)})
        return
    size = default_chat().model.tokenizer.inner.get_vocab_size()
    options = {"kind": BACKENDS[kind], "upstream_timeout_s": UPSTREAM_TIMEOUT_S, "max_upstream_mb": 1}
    async with relaying(url, default_chat(), size, **options) as relay:
        _say({"http": relay.address, "grpc": relay.grpc})
        while await lines.readline():
            _say(_held(errors))


def _held(errors: _Errors) -> dict[str, Any]:
    return {"num_tasks": len(asyncio.all_tasks()), "num_errors": errors.num, "errors": errors.shown}


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
