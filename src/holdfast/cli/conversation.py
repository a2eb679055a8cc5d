"""One chat on one engine sequence: keeps no tokens of its own, appends only what is new."""

import time
from collections.abc import AsyncIterator
from dataclasses import replace

from holdfast.chat.continuation import Continuation
from holdfast.chat.detokenize import Detokenizer
from holdfast.chat.template import Message
from holdfast.chat.tokenizer import Tokenizer
from holdfast.config import EngineConfig
from holdfast.engine.run import Done, Truncated
from holdfast.engine.sampling import Sampled, SamplingParams
from holdfast.engine.worker import Worker


class Conversation:
    def __init__(
        self,
        worker: Worker,
        tokenizer: Tokenizer,
        continuation: Continuation,
        params: SamplingParams,
        *,
        system: list[Message],
        config: EngineConfig,
    ) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._continuation = continuation
        self._params = replace(params, eos_token_ids=continuation.stop_token_ids)
        self._system = system
        self._config = config
        self._sequence: int | None = None
        self._decode_s = 0.0

    async def ask(self, text: str) -> AsyncIterator[str | Truncated | Done]:
        """The answer as it comes: pieces of text, what left the window, and at the end what it cost."""
        message = {"role": "user", "content": text}
        if self._sequence is None:
            first = [*self._system, message]
            pin = self._continuation.pinned(first, self._config.max_pin)
            new = self._continuation.first(first)
            self._sequence = await self._worker.open(sink=max(self._config.sink, pin))
        else:
            length = self._worker.info(self._sequence).history_length
            new = self._continuation.tail(await self._worker.tokens(self._sequence, max(0, length - 1)), [message])
        await self._worker.append(self._sequence, new)
        detokenizer = Detokenizer(self._tokenizer)
        first_at = last_at = 0.0
        async with self._worker.generate(self._sequence, self._params) as stream:
            async for batch in stream:
                last_at = time.perf_counter()
                first_at = first_at or last_at
                for event in batch:
                    if isinstance(event, Sampled):
                        if piece := detokenizer.push(event.token):
                            yield piece
                        continue
                    if isinstance(event, Done):
                        self._decode_s = last_at - first_at
                        if rest := detokenizer.finish():
                            yield rest
                    yield event

    async def reset(self) -> None:
        """Forget everything; the next question opens a new sequence."""
        if self._sequence is not None:
            await self._worker.close(self._sequence)
            self._sequence = None

    def summary(self, done: Done) -> str:
        """What the last answer cost."""
        speed = f"{(done.num_generated - 1) / self._decode_s:.1f} tokens/s, " if self._decode_s else ""
        return f"{done.num_generated} tokens, {speed}{self._fill()}, ended by {done.stop_reason}"

    def describe(self) -> str:
        if self._sequence is None:
            return "no session yet: ask something"
        info = self._worker.info(self._sequence)
        return (
            f"{info.history_length} tokens of history, {info.num_dropped} out of view, {self._fill()}, "
            f"cache {info.kv_live_bytes / 1e6:.1f} MB live of {info.kv_reserved_bytes / 1e6:.1f} MB reserved"
        )

    def _fill(self) -> str:
        assert self._sequence is not None
        info = self._worker.info(self._sequence)
        return f"window {info.num_visible}/{info.window_size}"
