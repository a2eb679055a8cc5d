"""The conversation of `holdfast chat`: text that a server's chat session takes, or tokens that are computed here."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.chat.chat_model import ChatModel
from holdfast.chat.messages import Message
from holdfast.chat.tokenizer import Detokenizer
from holdfast.cli.client import HttpServer, ServerError
from holdfast.cli.token_sessions import LocalSession, ServerSession
from holdfast.errors import HoldfastError
from holdfast.generation import SamplingParams

if TYPE_CHECKING:
    from holdfast_sdk import SessionInfo

    from holdfast.sessions.view import SessionView

_NO_SESSION = "no session yet; ask something first"
_SETTLE_TIMEOUT_S = 30.0
_SETTLE_PAUSE_S = 0.02


class Waiting(str):
    """What is being done until the reply begins."""


class Notice(str):
    """Something to know about the conversation, which is not part of the reply."""


class Conversation(Protocol):
    """`summary` says what the last reply took; `session_id` is that of a session which can be continued later."""

    summary: str
    session_id: str

    def ask(self, text: str) -> AsyncGenerator[str, None]:
        """The reply in parts, among them Waiting and Notice. Close it to stop: what was said so far is kept."""

    async def reset(self) -> None:
        """Close the session; the next question opens a new one."""

    async def describe(self) -> str:
        """The state of the session."""


class TextConversation:
    """A chat session of a server, which turns text into tokens itself."""

    def __init__(self, server: HttpServer, sampling: dict[str, Any], system: list[Message]) -> None:
        self._server = server
        self._sampling = sampling
        self._system = system
        self._messages = list(system)
        self._num_before = -1  # messages before a reply that was interrupted; -1: the last one was not
        self._num_dropped = 0
        self.summary = ""
        self.session_id = ""

    async def resume(self, session_id: str) -> None:
        """Continue a session of the server."""
        self.session_id = session_id
        self._messages = (await self._state())["messages"] or list(self._system)

    async def ask(self, text: str) -> AsyncGenerator[str, None]:
        yield Waiting("waiting for the first token")
        if not self.session_id:
            created = await self._server.request("POST", "/sessions", {"label": "holdfast chat"})
            self.session_id = created["session_id"]
        if self._num_before >= 0:
            await self._settle()
        messages = [*self._messages, {"role": "user", "content": text}]
        body = self._sampling | {"messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        path = f"/sessions/{self.session_id}/v1/chat/completions"
        parts: list[str] = []
        times: list[float] = []
        usage: dict[str, Any] = {}
        reason = ""
        try:
            async with contextlib.aclosing(self._server.events(path, body)) as events:
                self._num_before = len(self._messages)
                async for event in events:
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        reason = choice["finish_reason"] or reason
                        if part := choice["delta"].get("content"):
                            times.append(time.perf_counter())
                            parts.append(part)
                            yield part
            self._num_before = -1
        finally:
            if parts or self._num_before < 0:
                self._messages = [*messages, {"role": "assistant", "content": "".join(parts)}]
        if notice := self._report(usage, times, reason):
            yield notice

    def _report(self, usage: dict[str, Any], times: list[float], reason: str) -> Notice | None:
        """Write the summary; what there is to say about the window, if anything."""
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        prefilled = usage.get("prompt_tokens", 0) - cached
        self.summary = _summary(prefilled, usage.get("completion_tokens", 0), times, f"finish reason {reason}")
        dropped = (usage.get("holdfast") or {}).get("dropped_tokens", 0)
        before, self._num_dropped = self._num_dropped, dropped
        return Notice(f"{dropped:,} tokens have left the window") if dropped > before else None

    async def _settle(self) -> None:
        """After a reply that was interrupted: wait until the server has ended the turn. If it had been recorded after
        all, its messages count."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while (state := await self._state())["is_busy"]:
            if time.monotonic() > deadline:
                raise ServerError("the server has not ended the interrupted reply yet; ask again in a moment")
            await asyncio.sleep(_SETTLE_PAUSE_S)
        if len(state["messages"]) > self._num_before:
            self._messages = state["messages"]
        self._num_before = -1

    async def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = await self._server.request("GET", f"/sessions/{self.session_id}?payloads=false")
        return state

    async def reset(self) -> None:
        if self.session_id:
            with contextlib.suppress(HoldfastError):  # it may have been evicted or closed already
                await self._server.request("DELETE", f"/sessions/{self.session_id}")
        self.session_id, self._messages, self._num_before, self._num_dropped = "", list(self._system), -1, 0

    async def describe(self) -> str:
        if not self.session_id:
            return _NO_SESSION
        state = await self._state()
        window = state["window"]["sink"] + state["window"]["recent"]
        return _described(
            state["history_length"],
            state["dropped_tokens"],
            window,
            state["kv_live_bytes"],
            state["kv_reserved_bytes"],
        )


