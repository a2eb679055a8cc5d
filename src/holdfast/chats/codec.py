"""A chat's turns on their way into the journal and back."""

from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.chat.continuation import TemplateInputs
from holdfast.chats.idempotency import IdempotencyKey
from holdfast.chats.trajectory import Trajectory
from holdfast.chats.tree import Node, Record, TurnFacts
from holdfast.sessions.journal.base import StoredSession, StoredTurn
from holdfast.sessions.journal.entries import TurnRecorded


def turn_recorded(session_id: str, node: Node, ticket: IdempotencyKey, num_control: int) -> TurnRecorded:
    assert node.parent is not None
    assert node.record is not None
    return TurnRecorded(
        session_id=session_id,
        number=node.number,
        parent=node.parent.number,
        messages=msgspec.json.encode(node.messages),
        reply=msgspec.json.encode(node.reply),
        root=msgspec.json.encode(node.root),
        given=node.given,
        sampled=node.sampled,
        logprobs=node.logprobs,
        sampling_logprobs=node.sampling_logprobs,
        finish_reason=node.finish_reason,
        facts=msgspec.json.encode(node.facts),
        request=node.record.request or b"",
        response=node.record.response or b"",
        ticket_key=ticket.key,
        body_hash=ticket.body_hash,
        num_control=num_control,
    )


def restored(stored: StoredSession) -> Trajectory:
    """The trajectory as it was; what its turns said over the wire stays in the journal until someone asks."""
    trajectory = Trajectory(
        session_id=stored.opened.session_id,
        owner=stored.opened.owner,
        group=stored.opened.group,
        pin_tokens=stored.opened.pin_tokens,
        reward=stored.reward,
        created_at=stored.opened.created_at,
    )
    tree = trajectory.tree
    for turn in stored.turns:
        parent = tree.nodes[turn.parent - 1] if turn.parent else tree.root
        trajectory.num_branches += parent is not tree.tip
        trajectory.num_control += turn.num_control
        tree.add(_node(turn, parent))
    trajectory.synced_node = tree.tip
    if stored.last_ticket is not None:
        key, body_hash = stored.last_ticket
        trajectory.last_ticket, trajectory.last_number = IdempotencyKey(body_hash, key), tree.tip.number
    return trajectory


def _node(turn: StoredTurn, parent: Node) -> Node:
    facts = msgspec.json.decode(turn.facts, type=TurnFacts)
    return Node(
        number=turn.number,
        parent=parent,
        messages=tuple(_decoded(turn.messages)),
        reply=_decoded(turn.reply),
        root=msgspec.json.decode(turn.root, type=TemplateInputs),
        given=turn.given,
        sampled=turn.sampled,
        logprobs=turn.logprobs,
        sampling_logprobs=turn.sampling_logprobs,
        finish_reason=turn.finish_reason,
        facts=facts,
        record=Record(request=None, response=None, request_timestamp=facts.started_at, timestamp=facts.ended_at),
        reward=turn.reward,
        is_delivered=turn.is_delivered,
    )


def _decoded(data: bytes) -> Any:
    value: Mapping[str, Any] | list[Any] = msgspec.json.decode(data)
    return value
