"""Where the tokens of a conversation differ from what the template renders for its messages now. Pure.

They often do: templates strip reasoning from the past, models write calls their own way. Trainers log how often; the
tokens on record stay what they are. The findings have the types and members that miles gives them.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from holdfast.chat.chat_model import ChatModel
from holdfast.chat.tokenizer import Tokenizer
from holdfast.chats.tree import Node
from holdfast.errors import ContextTooLong, InvalidArgument

_MAX_TEXT = 2000  # characters of a text that is shown


class _Segment(NamedTuple):
    """One control token, or the text between two of them."""

    is_control: bool
    text: str
    has_sampled: bool


def mismatches(tip: Node, chat: ChatModel) -> list[dict[str, Any]]:
    """Each difference between the history up to `tip` and the whole conversation rendered anew; empty where there is
    none. Control tokens are compared one by one, the texts between them without white space at their ends."""
    if tip.parent is None:
        return []
    root = tip.path()[0].turn.root
    tools, variables = msgspec.json.decode(root.tools), msgspec.json.decode(root.variables)
    try:
        rendered = chat.continuation.first(list(tip.spoken()), tools, variables).ids
        continuation, start, reply = chat.continuation, tip.num_messages, tip.turn.reply
        tail = continuation.tail(tip.last_token, [], tools, variables, start=start, reply=reply).ids
    except (InvalidArgument, ContextTooLong) as exc:
        return [_finding("not_rendered", -1, detail=str(exc))]
    expected = list(_segments(((token, False) for token in rendered), chat.tokenizer))
    actual = list(_segments([*plain_history(tip), *((token, False) for token in tail)], chat.tokenizer))
    if [part.is_control for part in expected] != [part.is_control for part in actual]:
        detail = f"{len(expected)} control tokens and texts are rendered, {len(actual)} are on record"
        shapes = (" ".join(part.text if part.is_control else "..." for part in parts) for parts in (expected, actual))
        return [_finding("special_token_count", -1, *shapes, detail=detail)]
    found = []
    for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if one.text.strip() != other.text.strip():
            kind = "assistant_text" if other.has_sampled else "non_assistant_text"
            found.append(_finding("special_token_type" if one.is_control else kind, index, one.text, other.text))
    return found


def plain_history(tip: Node) -> Iterator[tuple[int, bool]]:
    """Every token but those of quotes, which no message has, and whether it was sampled."""
    for node in tip.path():
        given, recalled = node.turn.given, node.turn.facts.recalled
        if recalled is not None:
            given = given[: recalled.start] + given[recalled.start + recalled.length :]
        yield from ((token, False) for token in given)
        yield from ((token, True) for token in node.turn.sampled[: node.turn.num_lasting])


def _segments(tokens: Iterable[tuple[int, bool]], tokenizer: Tokenizer) -> Iterator[_Segment]:
    """Texts that are only white space are left out: a template may or may not put it between control tokens."""
    run, has_sampled = list[int](), False
    for token, is_sampled in [*tokens, (None, False)]:
        if token is not None and not tokenizer.is_control(token):
            run.append(token)
            has_sampled |= is_sampled
            continue
        if (text := tokenizer.decode(run)).strip():
            yield _Segment(False, text, has_sampled)
        run, has_sampled = [], False
        if token is not None:
            yield _Segment(True, tokenizer.decode([token]), is_sampled)


def _finding(kind: str, index: int, expected: str = "", actual: str = "", *, detail: str = "") -> dict[str, Any]:
    texts = {"expected_text": expected[:_MAX_TEXT], "actual_text": actual[:_MAX_TEXT]}
    return {"type": kind, "segment_index": index, **texts, "detail": detail}
