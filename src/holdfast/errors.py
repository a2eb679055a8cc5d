"""Every error Holdfast raises on purpose. Facts only: doors decide on status codes.

HoldfastError
├── InvalidArgument          the caller asked for something that cannot be
│   ├── ConfigError          a setting is unknown or out of range
│   ├── ModelError           a model file is missing, broken or unsupported
│   └── TemplateError        a chat template cannot render these messages
├── CapacityExhausted        no free slab, no free place
├── SequenceNotFound         the sequence was closed or never opened
├── SequenceBusy             one operation at a time
├── SequenceFailed           this sequence is broken; its neighbours are not
│   ├── InvariantViolated    the cache and the history disagree
│   └── NonFiniteLogits      the model produced NaN or infinity
├── RewindTooFar             the slab no longer holds what the target position must see
├── SnapshotMismatch         the snapshot belongs to another model, window or history
└── WorkerStopped            the engine thread is gone
"""


class HoldfastError(Exception):
    """Base of all. `code` is stable: clients may depend on it."""

    code = "internal"


class InvalidArgument(HoldfastError):
    code = "invalid_argument"


class ConfigError(InvalidArgument):
    pass


class ModelError(InvalidArgument):
    pass


class TemplateError(InvalidArgument):
    code = "template_error"


class CapacityExhausted(HoldfastError):
    code = "capacity_exhausted"


class SequenceNotFound(HoldfastError):
    code = "session_not_found"


class SequenceBusy(HoldfastError):
    code = "session_busy"


class SequenceFailed(HoldfastError):
    code = "session_failed"


class InvariantViolated(SequenceFailed):
    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


class NonFiniteLogits(SequenceFailed):
    pass


class RewindTooFar(HoldfastError):
    code = "recompute_too_long"

    def __init__(self, *, target: int, lowest: int) -> None:
        super().__init__(f"cannot rewind to {target} without recomputing: the slab reaches back to {lowest}")
        self.target = target
        self.lowest = lowest


class SnapshotMismatch(HoldfastError):
    code = "snapshot_mismatch"


class WorkerStopped(HoldfastError):
    code = "draining"
