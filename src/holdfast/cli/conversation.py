"""One chat on one session: keeps no history of its own, sends only what is new."""

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from holdfast.chat.chat_model import ChatModel
from holdfast.chat.messages import Message
from holdfast.chat.tokenizer import Detokenizer
from holdfast.cli.lines import Line
from holdfast.errors import HoldfastError
from holdfast.generation import Done, Sampled, SamplingParams, Truncated


class Conversation:
    def __init__(
        self,
        line: Line,
        chat: ChatModel,
        params: SamplingParams,
        system: list[Message],
    ) -> None:
        self._line = line
        self._tokenizer = chat.tokenizer
        self._continuation = chat.continuation
        self._params = replace(params, eos_token_ids=chat.continuation.stop_token_ids)
        self._system = system
        self._is_open = False
        self._decode_s = 0.0

    async def ask(self, text: str) -> AsyncGenerator[str | Truncated | Done, None]:
        """The answer as it comes: pieces of text, what left the window, and at the end what it cost."""
        message = {"role": "user", "content": text}
        messages = [*self._system, message]
        if not self._is_open:
            await self._line.open(max(self._line.sink, self._continuation.pinned(messages, self._line.max_pin)))
            self._is_open = True
        if (await self._line.facts()).history_length:
            prompt = self._continuation.tail(await self._line.last_token(), [message])
        else:
            prompt = self._continuation.first(messages)
        detokenizer = Detokenizer(self._tokenizer)
        times: list[float] = []
        async with contextlib.aclosing(self._line.say(prompt.ids, self._params)) as events:
            async for event in events:
                if isinstance(event, Sampled):
                    times.append(time.perf_counter())
                    if piece := detokenizer.push(event.token):
                        yield piece
                    continue
                if isinstance(event, Done):
                    self._decode_s = times[-1] - times[0] if times else 0.0
                    if rest := detokenizer.finish():
                        yield rest
                yield event

    async def reset(self) -> None:
        """Forget everything; the next question opens a new session."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(HoldfastError):  # it may be gone already, which is as good
                await self._line.close()

    async def summary(self, done: Done) -> str:
        """What the last answer cost."""
        speed = f"{(done.num_generated - 1) / self._decode_s:.1f} tokens/s, " if self._decode_s else ""
        facts = f"{done.prefill_tokens} prefilled, {done.num_generated} sampled, {speed}{await self._fill()}"
        return f"{facts}, ended by {done.stop_reason}"

    async def describe(self) -> str:
        if not self._is_open:
            return "no session yet: ask something"
        facts = await self._line.facts()
        live, reserved = (facts.kv_live_bytes or 0) / 1e6, (facts.kv_reserved_bytes or 0) / 1e6
        return (
            f"{facts.history_length} tokens of history, {facts.dropped_token_count} out of view, "
            f"{await self._fill()}, cache {live:.1f} MB live of {reserved:.1f} MB reserved"
        )

    async def _fill(self) -> str:
        facts = await self._line.facts()
        return f"window {facts.history_length - facts.dropped_token_count}/{facts.sink + facts.recent}"
