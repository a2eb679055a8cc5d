"""A stateless request: sessions that live for one reply. Created, used and closed, on every way out."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from holdfast.chat.reply import AssistantReply
from holdfast.chats.events import ReplyEnd, ReplyEvent, TokenUsage
from holdfast.chats.reply_stream import ReplyStream
from holdfast.chats.window_check import check_fits
from holdfast.errors import SessionNotFound
from holdfast.generation import SamplingParams
from holdfast.sessions.admission import Admission
from holdfast.sessions.runtime import Runtime

_LABEL = "single-shot"
_WAITING_EVENTS = 64  # of all choices together, before the slowest reader slows them down

NumberedEvent = tuple[int, ReplyEvent]  # with the number of its choice


@dataclass(frozen=True, slots=True, kw_only=True)
class StatelessRequest:
    """What is asked: a reply, or `num_choices` of them, to each prompt."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    new_answer: Callable[[], AssistantReply]
    num_choices: int = 1
    may_truncate: bool = False
    pin_tokens: int | None = None
    field: str = "messages"  # of the request that the prompts come from


@dataclass(frozen=True, slots=True)
class _StatelessChoice:
    session_id: str
    prompt: Sequence[int]
    params: SamplingParams
    is_appended: bool


class StatelessReplies:
    def __init__(self, runtime: Runtime, admission: Admission) -> None:
        self._runtime = runtime
        self._admission = admission

    async def replies(self, owner: str, asked: StatelessRequest) -> AsyncGenerator[NumberedEvent, None]:
        """All replies at once, as they come; choices are numbered prompt by prompt."""
        for prompt in asked.prompts:
            check_fits(len(prompt), self._runtime.model, may_truncate=asked.may_truncate, field=asked.field)
        num = len(asked.prompts) * asked.num_choices
        async with self._admission.admitted(num), contextlib.AsyncExitStack() as stack:
            choices = [choice for prompt in asked.prompts for choice in await self._open(owner, asked, prompt, stack)]
            replies = [self._reply(owner, choice, asked.new_answer()) for choice in choices]
            async with contextlib.aclosing(_merged(replies)) as events:
                async for event in events:
                    yield event

    async def _open(
        self, owner: str, asked: StatelessRequest, prompt: Sequence[int], stack: contextlib.AsyncExitStack
    ) -> list[_StatelessChoice]:
        """A session for each choice. Several share one prefill: the prompt is appended once, then forked."""
        runtime, is_shared = self._runtime, asked.num_choices > 1
        first = (await runtime.create(owner, label=_LABEL, pin_tokens=asked.pin_tokens, is_kept=False)).session_id
        stack.push_async_callback(self._close, first, owner)
        ids = [first]
        if is_shared:
            await runtime.append(first, owner, prompt)
        for _ in range(asked.num_choices - 1):
            fork, _recomputed = await runtime.fork(first, owner, label=_LABEL)
            stack.push_async_callback(self._close, fork.session_id, owner)
            ids.append(fork.session_id)
        return [_StatelessChoice(id, prompt, replace(asked.params, choice=n), is_shared) for n, id in enumerate(ids)]

    async def _close(self, session_id: str, owner: str) -> None:
        with contextlib.suppress(SessionNotFound):  # closed by its owner meanwhile
            await self._runtime.close(session_id, owner)

    async def _reply(
        self, owner: str, choice: _StatelessChoice, answer: AssistantReply
    ) -> AsyncGenerator[ReplyEvent, None]:
        answering = ReplyStream(self._runtime, choice.session_id, owner, answer)
        pieces = answering.pieces(choice.params, () if choice.is_appended else choice.prompt)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece
        yield ReplyEnd(
            message=answer.message,
            finish_reason=answering.finish_reason,
            tokens=tuple(answer.tokens),
            usage=TokenUsage(
                prompt_tokens=len(choice.prompt),
                completion_tokens=len(answer.tokens),
                prefilled_tokens=len(choice.prompt),
                dropped_tokens=self._runtime.info(choice.session_id, owner).dropped_token_count,
                reasoning_tokens=answer.num_reasoning,
                is_first=choice.params.choice == 0,
            ),
            matched_stop=answering.matched_stop,
            seed=choice.params.seed,
        )


async def _merged(replies: Sequence[AsyncGenerator[ReplyEvent, None]]) -> AsyncGenerator[NumberedEvent, None]:
    """All replies at once, in the order in which their events come."""
    if len(replies) == 1:
        async with contextlib.aclosing(replies[0]) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[NumberedEvent | Exception | None] = asyncio.Queue(_WAITING_EVENTS)

    async def read(number: int, events: AsyncGenerator[ReplyEvent, None]) -> None:
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    await queue.put((number, event))
        except Exception as exc:  # noqa: BLE001 - raised again by whoever reads the queue
            await queue.put(exc)
        await queue.put(None)

    tasks = [asyncio.ensure_future(read(number, events)) for number, events in enumerate(replies)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
