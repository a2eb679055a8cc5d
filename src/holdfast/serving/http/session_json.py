"""A session as JSON: its state, its messages, and every turn on record."""

import asyncio
import bisect
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from holdfast.chat.chat_model import ChatModel
from holdfast.chat.tokenizer import Tokenizer
from holdfast.chats.samples.mismatch import plain_history
from holdfast.chats.trajectory import Trajectory
from holdfast.chats.tree import Node, Tree
from holdfast.chats.view import shown_messages
from holdfast.errors import InvalidArgument
from holdfast.sessions.journal.base import Journal, with_bodies
from holdfast.sessions.record import TurnRecord
from holdfast.sessions.view import SessionView

HEAVY = ("routed_experts", "indexer_topk")
_MAX_OPENING = 200
_MAX_AGAIN = 4096  # tokens before a difference and bytes after it that are tokenized again to show it


def session_json(view: SessionView) -> dict[str, Any]:
    dropped = view.dropped_token_count
    return {
        "session_id": view.session_id,
        "kind": "tokens" if view.kind == "tokens" else "chat",
        "label": view.label,
        "group": view.group,
        "client_metadata": dict(view.metadata),
        "state": view.state,
        "is_busy": view.is_busy,
        "history_length": view.history_length,
        "dropped_tokens": dropped,
        "dropped_range": [view.sink, view.sink + dropped] if dropped else None,
        "window": {"sink": view.sink, "recent": view.recent},
        "kv_live_bytes": view.kv_live_bytes,
        "kv_reserved_bytes": view.kv_reserved_bytes,
        "created_at": view.created_at,
        "last_used_at": time.time() - view.idle_s,
        "idle_seconds": view.idle_s,
        "turns": view.num_turns,
        "reward": view.reward,
        "recomputed_tokens": view.recomputed_tokens,
        "failure": view.failure or None,
        **({"history": "forest"} if view.kind == "forest" else {}),
        **({"recalled_tokens": view.num_recalled} if view.num_recalled else {}),
    }


async def trajectory_json(
    trajectory: Trajectory,
    chat: ChatModel,
    journal: Journal,
    *,
    all_branches: bool,
    with_payloads: bool,
    with_records: bool = True,
    with_messages: bool = False,
) -> dict[str, Any]:
    """The records of the current path or of all branches, and what a trainer needs to know about the trajectory.
    Without records only its shape, which is small; `with_messages` the shape with what was said in each turn.

    Records repeat their prompts, so all of it may be large: it is assembled in a thread, and encoded one by one, as
    encoding holds the interpreter lock.
    """
    tip, nodes = trajectory.tree.tip, list(trajectory.tree.nodes)
    path = tip.path()
    asked = (nodes if all_branches else path) if with_records else []
    turns = [await with_bodies(node.turn, trajectory.session_id, journal) for node in asked]
    facts: dict[str, Any] = {
        "branches": trajectory.num_branches,
    }
    if sent := tip.turn.facts.view:  # of which the session's own window knows nothing
        facts |= {"dropped_tokens": sent.num_hidden, "dropped_range": [sent.pinned, sent.start]}
    if trajectory.is_forest:
        facts |= {"conversations": _conversations(trajectory.tree)}
    num_control = sum(node.turn.num_control for node in nodes)

    def assemble() -> dict[str, Any]:
        current = {node.number for node in path}
        tree = [
            turn_json(node.turn, is_current=node.number in current)
            | (_origin(node) if trajectory.is_forest else {})
            | (_said(node) if with_messages else {})
            for node in nodes
        ]
        if not with_records:
            return facts | {"metadata": {"control_tokens_spelled": num_control, "tree": tree}}
        return facts | {
            "messages": list(tip.spoken()),
            "records": [
                msgspec.Raw(msgspec.json.encode(_record_json(node, turn, with_payloads=with_payloads)))
                for node, turn in zip(asked, turns, strict=True)
            ],
            "metadata": {
                "accumulated_token_ids": tip.ids_as_sampled(),
                "max_trim_tokens": chat.continuation.max_trim_tokens,
                "tito_session_mismatch": _mismatch(tip, chat),
                "control_tokens_spelled": num_control,
                "tree": tree,
            },
        }

    return await asyncio.to_thread(assemble)


