"""The turns of a chat session as a tree. Pure data: append-only, ordered by number, never by the clock.

A node is one turn: the messages and tokens it was given, and the reply that was sampled. A retry is a
sibling. The root holds nothing; the first turns below it carry what shaped their first render.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from holdfast.chat.matching import Difference, Matcher
from holdfast.chat.messages import Message
from holdfast.generation import Sampled
from holdfast.sessions.record import TemplateInputs, TurnRecord


@dataclass(slots=True, eq=False)
class Node:
    """One turn in its tree. The root's turn is empty."""

    turn: TurnRecord
    parent: "Node | None"
    children: list["Node"] = field(default_factory=list)
    depth: int = field(init=False)  # sampled turns on the path
    end: int = field(init=False)  # tokens on the path, as the next turn goes on from them
    num_messages: int = field(init=False)  # messages on the path, replies included

    def __post_init__(self) -> None:
        above, turn = self.parent, self.turn
        self.depth = above.depth + 1 if above else 0
        self.end = (above.end if above else 0) + len(turn.given) + turn.num_lasting
        self.num_messages = above.num_messages + len(turn.messages) + 1 if above else 0

    @property
    def number(self) -> int:
        return self.turn.number

    @property
    def start(self) -> int:
        """Tokens on the path before this turn."""
        return self.parent.end if self.parent else 0

    @property
    def last_token(self) -> int | None:
        """Of the reply, as it was sampled."""
        tokens = self.turn.sampled or self.turn.given
        return tokens[-1] if tokens else None

    def tokens(self) -> "array[int]":
        """What this turn adds to the path."""
        return self.turn.given + self.turn.sampled[: self.turn.num_lasting]

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
            yield from node.turn.messages
            yield node.turn.reply

    def ids(self, since: "Node | None" = None) -> list[int]:
        """All tokens on the path, or those after the ancestor `since`."""
        nodes = self.path()[since.depth if since else 0 :]
        return [token for node in nodes for token in node.tokens()]

    def ids_as_sampled(self) -> list[int]:
        """All tokens on the path, with the end of the last reply that the next turn may not go on from."""
        return [*self.ids(), *self.turn.sampled[self.turn.num_lasting :]]


class Match(NamedTuple):
    """Where a request attaches: its first `num_messages` messages are those of `node`'s path.

    `edited`: at that index the request has an assistant message where another one was sampled.
    """

    node: Node
    edited: tuple[int, Difference] | None


class Tree:
    def __init__(self) -> None:
        self.root = Node(TurnRecord(number=0), None)
        self.tip = self.root
        self.nodes: list[Node] = []  # by number, from 1

    def match(self, root: TemplateInputs, messages: Sequence[Message], matcher: Matcher) -> Match:
        """The deepest node whose messages begin the request's; of several, that on the way to the tip or the latest."""
        current = {id(node) for node in self.tip.path()}
        best, edited, furthest = self.root, None, 0
        frontier = [
            child for child in self.root.children if child.turn.root == root or not child.turn.root.differs(root)
        ]
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

    def add(self, turn: TurnRecord) -> Node:
        """A turn below its parent; it is the tip from now on."""
        assert turn.number == self.next_number()
        parent = self.nodes[turn.parent - 1] if turn.parent else self.root
        node = Node(turn, parent)
        parent.children.append(node)
        self.nodes.append(node)
        self.tip = node
        return node

    def attach(self, parent: Node, *, sampled: Sequence[Sampled], given: Sequence[int], **fields: Any) -> Node:
        """A new turn below `parent`; it is the tip from now on."""
        return self.add(self.new_turn(parent, sampled=sampled, given=given, **fields))

    def new_turn(
        self,
        parent: Node,
        *,
        messages: Sequence[Message],
        given: Sequence[int],
        sampled: Sequence[Sampled],
        **fields: Any,
    ) -> TurnRecord:
        """A turn that could be added next; `fields` are others of TurnRecord."""
        return TurnRecord(
            number=self.next_number(),
            parent=parent.number,
            messages=tuple(messages),
            given=array("i", given),
            sampled=array("i", [token.token for token in sampled]),
            logprobs=array("d", [token.logprob for token in sampled]),
            sampling_logprobs=array("d", [token.sampling_logprob for token in sampled]),
            **fields,
        )

    def copy(self, tip: Node) -> "Tree":
        """An independent tree of the path to `tip` alone, numbered anew; retries of its turns are not known there."""
        other = Tree()
        for index, node in enumerate(tip.path()):
            own: dict[str, Any] = {"number": index + 1, "parent": index, "num_control": 0}
            other.add(msgspec.structs.replace(node.turn, **own, idempotency_key="", body_hash=b""))
        return other


class _Mismatch(NamedTuple):
    at: int
    what: Difference
    is_edit: bool


def _compare(node: Node, messages: Sequence[Message], matcher: Matcher) -> _Mismatch | None:
    """None if the request contains all messages of this node; it is known to contain those of its parent."""
    index = node.parent.num_messages if node.parent else 0
    for stored in node.turn.messages:
        if index >= len(messages):
            return _Mismatch(index, Difference("messages", stored, None), False)
        if difference := matcher(stored, messages[index]):
            return _Mismatch(index, difference, False)
        index += 1
    reply = node.turn.reply
    if index >= len(messages):
        return _Mismatch(index, Difference("messages", reply, None), False)
    if difference := matcher(reply, messages[index]):
        return _Mismatch(index, difference, messages[index]["role"] == "assistant")
    return None


def first_difference(tip: Node, messages: Sequence[Message], matcher: Matcher) -> tuple[int, Difference] | None:
    """Where the request first differs from the path to `tip`, for an error message."""
    for node in tip.path():
        if mismatch := _compare(node, messages, matcher):
            return mismatch.at, mismatch.what
    return None
