"""Routes of the Responses API besides creating a response: what is kept, of sessions and without one."""

from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from holdfast.chat.messages import Message
from holdfast.chats.service import ChatService
from holdfast.chats.trajectory import Trajectory
from holdfast.chats.tree import Node
from holdfast.errors import InvalidArgument, ResponseNotFound
from holdfast.serving.http.bodies import decode
from holdfast.serving.http.dialects.base import Json, ReplyFormat, Translated, as_object
from holdfast.serving.http.dialects.responses import (
    CONVERSATION,
    WITH_INSTRUCTIONS,
    ResponseReplies,
    items_of,
    read_items,
    tools_of,
)
from holdfast.serving.http.middleware import owner_of
from holdfast.serving.http.reading import ChatCall, Past
from holdfast.serving.http.response_store import Kept, ResponseStore, new_conversation
from holdfast.serving.http.schema import ChatCompletion
from holdfast.sessions.journal.base import with_bodies
from holdfast.sessions.record import without

_MAX_PAGE = 100


class StatelessResponses:
    """What the store has of an owner."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def get_response(self, request: Request) -> Response:
        return JSONResponse(self._kept(request).body)

    async def delete_response(self, request: Request) -> Response:
        id = self._kept(request).body["id"]
        self._store.discard(owner_of(request), id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        kept = self._kept(request)
        return _page(request, items_of(kept.given, kept.body["id"]))

    async def create_conversation(self, request: Request) -> Response:
        items, metadata = _new_conversation(await request.body())
        return JSONResponse(self._store.open_conversation(owner_of(request), items, metadata))

    async def get_conversation(self, request: Request) -> Response:
        return JSONResponse(self._kept(request).body)

    async def delete_conversation(self, request: Request) -> Response:
        id = self._kept(request).body["id"]
        self._store.discard(owner_of(request), id)
        return JSONResponse({"id": id, "object": "conversation.deleted", "deleted": True})

    def _kept(self, request: Request) -> Kept:
        kind = "conversation" if "conversation_id" in request.path_params else "response"
        kept = self._store.get(owner_of(request), request.path_params[f"{kind}_id"])
        if kept.body["object"] != kind:
            raise ResponseNotFound(f"{kept.body['id']!r} is not a {kind}")
        return kept


class SessionResponses:
    """The recorded turns of a session as responses."""

    def __init__(self, chats: ChatService) -> None:
        self._chats = chats

    async def get_response(self, request: Request) -> Response:
        trajectory, node = self._found(request)
        turn = await with_bodies(node.turn, trajectory.session_id, self._chats.setup.runtime.journal)
        asked = msgspec.json.decode(turn.request or b"{}")
        given: Json = {name: asked[name] for name in ("temperature", "top_p", "metadata") if name in asked}
        given["max_output_tokens"] = asked.get("max_completion_tokens")
        if has_instructions(node) and node.depth == 1:
            given["instructions"] = node.turn.messages[0]["content"]
        replies = ResponseReplies(
            request=given,
            tools=tools_of(msgspec.json.decode(turn.root.tools)),
            conversation=node.turn.facts.agent.get(CONVERSATION, ""),
        )
        body = replies.whole(without(turn.response or b"", turn.facts.cut), turn.facts.response_id)
        return Response(body, media_type="application/json")

    async def delete_response(self, request: Request) -> Response:
        self._found(request)
        raise InvalidArgument("the turns of a session stay on record; close the session to end it")

    async def input_items(self, request: Request) -> Response:
        _, node = self._found(request)
        given = messages_before(node)[:-1]
        return _page(request, items_of(given, node.turn.facts.response_id))

    async def create_conversation(self, request: Request) -> Response:
        self._chats.get(request.path_params["session_id"], owner_of(request))
        items, metadata = _new_conversation(await request.body())
        if items:
            raise InvalidArgument("items must be empty: a session records what was said on it", param="items")
        return JSONResponse(new_conversation(metadata))

    def _found(self, request: Request) -> tuple[Trajectory, Node]:
        trajectory = self._chats.get(request.path_params["session_id"], owner_of(request))
        return trajectory, find_response(trajectory, request.path_params["response_id"])


def has_instructions(node: Node) -> bool:
    """Whether the first message on the path to this turn came as `instructions`."""
    return node.path()[0].turn.facts.response_id.startswith(WITH_INSTRUCTIONS)


def find_response(trajectory: Trajectory, id: str) -> Node:
    node = trajectory.find_response(id)
    if node is None:
        raise ResponseNotFound(f"there is no response {id!r} on session {trajectory.session_id}")
    return node


def messages_before(node: Node) -> list[Message]:
    """All messages up to the reply of a turn, that included, without instructions, which nobody inherits."""
    return list(node.spoken())[has_instructions(node) :]


def recorded_past(trajectory: Trajectory, translated: Translated) -> Past:
    """What a request on a session continues that sends only what is new."""
    node = None
    if translated.previous:
        node = find_response(trajectory, translated.previous)
    elif name := translated.conversation:
        nodes = reversed(trajectory.tree.nodes)
        node = next((node for node in nodes if node.turn.facts.agent.get(CONVERSATION) == name), None)
    if node is None:
        return Past()
    if translated.has_their_tools:
        return Past(list(node.spoken()), msgspec.json.decode(node.turn.root.tools))
    return Past(messages_before(node))


def kept_past(store: ResponseStore, owner: str, translated: Translated) -> Past:
    """The same without a session."""
    if not (id := translated.previous or translated.conversation):
        return Past()
    kept = store.get(owner, id)
    return Past(kept.messages, kept.tools)


def keeping(store: ResponseStore, owner: str, call: ChatCall[ChatCompletion]) -> ReplyFormat:
    """How the reply to a request without a session is written: where the request allows it, it is kept as well."""
    is_kept, conversation = call.translated.is_kept, call.translated.conversation
    if not (is_kept or conversation):
        return call.translated.reply
    talk = store.get(owner, conversation) if conversation else None
    given, tools = call.new_messages, call.decoded.fields.get("tools") or ()

    def keep(reply: Json, message: Message) -> None:
        messages = [*given, message]
        if is_kept:
            store.put(owner, Kept(body=reply, given=given, messages=messages, tools=tools))
        if talk is not None:
            store.put(owner, replace(talk, messages=messages))

    return call.translated.reply.keeping(keep)


def _new_conversation(raw: bytes) -> tuple[list[Message], Json]:
    body = decode(raw, dict[str, Any], may_be_empty=True)
    metadata = dict(as_object(body.get("metadata"), "metadata"))
    return read_items(body.get("items"), "items", []), metadata


def _page(request: Request, items: list[Json]) -> Response:
    """The latest first, unless `order=asc`."""
    query = request.query_params
    if query.get("order") != "asc":
        items = items[::-1]
    if after := query.get("after"):
        at = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise InvalidArgument(f"after: there is no item {after!r}", param="after")
        items = items[at + 1 :]
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 5 and 1 <= int(limit) <= _MAX_PAGE):
        raise InvalidArgument(f"limit must be 1 to {_MAX_PAGE}, got {limit!r}", param="limit")
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return JSONResponse({"object": "list", "data": page, "has_more": len(items) > len(page), **ends})
