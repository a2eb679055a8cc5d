"""A turn on our own engine: only the new messages are computed, and the reply streams."""

import contextlib
import time
from collections.abc import AsyncGenerator

import msgspec

from holdfast.chat.reply import AssistantReply, ReplyEnd, ReplyPiece, TokenUsage
from holdfast.chats.tree import Node
from holdfast.chats.turn import ChatTurn, TurnResult, check_fits, kept_request, run_off_loop
from holdfast.generation import Done, Sampled, weight_spans
from holdfast.sessions.operations import Claim
from holdfast.sessions.record import TurnFacts


async def generate_reply(turn: ChatTurn) -> AsyncGenerator[ReplyPiece | TurnResult, None]:
    """The reply as it is sampled, then what is to be recorded."""
    setup, trajectory, prepared = turn.setup, turn.trajectory, turn.prepared
    request, prompt, parent = turn.request.request, prepared.prompt, prepared.parent
    check_fits(len(prompt.ids), setup.runtime.model, may_truncate=request.may_truncate)
    cache, claim = await turn.cache()
    started_at, version, params = time.time(), setup.weight_version, claim.bounded(request.params)
    base, recomputed = await cache.sync_to(claim, parent, is_limited=not trajectory.is_forest)
    uncomputed = claim.num_uncomputed
    if base is trajectory.tree.root:
        await _pin(turn, claim)
    is_reasoning = prompt.is_reasoning and request.params.constraint is None
    reply = setup.chat.reply(stop=request.stop, tools=request.callable_tools, is_reasoning=is_reasoning)
    cache.needs_rewind = True  # from here on the backend holds more than is recorded
    first_token_s, done = None, None
    turn.live.begin(prepared)
    generating = claim.generate(params, *turn.given_since(base), view=turn.sent_view)
    async with contextlib.aclosing(generating) as batches:
        async for batch in batches:
            if first_token_s is None and any(isinstance(event, Sampled) for event in batch):
                first_token_s = turn.elapsed_s()
            done = batch[-1] if isinstance(batch[-1], Done) else None
            turn.live.sampled(batch)
            for piece in reply.take(batch):
                yield piece
            if reply.is_stopped:
                break
    yield reply.finish()
    ending = ReplyEnd.of(
        reply, _usage(turn, claim, reply, base, recomputed=recomputed, uncomputed=uncomputed), request.params.seed
    )
    spans = weight_spans(ending.tokens) or ((version, 0), (setup.weight_version, 0))
    facts = TurnFacts(
        sampling=params.as_record(),
        logprob_kind="raw",
        weight_versions=(spans[0][0], spans[-1][0]),
        weight_spans=spans if len(spans) > 1 and ending.tokens else (),
        started_at=started_at,
        ended_at=time.time(),
        effort=turn.effort(
            prompt_tokens=ending.usage.prompt_tokens,
            cached_tokens=ending.usage.cached_tokens,
            first_token_s=first_token_s,
            **_speculation(done),
        ),
    )
    body = msgspec.json.encode(turn.request.writer.whole([ending]))
    yield TurnResult(
        message=ending.message,
        tokens=ending.tokens,
        finish_reason=ending.finish_reason,
        facts=facts,
        request=kept_request(request.body, parent.num_messages),
        response=body,
        body=body,
        ending=ending,
    )


def _speculation(done: Done | None) -> dict[str, int]:
    """Of a reply with drafts: drafted and accepted tokens, and the steps, each of which samples one token more than it
    accepts. Nothing of a reply that a stop string has ended, which hides what the engine did."""
    if done is None or not done.num_proposed:
        return {}
    steps = done.num_generated - done.num_accepted
    return {"spec_drafted": done.num_proposed, "spec_accepted": done.num_accepted, "spec_steps": steps}


async def _pin(turn: ChatTurn, claim: Claim) -> None:
    """Keep system prompt and tools in view for ever, unless the client chose itself what to pin."""
    if turn.trajectory.pin_tokens is not None:
        return
    request, runtime, continuation = turn.request.request, turn.setup.runtime, turn.setup.chat.continuation
    model = runtime.model
    pinned = await run_off_loop(
        lambda: continuation.pinned(request.messages, model.max_pin, request.tools, request.variables),
        request.num_bytes,
    )
    await claim.pin(runtime.checked_pin(max(model.sink, pinned)))


def _usage(
    turn: ChatTurn, claim: Claim, reply: AssistantReply, base: Node, *, recomputed: int, uncomputed: int
) -> TokenUsage:
    """`recomputed`: what rewinding took. `uncomputed`: what was to be computed again before the reply."""
    parent, view = turn.prepared.parent, turn.sent_view
    num_hidden = view.num_hidden if view else 0
    prompt_tokens = parent.end + len(turn.prepared.prompt.ids) - num_hidden
    num_known = base.end - num_hidden if view == base.turn.facts.view else 0
    return TokenUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=len(reply.tokens),
        prefilled_tokens=prompt_tokens - num_known + bool(num_known) + uncomputed,  # the last token was still pending
        dropped_tokens=num_hidden or claim.session.num_dropped(turn.setup.runtime.model.recent),
        recomputed_tokens=recomputed + uncomputed + parent.end - base.end,
        reasoning_tokens=reply.num_reasoning,
        recalled_tokens=turn.prepared.num_recalled,
    )
