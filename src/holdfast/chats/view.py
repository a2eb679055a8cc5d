"""The view of a session on an upstream: which part of a conversation the prompt is made of, within a budget of tokens.

Pure, and a function of what is on record: a retry, a restart and another member send the same prompt.
"""

from collections.abc import Callable, Sequence

from holdfast.chat.continuation import Opening
from holdfast.chats.tree import Node
from holdfast.errors import ContextTooLong
from holdfast.sessions.record import View

WHOLE = View(0, 0)


def bounded_view(
    parent: Node,
    prompt: Sequence[int],
    *,
    budget: int,
    opening: Callable[[], Opening],
    pin_tokens: int | None = None,
    reserve: int = 0,
) -> View:
    """What of the path to `parent` is shown before the new tokens of `prompt`, to which `reserve` more may be added.

    The view above stays while it fits, so that an upstream finds the beginning of the prompt in its cache. Then whole
    turns are dropped until those that are left have half the budget at most. `opening` is always shown, or the first
    `pin_tokens` tokens."""

    def num_tokens(view: View) -> int:
        return parent.end - view.num_hidden + len(prompt)

    above = parent.turn.facts.view
    if num_tokens(above or WHOLE) + reserve <= budget:
        return above or WHOLE
    view = WHOLE
    if parent.parent is not None:
        begins = opening()
        if above is None:
            first, pinned = parent.ancestor(1).turn.given, len(begins.ids) if pin_tokens is None else pin_tokens
            if pin_tokens is None and first[:pinned].tolist() != begins.ids:
                raise ContextTooLong(
                    f"messages: the conversation exceeds the server's --context-budget of {budget}, and does not begin "
                    "as the chat template renders it now, so that what must stay is not known; open a new session",
                    param="messages",
                )
            above = View(pinned, pinned)
        for node in parent.path():
            view = _from(node.start, node.turn.given, above, begins)
            fits = parent.end - node.start <= budget // 2 and num_tokens(view) + reserve <= budget
            if fits and view.start > above.start:
                return view
        view = _from(parent.end, prompt, above, begins)
    if (num := num_tokens(view)) > budget:
        raise ContextTooLong(
            f"messages: {num} tokens, those of the new messages and {view.pinned} that are pinned, exceed the server's "
            f"--context-budget of {budget}; send fewer",
            param="messages",
        )
    return view


def _from(start: int, given: Sequence[int], above: View, opening: Opening) -> View:
    return View(above.pinned, max(above.start, start + opening.num_closing(given)))


def shown_messages(parent: Node, view: View | None) -> list[int]:
    """The indices of the messages up to `parent` that a request names beside its token ids: those in view; the leading
    system messages; and what the first one answers, as templates render no tool's result without its call."""
    roles = [message["role"] for message in parent.spoken()]
    if view is None or not view.num_hidden:
        return list(range(len(roles)))
    nodes = [node for node in parent.path() if node.end > view.start]
    first = nodes[0].num_messages - len(nodes[0].turn.messages) - 1 if nodes else len(roles)
    leading = next((index for index, role in enumerate(roles) if role not in ("system", "developer")), 0)
    asked = [index for index in range(leading, first) if roles[index] == "user"]
    before = {*asked[-1:], *range(max(leading, first - 1), first)}
    return [*range(leading), *sorted(before), *range(max(first, leading), len(roles))]
