"""A fake engine, and functions that run any engine without scheduler or worker. No model, no torch.

The fake's logits are a hash of exactly what its last token can see. A cell stores a token as its key and the token's
position as its value, so reading a cell that was overwritten, or one cell too many, changes the logits completely.
Its one weight is a small number that every value contains, so a cell tells which weights computed it.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.interface import Engine, EngineInfo, KeysValues, Row
from holdfast.engine.slab import Slab, SlabShape
from holdfast.engine.window import Window

Logits = NDArray[np.float32]
_POSITIONS = 1 << 16  # float32 has room for 256 weights of so many positions


class FakeEngine(Engine):
    def __init__(self, *, num_slabs: int, shape: SlabShape, vocab_size: int = 64, fingerprint: str = "fake") -> None:
        self.weight = 0
        self._cells = np.zeros((2, num_slabs, shape.capacity), dtype=np.float32)  # tokens, positions
        info = EngineInfo(
            name="fake",
            vocab_size=vocab_size,
            context=1 << 30,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            kv_dtype="float32",
            fingerprint=fingerprint,
            row_invariant=True,
        )
        super().__init__(info, shape=shape, num_slabs=num_slabs)

    @property
    def kv_reserved_bytes(self) -> int:
        return self._cells.nbytes

    def forward(self, rows: Sequence[Row]) -> Logits:
        for slab, tokens, _ in rows:
            for position, token in enumerate(tokens, start=slab.length):
                self._cells[:, slab.slot, slab.cell(position)] = token, self._value(position)
        queries = [
            (slab, slab.length + len(tokens) - 1 - back)
            for slab, tokens, num_logits in rows
            for back in range(num_logits - 1, -1, -1)
        ]
        logits = [self._logits(self._seen(slab, query)) for slab, query in queries]
        return np.stack(logits) if logits else np.zeros((0, self.info.vocab_size), np.float32)

    def _seen(self, slab: Slab, query: int) -> Iterable[tuple[int, int]]:
        for part in slab.window.kept(query + 1):
            for position in part:
                token, stored = self._cells[:, slab.slot, slab.cell(position)]
                yield int(token), int(stored)

    def _value(self, position: int) -> int:
        return position + self.weight * _POSITIONS

    def _logits(self, seen: Iterable[tuple[int, int]]) -> Logits:
        digest = hashlib.blake2b(repr(list(seen)).encode(), digest_size=8).digest()
        source = np.random.Generator(np.random.PCG64(int.from_bytes(digest)))
        return source.standard_normal(self.info.vocab_size).astype(np.float32)

    def expected_logits(self, tokens: Sequence[int], window: Window) -> Logits:
        """What `forward` must return for every position of `tokens`, computed from the list alone."""
        rows = []
        for query in range(len(tokens)):
            rows.append(self._logits((tokens[p], self._value(p)) for part in window.kept(query + 1) for p in part))
        return np.stack(rows)

    def read_logits(self, logits: Logits) -> Logits:
        return logits

    def copy_slab(self, source: Slab, target: Slab) -> None:
        self._cells[:, target.slot] = self._cells[:, source.slot]

    def read_slab(self, slab: Slab, positions: Sequence[range]) -> KeysValues:
        cells = self._cells[:, slab.slot, _cells_of(slab, positions)]
        return KeysValues(*(part.reshape(1, 1, -1, 1).copy() for part in cells))

    def write_slab(self, slab: Slab, positions: Sequence[range], kv: KeysValues) -> None:
        for part, content in zip(self._cells, kv, strict=True):
            part[slab.slot, _cells_of(slab, positions)] = content.reshape(-1)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (1,)}

    def write_weight(self, name: str, tensor: NDArray[np.generic]) -> None:
        self.weight = int(tensor[0])

    def clear_slab(self, slab: Slab) -> None:
        self._cells[:, slab.slot] = 0


def _cells_of(slab: Slab, positions: Sequence[range]) -> list[int]:
    return [cell for part in positions for run in slab.runs(part) for cell in run]


# Runs an engine directly, without scheduler or worker


def forward(engine: Engine, parts: Sequence[tuple[Slab, Sequence[int]]], num_logits: int | None = None) -> list[Logits]:
    """One forward pass: for each part the logits of every token, or of the last `num_logits` ones."""
    rows = [Row(slab, tokens, len(tokens) if num_logits is None else num_logits) for slab, tokens in parts]
    for slab, tokens in parts:
        slab.begin_write(len(tokens))
    logits = engine.read_logits(engine.forward(rows))
    for slab, tokens in parts:
        slab.end_write(len(tokens))
    ends = np.cumsum([row.num_logits for row in rows])
    return [logits[end - row.num_logits : end] for row, end in zip(rows, ends, strict=True)]


def run_chunks(engine: Engine, slab: Slab, tokens: Sequence[int], sizes: Sequence[int]) -> Logits:
    """The logits of all `tokens`, computed in chunks of `sizes`, which repeat."""
    out, start, turn = [], 0, 0
    while start < len(tokens):
        size = sizes[turn % len(sizes)]
        out.append(forward(engine, [(slab, tokens[start : start + size])])[0])
        start, turn = start + size, turn + 1
    return np.concatenate(out)


def difference(ours: Logits, theirs: NDArray[np.floating]) -> float:
    return float(np.abs(ours - theirs).max())