def turn_json(turn: TurnRecord, *, is_current: bool) -> dict[str, Any]:
    """A turn in short, as the tree of its session shows it."""
    return {
        "turn": turn.number,
        "parent": turn.parent,
        "is_current": is_current,
        "given_tokens": len(turn.given),
        "sampled_tokens": len(turn.sampled),
        "finish_reason": turn.finish_reason,
        "delivered": turn.is_delivered,
        "reward": turn.reward,
    }


def _said(node: Node) -> dict[str, Any]:
    """What a turn added to the conversation, where its tokens are, and how its reply came about."""
    turn, facts = node.turn, node.turn.facts
    return {
        "start": node.start,
        "sampled_start": node.start + len(turn.given),
        "end": node.end,
        "messages": list(turn.messages),
        "reply": turn.reply,
        "recalled_tokens": facts.recalled.length if facts.recalled else 0,
        "started_at": facts.started_at,
        "ended_at": facts.ended_at,
        "sampling": dict(facts.sampling),
        "weight_versions": list(facts.weight_versions),
    }


def _origin(node: Node) -> dict[str, Any]:
    """Where in a forest a turn comes from."""
    facts = node.turn.facts
    return {"root": node.ancestor(1).number, "edited": facts.is_edited, "agent": dict(facts.agent)}


def _conversations(tree: Tree) -> list[dict[str, Any]]:
    """What began where: each first turn with all turns below it, and the ids that its client sent."""
    found: dict[int, dict[str, Any]] = {
        node.number: {
            **{"root": node.number, "opening": _opening(node), "turns": 0, "branches": 0, "last_turn": 0, "agent": {}}
        }
        for node in tree.root.children
    }
    roots: dict[int, int] = {}  # of each turn
    for node in tree.nodes:
        assert node.parent is not None
        roots[node.number] = roots.get(node.parent.number, node.number)
        one = found[roots[node.number]]
        one["turns"] += 1
        one["branches"] += max(0, len(node.children) - 1)
        one["last_turn"] = node.number
        one["agent"] |= node.turn.facts.agent
    return list(found.values())


def _opening(node: Node) -> str:
    """What the user said first, in short: the last text of the first turn, as agents put their own texts before it."""
    texts = [message["content"] for message in node.turn.messages if message["role"] == "user"]
    said = [text.rpartition("</system-reminder>")[2].strip() or text for text in reversed(texts)]
    return next((text for text in said if not text.startswith("<")), "")[:_MAX_OPENING]


def _record_json(node: Node, turn: TurnRecord, *, with_payloads: bool = True) -> dict[str, Any]:
    """A turn's record with its whole prompt; `turn` is the node's, with its bodies. The response is not parsed."""
    assert node.parent is not None
    reply, view = turn.response or b"", turn.facts.view
    request = msgspec.json.decode(turn.request or b"{}")
    if "messages" in request:
        spoken = list(node.parent.spoken())
        request["messages"] = [*(spoken[index] for index in shown_messages(node.parent, view)), *request["messages"]]
    if with_payloads:
        ids = node.parent.ids() + list(turn.given)
        request["input_ids"] = view.of(ids) if view else ids
    response: Any = msgspec.Raw(reply)
    if not with_payloads and any(name.encode() in reply for name in HEAVY):
        response = _without(msgspec.json.decode(reply), HEAVY)
    return {
        "timestamp": turn.facts.ended_at,
        "request_timestamp": turn.facts.started_at,
        "method": "POST",
        "path": "/v1/chat/completions",
        "request": request,
        "response": response,
        "status_code": 200,
        "turn": node.number,
        "parent": node.parent.number,
        "delivered": turn.is_delivered,
        "reward": turn.reward,
        "logprob_kind": turn.facts.logprob_kind,
        "weight_versions": list(turn.facts.weight_versions),
        **({"weight_spans": turn.facts.weight_spans} if turn.facts.weight_spans else {}),
        **({"effort": turn.facts.effort} if turn.facts.effort else {}),
    }


