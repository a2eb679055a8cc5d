"""The state of a chat session: its tree of turns, the turn that the backend is at, and the turn in flight."""

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.chat.chat_model import ChatModel
from holdfast.chat.continuation import Fits, Prompt
from holdfast.chat.matching import Difference, Matcher
from holdfast.chat.messages import Message
from holdfast.chats.events import ChatRequest, TurnResponse
from holdfast.chats.retry import IdempotencyKey
from holdfast.chats.tree import Node, Tree, first_difference
from holdfast.errors import HistoryConflict, MessageMismatch
from holdfast.sessions.journal.base import StoredSession
from holdfast.sessions.operations import Claim
from holdfast.sessions.record import TemplateInputs, TurnRecord

if TYPE_CHECKING:
    from holdfast.chats.turn import ChatTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRules:
    """What a request may do to the past."""

    matcher: Matcher
    max_rollback: int = 1  # -1: any number
    may_edit_replies: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTurn:
    """A turn that is about to be generated below `parent`."""

    parent: Node
    root: TemplateInputs
    messages: list[Message]  # new ones
    prompt: Prompt
    is_branch: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Trajectory:
    """Mutable; touched only on the event loop that serves it, by whoever has claimed its session."""

    session_id: str
    owner: str
    group: str = ""
    pin_tokens: int | None = None  # the client's own choice
    tree: Tree = field(default_factory=Tree)
    synced_node: Node = field(init=False)  # the turn at whose end the backend's history is
    needs_rewind: bool = False  # the backend holds more than that: a cancelled turn was not rolled back yet
    turn: "ChatTurn | None" = None  # in flight
    last_response: TurnResponse | None = None  # of the last turn, without a body where that follows from the record
    reward: float | None = None
    created_at: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.synced_node = self.tree.tip

    @classmethod
    def of_stored(cls, stored: StoredSession) -> "Trajectory":
        """The trajectory of a session on record; the bodies of its turns may stay in the journal."""
        tree = Tree()
        for turn in stored.turns:
            tree.add(turn)
        opened = stored.opened
        return cls(
            session_id=opened.session_id,
            owner=opened.owner,
            group=opened.group,
            pin_tokens=opened.pin_tokens,
            tree=tree,
            reward=stored.reward,
            created_at=opened.created_at,
        )

    @property
    def last_key(self) -> IdempotencyKey | None:
        """Of the request whose turn was recorded last."""
        turn = self.tree.tip.turn
        return IdempotencyKey(turn.body_hash, turn.idempotency_key) if turn.body_hash else None

    @property
    def num_branches(self) -> int:
        """How many turns do not follow the turn before them."""
        nodes = [self.tree.root, *self.tree.nodes]
        return sum(node.parent is not before for before, node in itertools.pairwise(nodes))

    def find_response(self, response_id: str) -> Node | None:
        found = (node for node in reversed(self.tree.nodes) if node.turn.facts.response_id == response_id)
        return next(found, None) if response_id else None

    def add(self, turn: TurnRecord) -> None:
        """Take a turn that is on record into the tree; the backend's history is at its end."""
        self.synced_node, self.needs_rewind = self.tree.add(turn), False

    async def sync_to(self, claim: Claim, node: Node) -> tuple[Node, int]:
        """Rewind the backend to the deepest turn that it shares with the path to `node`: that turn, and how many tokens
        had to be computed again."""
        length = claim.history_length
        if length != self.synced_node.end and not self.needs_rewind:
            raise HistoryConflict(expected=self.synced_node.end, actual=length)
        base = self.tree.common(self.synced_node, node)
        recomputed = 0
        if length > base.end:
            recomputed = (await claim.rewind(base.end, is_limited=not self.needs_rewind)).recomputed_tokens
        self.synced_node, self.needs_rewind = base, False
        return base, recomputed

    async def rollback(self, claim: Claim) -> None:
        """Rewind what a turn that was not committed has left in the backend."""
        if self.needs_rewind:
            if claim.history_length > self.synced_node.end:
                await claim.rewind(self.synced_node.end, is_limited=False)
            self.needs_rewind = False

    def prepare(
        self, request: ChatRequest, chat: ChatModel, rules: HistoryRules, fits: Fits | None = None
    ) -> PreparedTurn:
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
            prompt = continuation.first(new, request.tools, request.variables, fits)
        else:
            prompt = continuation.tail(
                parent.last_token, new, request.tools, request.variables, fits, start=parent.num_messages
            )
        return PreparedTurn(parent=parent, root=root, messages=new, prompt=prompt, is_branch=parent is not tree.tip)

    def _too_far(self, request: ChatRequest, root: TemplateInputs, rules: HistoryRules, left: int) -> MessageMismatch:
        first = self.tree.tip.path()[0]
        limit = f"this would leave {left} sampled turns behind, --max-rollback allows {rules.max_rollback}"
        if field_name := first.turn.root.differs(root):
            name = "tools" if field_name == "tools" else "chat_template_kwargs"
            return MessageMismatch(
                f"{name} differ from those that this session began with: {limit}; "
                "send the same ones, or open a new session",
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
