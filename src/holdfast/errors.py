"""Every error Holdfast raises on purpose. Facts only: the endpoints map them to status codes.

HoldfastError
├── InvalidArgument          the caller asked for something that cannot be
│   ├── ConfigError          a setting is unknown or out of range
│   ├── ModelError           a model file is missing, broken or unsupported
│   ├── TemplateError        a chat template cannot render these messages
│   ├── MessageMismatch      a chat's messages are not those on record
│   ├── SessionFileRefused   a session file that is none, is damaged, or does not belong here
│   └── ContextTooLong       new tokens alone exceed the window
├── Unauthenticated          no key, or a wrong one
├── Forbidden                a key, but not one for this
├── CapacityExhausted        no free slab, no free place
│   ├── QueueTimeout         a place in the queue, but no turn in time
│   └── QuotaExceeded        the owner has as much as one owner may have
├── PayloadTooLarge          a request body beyond the limit
├── RequestTimeout           a request body that stopped arriving, or arrives too slowly
├── ModelNotFound            another model than the one that is served
├── ResponseNotFound         a response or conversation that is not, or no longer, kept
├── SessionNotFound          unknown, closed, expired or evicted
├── SessionElsewhere         another member of the cluster owns the session
├── SessionBusy              one operation at a time
├── WeightsBusy              other weights are being loaded
├── IdempotencyMismatch      a key that was used for another request
├── Paused                   a trainer has stopped new turns for now
├── HistoryConflict          the history is not as long as the caller expected
├── SessionFailed            this session is broken; its neighbours are not
│   ├── InvariantViolated    the cache and the history disagree
│   └── NonFiniteLogits      the model produced NaN or infinity
├── ConstraintFailed         a generation's constraint came to a dead end or a limit; its session goes on
├── RecomputeTooLong         the slab no longer holds what the target position must see
├── SnapshotMismatch         the snapshot belongs to another model, window or history
├── SamplesUnusable          what is on record, or in a file, makes no samples that may be trained on
├── UpstreamError            the server behind us did not do its part; the session is as it was
│   ├── UpstreamInvalid      it answered, but not with something that may be recorded
│   ├── UpstreamUnreachable  no connection, or it broke off
│   ├── UpstreamTimeout      no answer in time
│   ├── UpstreamAborted      it gave up on this generation; worth another try
│   └── UpstreamUnavailable  no upstream is there at this moment; nothing was sent
├── StorageUnavailable       something on record cannot be read, or is damaged
│   └── JournalFailed        what should have been recorded was not; nothing of it is on record
│       ├── RecordUncertain  whether it was recorded is not known; the journal alone can tell
│       └── Fenced           this server's lease ended and others may have its sessions: it must stop
├── Unimplemented            the wire has it, this build does not yet
├── StreamStalled            the client did not read its stream, which was cancelled
├── Draining                 the server or its engine is going away
│   └── NotServing           it takes no requests, and did nothing of this one
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
    """`param` is the path of the field that is wrong, where one is."""

    code = "invalid_argument"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    @property
    def details(self) -> dict[str, str]:
        return {"param": self.param} if self.param else {}


class ConfigError(InvalidArgument):
    pass


class ModelError(InvalidArgument):
    pass


class TemplateError(InvalidArgument):
    code = "template_error"


class MessageMismatch(InvalidArgument):
    code = "message_mismatch"


class ContextTooLong(InvalidArgument):
    code = "context_length_exceeded"


class SessionFileRefused(InvalidArgument):
    """Nothing was imported. `reason` is what stands in the way, in one word."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    @property
    def details(self) -> dict[str, str]:
        return {"reason": self.reason}


class Unauthenticated(HoldfastError):
    code = "unauthenticated"


class Forbidden(HoldfastError):
    code = "forbidden"


class IdempotencyMismatch(HoldfastError):
    code = "idempotency_mismatch"


class Paused(HoldfastError):
    code = "paused"


class CapacityExhausted(HoldfastError):
    code = "capacity_exhausted"


class QueueTimeout(CapacityExhausted):
    code = "queue_timeout"


