"""Pages of the tokens of a session, column by column: what each token is, what it spells, and how likely it was.

Pure: what it is given does not change, so that it may run in any thread.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.chat.tokenizer import Tokenizer
from holdfast.chats.tree import Node
from holdfast.errors import InvalidArgument
from holdfast.sessions.history import SpanKind, SpanPiece
from holdfast.sessions.record import Recalled, View

MAX_PAGE_TOKENS = 10_000
PAGE_TOKENS = 2000

_ESCAPED = re.compile(r"(\\x[0-9a-f]{2})+")
_AS_ID = re.compile(r"token_id:([0-9]{1,9})")  # how vLLM is asked to tell tokens


def spelled(data: bytes) -> str:
    r"""The text of a token. Bytes that are no text become `\xNN` each, and so does a text that looks like that."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)
    return "".join(f"\\x{byte:02x}" for byte in data) if _ESCAPED.fullmatch(text) else text


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that was likely at a place. Some servers tell its text alone."""

    text: str
    logprob: float | None
    id: int | None = None


Alternatives = list[list[Alternative] | None]  # for each sampled token


@dataclass(slots=True)
class Columns:
    """What is known of some tokens, one after the other."""

    ids: list[int] = field(default_factory=list)
    kinds: list[SpanKind] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    sampling_logprobs: list[float | None] = field(default_factory=list)
    top: Alternatives = field(default_factory=list)
    weight_versions: list[str | None] = field(default_factory=list)

    def give(self, tokens: Sequence[int], kind: SpanKind) -> None:
        nothing = [None] * len(tokens)
        self.ids += tokens
        self.kinds += [kind] * len(tokens)
        for column in (self.logprobs, self.sampling_logprobs, self.top, self.weight_versions):
            column.extend(nothing)

    def sample(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        sampling_logprobs: Sequence[float],
        weight_versions: Sequence[str],
        top: Alternatives | None = None,
    ) -> None:
        self.ids += tokens
        self.kinds += [SpanKind.SAMPLED] * len(tokens)
        self.logprobs += logprobs
        self.sampling_logprobs += sampling_logprobs
        self.weight_versions += [version or None for version in weight_versions]
        self.top += top or [None] * len(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPage:
    """Tokens from `start` on of a path that has `total` and ends at turn `turn`; `nodes` are the turns they are of.

    `seen`: what of the path its next token attends to."""

    turn: int | None
    total: int
    start: int
    seen: View
    nodes: Sequence[Node]
    columns: Columns

    def texts(self, tokenizer: Tokenizer) -> list[str]:
        return [spelled(tokenizer.token_bytes(token)) for token in self.columns.ids]


def checked_range(start: int, limit: int, total: int) -> range:
    """The positions of a page. Raises InvalidArgument."""
    if not 1 <= limit <= MAX_PAGE_TOKENS:
        raise InvalidArgument(f"limit must be 1 to {MAX_PAGE_TOKENS}, got {limit}", param="limit")
    if not 0 <= start <= total:
        raise InvalidArgument(f"start must be 0 to {total}, the number of tokens, got {start}", param="start")
    return range(start, min(total, start + limit))


def path_page(
    tip: Node, page: range, seen: View, response_of: Callable[[Node], bytes], tokenizer: Tokenizer
) -> TokenPage:
    """A page of the path to `tip`. `response_of` may read from the disk."""
    nodes: list[Node] = []
    node = tip
    while node.parent is not None and node.end > page.start:
        if node.start < page.stop:
            nodes.append(node)
        node = node.parent
    columns = Columns()
    for node in reversed(nodes):
        inner = range(max(page.start, node.start) - node.start, min(page.stop, node.end) - node.start)
        _add_turn(columns, node, inner, response_of, tokenizer)
    return TokenPage(
        turn=tip.number or None, total=tip.end, start=page.start, seen=seen, nodes=nodes[::-1], columns=columns
    )


def span_page(pieces: Sequence[SpanPiece], page: range, total: int, seen: View) -> TokenPage:
    """A page of the history of a token session, which has no turns."""
    columns = Columns()
    for piece in pieces:
        if piece.kind is SpanKind.SAMPLED:
            versions = [piece.weight_version] * len(piece.tokens)
            columns.sample(piece.tokens, piece.logprobs, piece.sampling_logprobs, versions)
        else:
            columns.give(piece.tokens, piece.kind)
    return TokenPage(turn=None, total=total, start=page.start, seen=seen, nodes=(), columns=columns)


def _add_turn(
    columns: Columns, node: Node, inner: range, response_of: Callable[[Node], bytes], tokenizer: Tokenizer
) -> None:
    """Add those tokens of a turn that are at these places in it."""
    turn, num_given = node.turn, len(node.turn.given)
    for kind, first, end in given_spans(num_given, turn.facts.recalled):
        columns.give(turn.given[max(first, inner.start) : min(end, inner.stop)], kind)
    part = slice(max(0, inner.start - num_given), inner.stop - num_given)
    if part.stop <= part.start:
        return
    spans = turn.facts.weight_spans or ((turn.facts.weight_versions[0], len(turn.sampled)),)
    versions = [version for version, num in spans for _ in range(num)]
    top = _alternatives(response_of(node), len(turn.sampled), tokenizer)
    columns.sample(
        turn.sampled[part],
        turn.logprobs[part].tolist(),
        turn.sampling_logprobs[part].tolist(),
        versions[part],
        top and top[part],
    )


def given_spans(num_given: int, recalled: Recalled | None) -> Iterator[tuple[SpanKind, int, int]]:
    """The runs of a turn's given tokens, of which some may be quotes: kind, first place in the turn, and end."""
    first, end = (recalled.start, recalled.start + recalled.length) if recalled else (num_given, num_given)
    for run in ((SpanKind.GIVEN, 0, first), (SpanKind.RECALLED, first, end), (SpanKind.GIVEN, end, num_given)):
        if run[1] < run[2]:
            yield run


