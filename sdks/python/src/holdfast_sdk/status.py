"""gRPC's errors, sync and async, turned into ours. The only place that reads status codes and trailers."""

from collections.abc import Iterable
from typing import Protocol, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from holdfast_sdk import errors
from holdfast_sdk.errors import HoldfastError

DOMAIN = "holdfast"
TRAILER = "grpc-status-details-bin"

# What comes from gRPC itself or from something between us and the server carries no ErrorInfo.
_WITHOUT_INFO: dict[grpc.StatusCode, type[HoldfastError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.ConnectionFailed,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unimplemented,
}
# How gRPC begins to say that a call found no connection, and so was never sent. A text that is not here is taken as a
# call that may have arrived: then it is not sent again, unless that is safe.
_NEVER_SENT = ("failed to connect to all addresses", "errors resolving ", "DNS resolution failed")
_LOCAL = {errors.ConnectionFailed, errors.DeadlineExceeded, errors.Cancelled}
_BY_CODE = {cls.code: cls for cls in HoldfastError.__subclasses__() if cls not in _LOCAL}


class _Ended(Protocol):
    """What every error that a call raises can tell, sync or async; grpc's own class tree does not say so."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def from_rpc_error(error: grpc.RpcError) -> HoldfastError:
    """The error of ours that says the same; raise it `from` the one given."""
    ended = cast(_Ended, error)
    status = ended.code()
    message = ended.details() or status.name
    if info := _error_info(ended.trailing_metadata() or ()):
        cls = _BY_CODE.get(info.reason, HoldfastError)
        return cls(message, code=info.reason, details=info.metadata, grpc_status=status)
    is_unsent = status is grpc.StatusCode.UNAVAILABLE and message.startswith(_NEVER_SENT)
    details = {"accepted": "false"} if is_unsent else None
    return _WITHOUT_INFO.get(status, HoldfastError)(message, details=details, grpc_status=status)


def _error_info(trailers: Iterable[tuple[str, str | bytes]]) -> ErrorInfo | None:
    """The detail that names our code, where the trailers hold a readable one."""
    info = ErrorInfo()
    for key, value in trailers:
        if key != TRAILER or not isinstance(value, bytes):
            continue
        try:
            details = Status.FromString(value).details
            if any(detail.Unpack(info) and info.domain == DOMAIN for detail in details):
                return info
        except DecodeError:
            continue
    return None
