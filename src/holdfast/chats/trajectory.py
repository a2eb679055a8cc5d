"""A chat session: its tree of turns, which of them its backend stands at, and whose turn it is."""

import asyncio
import secrets
import time
from dataclasses import dataclass, field

from holdfast.chat.chat_model import ChatModel
from holdfast.chat.continuation import Prompt, TemplateInputs
from holdfast.chat.matching import Difference, Matcher
from holdfast.chat.messages import Message
from holdfast.chats.broadcast import Broadcast
from holdfast.chats.events import ChatRequest, TurnEvent, TurnResponse
from holdfast.chats.idempotency import IdempotencyKey
from holdfast.chats.tree import Node, Tree, first_difference
from holdfast.errors import MessageMismatch, SessionBusy


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRules:
    """What a request may do to the past."""

    matcher: Matcher
    max_rollback: int = 1  # -1: any number
    may_edit_replies: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTurn:
    """A turn that is about to be generated. `tip` is what it must find again when it commits."""

    parent: Node
    tip: Node
    root: TemplateInputs
    messages: list[Message]  # new ones
    prompt: Prompt
    is_branch: bool


@dataclass(frozen=True, slots=True)
class InFlight:
    """The operation that holds a session's slot."""

    turn_id: str
    ticket: IdempotencyKey | None
    shared: Broadcast[TurnEvent]


@dataclass(slots=True, kw_only=True, eq=False)
class Trajectory:
    """Mutable; touched only on the event loop that serves it."""

    session_id: str
    owner: str
    group: str = ""
    pin_tokens: int | None = None  # the client's own choice
    tree: Tree = field(default_factory=Tree)
    synced_node: Node = field(init=False)  # the turn whose end the backend's history is at
    needs_rewind: bool = False  # the backend holds more than that: a cancelled turn was not taken back yet
    in_flight: InFlight | None = None
    committing: "asyncio.Task[Node] | None" = None  # a turn that is being recorded
    last_ticket: IdempotencyKey | None = None  # of the turn that was recorded last
    last_number: int = 0
    last_reply: TurnResponse | None = None  # as its client got it; without a body where the record has it
    reward: float | None = None
    num_branches: int = 0
    num_control: int = 0
    created_at: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.synced_node = self.tree.root

    def claim(self, ticket: IdempotencyKey | None = None, shared: Broadcast[TurnEvent] | None = None) -> InFlight:
        """The slot for one operation; whoever gets it must release it."""
        if (flying := self.in_flight) is not None:
            raise SessionBusy(f"session {self.session_id} is busy with turn {flying.turn_id}", turn_id=flying.turn_id)
        self.in_flight = InFlight(secrets.token_hex(8), ticket, shared or Broadcast())
        return self.in_flight

    def release(self) -> None:
        self.in_flight = self.committing = None

    def prepare(self, request: ChatRequest, chat: ChatModel, rules: HistoryRules) -> PreparedTurn:
        """Match the request's messages with those on record; render what is new. Changes nothing."""
        continuation, tree = chat.continuation, self.tree
        root = continuation.root(request.tools, request.variables)
        match = tree.match(root, request.messages, rules.matcher)
        if match.edited and not rules.may_edit_replies:
            raise _edited(*match.edited)
        parent = match.node
        left = tree.left_behind(parent)
        if 0 <= rules.max_rollback < left:
            raise self._too_far(request, root, rules, left)
        new = request.messages[parent.num_messages :]
        if parent is tree.root:
            prompt = continuation.first(new, request.tools, request.variables)
        else:
            prompt = continuation.tail(
                parent.last_token, new, request.tools, request.variables, start=parent.num_messages
            )
        return PreparedTurn(
            parent=parent, tip=tree.tip, root=root, messages=new, prompt=prompt, is_branch=parent is not tree.tip
        )

    def _too_far(self, request: ChatRequest, root: TemplateInputs, rules: HistoryRules, left: int) -> MessageMismatch:
        first = self.tree.tip.path()[0]
        limit = f"this would leave {left} sampled turns behind, --max-rollback allows {rules.max_rollback}"
        for field_name in ("tools", "variables"):
            if getattr(first.root, field_name) != getattr(root, field_name):
                name = "tools" if field_name == "tools" else "chat_template_kwargs"
                return MessageMismatch(
                    f"{name} differ from those that this session began with: {limit}; "
                    "send the same ones or open a new session",
                    param=name,
                )
        found = first_difference(self.tree.tip, request.messages, rules.matcher)
        assert found is not None  # otherwise nothing would be left behind
        return _mismatch(*found, f"{limit}; resend the history as it was answered, or open a new session")


def _edited(index: int, difference: Difference) -> MessageMismatch:
    return _mismatch(
        index, difference, "a sampled reply came back changed; send it as it was answered, or drop it to retry"
    )


def _mismatch(index: int, difference: Difference, advice: str) -> MessageMismatch:
    where = f"messages[{index}]" if difference.field == "messages" else f"messages[{index}].{difference.field}"
    stored, given = (_short(value) for value in (difference.stored, difference.given))
    return MessageMismatch(f"{where} is {stored} on record and {given} in the request: {advice}", param=where)


def _short(value: object, limit: int = 200) -> str:
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
