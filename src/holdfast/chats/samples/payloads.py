"""Routed experts and indexer choices as upstreams send them, merged for a whole branch.

A turn's payload has one row for each position that was computed: all of the turn's context up to, not including,
its last token (`full`), or only those that its ancestors do not have (`additional`).
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.chats.samples.sample import Rows
from holdfast.chats.tree import Node
from holdfast.errors import SamplesUnusable
from holdfast.sessions.payload import payload_values

Field = Literal["routed_experts", "indexer_topk"]

ResponseOf = Callable[[Node], bytes]


def no_response(node: Node) -> bytes:
    raise SamplesUnusable(f"the response of turn {node.number} is not available", reason="responses")


class _Piece(NamedTuple):
    start: int
    rows: Rows


def rows_of(
    nodes: Sequence[Node],
    field: Field,
    num_tokens: int,
    *,
    shape: tuple[int, int | None] | None = None,
    response_of: ResponseOf = no_response,
) -> Rows | None:
    """One row for each of the first `num_tokens - 1` positions; None where no turn has a payload.

    Rows that came without a shape get `shape` (layers, and experts per token where that is known), and stay flat
    without it. `response_of` is asked for the bytes of a turn that names its payload by a range in them.
    """
    pieces: list[_Piece] = []
    covered = 0
    row_shape: tuple[int, ...] | None = None
    for node in nodes:
        text = _text(node, field, response_of)
        if text is None:
            continue
        last = _last(node)
        rows = _shaped(_values(text, node, field), row_shape, node, field, wanted=shape)
        start = last - len(rows)
        if not 0 <= start <= covered:
            raise _unusable(
                node, field, f"has {len(rows)} rows; {last} positions were computed and {covered} known before"
            )
        if len(rows):
            row_shape = rows.shape[1:]
        while pieces and pieces[-1].start >= start:
            pieces.pop()
        pieces.append(_Piece(start, rows))
        covered = last
    if row_shape is None:
        return None
    if covered < num_tokens - 1:
        raise _unusable(nodes[-1], field, f"ends at position {covered}; {num_tokens - 1} were computed")
    merged = np.zeros((num_tokens - 1, *row_shape), np.int32)
    for piece in pieces:  # each reaches further than those before and replaces what they said from its start on
        merged[piece.start : piece.start + len(piece.rows)] = piece.rows[: max(0, num_tokens - 1 - piece.start)]
    return merged


def _last(node: Node) -> int:
    """The position of the turn's last token among those that were computed for it."""
    view = node.turn.facts.view
    return node.end + node.turn.facts.num_trimmed - (view.num_hidden if view else 0) - 1


def _text(node: Node, field: Field, response_of: ResponseOf) -> str | None:
    said = node.turn.facts.routed_experts if field == "routed_experts" else node.turn.facts.indexer_topk
    if said is None or isinstance(said, str):
        return said
    start, end = said
    content = response_of(node)[start:end]
    try:
        return content.decode() if content.startswith(b"[") else msgspec.json.decode(content, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise _unusable(node, field, f"is not in the response at {start}: {exc}") from exc


def _shaped(
    values: NDArray[np.int32],
    shape: tuple[int, ...] | None,
    node: Node,
    field: Field,
    *,
    wanted: tuple[int, int | None] | None,
) -> Rows:
    """`values` as rows of the shape that earlier turns had; without any, as one for each computed position."""
    if values.ndim > 1:
        if shape is not None and values.shape[1:] != shape:
            raise _unusable(node, field, f"has rows of shape {list(values.shape[1:])}, earlier turns {list(shape)}")
        return values
    last = _last(node)
    width = int(np.prod(shape)) if shape is not None else values.size // max(1, last)
    num_rows = values.size // width if width else 0
    if num_rows * width != values.size or (shape is None and num_rows != (last if width else 0)):
        raise _unusable(node, field, f"has {values.size} values, which do not make rows for {last} positions")
    if shape is None:
        shape = (width,)
        if wanted:
            num_layers, top_k = wanted
            if width % num_layers or top_k not in (None, width // num_layers):
                of = f"{num_layers} layers" if top_k is None else f"{num_layers} layers with {top_k} experts each"
                raise _unusable(node, field, f"has {width} values a position, not a multiple of {of}")
            shape = (num_layers, width // num_layers)
    return values.reshape(num_rows, *shape)


def _values(text: str, node: Node, field: Field) -> NDArray[np.int32]:
    try:
        return payload_values(text)
    except ValueError as exc:
        raise _unusable(node, field, str(exc)) from exc


def _unusable(node: Node, field: Field, what: str) -> SamplesUnusable:
    return SamplesUnusable(f"the {field} of turn {node.number}: it {what}", reason=field)