class TokenConversation:
    """A session of tokens: keeps no history of its own, sends only what is new. Ends with this process."""

    session_id = ""

    def __init__(
        self,
        session: LocalSession | ServerSession,
        chat: ChatModel,
        params: SamplingParams,
        system: list[Message],
    ) -> None:
        self._session = session
        self._tokenizer = chat.tokenizer
        self._continuation = chat.continuation
        self._params = replace(params, eos_token_ids=chat.continuation.stop_token_ids)
        self._system = system
        self._is_open = False
        self.summary = ""

    async def ask(self, text: str) -> AsyncGenerator[str, None]:
        message = {"role": "user", "content": text}
        messages = [*self._system, message]
        if not self._is_open:
            num_pinned = self._continuation.pinned(messages, self._session.max_pin)
            await self._session.open(max(self._session.sink, num_pinned))
            self._is_open = True
        if length := (await self._session.info()).history_length:
            last = await self._session.last_token()
            if num_trimmed := self._continuation.num_trimmed(last):
                await self._session.rewind(length - num_trimmed)
            prompt = self._continuation.tail(last, [message])
        else:
            prompt = self._continuation.first(messages)
        yield Waiting(f"computing {len(prompt.ids):,} tokens")
        detokenizer = Detokenizer(self._tokenizer)
        times: list[float] = []
        async with contextlib.aclosing(self._session.turn(prompt.ids, self._params)) as events:
            async for event in events:
                if isinstance(event, int):
                    times.append(time.perf_counter())
                    if part := detokenizer.push(event):
                        yield part
                elif isinstance(event, range):
                    yield Notice(f"tokens {event.start} to {event.stop - 1} have left the window")
                else:
                    if rest := detokenizer.finish():
                        yield rest
                    ending = f"{_window(await self._session.info())}, stop reason {str(event.stop_reason).lower()}"
                    self.summary = _summary(event.prefill_tokens, len(times), times, ending)

    async def reset(self) -> None:
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(HoldfastError):  # it may have been evicted or closed already
                await self._session.close()

    async def describe(self) -> str:
        if not self._is_open:
            return _NO_SESSION
        info = await self._session.info()
        return _described(
            info.history_length,
            info.dropped_token_count,
            info.sink + info.recent,
            info.kv_live_bytes,
            info.kv_reserved_bytes,
        )


def _summary(num_prefilled: int, num_sampled: int, times: list[float], ending: str) -> str:
    """`times`: when the parts of the reply came."""
    decode_s = times[-1] - times[0] if times else 0.0
    speed = f"{(num_sampled - 1) / decode_s:.1f} tokens/s, " if decode_s else ""
    return f"{num_prefilled} prefilled, {num_sampled} sampled, {speed}{ending}"


def _described(length: int, num_dropped: int, window: int, live_bytes: int | None, reserved_bytes: int | None) -> str:
    return (
        f"{length} tokens of history, {num_dropped} out of view, window {length - num_dropped}/{window}, "
        f"cache {(live_bytes or 0) / 1e6:.1f} MB live of {(reserved_bytes or 0) / 1e6:.1f} MB reserved"
    )


def _window(info: "SessionView | SessionInfo") -> str:
    return f"window {info.history_length - info.dropped_token_count}/{info.sink + info.recent}"
