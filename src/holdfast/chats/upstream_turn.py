"""A turn through an upstream server: our ids go in as the prompt, its bytes come back untouched."""

import time
from collections.abc import AsyncGenerator

from holdfast.chat.messages import Message, read_messages
from holdfast.chats.control import Control
from holdfast.chats.events import TurnRequest, TurnResponse
from holdfast.chats.history_sync import sync_to, uncommitted
from holdfast.chats.record_json import SAMPLING_FIELDS, kept_request
from holdfast.chats.trajectory import PreparedTurn, Trajectory
from holdfast.chats.tree import TurnFacts
from holdfast.chats.turn_source import TurnResult
from holdfast.errors import InvalidArgument, UpstreamInvalid
from holdfast.generation import Sampled, StopReason
from holdfast.sessions.ports import ChatUpstream, UpstreamCompletion
from holdfast.sessions.runtime import Runtime

_STOP_REASONS = {"length": StopReason.MAX_TOKENS}


class UpstreamTurns:
    def __init__(self, runtime: Runtime, upstream: ChatUpstream, control: Control) -> None:
        self._runtime = runtime
        self._upstream = upstream
        self._control = control

    async def events(
        self, trajectory: Trajectory, prepared: PreparedTurn, asked: TurnRequest
    ) -> AsyncGenerator[TurnResponse | TurnResult, None]:
        request = asked.request
        started_at, version = time.time(), self._control.weight_version
        body = dict(request.body)
        if request.variables:
            body["chat_template_kwargs"] = dict(request.variables)
        reply = await self._upstream.complete(
            body,
            prepared.parent.ids() + prepared.prompt.ids,
            session_id=trajectory.session_id,
            routed_from=max(0, prepared.parent.end - 1),
        )
        completion = reply.completion
        if completion is None:
            yield TurnResponse(body=reply.body, number=None, status=reply.status, headers=reply.headers)
            return
        yield TurnResult(
            message=_message(completion),
            tokens=_tokens(completion),
            finish_reason=completion.finish_reason,
            facts=TurnFacts(
                sampling={name: body[name] for name in SAMPLING_FIELDS if name in body},
                logprob_kind=completion.logprob_kind,
                weight_versions=(
                    completion.weight_version or version,
                    completion.weight_version or self._control.weight_version,
                ),
                started_at=started_at,
                ended_at=time.time(),
                routed_experts=completion.routed_experts,
                indexer_topk=completion.indexer_topk,
                cut=completion.cut,
            ),
            request=kept_request(reply.request, prepared.parent),
            response=reply.received,
            body=reply.body,
            status=reply.status,
            headers=reply.headers,
        )

    async def sync_history(self, trajectory: Trajectory, prepared: PreparedTurn, made: TurnResult) -> None:
        """Take the turn over into the session's own history."""
        base, _ = await sync_to(self._runtime, trajectory, prepared.parent)
        with uncommitted(trajectory):
            await self._runtime.adopt(
                trajectory.session_id,
                trajectory.owner,
                prepared.parent.ids(since=base) + prepared.prompt.ids,
                made.tokens,
                _STOP_REASONS.get(made.finish_reason, StopReason.EOS),
                expected_length=base.end,
            )


def _message(completion: UpstreamCompletion) -> Message:
    """The reply in normal form; what else the upstream put beside it stays in the record alone."""
    known = ("role", "content", "tool_calls", "reasoning_content", "reasoning")
    try:
        return read_messages([{name: completion.message.get(name) for name in known}], "message")[0]
    except InvalidArgument as exc:
        raise UpstreamInvalid(f"the upstream's message cannot be understood: {exc}") from exc


def _tokens(completion: UpstreamCompletion) -> tuple[Sampled, ...]:
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return tuple(Sampled(token=token, logprob=logprob, sampling_logprob=logprob) for token, logprob in pairs)
