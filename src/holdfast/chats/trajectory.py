"""The state of a chat session: its tree of turns, its caches, and the turns in flight."""

import asyncio
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from holdfast.chat.chat_model import ChatModel
from holdfast.chat.continuation import Fits, Prompt
from holdfast.chat.matching import Difference, Matcher
from holdfast.chat.messages import Message
from holdfast.chat.tokenizer import Tokenizer
from holdfast.chats.caches import Cache, CachePool
from holdfast.chats.events import ChatRequest, TurnResponse
from holdfast.chats.recall import NO_RECALL, Recall, RecallLimits, spelled, with_text
from holdfast.chats.retry import IdempotencyKey
from holdfast.chats.tree import Node, Tree, first_difference
from holdfast.errors import InvalidArgument, MessageMismatch
from holdfast.sessions.journal.base import StoredSession
from holdfast.sessions.operations import Claim
from holdfast.sessions.record import Recalled, TemplateInputs, TurnRecord, View

if TYPE_CHECKING:
    from holdfast.chats.turn import ChatTurn

# What of its path a turn sees, by the turn above and its new tokens, and how many tokens of quotes have room there.
ViewOf = Callable[[Node, list[int]], tuple[View, int]]
Tip = Hashable  # where a conversation goes on; see `PreparedTurn.tip`

_MAX_REPEATABLE = 64  # turns on record among which a forest looks for one that is asked for again


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
    is_edited: bool = False  # it has another assistant message where a reply was sampled
    recalled: Recalled | None = None  # which part of the prompt is quotes
    view: View | None = None  # what the model sees of the path

    @property
    def num_recalled(self) -> int:
        return self.recalled.length if self.recalled else 0

    @property
    def tip(self) -> Tip:
        """Equal for turns of one conversation, which must not run at once: those below the same turn, and beginnings of
        a conversation that are the same."""
        if self.parent.parent is not None:
            return self.parent.number
        return self.root, msgspec.json.encode(self.messages)


