"""Sessions as they are shown: how they stand, what was said, and every turn on record."""

import asyncio
from typing import Any

from holdfast.chat.chat_model import ChatModel
from holdfast.chats.record_json import mismatch, record_of, request_of, response_of
from holdfast.chats.trajectory import Trajectory
from holdfast.chats.tree import Node
from holdfast.sessions.journal.base import Journal
from holdfast.sessions.view import SessionView


def session_json(view: SessionView) -> dict[str, Any]:
    dropped = view.dropped_token_count
    return {
        "session_id": view.session_id,
        "label": view.label,
        "client_metadata": dict(view.metadata),
        "state": view.state,
        "is_busy": view.is_busy,
        "history_length": view.history_length,
        "dropped_tokens": dropped,
        "dropped_range": [view.sink, view.sink + dropped] if dropped else None,
        "window": {"sink": view.sink, "recent": view.recent},
        "kv_live_bytes": view.kv_live_bytes,
        "kv_reserved_bytes": view.kv_reserved_bytes,
        "idle_seconds": view.idle_s,
        "recomputed_tokens": view.recomputed_tokens,
        "failure": view.failure or None,
    }


async def trajectory_json(
    trajectory: Trajectory, chat: ChatModel, journal: Journal, *, all_branches: bool, with_payloads: bool
) -> dict[str, Any]:
    """A trajectory: the current path's records, or all of them, and what a trainer asks about it.

    Records repeat their prompts, so all of it may be large: it is put together in a thread.
    """
    tip, nodes = trajectory.tree.tip, list(trajectory.tree.nodes)
    path = tip.path()
    asked = nodes if all_branches else path
    bodies = [
        (
            node,
            await request_of(node, trajectory.session_id, journal),
            await response_of(node, trajectory.session_id, journal),
        )
        for node in asked
        if node.record is not None
    ]
    facts = {
        "group": trajectory.group,
        "created_at": trajectory.created_at,
        "turns": tip.depth,
        "branches": trajectory.num_branches,
        "reward": trajectory.reward,
    }
    num_control = trajectory.num_control

    def put_together() -> dict[str, Any]:
        current = {node.number for node in path}
        return facts | {
            "messages": list(tip.spoken()),
            "records": [record_of(*body, with_payloads=with_payloads) for body in bodies],
            "metadata": {
                "accumulated_token_ids": tip.ids(),
                "max_trim_tokens": 0,
                "tito_session_mismatch": mismatch(tip, chat),
                "control_tokens_spelled": num_control,
                "tree": [_summary(node, is_current=node.number in current) for node in nodes],
            },
        }

    return await asyncio.to_thread(put_together)


def _summary(node: Node, *, is_current: bool) -> dict[str, Any]:
    return {
        "turn": node.number,
        "parent": node.parent.number if node.parent else None,
        "is_current": is_current,
        "given_tokens": len(node.given),
        "sampled_tokens": len(node.sampled),
        "finish_reason": node.finish_reason,
        "delivered": node.is_delivered,
        "reward": node.reward,
    }
