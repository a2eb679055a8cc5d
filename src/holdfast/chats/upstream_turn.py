"""A turn on an upstream server: our token ids are its prompt, and its bytes are the response."""

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

from holdfast.chat.messages import Message, read_messages
from holdfast.chat.reply import ReplyPiece
from holdfast.chats.embedded_turn import generate_reply
from holdfast.chats.events import TurnResponse
from holdfast.chats.tree import Node
from holdfast.chats.turn import ChatTurn, TurnResult, TurnSource, kept_request
from holdfast.chats.view import shown_messages
from holdfast.errors import InvalidArgument, UpstreamInvalid
from holdfast.generation import RECORDED_FIELDS, Sampled
from holdfast.sessions.ports import ChatUpstream, LogprobKind, UpstreamCompletion
from holdfast.sessions.record import TurnFacts, View

_SAMPLING_FIELDS = (*RECORDED_FIELDS, "max_completion_tokens", "stop")


def relay_to(upstream: ChatUpstream) -> TurnSource:
    """Replies come from `upstream`: whole, and recorded only where they are a completion that was checked."""

    async def relay_reply(turn: ChatTurn) -> AsyncGenerator[TurnResponse | TurnResult, None]:
        setup, request, prepared = turn.setup, turn.request.request, turn.prepared
        started_at, version = time.time(), setup.weight_version
        body = dict(request.body)
        if request.variables:
            body["chat_template_kwargs"] = dict(request.variables)
        ids, view, parent = prepared.parent.ids() + prepared.prompt.ids, turn.sent_view, prepared.parent
        shown = shown_messages(parent, view)
        if view is not None:
            ids, messages = view.of(ids), body["messages"]
            body["messages"] = [*(messages[index] for index in shown), *messages[parent.num_messages :]]
        body |= _bounded(body, setup.runtime.max_reply_tokens, room=setup.runtime.model.context - len(ids))
        reply = await upstream.complete(
            body,
            ids,
            session_id=turn.trajectory.session_id,
            known=_known_rows(parent, view),
        )
        completion = reply.completion
        if completion is None:
            yield TurnResponse(body=reply.body, number=None, status=reply.status, headers=reply.headers)
            return
        told = completion.weight_version
        yield TurnResult(
            message=_message(completion),
            tokens=_tokens(completion),
            finish_reason=completion.finish_reason,
            facts=TurnFacts(
                sampling={name: body[name] for name in _SAMPLING_FIELDS if name in body},
                logprob_kind=completion.logprob_kind,
                weight_versions=(told or version, told or setup.weight_version),
                started_at=started_at,
                ended_at=time.time(),
                routed_experts=completion.routed_experts,
                indexer_topk=completion.indexer_topk,
                cut=completion.cut,
                effort=turn.effort(prompt_tokens=len(ids), num_aborted=reply.num_aborted or None, **completion.effort),
            ),
            request=kept_request(reply.request, len(shown)),
            response=reply.received,
            body=reply.body,
            status=reply.status,
            headers=reply.headers,
            is_adopted=True,
        )

    return relay_reply


def generate_on(upstream: ChatUpstream) -> TurnSource:
    """Replies are generated on `upstream` token by token, and parsed here."""

    async def generate(turn: ChatTurn) -> AsyncGenerator[ReplyPiece | TurnResult, None]:
        async with contextlib.aclosing(generate_reply(turn)) as events:
            async for event in events:
                yield _of_kind(event, upstream.logprob_kind) if isinstance(event, TurnResult) else event

    return generate


def _of_kind(result: TurnResult, kind: LogprobKind) -> TurnResult:
    """Only the upstream knows which logprobs it sent."""
    return replace(result, facts=replace(result.facts, logprob_kind=kind))


def _known_rows(parent: Node, view: View | None) -> dict[str, int]:
    """For each training payload, the positions of the prompt of which the turns up to `parent` have it on record. What
    was computed from another view is not known."""
    names, num_hidden = ("routed_experts", "indexer_topk"), view.num_hidden if view else 0
    nodes = [node for node in parent.path() if node.turn.facts.view == view]
    return {n: node.end - num_hidden - 1 for node in nodes for n in names if getattr(node.turn.facts, n) is not None}


def _bounded(body: Mapping[str, Any], limit: int, *, room: int) -> dict[str, int]:
    """What bounds the reply to `limit` tokens (0: any number) and to the room that the prompt leaves in the context.

    A prompt that leaves none is for the upstream to refuse.
    """
    asked = {name: body[name] for name in ("max_tokens", "max_completion_tokens") if isinstance(body.get(name), int)}
    if not asked:
        return {"max_tokens": limit} if 0 < limit < room else {}
    most = min((num for num in (limit, room) if num > 0), default=0)
    return {name: min(num, most) for name, num in asked.items()} if most else {}


def _message(completion: UpstreamCompletion) -> Message:
    """The reply in normal form; other fields that the upstream sent are in the recorded response alone."""
    known = ("role", "content", "tool_calls", "reasoning_content", "reasoning")
    try:
        return read_messages([{name: completion.message.get(name) for name in known}], "message")[0]
    except InvalidArgument as exc:
        raise UpstreamInvalid(f"the upstream sent an invalid message: {exc}") from exc


def _tokens(completion: UpstreamCompletion) -> tuple[Sampled, ...]:
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return tuple(Sampled(token=token, logprob=logprob, sampling_logprob=logprob) for token, logprob in pairs)
