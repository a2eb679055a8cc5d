"""Protobuf messages to our own values and back."""

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from holdfast.errors import InvalidArgument
from holdfast.generation import Done, Event, Sampled, SamplingParams, StopReason, Truncated
from holdfast.serving.cluster.membership import ClusterView
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.sessions.history import SpanKind, SpanPiece
from holdfast.sessions.limits import check_biases, check_ids
from holdfast.sessions.ports import ModelInfo
from holdfast.sessions.view import FoundPassage, SessionState, SessionView

_STOP_REASONS = {
    None: pb.STOP_REASON_UNSPECIFIED,
    StopReason.MAX_TOKENS: pb.STOP_REASON_MAX_TOKENS,
    StopReason.EOS: pb.STOP_REASON_EOS,
    StopReason.STOP_TOKEN: pb.STOP_REASON_STOP_TOKEN,
    StopReason.CANCELLED: pb.STOP_REASON_CANCELLED,
}
_STATES = {
    SessionState.LIVE: pb.SESSION_STATE_LIVE,
    SessionState.PARKED: pb.SESSION_STATE_PARKED,
    SessionState.FAILED: pb.SESSION_STATE_FAILED,
}
_KINDS = {
    SpanKind.GIVEN: pb.SPAN_KIND_GIVEN,
    SpanKind.SAMPLED: pb.SPAN_KIND_SAMPLED,
    SpanKind.RECALLED: pb.SPAN_KIND_RECALLED,
}

_OPTIONAL = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def sampling_params(options: pb.SamplingOptions, max_tokens: int, eos_token_ids: frozenset[int]) -> SamplingParams:
    """Fields that the wire leaves out keep their defaults; without a seed one is drawn, and reported."""
    check_ids("stop_token_ids", options.stop_token_ids)
    check_biases("logit_bias", options.logit_bias)
    given = {name: getattr(options, name) for name in _OPTIONAL if options.HasField(name)}
    return SamplingParams(
        seed=options.seed if options.HasField("seed") else secrets.randbits(64),
        max_tokens=max_tokens,
        logit_bias=dict(options.logit_bias),
        stop_token_ids=frozenset(options.stop_token_ids),
        eos_token_ids=eos_token_ids,
        top_logprobs=options.top_logprobs,
        speculation=options.speculation if options.HasField("speculation") else True,
        **given,
    )


def events(values: Iterable[Event], *, batch_tokens: bool) -> Iterator[pb.GenerateEvent]:
    """One message each, in order; with `batch_tokens`, one for all tokens between two other events."""
    for kind, group in itertools.groupby(values, type):
        if batch_tokens and kind is Sampled:
            yield pb.GenerateEvent(tokens=pb.TokenBatch(tokens=map(_token, group)))
        else:
            yield from (_EVENTS[kind](value) for value in group)


def _token(value: Any) -> pb.Token:
    return pb.Token(
        token_id=value.token,
        logprob=value.logprob,
        sampling_logprob=value.sampling_logprob,
        top=[pb.TokenLogprob(token_id=token, logprob=logprob) for token, logprob in value.top],
    )


def _sampled(value: Sampled) -> pb.GenerateEvent:
    return pb.GenerateEvent(token=_token(value))


def _truncated(value: Truncated) -> pb.GenerateEvent:
    return pb.GenerateEvent(truncated=pb.HistoryTruncated(from_position=value.first, to_position=value.end))


def _done(value: Done) -> pb.GenerateEvent:
    return pb.GenerateEvent(
        done=pb.Done(
            stop_reason=_STOP_REASONS[value.stop_reason],
            generated_token_count=value.num_generated,
            prefill_tokens=value.prefill_tokens,
            prefill_duration_seconds=value.prefill_duration_s,
            total_duration_seconds=value.total_duration_s,
            dropped_token_count=value.num_dropped,
            seed=value.seed,
            history_length=value.history_length,
            proposed_draft_tokens=value.num_proposed,
            accepted_draft_tokens=value.num_accepted,
        )
    )


_EVENTS: dict[type[Event], Callable[..., pb.GenerateEvent]] = {Sampled: _sampled, Truncated: _truncated, Done: _done}


def session_info(view: SessionView) -> pb.SessionInfo:
    return pb.SessionInfo(
        session_id=view.session_id,
        client_label=view.label,
        state=_STATES[view.state],
        busy=view.is_busy,
        history_length=view.history_length,
        dropped_token_count=view.dropped_token_count,
        kv_live_bytes=view.kv_live_bytes,
        kv_reserved_bytes=view.kv_reserved_bytes,
        inv1_violations=view.inv1_violations,
        inv2_violations=view.inv2_violations,
        idle_seconds=view.idle_s,
        spans=pb.SpansSummary(
            given_spans=view.given[0],
            given_tokens=view.given[1],
            sampled_spans=view.sampled[0],
            sampled_tokens=view.sampled[1],
        ),
        metadata=view.metadata,
        failure=view.failure,
        sink=view.sink,
        recent=view.recent,
        rewind_count=view.rewind_count,
    )


def model_info(model: ModelInfo) -> pb.GetModelInfoResponse:
    return pb.GetModelInfoResponse(
        name=model.name,
        fingerprint=model.fingerprint,
        vocabulary_size=model.vocab_size,
        eos_token_ids=sorted(model.eos_token_ids),
        tokenizer_hash=model.tokenizer_hash,
        chat_template_hash=model.chat_template_hash,
        sink=model.sink,
        recent=model.recent,
        max_pin_tokens=model.max_pin,
        context_length=model.context,
    )


def cluster(view: ClusterView) -> pb.GetClusterResponse:
    return pb.GetClusterResponse(
        this_member=view.this,
        is_cluster=view.is_cluster,
        members=[
            pb.ClusterMember(
                name=member.name,
                state=member.state,
                lease_left_seconds=member.lease_left_s if view.is_cluster else None,
                epoch=member.epoch,
                sessions=member.num_sessions,
                room=member.room,
                version=member.version,
                http=member.http,
                grpc=member.grpc,
            )
            for member in view.members
        ],
    )


def history_chunk(piece: SpanPiece) -> pb.HistoryChunk:
    return pb.HistoryChunk(
        from_position=piece.start,
        kind=_KINDS[piece.kind],
        token_ids=piece.tokens,
        logprobs=piece.logprobs,
        sampling_logprobs=piece.sampling_logprobs,
        stop_reason=_STOP_REASONS[piece.stop_reason],
        weight_version=piece.weight_version,
    )


def passage(found: FoundPassage) -> pb.Passage:
    return pb.Passage(
        turn=found.turn,
        role=found.role,
        text=found.text,
        from_position=found.start,
        to_position=found.end,
        score=found.score,
    )


def state_filter(request: pb.ListSessionsRequest) -> SessionState | None:
    if not request.HasField("state"):
        return None
    for state, number in _STATES.items():
        if number == request.state:
            return state
    raise InvalidArgument(f"state: {request.state} is not a session state")
