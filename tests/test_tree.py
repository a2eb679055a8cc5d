"""The tree of turns: where requests attach, what is left behind, and that nothing is ever lost."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.chat.matching import normal
from holdfast.chats.tree import Node, Tree, first_difference
from holdfast.generation import Sampled
from holdfast.sessions.record import TemplateInputs

ROOT = TemplateInputs()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def attach(
    tree: Tree, parent: Node, question: str, reply: str, *, tokens: int = 2, root: TemplateInputs = ROOT
) -> Node:
    sampled = [Sampled(token=t, logprob=-0.5, sampling_logprob=-0.25) for t in range(tokens)]
    return tree.attach(
        parent,
        messages=[user(question)],
        reply=said(reply),
        root=root,
        given=[9] * tokens,
        sampled=sampled,
        finish_reason="stop",
    )


def test_a_longer_conversation_attaches_at_the_tip() -> None:
    tree = Tree()
    first = attach(tree, tree.root, "a", "A")
    second = attach(tree, first, "b", "B")
    match = tree.match(ROOT, [user("a"), said("A"), user("b"), said("B"), user("c")], normal)
    assert (match.node, match.edited) == (second, None)
    assert tree.left_behind(match.node) == 0
    assert second.ids() == [9, 9, 0, 1, 9, 9, 0, 1]
    assert second.ids(since=first) == [9, 9, 0, 1]


def test_dropping_the_reply_is_a_retry_at_its_parent() -> None:
    tree = Tree()
    first = attach(tree, tree.root, "a", "A")
    attach(tree, first, "b", "B")
    match = tree.match(ROOT, [user("a"), said("A"), user("b")], normal)
    assert (match.node, match.edited) == (first, None)
    assert tree.left_behind(first) == 1
    again = attach(tree, first, "b", "B2")
    assert first.children == [tree.nodes[1], again]
    assert tree.tip is again


def test_a_changed_question_is_a_retry_too() -> None:
    tree = Tree()
    first = attach(tree, tree.root, "a", "A")
    attach(tree, first, "b", "B")
    assert tree.match(ROOT, [user("a"), said("A"), user("other")], normal).node is first
    assert tree.match(ROOT, [user("other")], normal).node is tree.root


def test_an_edited_reply_is_told_from_a_retry() -> None:
    tree = Tree()
    first = attach(tree, tree.root, "a", "A")
    match = tree.match(ROOT, [user("a"), said("B"), user("c")], normal)
    assert match.node is tree.root
    assert match.edited is not None
    index, difference = match.edited
    assert (index, difference.field, difference.stored, difference.given) == (1, "content", "A", "B")
    attach(tree, tree.root, "a", "B")
    assert tree.match(ROOT, [user("a"), said("B"), user("c")], normal).edited is None
    assert tree.match(ROOT, [user("a"), said("A"), user("c")], normal).node is first


def test_of_equal_siblings_the_one_on_the_way_to_the_tip_is_taken() -> None:
    tree = Tree()
    old = attach(tree, tree.root, "a", "A")
    new = attach(tree, tree.root, "a", "A")
    request = [user("a"), said("A"), user("b")]
    assert tree.match(ROOT, request, normal).node is new
    deep = attach(tree, old, "b", "B")
    assert tree.match(ROOT, [*request, said("B"), user("c")], normal).node is deep
    assert tree.match(ROOT, request, normal).node is old


def test_more_agreeing_messages_beat_more_turns() -> None:
    tree = Tree()
    one, two = said("x"), said("y")
    fields: Any = {"root": ROOT, "given": [1], "sampled": [], "finish_reason": "stop"}
    whole = tree.attach(tree.root, messages=[user("a"), one, user("b"), two, user("c")], reply=said("z"), **fields)
    first = tree.attach(tree.root, messages=[user("a")], reply=one, **fields)
    tree.attach(first, messages=[user("b")], reply=two, **fields)
    request = [user("a"), one, user("b"), two, user("c"), said("z"), user("d")]
    assert tree.match(ROOT, request, normal).node is whole


def test_a_message_that_stands_so_elsewhere_on_record_is_no_edit() -> None:
    tree = Tree()
    fields: Any = {"root": ROOT, "given": [1], "sampled": [], "finish_reason": "stop"}
    tree.attach(tree.root, messages=[user("a"), said("mine"), user("b")], reply=said("z"), **fields)
    tree.attach(tree.root, messages=[user("a")], reply=said("q"), **fields)
    match = tree.match(ROOT, [user("a"), said("mine"), user("other")], normal)
    assert (match.node, match.edited) == (tree.root, None)


def test_other_tools_are_another_root() -> None:
    tree = Tree()
    attach(tree, tree.root, "a", "A")
    assert tree.match(TemplateInputs(tools="[1]"), [user("a"), said("A"), user("b")], normal).node is tree.root


def test_the_first_difference_is_told_for_the_current_path() -> None:
    tree = Tree()
    first = attach(tree, tree.root, "a", "A")
    attach(tree, first, "b", "B")
    found = first_difference(tree.tip, [user("a"), said("A"), user("x")], normal)
    assert found is not None
    assert (found[0], found[1].field, found[1].given) == (2, "content", "x")
    missing = first_difference(tree.tip, [user("a")], normal)
    assert missing is not None
    assert (missing[0], missing[1].given) == (1, None)
    assert first_difference(tree.tip, [user("a"), said("A"), user("b"), said("B")], normal) is None


def test_a_copy_goes_its_own_way() -> None:
    tree = Tree()
    first = attach(tree, tree.root, "a", "A")
    attach(tree, tree.root, "z", "Z")
    copy = tree.copy(first)
    tip = copy.tip
    assert tip.ids() == first.ids()
    assert len(copy.nodes) == 1
    attach(copy, tip, "b", "B")
    assert first.children == []


class Growing(RuleBasedStateMachine):
    """Random turns and retries: every path stays as it was attached, and a resent path finds its node."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree()
        self.paths: dict[int, tuple[list[dict[str, Any]], list[int]]] = {}

    @rule(pick=st.integers(0, 1000), question=st.sampled_from("ab"), reply=st.sampled_from("AB"), n=st.integers(1, 3))
    def turn(self, pick: int, question: str, reply: str, n: int) -> None:
        parent = [self.tree.root, *self.tree.nodes][pick % (len(self.tree.nodes) + 1)]
        node = attach(self.tree, parent, question, reply, tokens=n)
        self.paths[node.number] = (list(node.spoken()), node.ids())

    @invariant()
    def nothing_changes(self) -> None:
        for node in self.tree.nodes:
            messages, ids = self.paths[node.number]
            assert list(node.spoken()) == messages
            assert node.ids() == ids
            assert node.end == len(ids)
            assert node.num_messages == len(messages)

    @invariant()
    def resending_finds_the_deepest(self) -> None:
        for node in self.tree.nodes:
            found = self.tree.match(ROOT, [*node.spoken(), user("more")], normal)
            assert list(found.node.spoken()) == list(node.spoken())
            assert found.edited is None

    @invariant()
    def common_ancestors_are_common(self) -> None:
        for node in self.tree.nodes:
            base = self.tree.common(node, self.tree.tip)
            assert base.depth == 0 or (base in node.path() and base in self.tree.tip.path())
            assert self.tree.left_behind(node) == self.tree.tip.depth - base.depth


TestGrowing = Growing.TestCase


@given(st.integers(0, 30))
def test_long_conversations_need_no_recursion(extra: int) -> None:
    tree = Tree()
    messages: list[dict[str, Any]] = []
    for number in range(1200 + extra):
        attach(tree, tree.tip, str(number), "A", tokens=1)
        messages += [user(str(number)), said("A")]
    assert tree.match(ROOT, messages, normal).node is tree.tip