class QuotaExceeded(CapacityExhausted):
    """`setting` is the flag that sets the limit for each owner."""

    code = "quota_exceeded"

    def __init__(self, what: str, setting: str, limit: int) -> None:
        super().__init__(f"you already have the {limit} {what} that one owner may have here ({setting})")
        self.setting = setting
        self.limit = limit

    @property
    def details(self) -> dict[str, str]:
        return {"setting": self.setting, "limit": str(self.limit)}


class PayloadTooLarge(HoldfastError):
    code = "payload_too_large"


class RequestTimeout(HoldfastError):
    code = "request_timeout"


class ModelNotFound(HoldfastError):
    code = "model_not_found"


class ResponseNotFound(HoldfastError):
    code = "response_not_found"


class SessionNotFound(HoldfastError):
    code = "session_not_found"

    def __init__(self, session_id: object, *, detail: str = "unknown") -> None:
        super().__init__(f"no session {session_id}: {_WHY.get(detail, detail)}")
        self.detail = detail

    @property
    def details(self) -> dict[str, str]:
        return {"detail": self.detail}


_WHY = {
    "unknown": "no such session of yours",
    "closed": "it was closed",
    "expired": "it was idle for too long",
    "evicted": "it was idle and its slot was needed",
}


class SessionElsewhere(HoldfastError):
    """`member` is the name of the one that owns the session."""

    code = "session_elsewhere"

    def __init__(self, session_id: str, member: str) -> None:
        super().__init__(f"session {session_id} is owned by {member}, another member of the cluster; send it there")
        self.session_id = session_id
        self.member = member

    @property
    def details(self) -> dict[str, str]:
        return {"session_id": self.session_id, "member": self.member}


class SessionBusy(HoldfastError):
    """`turn_id`: the turn that is in the way, where it has a name."""

    code = "session_busy"

    def __init__(self, message: str, *, turn_id: str = "") -> None:
        super().__init__(message)
        self.turn_id = turn_id

    @property
    def details(self) -> dict[str, str]:
        return {"turn_id": self.turn_id} if self.turn_id else {}


class WeightsBusy(HoldfastError):
    code = "weights_busy"


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


class ConstraintFailed(HoldfastError):
    code = "constraint_failed"


class RecomputeTooLong(HoldfastError):
    code = "recompute_too_long"

    def __init__(self, *, target: int, lowest: int) -> None:
        super().__init__(
            f"cannot rewind to {target}: too many tokens would have to be computed again (free down to {lowest})"
        )
        self.lowest = lowest

    @property
    def details(self) -> dict[str, str]:
        return {"lowest_free_position": str(self.lowest)}


class SnapshotMismatch(HoldfastError):
    code = "snapshot_mismatch"


class SamplesUnusable(HoldfastError):
    """Asking again does not help. `reason` is what stands in the way, in one word."""

    code = "samples_unusable"

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    @property
    def details(self) -> dict[str, str]:
        return {"reason": self.reason}


class UpstreamError(HoldfastError):
    code = "upstream_invalid"


class UpstreamInvalid(UpstreamError):
    code = "upstream_invalid"


class UpstreamUnreachable(UpstreamError):
    code = "upstream_unreachable"


class UpstreamTimeout(UpstreamError):
    code = "upstream_timeout"


class UpstreamAborted(UpstreamError):
    code = "upstream_aborted"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def details(self) -> dict[str, str]:
        return {"retry_after_s": str(self.retry_after_s)}


class UpstreamUnavailable(UpstreamError):
    code = "upstream_unavailable"

    @property
    def details(self) -> dict[str, str]:
        return {"retry_after_s": "5"}


class StorageUnavailable(HoldfastError):
    code = "storage_unavailable"


class JournalFailed(StorageUnavailable):
    code = "journal_failed"


class RecordUncertain(JournalFailed):
    pass


class Fenced(JournalFailed):
    code = "fenced"


class Unimplemented(HoldfastError):
    code = "unimplemented"


class StreamStalled(HoldfastError):
    code = "stream_stalled"


class Draining(HoldfastError):
    code = "draining"

    def __init__(self, message: str = "the server is shutting down; send the request to another one") -> None:
        super().__init__(message)


class NotServing(Draining):
    """Nothing was done for the request: another server may have it as it is."""

    @property
    def details(self) -> dict[str, str]:
        return {"accepted": "false"}


class EngineDied(HoldfastError):
    code = "engine_died"