@dataclass(slots=True, kw_only=True, eq=False)
class Trajectory:
    """Mutable; touched only on the event loop that serves it. Of a strict session, by whoever has claimed it; in a
    forest, whose turns run side by side, changes are made between two waits or under `commit_lock`."""

    session_id: str
    owner: str
    is_forest: bool = False
    name: str = ""  # by which the owner finds it, if it has one
    pin_tokens: int | None = None  # the client's own choice
    tree: Tree = field(default_factory=Tree)
    cache: Cache = field(init=False)  # of a strict session, that is, the session itself
    caches: CachePool | None = None  # of a forest on our engine, once there was a turn
    claim: Claim | None = None  # on a forest's session while it has turns in flight
    turns: "list[ChatTurn]" = field(default_factory=list)  # in flight; at most one in a strict session
    busy_tips: "dict[Tip, asyncio.Event]" = field(default_factory=dict)  # where a forest has a turn in flight
    num_waiting: int = 0  # turns that wait for one of these
    commit_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    last_responses: dict[int, TurnResponse] = field(default_factory=dict)  # by turn, of the last of each conversation;
    # without a body where that follows from the record
    recall: RecallLimits | None = None  # the session's own
    passages: Recall = field(default_factory=Recall)

    def __post_init__(self) -> None:
        self.cache = Cache(session_id=self.session_id, node=self.tree.tip)

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
            is_forest=opened.kind == "forest",
            name=opened.name,
            pin_tokens=opened.pin_tokens,
            tree=tree,
            recall=RecallLimits.of_metadata(opened.metadata),
        )

    def node(self, number: int) -> Node:
        """The turn of that number. Raises InvalidArgument."""
        nodes = self.tree.nodes
        if not 1 <= number <= len(nodes):
            known = f"1 to {len(nodes)}" if nodes else "left out: the session has no turns yet"
            raise InvalidArgument(f"turn must be {known}, got {number}", param="turn")
        return nodes[number - 1]

    def repeated(self, key: IdempotencyKey) -> Node | None:
        """The turn on record that this request has made already: the last one, in a forest the last one of some
        conversation."""
        nodes = [self.tree.tip]
        if self.is_forest:
            nodes = [node for node in reversed(self.tree.nodes[-_MAX_REPEATABLE:]) if not node.children]
        for node in nodes:
            turn = node.turn
            if turn.body_hash and key.repeats(IdempotencyKey(turn.body_hash, turn.idempotency_key)):
                return node
        return None

    def find_response(self, response_id: str) -> Node | None:
        """The turn whose client was told this id."""
        found = (node for node in reversed(self.tree.nodes) if node.turn.facts.response_id == response_id)
        return next(found, None) if response_id else None

    @property
    def num_branches(self) -> int:
        """How many turns do not follow the turn before them; in a forest, how many are not the first at their place."""
        nodes = [self.tree.root, *self.tree.nodes]
        if self.is_forest:
            return sum(max(0, len(node.children) - 1) for node in self.tree.nodes)
        return sum(node.parent is not before for before, node in itertools.pairwise(nodes))

    def add(self, turn: TurnRecord, response: TurnResponse) -> Node:
        """Take a turn that is on record into the tree, and its response."""
        node = self.tree.add(turn)
        self.last_responses[turn.number] = response
        gone = [turn.parent] if self.is_forest else [number for number in self.last_responses if number != turn.number]
        if len(self.last_responses) > _MAX_REPEATABLE:
            gone.append(min(self.last_responses))
        for number in gone:
            self.last_responses.pop(number, None)
        return node

    @property
    def num_unindexed(self) -> int:
        """About how many bytes of text are to be taken into the index before it can be searched."""
        return 4 * sum(len(node.turn.given) + len(node.turn.sampled) for node in self.passages.missing(self.tree))

    def prepare(
        self,
        request: ChatRequest,
        chat: ChatModel,
        rules: HistoryRules,
        fits: Fits | None = None,
        *,
        limits: RecallLimits = NO_RECALL,
        view: ViewOf | None = None,
    ) -> PreparedTurn:
        """Match the request's messages with those on record; render what is new, with quotes of what is out of view
        there. Changes nothing on record."""
        continuation, tree = chat.continuation, self.tree
        root = continuation.root(request.tools, request.variables)
        match = tree.match(root, request.messages, rules.matcher)
        if match.edited and not rules.may_edit_replies:
            raise _edited(*match.edited)
        parent, recalled = match.node, None
        left = tree.left_behind(parent)
        if 0 <= rules.max_rollback < left:
            raise self._too_far(request, root, rules, left)
        new = request.messages[parent.num_messages :]
        if parent is tree.root:
            at = self._begun_at(new) if continuation.tells_time else None
            prompt = continuation.first(new, request.tools, request.variables, fits, at=at)
            seen, _ = view(parent, prompt.ids) if view else (None, 0)
        else:
            tail = partial(
                continuation.tail,
                parent.last_token,
                tools=request.tools,
                variables=request.variables,
                fits=fits,
                start=parent.num_messages,
                reply=parent.turn.reply,
            )
            prompt = tail(new)
            seen, room = view(parent, prompt.ids) if view else (None, 0)
            if seen is not None:
                limits = replace(limits, tokens=min(limits.tokens, room))
                prompt, recalled = self._recalling(
                    parent, seen, new, prompt=prompt, limits=limits, tail=tail, tokenizer=chat.tokenizer
                )
        has_siblings = parent is not tree.root and bool(parent.children)
        return PreparedTurn(
            parent=parent,
            root=root,
            messages=new,
            prompt=prompt,
            is_branch=has_siblings if self.is_forest else parent is not tree.tip,
            is_edited=match.edited is not None and match.edited[0] >= parent.num_messages,
            recalled=recalled,
            view=seen,
        )

    def _recalling(
        self,
        parent: Node,
        seen: View,
        new: list[Message],
        *,
        prompt: Prompt,
        limits: RecallLimits,
        tail: Callable[[list[Message]], Prompt],
        tokenizer: Tokenizer,
    ) -> tuple[Prompt, Recalled | None]:
        """The prompt with quotes before the last thing that was said, and which of its tokens these are. The others are
        those of the prompt without quotes."""
        if limits.tokens <= 0 or seen.start <= seen.pinned:
            return prompt, None
        self.passages.update(self.tree, tokenizer)
        chosen = self.passages.choose(parent, seen, new, limits, tokenizer)
        # What opens the message ends where two texts differ. Its last token may be one with the message's first.
        opening = _shared(*(tail(with_text(new, text)).ids for text in "A1")) if chosen else []
        start = len(_shared(opening, prompt.ids))
        while chosen and len(quotes := opening[start:] + spelled(chosen, tokenizer)) > limits.tokens:
            chosen.pop()
        if not chosen:
            return prompt, None
        keys = tuple(sorted(passage.key for passage in chosen))
        ids = prompt.ids[:start] + quotes + prompt.ids[start:]
        return replace(prompt, ids=ids), Recalled(start=start, length=len(quotes), passages=keys)

    def _begun_at(self, messages: list[Message]) -> float | None:
        """When a conversation began with just these messages: a retry is told the same date."""
        again = (node.turn for node in self.tree.root.children if list(node.turn.messages) == messages)
        return next((turn.facts.started_at for turn in again), None)

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


def _shared(one: list[int], other: list[int]) -> list[int]:
    """What both begin with."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [token for token, _ in same]


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