def _mismatch(tip: Node, chat: ChatModel) -> dict[str, Any] | None:
    """Where the recorded tokens differ from what the template renders for the messages now; None where they do not.

    They often do: templates strip reasoning from the past, models write calls their own way. It is reported, not fixed.
    Texts are compared, and only replies are tokenized again: what was given is on record as it was tokenized.
    """
    if tip.parent is None:
        return None
    root, at = (first := tip.path()[0].turn).root, first.facts.started_at
    tools, variables = msgspec.json.decode(root.tools), msgspec.json.decode(root.variables)
    tokenizer, history, messages = chat.tokenizer, [*plain_history(tip)], list(tip.spoken())
    ids = [token for token, _ in history]
    try:
        if not tokenizer.is_byte_level:  # the bytes of a token depend on its neighbours
            whole = chat.continuation.first(messages, tools, variables, at=at).ids
            return _tokens_differ(0, ids, whole, tip, tokenizer)
        rendered = chat.continuation.whole_text(messages, tools, variables, at=at).encode(errors="replace")
    except InvalidArgument as exc:
        return {"reason": str(exc)}
    pieces = [tokenizer.token_bytes(token) for token in ids]
    stored = b"".join(pieces)
    same = _common_length(stored, rendered)
    if same < min(len(stored), len(rendered)):
        ends = list(itertools.accumulate(map(len, pieces)))
        position = bisect.bisect_right(ends, same)
        # Tokens of both texts are compared from the last control token before the difference on, where both are split.
        start = next((at + 1 for at in range(position - 1, -1, -1) if tokenizer.is_control(ids[at])), 0)
        start = max(start, position - _MAX_AGAIN)
        text = rendered[ends[start - 1] if start else 0 : same + _MAX_AGAIN].decode(errors="ignore")
        return _tokens_differ(start, ids, ids[:start] + tokenizer.encode(text), tip, tokenizer)
    for start, run in _sampled_runs(history, tokenizer.is_control):
        if (again := tokenizer.encode_plain(tokenizer.decode(run))) != run:
            return _tokens_differ(start, ids, ids[:start] + again + ids[start + len(run) :], tip, tokenizer)
    return None


def _tokens_differ(
    start: int, stored: list[int], rendered: list[int], tip: Node, tokenizer: Tokenizer
) -> dict[str, Any] | None:
    """The first difference at or after `start`. Its position is that in the history up to `tip`."""
    for index in range(start, min(len(stored), len(rendered))):
        if stored[index] != rendered[index]:
            around = slice(max(0, index - 8), index + 8)
            one, other = tokenizer.decode(stored[around]), tokenizer.decode(rendered[around])
            return {"position": _with_quotes(index, tip), "stored": one, "rendered": other}
    return None


def _with_quotes(position: int, tip: Node) -> int:
    """Where a token of the history without quotes stands in the history."""
    for node in tip.path():
        quotes = node.turn.facts.recalled
        position += quotes.length if quotes and node.start + quotes.start <= position else 0
    return position


def _sampled_runs(
    history: Iterable[tuple[int, bool]], is_control: Callable[[int], bool]
) -> Iterator[tuple[int, list[int]]]:
    """Every run of tokens without a control token in which some were sampled, and where it starts."""
    run, start, has_sampled = list[int](), 0, False
    for token, is_sampled in history:
        if not is_control(token):
            run.append(token)
            has_sampled |= is_sampled
            continue
        if has_sampled:
            yield start, run
        run, start, has_sampled = [], start + len(run) + 1, False
    if has_sampled:
        yield start, run


def _common_length(one: bytes, other: bytes) -> int:
    """How many bytes two texts have in common at their start."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _without(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, names) for key, item in value.items() if key not in names}
    return [_without(item, names) for item in value] if isinstance(value, list) else value
