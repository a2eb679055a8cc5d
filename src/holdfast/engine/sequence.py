"""The computation of one session: its tokens, its slab, and the rule that the two always agree.

The last token of a history is not computed until something is sampled after it; until then it is `pending`. So a turn
forwards exactly the pending token and the appended ones, and logits are never stored.
"""

from array import array
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from holdfast.engine.slab import Slab
from holdfast.errors import InvalidArgument, InvariantViolated, RecomputeTooLong, SessionFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInfo:
    """The state of a sequence at one moment."""

    history_length: int
    computed_length: int
    num_visible: int
    num_dropped: int
    kv_live_bytes: int
    kv_reserved_bytes: int
    inv1_violations: int
    inv2_violations: int
    is_busy: bool
    failure: str | None


class Sequence:
    """Mutable; owned by the worker thread."""

    def __init__(self, sequence_id: int, slab: Slab, tokens: Tokens[int] = ()) -> None:
        self.id = sequence_id
        self.slab = slab
        self.tokens = array("i", tokens)
        self.failure: SessionFailed | None = None
        self.reported_dropped = slab.window.sink  # the caller has been told that positions below it are dropped
        self.num_rewinds = 0
        self.inv1_violations = 0
        self.inv2_violations = 0
        self._declared_tail = len(self.tokens) - slab.length
        self._floor = slab.length

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.slab.length

    def next_tokens(self, limit: int) -> list[int]:
        """The next uncomputed tokens, at most `limit` of them."""
        start = self.slab.length
        return self.tokens[start : start + limit].tolist()

    def visible_tokens(self) -> list[int]:
        sinks, recent = self.slab.window.kept(len(self.tokens))
        return self.tokens[: sinks.stop].tolist() + self.tokens[recent.start :].tolist()

    def append(self, tokens: Tokens[int]) -> None:
        self.tokens.extend(tokens)
        self._declared_tail += len(tokens)

    def computed(self, num_tokens: int) -> None:
        """Record that the slab holds `num_tokens` more. Call it after the slab has advanced."""
        self._declared_tail -= num_tokens
        self.check()

    def rewind(self, length: int, *, max_recompute: int) -> int:
        """Forget the tokens from `length` on; returns how many must be computed again."""
        if not 0 <= length <= len(self.tokens):
            raise InvalidArgument(f"cannot rewind a history of {len(self.tokens)} tokens to {length}")
        slab = self.slab
        target = min(slab.length, max(length - 1, 0))
        is_free = slab.can_rewind(target)
        if not is_free and length > max_recompute:
            raise RecomputeTooLong(target=length, lowest=slab.lowest_rewind() + 1)
        if is_free:
            slab.rewind(target)
        else:
            slab.reset()
        del self.tokens[length:]
        self.num_rewinds += 1
        self._declared_tail = length - self.slab.length
        self._floor = self.slab.length
        self.reported_dropped = min(self.reported_dropped, self.slab.window.dropped(length).stop)
        self.check()
        return 0 if is_free else length

    def forget_cache(self) -> None:
        """Nothing is computed from here on: the next run computes the whole history."""
        self.slab.reset()
        self._declared_tail, self._floor = len(self.tokens), 0

    def check(self) -> None:
        """INV-1: history minus slab is the declared tail. INV-2: the slab only goes back in a rewind."""
        if self.num_uncomputed != self._declared_tail or self._declared_tail < 0:
            self.inv1_violations += 1
            self._fail("INV-1", f"history {len(self.tokens)}, slab {self.slab.length}, tail {self._declared_tail}")
        if self.slab.length < self._floor or self.slab.high < self.slab.length:
            self.inv2_violations += 1
            self._fail("INV-2", f"slab went from {self._floor} to {self.slab.length} (high {self.slab.high})")
        self._floor = self.slab.length

    def _fail(self, invariant: str, message: str) -> None:
        self.failure = InvariantViolated(invariant, message)
        raise self.failure

    def newly_dropped(self) -> range:
        """Positions that left the window since the last `mark_reported`."""
        return range(self.reported_dropped, self.slab.window.dropped(len(self.tokens)).stop)

    def mark_reported(self) -> None:
        self.reported_dropped = self.slab.window.dropped(len(self.tokens)).stop
