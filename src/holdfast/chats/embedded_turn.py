"""A turn on our own engine: only the tail is computed, and the reply streams."""

import contextlib
import time
from collections.abc import AsyncGenerator

import msgspec

from holdfast.chat.chat_model import ChatModel
from holdfast.chat.reply import ReplyPiece
from holdfast.chats.control import Control
from holdfast.chats.events import ChatRequest, ReplyEnd, TokenUsage, TurnRequest
from holdfast.chats.history_sync import sync_to, uncommitted
from holdfast.chats.record_json import kept_request, sampling_of
from holdfast.chats.reply_stream import ReplyStream
from holdfast.chats.trajectory import PreparedTurn, Trajectory
from holdfast.chats.tree import Node, TurnFacts
from holdfast.chats.turn_source import TurnResult
from holdfast.chats.window_check import check_fits
from holdfast.off_loop import run_off_loop
from holdfast.sessions.runtime import Runtime


class EmbeddedTurns:
    def __init__(self, runtime: Runtime, chat: ChatModel, control: Control) -> None:
        self._runtime = runtime
        self._chat = chat
        self._control = control

    async def events(
        self, trajectory: Trajectory, prepared: PreparedTurn, asked: TurnRequest
    ) -> AsyncGenerator[ReplyPiece | TurnResult, None]:
        request, prompt = asked.request, prepared.prompt
        check_fits(len(prompt.ids), self._runtime.model, may_truncate=request.may_truncate)
        started_at, version = time.time(), self._control.weight_version
        base, recomputed = await sync_to(self._runtime, trajectory, prepared.parent)
        if base is trajectory.tree.root:
            await self._pin(trajectory, request)
        tokens = prepared.parent.ids(since=base) + prompt.ids
        answer = self._chat.reply(
            stop=request.stop,
            tools=request.callable_tools,
            is_reasoning=prompt.is_reasoning and request.params.constraint is None,
        )
        answering = ReplyStream(self._runtime, trajectory.session_id, trajectory.owner, answer)
        pieces = answering.pieces(request.params, tokens, expected_length=base.end, writes="chat")
        with uncommitted(trajectory):
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield piece
        usage = self._usage(trajectory, prepared, answering, base, recomputed)
        ending = ReplyEnd(
            message=answer.message,
            finish_reason=answering.finish_reason,
            tokens=tuple(answer.tokens),
            usage=usage,
            matched_stop=answering.matched_stop,
            seed=request.params.seed,
        )
        facts = TurnFacts(
            sampling=sampling_of(request.params),
            logprob_kind="raw",
            weight_versions=(version, self._control.weight_version),
            started_at=started_at,
            ended_at=time.time(),
        )
        body = msgspec.json.encode(asked.writer.whole([ending]))
        yield TurnResult(
            message=ending.message,
            tokens=ending.tokens,
            finish_reason=ending.finish_reason,
            facts=facts,
            request=kept_request(request.body, prepared.parent),
            response=body,
            body=body,
            ending=ending,
        )

    async def sync_history(self, trajectory: Trajectory, prepared: PreparedTurn, made: TurnResult) -> None:
        """Rewind what the engine sampled beyond a stop string."""
        end = prepared.parent.end + len(prepared.prompt.ids) + len(made.tokens)
        if self._runtime.info(trajectory.session_id, trajectory.owner).history_length > end:
            await self._runtime.rewind(trajectory.session_id, trajectory.owner, end, writes="chat")

    async def _pin(self, trajectory: Trajectory, request: ChatRequest) -> None:
        if trajectory.pin_tokens is not None:
            return
        model = self._runtime.model
        pinned = await run_off_loop(
            lambda: self._chat.continuation.pinned(request.messages, model.max_pin, request.tools, request.variables),
            request.num_bytes,
        )
        await self._runtime.pin(trajectory.session_id, trajectory.owner, max(model.sink, pinned))

    def _usage(
        self, trajectory: Trajectory, prepared: PreparedTurn, answering: ReplyStream, base: Node, recomputed: int
    ) -> TokenUsage:
        prompt_tokens = prepared.parent.end + len(prepared.prompt.ids)
        return TokenUsage(
            prompt_tokens=prompt_tokens,
            completion_tokens=len(answering.answer.tokens),
            prefilled_tokens=prompt_tokens - base.end + bool(base.end),  # the last token there was still pending
            dropped_tokens=self._runtime.info(trajectory.session_id, trajectory.owner).dropped_token_count,
            recomputed_tokens=recomputed + prepared.parent.end - base.end,
            reasoning_tokens=answering.answer.num_reasoning,
        )
