"""A turn as it went over the wire, and sessions as trainers read them. Reply bytes are kept as they came."""

from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.chat.chat_model import ChatModel
from holdfast.chats.tree import Node
from holdfast.errors import InvalidArgument
from holdfast.generation import SamplingParams
from holdfast.sessions.journal.base import Journal

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stop_token_ids",
)
HEAVY = ("routed_experts", "indexer_topk")


def record_of(node: Node, body: bytes, reply: bytes, *, with_payloads: bool = True) -> dict[str, Any]:
    """A turn's record, its prompt's ids put back. Reply bytes go in as they are."""
    record = node.record
    assert record is not None
    assert node.parent is not None
    request = msgspec.json.decode(body)
    if "messages" in request:
        request["messages"] = [*node.parent.spoken(), *request["messages"]]
    if with_payloads:
        request["input_ids"] = node.parent.ids() + list(node.given)
    response: Any = msgspec.Raw(reply)
    if not with_payloads and any(name.encode() in reply for name in HEAVY):
        response = _without(msgspec.json.decode(reply), HEAVY)
    return {
        "timestamp": record.timestamp,
        "request_timestamp": record.request_timestamp,
        "method": record.method,
        "path": record.path,
        "request": request,
        "response": response,
        "status_code": record.status_code,
        "turn": node.number,
        "parent": node.parent.number,
        "delivered": node.is_delivered,
        "reward": node.reward,
        "logprob_kind": node.facts.logprob_kind,
        "weight_versions": list(node.facts.weight_versions),
    }


async def request_of(node: Node, session_id: str, journal: Journal) -> bytes:
    kept = node.record.request if node.record else None
    return kept if kept is not None else await journal.read_request(session_id, node.number)


async def response_of(node: Node, session_id: str, journal: Journal) -> bytes:
    kept = node.record.response if node.record else None
    return kept if kept is not None else await journal.read_response(session_id, node.number)


def mismatch(tip: Node, chat: ChatModel) -> dict[str, Any] | None:
    """Where the tokens on record part from what the template makes of the messages now; None where they do not.

    They often do: templates strip reasoning from the past, models spell calls their own way. It is told, not mended.
    """
    if tip.parent is None:
        return None
    root = tip.path()[0].root
    tools, variables = msgspec.json.decode(root.tools), msgspec.json.decode(root.variables)
    stored = tip.ids()
    try:
        rendered = chat.continuation.first(list(tip.spoken()), tools, variables).ids
    except InvalidArgument as exc:
        return {"reason": str(exc)}
    for position, (one, other) in enumerate(zip(stored, rendered, strict=False)):
        if one != other:
            around = slice(max(0, position - 8), position + 8)
            decode = chat.tokenizer.decode
            return {"position": position, "stored": decode(stored[around]), "rendered": decode(rendered[around])}
    return None


def sampling_of(params: SamplingParams) -> dict[str, Any]:
    """How a turn of ours was sampled, for the record."""
    named = {name: getattr(params, name) for name in SAMPLING_FIELDS if hasattr(params, name)}
    return named | {
        "stop_token_ids": sorted(params.stop_token_ids),
        "logit_bias": {str(k): v for k, v in params.logit_bias.items()},
    }


def kept_request(request: Mapping[str, Any], parent: Node) -> bytes:
    """A request as it is kept: the path has its prompt's ids and its earlier messages."""
    kept = {key: value for key, value in request.items() if key not in ("input_ids", "kv_transfer_params")}
    if isinstance(messages := kept.get("messages"), list):
        kept["messages"] = messages[parent.num_messages :]
    return msgspec.json.encode(kept)


def _without(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, names) for key, item in value.items() if key not in names}
    return [_without(item, names) for item in value] if isinstance(value, list) else value