# What the reply of a turn tells of other tokens that were likely: in OpenAI's format, or in SGLang's


class _Likely(Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Place(Struct):
    top_logprobs: list[_Likely] = []


class _Logprobs(Struct):
    content: list[_Place] | None = None


class _Meta(Struct):
    output_top_logprobs: list[list[tuple[float | None, int, Any]] | None] | None = None


class _Choice(Struct):
    logprobs: _Logprobs | None = None
    meta_info: _Meta | None = None


class _Reply(Struct):
    choices: list[_Choice]


def _alternatives(response: bytes, num_sampled: int, tokenizer: Tokenizer) -> Alternatives | None:
    if b'top_logprobs":' not in response:
        return None
    try:
        choice = next(iter(msgspec.json.decode(response, type=_Reply).choices), _Choice())
    except (msgspec.DecodeError, UnicodeDecodeError):  # an upstream may call something else so
        return None
    told: list[Any] = (choice.logprobs and choice.logprobs.content) or []
    found: Alternatives = [[_likely(one, tokenizer) for one in place.top_logprobs] or None for place in told]
    if not any(found):
        places = (choice.meta_info and choice.meta_info.output_top_logprobs) or []
        found = [[_known(id, logprob, tokenizer) for logprob, id, _ in place or ()] or None for place in places]
    return found if len(found) == num_sampled and any(found) else None


def _known(token: int, logprob: float | None, tokenizer: Tokenizer) -> Alternative:
    return Alternative(spelled(tokenizer.token_bytes(token)), logprob, token)


def _likely(one: _Likely, tokenizer: Tokenizer) -> Alternative:
    if found := _AS_ID.fullmatch(one.token):
        return _known(int(found[1]), one.logprob, tokenizer)
    if one.bytes is None or not all(0 <= byte < 256 for byte in one.bytes):
        return Alternative(one.token, one.logprob)
    return Alternative(spelled(bytes(one.bytes)), one.logprob)
