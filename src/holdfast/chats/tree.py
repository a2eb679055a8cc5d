"""The turns of a chat session as a tree. Pure data: append-only, ordered by number, never by the clock.

A node is one turn: the messages and tokens it was given, and the reply that was sampled. A retry is a
sibling. The root holds nothing; the first turns below it carry what shaped their first render.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from holdfast.chat.continuation import TemplateInputs
from holdfast.chat.matching import Difference, Matcher
from holdfast.chat.messages import Message
from holdfast.generation import Sampled
from holdfast.sessions.ports import ByteRange


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """What a trainer must know of a turn beside its tokens."""

    sampling: Mapping[str, Any] = field(default_factory=dict)  # the parameters it was sampled with
    logprob_kind: str = "unknown"  # of `logprobs`: raw (before temperature), sampling, or unknown
    weight_versions: tuple[str, str] = ("", "")  # when it began and when it ended
    started_at: float = 0.0
    ended_at: float = 0.0
    routed_experts: str | ByteRange | None = None  # base64 of int32 or a list; mostly its range in the response
    indexer_topk: str | ByteRange | None = None
    cut: tuple[ByteRange, ...] = ()  # of the response, what its client did not get


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A turn as it went over the wire. `request` is the body as the backend got it, less the ids that the path has.

    Bodies that are None are in the journal.
    """

    request: bytes | None
    response: bytes | None
    request_timestamp: float = 0.0
    timestamp: float = 0.0
    path: str = "/v1/chat/completions"
    method: str = "POST"
    status_code: int = 200


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """One turn. Everything but `children`, `reward` and `is_delivered` is fixed once the node is in a tree."""

    number: int
    parent: "Node | None"
    messages: tuple[Message, ...] = ()  # new in this turn
    reply: Message | None = None  # None only at the root
    root: TemplateInputs = field(default_factory=TemplateInputs)
    given: "array[int]" = field(default_factory=lambda: array("i"))
    sampled: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("d"))
    sampling_logprobs: "array[float]" = field(default_factory=lambda: array("d"))
    finish_reason: str = ""
    facts: TurnFacts = field(default_factory=TurnFacts)
    record: "Record | None" = None
    reward: float | None = None
    is_delivered: bool = False
    children: list["Node"] = field(default_factory=list)
    depth: int = field(init=False)  # sampled turns on the path
    end: int = field(init=False)  # tokens on the path
    num_messages: int = field(init=False)  # messages on the path

    def __post_init__(self) -> None:
        above = self.parent
        self.depth = above.depth + 1 if above else 0
        self.end = (above.end if above else 0) + len(self.given) + len(self.sampled)
        self.num_messages = (above.num_messages if above else 0) + len(self.messages) + (self.reply is not None)

    @property
    def last_token(self) -> int | None:
        return self.sampled[-1] if self.sampled else self.given[-1] if self.given else None

    def path(self) -> list["Node"]:
        """From the first turn down to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def ancestor(self, depth: int) -> "Node":
        """The node on the path, or the root, that is so deep."""
        node = self
        while node.depth > depth and node.parent is not None:
            node = node.parent
        return node

    def spoken(self) -> Iterator[Message]:
        """All messages on the path."""
        for node in self.path():
            yield from node.messages
            if node.reply is not None:
                yield node.reply

    def ids(self, since: "Node | None" = None) -> list[int]:
        """All tokens on the path, or those after the ancestor `since`."""
        nodes = self.path()[since.depth if since else 0 :]
        return [token for node in nodes for part in (node.given, node.sampled) for token in part]


class Match(NamedTuple):
    """Where a request attaches: its first `num_messages` messages are those of `node`'s path.

    `edited`: at that index the request has an assistant message where another one was sampled.
    """

    node: Node
    edited: tuple[int, Difference] | None


class Tree:
    def __init__(self) -> None:
        self.root = Node(number=0, parent=None)
        self.tip = self.root
        self.nodes: list[Node] = []  # by number, from 1

    def match(self, root: TemplateInputs, messages: Sequence[Message], matcher: Matcher) -> Match:
        """The deepest node whose messages begin the request's; of several, that on the way to the tip or the latest."""
        current = {id(node) for node in self.tip.path()}
        best, edited, furthest = self.root, None, 0
        frontier = [child for child in self.root.children if child.root == root]
        while frontier:
            matched = []
            for node in frontier:
                difference = _compare(node, messages, matcher)
                furthest = max(furthest, node.num_messages if difference is None else difference.at)
                if difference is None:
                    matched.append(node)
                elif difference.is_edit and (edited is None or difference.at >= edited[0]):
                    edited = (difference.at, difference.what)
            if matched:
                best = max([best, *matched], key=lambda node: (node.num_messages, id(node) in current, node.number))
            frontier = [child for node in matched for child in node.children]
        if edited is not None and edited[0] < furthest:
            edited = None  # elsewhere on record the message stands just so
        return Match(best, edited)

    def left_behind(self, node: Node) -> int:
        """How many sampled turns of the current path do not lie on `node`'s."""
        return self.tip.depth - self.common(self.tip, node).depth

    @staticmethod
    def common(one: Node, other: Node) -> Node:
        """The deepest node on both paths."""
        while one is not other:
            if one.depth >= other.depth and one.parent is not None:
                one = one.parent
            elif other.parent is not None:
                other = other.parent
        return one

    def next_number(self) -> int:
        return len(self.nodes) + 1

    def add(self, node: Node) -> Node:
        """A turn below its parent; it is the tip from now on."""
        assert node.number == self.next_number()
        assert node.parent is not None
        node.parent.children.append(node)
        self.nodes.append(node)
        self.tip = node
        return node

    def attach(self, parent: Node, *, sampled: Sequence[Sampled], given: Sequence[int], **fields: Any) -> Node:
        """A new turn below `parent`; it is the tip from now on."""
        return self.add(self.new_node(parent, sampled=sampled, given=given, **fields))

    def new_node(
        self,
        parent: Node,
        *,
        messages: Sequence[Message],
        reply: Message,
        root: TemplateInputs,
        given: Sequence[int],
        sampled: Sequence[Sampled],
        finish_reason: str,
        facts: TurnFacts | None = None,
        record: Record | None = None,
    ) -> Node:
        """A turn that could be added next."""
        return Node(
            number=self.next_number(),
            parent=parent,
            messages=tuple(messages),
            reply=reply,
            root=root,
            given=array("i", given),
            sampled=array("i", [token.token for token in sampled]),
            logprobs=array("d", [token.logprob for token in sampled]),
            sampling_logprobs=array("d", [token.sampling_logprob for token in sampled]),
            finish_reason=finish_reason,
            facts=facts or TurnFacts(),
            record=record,
        )

    def copy(self, tip: Node) -> tuple["Tree", Node]:
        """An independent tree of the path to `tip` alone, and its tip."""
        other = Tree()
        for node in tip.path():
            other.tip = replace(node, number=len(other.nodes) + 1, parent=other.tip, children=[])
            assert other.tip.parent is not None
            other.tip.parent.children.append(other.tip)
            other.nodes.append(other.tip)
        return other, other.tip


class _Mismatch(NamedTuple):
    at: int
    what: Difference
    is_edit: bool


def _compare(node: Node, messages: Sequence[Message], matcher: Matcher) -> _Mismatch | None:
    """None where the request goes on with all that this node said, given that it did so up to its parent."""
    index = node.parent.num_messages if node.parent else 0
    for stored in node.messages:
        if index >= len(messages):
            return _Mismatch(index, Difference("messages", stored, None), False)
        if difference := matcher(stored, messages[index]):
            return _Mismatch(index, difference, False)
        index += 1
    if node.reply is None:
        return None
    if index >= len(messages):
        return _Mismatch(index, Difference("messages", node.reply, None), False)
    if difference := matcher(node.reply, messages[index]):
        return _Mismatch(index, difference, messages[index]["role"] == "assistant")
    return None


def first_difference(tip: Node, messages: Sequence[Message], matcher: Matcher) -> tuple[int, Difference] | None:
    """Where the request leaves the path to `tip`, for whoever has to explain it."""
    for node in tip.path():
        if mismatch := _compare(node, messages, matcher):
            return mismatch.at, mismatch.what
    return None
