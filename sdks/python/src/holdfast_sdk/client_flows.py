"""What a client asks of the server outside a session. Shared by sync and async."""

from collections.abc import Iterable, Mapping

from holdfast_sdk import convert
from holdfast_sdk.flow import Flow, Limits, build, once, repeat
from holdfast_sdk.gen import runtime_pb2 as pb
from holdfast_sdk.results import Cluster, Created, Imported, ModelInfo, SessionInfo, SessionState

DEFAULT_PAGE_SIZE = 100


def create_session(
    limits: Limits,
    *,
    label: str,
    token_ids: Iterable[int],
    pin_tokens: int | None,
    eos_token_ids: Iterable[int],
    metadata: Mapping[str, str] | None,
) -> Flow[Created]:
    request = build(
        pb.CreateSessionRequest,
        client_label=label,
        token_ids=token_ids,
        pin_tokens=pin_tokens,
        eos_token_ids=eos_token_ids,
        metadata=metadata,
    )
    return convert.created((yield from once(limits.call("CreateSession", request), limits)))


def model_info(limits: Limits) -> Flow[ModelInfo]:
    answer = yield from repeat(limits.call("GetModelInfo", pb.GetModelInfoRequest()), limits)
    return convert.model_info(answer)


def cluster(limits: Limits) -> Flow[Cluster]:
    return convert.cluster((yield from repeat(limits.call("GetCluster", pb.GetClusterRequest()), limits)))


def page_of_sessions(
    limits: Limits, label: str | None, state: SessionState | None, page_size: int, page_token: str
) -> Flow[tuple[list[SessionInfo], str]]:
    """One page, and the token of the next; empty after the last."""
    request = build(
        pb.ListSessionsRequest,
        page_size=page_size,
        page_token=page_token,
        client_label=label,
        state=None if state is None else convert.state_number(state),
    )
    answer = yield from repeat(limits.call("ListSessions", request), limits)
    return [convert.session_info(info) for info in answer.sessions], answer.next_page_token


def import_session(limits: Limits, chunks: object, timeout_s: float | None) -> Flow[Imported]:
    """`chunks` iterates SessionChunk messages, in the way that the wire reads them."""
    if limits.num_addresses > 1:  # chunks that were read cannot be sent again: find an address that answers first
        yield from model_info(limits)
    return convert.imported((yield Limits(timeout_s).call("ImportSession", chunks)))
