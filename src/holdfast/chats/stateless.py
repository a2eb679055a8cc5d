"""A stateless request: sessions that live for one reply, and are closed on every way out."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from holdfast.chat.reply import AssistantReply, ReplyEnd, TokenUsage
from holdfast.chats.events import ReplyEvent
from holdfast.chats.turn import check_fits
from holdfast.errors import SessionNotFound
from holdfast.generation import SamplingParams
from holdfast.sessions.admission import Admission
from holdfast.sessions.runtime import Runtime

_LABEL = "single-shot"
_WAITING_EVENTS = 64  # of all choices together, before the slowest reader slows them down

NumberedEvent = tuple[int, ReplyEvent]  # with the number of its choice


@dataclass(frozen=True, slots=True, kw_only=True)
class StatelessRequest:
    """A request for `num_choices` replies to each prompt."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    new_reply: Callable[[], AssistantReply]
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

    async def replies(self, owner: str, request: StatelessRequest) -> AsyncGenerator[NumberedEvent, None]:
        """All replies at once, as they come; choices are numbered prompt by prompt."""
        for prompt in request.prompts:
            check_fits(len(prompt), self._runtime.model, may_truncate=request.may_truncate, field=request.field)
        num = len(request.prompts) * request.num_choices
        async with self._admission.admitted(num, owner=owner), contextlib.AsyncExitStack() as stack:
            opened = [await self._open(owner, request, prompt, stack) for prompt in request.prompts]
            choices = [choice for of_prompt in opened for choice in of_prompt]
            replies = [self._reply(owner, n, choice, request) for n, choice in enumerate(choices)]
            async with contextlib.aclosing(replies[0] if len(replies) == 1 else _merged(replies)) as events:
                async for event in events:
                    yield event

    async def _open(
        self, owner: str, request: StatelessRequest, prompt: Sequence[int], stack: contextlib.AsyncExitStack
    ) -> list[_StatelessChoice]:
        """A session for each choice. Several share one prefill: the prompt is appended once, then forked."""
        runtime, is_shared = self._runtime, request.num_choices > 1
        first = (await runtime.create(owner, label=_LABEL, pin_tokens=request.pin_tokens, is_kept=False)).session_id
        stack.push_async_callback(self._close, first, owner)
        ids = [first]
        if is_shared:
            await runtime.append(first, owner, prompt)
        for _ in range(request.num_choices - 1):
            fork, _recomputed = await runtime.fork(first, owner, label=_LABEL)
            stack.push_async_callback(self._close, fork.session_id, owner)
            ids.append(fork.session_id)
        return [_StatelessChoice(id, prompt, replace(request.params, choice=n), is_shared) for n, id in enumerate(ids)]

    async def _close(self, session_id: str, owner: str) -> None:
        with contextlib.suppress(SessionNotFound):  # closed by its owner meanwhile
            await self._runtime.close(session_id, owner)

    async def _reply(
        self, owner: str, number: int, choice: _StatelessChoice, request: StatelessRequest
    ) -> AsyncGenerator[NumberedEvent, None]:
        reply, prompt, params = request.new_reply(), choice.prompt, choice.params
        async with (
            self._runtime.claim(choice.session_id, owner) as claim,
            contextlib.aclosing(claim.generate(params, () if choice.is_appended else prompt)) as batches,
        ):
            async for batch in batches:
                for piece in reply.take(batch):
                    yield number, piece
                if reply.is_stopped:
                    break
        yield number, reply.finish()
        usage = TokenUsage(
            prompt_tokens=len(prompt),
            completion_tokens=len(reply.tokens),
            prefilled_tokens=len(prompt),
            dropped_tokens=claim.session.num_dropped(self._runtime.model.recent),
            reasoning_tokens=reply.num_reasoning,
            is_first=params.choice == 0,
        )
        yield number, ReplyEnd.of(reply, usage, params.seed)


async def _merged(replies: Sequence[AsyncGenerator[NumberedEvent, None]]) -> AsyncGenerator[NumberedEvent, None]:
    """The events of all replies in the order in which they come."""
    queue: asyncio.Queue[NumberedEvent | Exception | None] = asyncio.Queue(_WAITING_EVENTS)

    async def read(events: AsyncGenerator[NumberedEvent, None]) -> None:
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    await queue.put(event)
        except Exception as exc:  # noqa: BLE001 - raised again by whoever reads the queue
            await queue.put(exc)
        await queue.put(None)

    tasks = [asyncio.ensure_future(read(events)) for events in replies]
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
