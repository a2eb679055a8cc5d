"""Runs an engine directly, without scheduler or worker."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.interface import Engine, Row
from holdfast.engine.slab import Slab

Array = NDArray[np.float32]


def forward(engine: Engine, parts: Sequence[tuple[Slab, Sequence[int]]], num_logits: int | None = None) -> list[Array]:
    """One forward pass: for each part the logits of every token, or of the last `num_logits` ones."""
    rows = [Row(slab, tokens, len(tokens) if num_logits is None else num_logits) for slab, tokens in parts]
    for slab, tokens in parts:
        slab.begin_write(len(tokens))
    logits = engine.read_logits(engine.forward(rows))
    for slab, tokens in parts:
        slab.end_write(len(tokens))
    ends = np.cumsum([row.num_logits for row in rows])
    return [logits[end - row.num_logits : end] for row, end in zip(rows, ends, strict=True)]


def run_chunks(engine: Engine, slab: Slab, tokens: Sequence[int], sizes: Sequence[int]) -> Array:
    """The logits of all `tokens`, computed in chunks of `sizes`, which repeat."""
    out, start, turn = [], 0, 0
    while start < len(tokens):
        size = sizes[turn % len(sizes)]
        out.append(forward(engine, [(slab, tokens[start : start + size])])[0])
        start, turn = start + size, turn + 1
    return np.concatenate(out)


def difference(ours: Array, theirs: NDArray[np.floating]) -> float:
    return float(np.abs(ours - theirs).max())
