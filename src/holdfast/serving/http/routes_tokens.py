"""The route of a session's tokens, page by page."""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from holdfast.chat.tokenizer import Tokenizer
from holdfast.chats.service import ChatService
from holdfast.chats.tokens import PAGE_TOKENS, Alternatives, TokenPage
from holdfast.errors import InvalidArgument
from holdfast.serving.http.middleware import owner_of
from holdfast.sessions.record import View


class TokenRoutes:
    def __init__(self, chats: ChatService) -> None:
        self._chats = chats

    async def tokens(self, request: Request) -> Response:
        session_id, owner = request.path_params["session_id"], owner_of(request)
        made = self._chats.tokens(
            session_id,
            owner,
            turn=number(request, "turn"),
            start=number(request, "start") or 0,
            limit=PAGE_TOKENS if (limit := number(request, "limit")) is None else limit,
        )
        tokenizer = self._chats.setup.chat.tokenizer
        content = await asyncio.to_thread(
            lambda: msgspec.json.encode({"session_id": session_id} | page_json(made(), tokenizer))
        )
        return Response(content, media_type="application/json")


def number(request: Request, name: str) -> int | None:
    """A query parameter that is a count, if it is there. Raises InvalidArgument."""
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidArgument(f"{name} must be a number, got {text!r}", param=name)
    return int(text)


def page_json(page: TokenPage, tokenizer: Tokenizer) -> dict[str, Any]:
    columns = page.columns
    return {
        "turn": page.turn,
        "total": page.total,
        "start": page.start,
        "window": window_json(page.seen, page.total),
        "turns": [
            {
                "turn": node.number,
                "parent": node.turn.parent,
                "start": node.start,
                "sampled_start": node.start + len(node.turn.given),
                "end": node.end,
            }
            for node in page.nodes
        ],
        "ids": columns.ids,
        "texts": page.texts(tokenizer),
        "kinds": columns.kinds,
        "logprobs": _known(columns.logprobs),
        "sampling_logprobs": _known(columns.sampling_logprobs),
        "top": _known(_told(columns.top)),
        "weight_versions": _known(columns.weight_versions),
    }


def window_json(seen: View, total: int) -> dict[str, Any]:
    """What of `total` tokens is in view: the first `sink`, and the last `recent`."""
    dropped = [seen.pinned, seen.start] if seen.num_hidden else None
    return {"sink": seen.pinned, "recent": total - seen.start, "dropped_range": dropped}


def _told(top: Alternatives) -> list[Any]:
    return [
        places
        and [{"text": one.text, "logprob": one.logprob} | ({} if one.id is None else {"id": one.id}) for one in places]
        for places in top
    ]


def _known(column: list[Any]) -> list[Any] | None:
    """The column; None where it says nothing."""
    return column if any(value is not None for value in column) else None
