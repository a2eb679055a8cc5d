"""Protobuf messages turned into results. Every field is named here once; messages go no further."""

from typing import TypeVar

from holdfast_sdk import results
from holdfast_sdk.gen import runtime_pb2 as pb
from holdfast_sdk.results import SessionState, SpanKind, StopReason

Named = TypeVar("Named", StopReason, SessionState, SpanKind)


def _named(names: type[Named], number: int) -> Named:
    """The value with this number; both sides count in the same order. A newer server may know more."""
    members: list[Named] = list(names)
    return members[number] if number < len(members) else members[0]


def state_number(state: SessionState) -> int:
    return list(SessionState).index(SessionState(state))


def model_info(message: pb.GetModelInfoResponse) -> results.ModelInfo:
    return results.ModelInfo(
        name=message.name,
        fingerprint=message.fingerprint,
        vocabulary_size=message.vocabulary_size,
        eos_token_ids=tuple(message.eos_token_ids),
        tokenizer_hash=message.tokenizer_hash,
        chat_template_hash=message.chat_template_hash,
        sink=message.sink,
        recent=message.recent,
        max_pin_tokens=message.max_pin_tokens,
        context_length=message.context_length,
    )


def cluster(message: pb.GetClusterResponse) -> results.Cluster:
    members = tuple(
        results.Member(
            name=member.name,
            state=member.state,
            lease_left_s=member.lease_left_seconds if member.HasField("lease_left_seconds") else None,
            epoch=member.epoch,
            sessions=member.sessions,
            room=member.room,
            version=member.version,
            http=member.http,
            grpc=member.grpc,
        )
        for member in message.members
    )
    return results.Cluster(members=members, this_member=message.this_member, is_cluster=message.is_cluster)


def created(message: pb.CreateSessionResponse) -> results.Created:
    return results.Created(
        session_id=message.session_id,
        sink=message.sink,
        recent=message.recent,
        kv_reserved_bytes=message.kv_reserved_bytes if message.HasField("kv_reserved_bytes") else None,
        model_fingerprint=message.model_fingerprint,
        history_length=message.history_length,
    )


def forked(message: pb.ForkSessionResponse) -> results.Forked:
    return results.Forked(
        session_id=message.session_id,
        history_length=message.history_length,
        recomputed_tokens=message.recomputed_tokens,
    )


def imported(message: pb.ImportSessionResponse) -> results.Imported:
    return results.Imported(
        session_id=message.session_id,
        reused_tokens=message.reused_tokens,
        recomputed_tokens=message.recomputed_tokens,
        history_length=message.history_length,
    )


def appended(message: pb.AppendTokensResponse) -> results.Appended:
    return results.Appended(
        history_length=message.history_length,
        prefilled_tokens=message.prefilled_tokens,
        prefill_duration_seconds=message.prefill_duration_seconds,
    )


def rewound(message: pb.RewindSessionResponse) -> results.Rewound:
    return results.Rewound(history_length=message.history_length, recomputed_tokens=message.recomputed_tokens)


def closed(message: pb.CloseSessionResponse) -> results.Closed:
    return results.Closed(final_history_length=message.final_history_length)


def token(message: pb.Token) -> results.Token:
    top = tuple(results.TokenLogprob(other.token_id, other.logprob) for other in message.top)
    return results.Token(message.token_id, message.logprob, message.sampling_logprob, top)


def truncated(message: pb.HistoryTruncated) -> range:
    return range(message.from_position, message.to_position)


def done(message: pb.Done) -> results.Done:
    return results.Done(
        stop_reason=_named(StopReason, message.stop_reason),
        generated_token_count=message.generated_token_count,
        prefill_tokens=message.prefill_tokens,
        prefill_duration_seconds=message.prefill_duration_seconds,
        total_duration_seconds=message.total_duration_seconds,
        accepted_draft_tokens=message.accepted_draft_tokens,
        proposed_draft_tokens=message.proposed_draft_tokens,
        dropped_token_count=message.dropped_token_count,
        seed=message.seed,
        history_length=message.history_length,
    )


def session_info(message: pb.SessionInfo) -> results.SessionInfo:
    spans = message.spans
    return results.SessionInfo(
        session_id=message.session_id,
        label=message.client_label,
        state=_named(SessionState, message.state),
        busy=message.busy,
        history_length=message.history_length,
        dropped_token_count=message.dropped_token_count,
        kv_live_bytes=message.kv_live_bytes if message.HasField("kv_live_bytes") else None,
        kv_reserved_bytes=message.kv_reserved_bytes if message.HasField("kv_reserved_bytes") else None,
        inv1_violations=message.inv1_violations,
        inv2_violations=message.inv2_violations,
        idle_seconds=message.idle_seconds,
        spans=results.SpansSummary(
            given_spans=spans.given_spans,
            given_tokens=spans.given_tokens,
            sampled_spans=spans.sampled_spans,
            sampled_tokens=spans.sampled_tokens,
        ),
        metadata=dict(message.metadata),
        failure=message.failure or None,
        sink=message.sink,
        recent=message.recent,
        rewind_count=message.rewind_count,
    )


def passage(message: pb.Passage) -> results.Passage:
    return results.Passage(
        turn=message.turn,
        role=message.role,
        text=message.text,
        start=message.from_position,
        end=message.to_position,
        score=message.score,
    )


def history_chunk(message: pb.HistoryChunk) -> results.HistoryChunk:
    return results.HistoryChunk(
        start=message.from_position,
        kind=_named(SpanKind, message.kind),
        token_ids=tuple(message.token_ids),
        logprobs=tuple(message.logprobs),
        sampling_logprobs=tuple(message.sampling_logprobs),
        stop_reason=_named(StopReason, message.stop_reason),
    )
