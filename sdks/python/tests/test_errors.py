"""Every way a call can fail becomes one error of ours, with its facts."""

import pickle
from typing import Any

import grpc
import pytest

import holdfast_sdk
from both import every, settled
from conftest import Connect
from fake_server import FakeServer
from faults import Fault
from holdfast_sdk import errors
from holdfast_sdk.errors import HoldfastError

Status = grpc.StatusCode

STATUS_OF_CODE = {
    "session_not_found": Status.NOT_FOUND,
    "session_elsewhere": Status.UNAVAILABLE,
    "session_busy": Status.ABORTED,
    "history_conflict": Status.ABORTED,
    "message_mismatch": Status.INVALID_ARGUMENT,
    "invalid_argument": Status.INVALID_ARGUMENT,
    "unauthenticated": Status.UNAUTHENTICATED,
    "capacity_exhausted": Status.RESOURCE_EXHAUSTED,
    "queue_timeout": Status.RESOURCE_EXHAUSTED,
    "quota_exceeded": Status.RESOURCE_EXHAUSTED,
    "session_failed": Status.FAILED_PRECONDITION,
    "tokenization_mismatch": Status.INTERNAL,
    "upstream_invalid": Status.UNAVAILABLE,
    "upstream_unreachable": Status.UNAVAILABLE,
    "upstream_timeout": Status.DEADLINE_EXCEEDED,
    "upstream_aborted": Status.UNAVAILABLE,
    "upstream_unavailable": Status.UNAVAILABLE,
    "context_length_exceeded": Status.INVALID_ARGUMENT,
    "template_error": Status.INVALID_ARGUMENT,
    "idempotency_mismatch": Status.FAILED_PRECONDITION,
    "journal_failed": Status.UNAVAILABLE,
    "fenced": Status.UNAVAILABLE,
    "storage_unavailable": Status.UNAVAILABLE,
    "recompute_too_long": Status.FAILED_PRECONDITION,
    "payload_too_large": Status.RESOURCE_EXHAUSTED,
    "unimplemented": Status.UNIMPLEMENTED,
    "draining": Status.UNAVAILABLE,
}
WITHOUT_INFO = {
    Status.UNAVAILABLE: errors.ConnectionFailed,
    Status.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    Status.CANCELLED: errors.Cancelled,
    Status.UNAUTHENTICATED: errors.Unauthenticated,
    Status.UNIMPLEMENTED: errors.Unimplemented,
    Status.INTERNAL: HoldfastError,
}


async def error_of(connect: Connect, server: FakeServer, fault: Fault) -> HoldfastError:
    server.faults.plan("GetModelInfo", fault)
    with pytest.raises(HoldfastError) as caught:
        await settled(connect(retries=0).model_info())
    return caught.value


@pytest.mark.parametrize("code", STATUS_OF_CODE)
async def test_a_code_becomes_its_class(code: str, connect: Connect, server: FakeServer) -> None:
    fault = Fault(status=STATUS_OF_CODE[code], code=code, details={"fact": "7"}, message="what happened")
    error = await error_of(connect, server, fault)
    name = "".join(word.capitalize() for word in code.split("_"))
    assert type(error).__name__ == name
    assert (error.code, error.details, error.grpc_status) == (code, {"fact": "7"}, STATUS_OF_CODE[code])
    assert str(error) == "what happened"


@pytest.mark.parametrize("status", WITHOUT_INFO)
async def test_a_status_alone_becomes_what_it_can(status: Status, connect: Connect, server: FakeServer) -> None:
    error = await error_of(connect, server, Fault(status=status, message="from gRPC"))
    assert type(error) is WITHOUT_INFO[status]
    assert (error.code, error.details, error.grpc_status) == (type(error).code, {}, status)
    assert str(error) == "from gRPC"


async def test_a_code_of_a_newer_server_is_kept(connect: Connect, server: FakeServer) -> None:
    error = await error_of(connect, server, Fault(status=Status.INTERNAL, code="not_invented_yet"))
    assert type(error) is HoldfastError
    assert error.code == "not_invented_yet"


async def test_the_code_of_another_domain_is_not_ours(connect: Connect, server: FakeServer) -> None:
    error = await error_of(connect, server, Fault(code="session_busy", domain="elsewhere"))
    assert type(error) is errors.ConnectionFailed


async def test_nobody_listens(connect: Connect, server: FakeServer) -> None:
    server.stop()
    with pytest.raises(errors.ConnectionFailed):
        await settled(connect(retries=0).model_info())


async def test_errors_of_streams_are_translated_too(session: Any, server: FakeServer) -> None:
    generation = await settled(session.generate(max_tokens=0))
    with pytest.raises(errors.InvalidArgument):
        await every(generation)


async def test_a_number_that_does_not_fit_is_refused_before_it_is_sent(session: Any, server: FakeServer) -> None:
    calls = list(server.faults.calls)
    with pytest.raises(errors.InvalidArgument, match="does not fit"):
        await settled(session.append([2**40]))
    with pytest.raises(errors.InvalidArgument, match="does not fit"):
        await settled(session.generate(max_tokens=1, seed=-1))
    assert server.faults.calls == calls


def test_errors_travel_between_processes() -> None:
    error = errors.HistoryConflict("no", details={"history_length": "3"}, grpc_status=Status.ABORTED)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.HistoryConflict
    assert (str(copy), copy.code, copy.details, copy.grpc_status) == (
        "no",
        "history_conflict",
        {"history_length": "3"},
        Status.ABORTED,
    )
    assert copy.history_length == 3


def test_every_class_is_in_the_drawing_and_exported() -> None:
    drawn = {line.split("── ")[1].split()[0] for line in (errors.__doc__ or "").splitlines() if "── " in line}
    classes = {cls.__name__ for cls in HoldfastError.__subclasses__()}
    assert drawn == classes
    assert classes <= set(holdfast_sdk.__all__)
    assert {cls.code for cls in HoldfastError.__subclasses__()} == {
        *STATUS_OF_CODE,
        "connection_failed",
        "deadline_exceeded",
        "cancelled",
    }
