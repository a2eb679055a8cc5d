"""The error table of the gRPC endpoint."""

from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from holdfast.errors import HoldfastError

DOMAIN = "holdfast"

STATUS = {
    "session_not_found": grpc.StatusCode.NOT_FOUND,
    "session_busy": grpc.StatusCode.ABORTED,
    "history_conflict": grpc.StatusCode.ABORTED,
    "constraint_failed": grpc.StatusCode.INVALID_ARGUMENT,
    "invalid_argument": grpc.StatusCode.INVALID_ARGUMENT,
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "capacity_exhausted": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "payload_too_large": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "journal_failed": grpc.StatusCode.UNAVAILABLE,
    "storage_unavailable": grpc.StatusCode.UNAVAILABLE,
    "upstream_invalid": grpc.StatusCode.UNAVAILABLE,
    "upstream_unreachable": grpc.StatusCode.UNAVAILABLE,
    "upstream_aborted": grpc.StatusCode.UNAVAILABLE,
    "upstream_timeout": grpc.StatusCode.DEADLINE_EXCEEDED,
    "session_failed": grpc.StatusCode.FAILED_PRECONDITION,
    "recompute_too_long": grpc.StatusCode.FAILED_PRECONDITION,
    "unimplemented": grpc.StatusCode.UNIMPLEMENTED,
    "draining": grpc.StatusCode.UNAVAILABLE,
}


def code_of(error: HoldfastError) -> grpc.StatusCode:
    return STATUS.get(error.code, grpc.StatusCode.INTERNAL)


async def abort(context: Any, error: HoldfastError) -> None:
    """End the call with the error's status, its sentence and its facts. Always raises."""
    info = error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN, metadata=error.details)
    detail = any_pb2.Any()
    detail.Pack(info)
    number = code_of(error).value[0]
    status = status_pb2.Status(code=number, message=str(error), details=[detail])
    await context.abort_with_status(rpc_status.to_status(status))
