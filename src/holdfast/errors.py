"""Every error Holdfast raises on purpose. Facts only: doors decide on status codes.

HoldfastError
├── InvalidArgument          the caller asked for something that cannot be
│   ├── ConfigError          a setting is unknown or out of range
│   ├── ModelError           a model file is missing, broken or unsupported
│   └── TemplateError        a chat template cannot render these messages
├── Unauthenticated          no key, or a wrong one
├── CapacityExhausted        no free slab, no free place
├── SessionNotFound          unknown, closed, expired or evicted
├── SessionBusy              one operation at a time
├── HistoryConflict          the history is not as long as the caller expected
├── SessionFailed            this session is broken; its neighbours are not
│   ├── InvariantViolated    the cache and the history disagree
│   └── NonFiniteLogits      the model produced NaN or infinity
├── RecomputeTooLong         the slab no longer holds what the target position must see
├── SnapshotMismatch         the snapshot belongs to another model, window or history
├── Unimplemented            the wire has it, this build does not yet
├── Draining                 the server or its engine is going away
└── EngineDied               the engine's thread ended by itself; the process must be started again
"""


class HoldfastError(Exception):
    """Base of all. `code` is stable: clients may depend on it."""

    code = "internal"

    @property
    def details(self) -> dict[str, str]:
        """The facts, for programs."""
        return {}


class InvalidArgument(HoldfastError):
    code = "invalid_argument"


class ConfigError(InvalidArgument):
    pass


class ModelError(InvalidArgument):
    pass


class TemplateError(InvalidArgument):
    code = "template_error"


class Unauthenticated(HoldfastError):
    code = "unauthenticated"


class CapacityExhausted(HoldfastError):
    code = "capacity_exhausted"


class SessionNotFound(HoldfastError):
    code = "session_not_found"

    def __init__(self, session_id: object, *, detail: str = "unknown") -> None:
        super().__init__(f"no session {session_id}: {_WHY[detail]}")
        self.detail = detail

    @property
    def details(self) -> dict[str, str]:
        return {"detail": self.detail}


_WHY = {
    "unknown": "this id was never issued, or not to you",
    "closed": "it was closed",
    "expired": "it was idle for too long",
    "evicted": "it was idle and its place was needed",
}


class SessionBusy(HoldfastError):
    code = "session_busy"


class HistoryConflict(HoldfastError):
    code = "history_conflict"

    def __init__(self, *, expected: int, actual: int) -> None:
        super().__init__(f"the history has {actual} tokens, not {expected}")
        self.actual = actual

    @property
    def details(self) -> dict[str, str]:
        return {"history_length": str(self.actual)}


class SessionFailed(HoldfastError):
    code = "session_failed"


class InvariantViolated(SessionFailed):
    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


class NonFiniteLogits(SessionFailed):
    pass


class RecomputeTooLong(HoldfastError):
    code = "recompute_too_long"

    def __init__(self, *, target: int, lowest: int) -> None:
        super().__init__(f"cannot rewind to {target} without recomputing: the slab reaches back to {lowest}")
        self.lowest = lowest

    @property
    def details(self) -> dict[str, str]:
        return {"lowest_free_position": str(self.lowest)}


class SnapshotMismatch(HoldfastError):
    code = "snapshot_mismatch"


class Unimplemented(HoldfastError):
    code = "unimplemented"


class Draining(HoldfastError):
    code = "draining"


class EngineDied(HoldfastError):
    code = "engine_died"
