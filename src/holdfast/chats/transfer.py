"""A chat's turns on their way to another server, and those that come from one."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import msgspec

from holdfast.chat.messages import read_messages
from holdfast.chats.codec import restored, turn_recorded
from holdfast.chats.idempotency import IdempotencyKey
from holdfast.chats.record_json import request_of, response_of
from holdfast.chats.trajectory import Trajectory
from holdfast.chats.tree import Node, Record
from holdfast.errors import HoldfastError, SessionFileRefused
from holdfast.sessions.journal.base import Journal, StoredSession
from holdfast.sessions.journal.entries import TurnRecorded
from holdfast.sessions.portable.chat_port import ChatContent
from holdfast.sessions.portable.content import PortableTurn

_NO_TICKET = IdempotencyKey(b"")
_FIELDS = [field.name for field in fields(TurnRecorded)]


async def chat_content(trajectory: Trajectory, journal: Journal) -> ChatContent:
    """All turns with their bodies. Nobody may take a turn meanwhile."""
    turns = [await _portable(node, trajectory.session_id, journal) for node in trajectory.tree.nodes]
    if turns:  # how often control tokens were spelled out is counted for the chat, not for each turn
        turns[0] = replace(turns[0], num_control=trajectory.num_control)
    return ChatContent(tuple(turns), trajectory.reward)


async def _portable(node: Node, session_id: str, journal: Journal) -> PortableTurn:
    assert node.record is not None
    request, response = await request_of(node, session_id, journal), await response_of(node, session_id, journal)
    whole = replace(node, record=replace(node.record, request=request, response=response), children=[])
    turn = turn_recorded(session_id, whole, _NO_TICKET, 0)
    values: dict[str, Any] = {name: getattr(turn, name) for name in _FIELDS}
    return PortableTurn(**values, reward=node.reward, is_delivered=node.is_delivered)


def checked_trajectory(stored: StoredSession, turns: Sequence[PortableTurn], *, keeps_bodies: bool) -> Trajectory:
    """The trajectory of a chat from elsewhere, or SessionFileRefused; with `keeps_bodies` it holds them itself."""
    try:
        trajectory = restored(stored)
        for node, turn in zip(trajectory.tree.nodes, turns, strict=True):
            _check(node, turn)
    except (HoldfastError, msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as exc:
        raise SessionFileRefused(f"the chat in the session file cannot be read: {exc}", reason="damaged") from exc
    for node, turn in zip(trajectory.tree.nodes, turns, strict=True):
        if keeps_bodies:
            node.record = _record(node, turn)
    return trajectory


def _check(node: Node, turn: PortableTurn) -> None:
    """What a turn said must be what turns can say: nobody else looks at it before it is used."""
    read_messages([*node.messages, node.reply])
    for text in (node.root.tools, node.root.variables):
        msgspec.json.decode(text)
    if not isinstance(msgspec.json.decode(turn.request), dict):
        raise ValueError(f"the request of turn {node.number} is not an object")
    if not isinstance(msgspec.json.decode(turn.response), dict):
        raise ValueError(f"the response of turn {node.number} is not an object")
    for told in ([node.facts.routed_experts], [node.facts.indexer_topk], node.facts.cut):
        at = 0
        for start, end in (place for place in told if isinstance(place, tuple)):
            if not at <= start < end <= len(turn.response):
                raise ValueError(f"turn {node.number} tells of places that its response does not have")
            at = end


def _record(node: Node, turn: PortableTurn) -> Record:
    assert node.record is not None
    return replace(node.record, request=turn.request, response=turn.response)
