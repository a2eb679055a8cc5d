"""Which turns a sample contains, which of them are trained, and the loss mask."""

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from holdfast.chats.samples.sample import Mask, Masked, TurnSpan, version_number
from holdfast.chats.tree import Node, Tree
from holdfast.chats.view import WHOLE
from holdfast.errors import SamplesUnusable
from holdfast.sessions.record import View


class Kept(NamedTuple):
    """Turns of a branch, one after the other, that a sample may hold. `last_sampled`: how much of the last one."""

    nodes: list[Node]
    last_sampled: int
    is_cut: bool  # the last turn is not whole

    @property
    def view(self) -> View:
        """What of the branch the prompts of all these turns were made of."""
        return view_of(self.nodes[0])


def branches(tree: Tree) -> list[list[Node]]:
    """All paths from the first turn to a leaf: depth first, siblings by number.

    So the order never changes as the tree grows, and neither does the branch that comes first at any node.
    """
    paths = [node.path() for node in tree.nodes if not node.children]
    return sorted(paths, key=lambda path: [node.number for node in path])


def view_of(node: Node) -> View:
    return node.turn.facts.view or WHOLE


def parts(path: Sequence[Node]) -> list[list[Node]]:
    """The turns of a branch whose prompts extend each other: all of them, unless an upstream got a view that changed.
    Each part is a sample."""
    return [list(nodes) for _, nodes in itertools.groupby(path, view_of)]


def cut(path: Sequence[Node], max_seq_len: int | None) -> Kept | None:
    """What of a part of a branch fits into `max_seq_len` tokens; None where nothing sampled does.

    A turn that crosses the limit is left out whole, so what a turn says of its end stays true. Only where nothing
    sampled would be left is the first turn that has any shortened, and then it says that it ended by length.
    """
    hidden = view_of(path[0]).num_hidden if path else 0
    limit = None if max_seq_len is None else max_seq_len + hidden
    whole = [node for node in path if limit is None or node.end + node.turn.facts.num_trimmed <= limit]
    if any(node.turn.sampled for node in whole):
        return Kept(whole, len(whole[-1].turn.sampled), False)
    if limit is None or len(whole) == len(path):
        return None
    crossing = path[len(whole)]
    room = limit - (crossing.end - crossing.turn.num_lasting)
    return Kept([*whole, crossing], room, True) if room > 0 and crossing.turn.sampled else None


def masked(node: Node, already_trained: Collection[int], min_weight_version: int | None) -> Masked:
    """Whether a turn is trained, and if not, why. What cannot be decided is an error."""
    if node.number in already_trained:
        return Masked.SHARED
    if min_weight_version is None or not node.turn.sampled:
        return Masked.NO
    facts = node.turn.facts
    for version in [name for name, _ in facts.weight_spans] or facts.weight_versions:
        number = version_number(version)
        if number is None:
            has = f"weight version {version!r}" if version else "no weight version"
            raise SamplesUnusable(
                f"turn {node.number} has {has}: it cannot be compared with min_weight_version {min_weight_version}",
                reason="weight_version",
            )
        if number < min_weight_version:
            return Masked.STALE
    return Masked.NO


def response_start(turns: Sequence[TurnSpan]) -> int:
    """Where the first sampled token stands; the end where there is none."""
    return next((turn.sampled_start for turn in turns if turn.num_sampled), turns[-1].end if turns else 0)


def loss_mask(turns: Sequence[TurnSpan]) -> Mask:
    """1 on the sampled tokens of turns that are trained, from the first sampled token of all on."""
    mask = np.zeros(turns[-1].end if turns else 0, np.uint8)
    for turn in turns:
        if turn.num_trained:
            mask[turn.sampled_start : turn.end] = 1
    return mask[response_start(turns) :]
