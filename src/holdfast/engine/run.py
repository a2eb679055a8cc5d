"""One operation in progress on a sequence: computing appended tokens, or generating."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.engine.sequence import Sequence
from holdfast.errors import ConstraintFailed, HoldfastError
from holdfast.generation import ConstraintState, Done, Event, Mask, Sampled, SamplingParams, StopReason, Truncated


@dataclass(frozen=True, slots=True)
class Failed:
    error: HoldfastError


@dataclass(slots=True, eq=False)
class Run:
    """Generates with `params`. None: only computes, up to the last token, which stays pending."""

    sequence: Sequence
    emit: Callable[[Event | Failed], None]
    params: SamplingParams | None = None
    has_room: Callable[[], bool] = lambda: True  # whether the caller keeps up with reading the events
    sampled: list[int] = field(default_factory=list)
    prefill_tokens: int = 0
    prefill_duration_s: float = 0.0
    is_cancelled: bool = False
    state: ConstraintState | None = None  # of the constraint in `params`; created on first use
    num_shown: int = 0  # how many of `sampled` the state has accepted
    strength: int = 0  # of the last draft
    num_proposed: int = 0  # drafted tokens
    num_accepted: int = 0  # drafted tokens that were sampled
    is_ended: bool = False
    started_at: float = field(default_factory=time.perf_counter)

    @property
    def num_to_compute(self) -> int:
        """How many tokens this run still has to forward before it can sample or end."""
        return self.sequence.num_uncomputed - (self.params is None)

    @property
    def is_decoding(self) -> bool:
        """Whether one token is left to compute; with new weights a run may have to compute its whole history again."""
        return self.params is not None and self.num_to_compute == 1

    def allowed(self) -> Mask | None:
        """Which tokens may be sampled next; None: all. Raises ConstraintFailed where no token may.

        Advances the constraint's state to the sampled tokens first, so calling it again changes nothing.
        """
        if self.params is None or self.params.constraint is None:
            return None
        if self.state is None:
            self.state = self.params.constraint.start()
        while self.num_shown < len(self.sampled):
            self.state.accept(self.sampled[self.num_shown])
            self.num_shown += 1
        allowed = self.state.allowed()
        allowed[list(self.params.eos_token_ids)] = self.state.may_end
        if not allowed.any():
            raise ConstraintFailed(f"no token may follow the {len(self.sampled)} sampled tokens under this constraint")
        return allowed

    def report_dropped(self) -> None:
        """Tell the caller which positions have left the window since the last report."""
        if dropped := self.sequence.newly_dropped():
            self.sequence.mark_reported()
            self.emit(Truncated(dropped.start, dropped.stop))

    def take(self, outcome: Sampled) -> StopReason | None:
        """Append a sampled token to the history; returns the stop reason if the run ends with it.

        Dropped positions are reported before the first token, and once more if dropping begins during this run.
        """
        assert self.params is not None
        if not self.sampled:
            self.report_dropped()
        self.sampled.append(outcome.token)
        self.sequence.append([outcome.token])
        self.emit(outcome)
        if self.sequence.reported_dropped == self.sequence.slab.window.sink:
            self.report_dropped()
        if outcome.token in self.params.eos_token_ids:
            return StopReason.EOS
        if outcome.token in self.params.stop_token_ids:
            return StopReason.STOP_TOKEN
        if len(self.sampled) >= self.params.max_tokens:
            return StopReason.MAX_TOKENS
        return None

    def cancelled(self) -> Done:
        return self.done(StopReason.CANCELLED if self.params else None)

    def done(self, reason: StopReason | None) -> Done:
        sequence = self.sequence
        length = len(sequence.tokens)
        return Done(
            stop_reason=reason,
            num_generated=len(self.sampled),
            history_length=length,
            num_dropped=len(sequence.slab.window.dropped(length)),
            prefill_tokens=self.prefill_tokens,
            prefill_duration_s=self.prefill_duration_s,
            total_duration_s=time.perf_counter() - self.started_at,
            seed=self.params.seed if self.params else None,
            num_proposed=self.num_proposed,
            num_accepted=self.num_accepted,
        )
