"""Every error the SDK raises on purpose. What gRPC raises is translated in `status.py` and nowhere else.

HoldfastError               `code`, `details`, `grpc_status`; also a code that this version does not know
├── SessionNotFound         unknown, closed, expired or evicted: details["detail"] says which
├── SessionElsewhere        another member of the cluster owns it; nothing was done. Ask another address
├── SessionBusy             one operation at a time per session; nothing was done
├── SessionFailed           an invariant broke; the session is lost, its neighbours are not
├── HistoryConflict         the history has another length than expected; nothing was done
├── RecomputeTooLong        the target left the cache and is too long to be computed again
├── InvalidArgument         out of range, or out of the vocabulary; nothing was done
├── ContextLengthExceeded   the new tokens alone exceed the window
├── PayloadTooLarge         the request is bigger than the server takes
├── Unimplemented           this server or its backend cannot do that
├── Unauthenticated         the API key is missing or wrong
├── CapacityExhausted       no free place; try later
├── QueueTimeout            waited for a place and got none; try later
├── QuotaExceeded           you have as much as one owner may have; `details` names the setting
├── Draining                the server is shutting down
├── JournalFailed           the server could not write it down, so it did not happen
├── Fenced                  the server lost its lease and stops; another member has its sessions
├── StorageUnavailable      the server's disk cannot be used
├── MessageMismatch         chat: the messages do not continue the stored ones
├── TemplateError           chat: the template cannot render these messages
├── TokenizationMismatch    client, server or upstream disagree about tokens
├── IdempotencyMismatch     chat: an idempotency key came back with another body
├── UpstreamInvalid         the backend behind the server answered nonsense
├── UpstreamUnreachable     the backend behind the server cannot be reached
├── UpstreamTimeout         the backend behind the server took too long
├── UpstreamAborted         the backend behind the server gave up
├── UpstreamUnavailable     the backend behind the server is not there at this moment
├── ConnectionFailed        no answer: refused, reset or lost. The call may have arrived, unless `is_untouched`
├── DeadlineExceeded        no answer in time. The call may or may not have arrived
└── Cancelled               ended by the other side or by closing the client
"""

from collections.abc import Mapping
from typing import Any

import grpc


class HoldfastError(Exception):
    """Base of all. `code` is stable, `details` are facts, `grpc_status` is None where no call was made."""

    code = "unknown"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        details: Mapping[str, str] | None = None,
        grpc_status: grpc.StatusCode | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.details: Mapping[str, str] = dict(details or {})
        self.grpc_status = grpc_status

    @property
    def is_untouched(self) -> bool:
        """Whether nobody has begun to carry out the call: it never left, or was turned away at once."""
        return self.details.get("accepted") == "false"

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors travel between processes with their facts."""
        return type(self), (str(self),), self.__dict__


class SessionNotFound(HoldfastError):
    code = "session_not_found"


class SessionElsewhere(HoldfastError):
    code = "session_elsewhere"

    @property
    def is_untouched(self) -> bool:
        return True


class SessionBusy(HoldfastError):
    code = "session_busy"


class SessionFailed(HoldfastError):
    code = "session_failed"


class HistoryConflict(HoldfastError):
    code = "history_conflict"

    @property
    def history_length(self) -> int | None:
        """The length that the history really has, where the server said so."""
        length = self.details.get("history_length", "")
        return int(length) if length.isdecimal() else None


class RecomputeTooLong(HoldfastError):
    code = "recompute_too_long"


class InvalidArgument(HoldfastError):
    code = "invalid_argument"


class ContextLengthExceeded(HoldfastError):
    code = "context_length_exceeded"


class PayloadTooLarge(HoldfastError):
    code = "payload_too_large"


class Unimplemented(HoldfastError):
    code = "unimplemented"


class Unauthenticated(HoldfastError):
    code = "unauthenticated"


class CapacityExhausted(HoldfastError):
    code = "capacity_exhausted"


class QueueTimeout(HoldfastError):
    code = "queue_timeout"


class QuotaExceeded(HoldfastError):
    code = "quota_exceeded"


class Draining(HoldfastError):
    code = "draining"


class JournalFailed(HoldfastError):
    code = "journal_failed"


class Fenced(HoldfastError):
    code = "fenced"


class StorageUnavailable(HoldfastError):
    code = "storage_unavailable"


class MessageMismatch(HoldfastError):
    code = "message_mismatch"


class TemplateError(HoldfastError):
    code = "template_error"


class TokenizationMismatch(HoldfastError):
    code = "tokenization_mismatch"


class IdempotencyMismatch(HoldfastError):
    code = "idempotency_mismatch"


class UpstreamInvalid(HoldfastError):
    code = "upstream_invalid"


class UpstreamUnreachable(HoldfastError):
    code = "upstream_unreachable"


class UpstreamTimeout(HoldfastError):
    code = "upstream_timeout"


class UpstreamAborted(HoldfastError):
    code = "upstream_aborted"


class UpstreamUnavailable(HoldfastError):
    code = "upstream_unavailable"


class ConnectionFailed(HoldfastError):
    code = "connection_failed"


class DeadlineExceeded(HoldfastError):
    code = "deadline_exceeded"


class Cancelled(HoldfastError):
    code = "cancelled"
