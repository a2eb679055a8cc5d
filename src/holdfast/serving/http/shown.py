"""Sessions as they are shown: how they stand, what was said, and every turn on record."""

from typing import Any

from holdfast.chat.chat_model import ChatModel
from holdfast.sessions.view import SessionView
from holdfast.trajectories.records import mismatch, record_of
from holdfast.trajectories.trajectory import Trajectory
from holdfast.trajectories.tree import Node


def shown(view: SessionView) -> dict[str, Any]:
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
        "failure": view.failure or None,
    }


def told(trajectory: Trajectory, chat: ChatModel, *, all_branches: bool, with_payloads: bool) -> dict[str, Any]:
    """A trajectory: the current path's records, or all of them, and what a trainer asks about it."""
    tip, tree = trajectory.tree.tip, trajectory.tree
    nodes = tree.nodes if all_branches else tip.path()
    return {
        "group": trajectory.group,
        "created_at": trajectory.created_at,
        "turns": tip.depth,
        "branches": trajectory.num_branches,
        "reward": trajectory.reward,
        "messages": list(tip.spoken()),
        "records": [record_of(node, with_payloads=with_payloads) for node in nodes if node.record is not None],
        "metadata": {
            "accumulated_token_ids": tip.ids(),
            "max_trim_tokens": 0,
            "tito_session_mismatch": mismatch(tip, chat),
            "control_tokens_spelled": trajectory.num_control,
            "tree": [_summary(node, tip.path()) for node in tree.nodes],
        },
    }


def _summary(node: Node, path: list[Node]) -> dict[str, Any]:
    return {
        "turn": node.number,
        "parent": node.parent.number if node.parent else None,
        "is_current": node in path,
        "given_tokens": len(node.given),
        "sampled_tokens": len(node.sampled),
        "finish_reason": node.finish_reason,
        "delivered": node.is_delivered,
        "reward": node.reward,
    }
