from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StopReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_REASON_UNSPECIFIED: _ClassVar[StopReason]
    STOP_REASON_MAX_TOKENS: _ClassVar[StopReason]
    STOP_REASON_EOS: _ClassVar[StopReason]
    STOP_REASON_STOP_TOKEN: _ClassVar[StopReason]
    STOP_REASON_CANCELLED: _ClassVar[StopReason]

class SessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_STATE_UNSPECIFIED: _ClassVar[SessionState]
    SESSION_STATE_LIVE: _ClassVar[SessionState]
    SESSION_STATE_PARKED: _ClassVar[SessionState]
    SESSION_STATE_FAILED: _ClassVar[SessionState]

class SpanKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPAN_KIND_UNSPECIFIED: _ClassVar[SpanKind]
    SPAN_KIND_GIVEN: _ClassVar[SpanKind]
    SPAN_KIND_SAMPLED: _ClassVar[SpanKind]
    SPAN_KIND_RECALLED: _ClassVar[SpanKind]
STOP_REASON_UNSPECIFIED: StopReason
STOP_REASON_MAX_TOKENS: StopReason
STOP_REASON_EOS: StopReason
STOP_REASON_STOP_TOKEN: StopReason
STOP_REASON_CANCELLED: StopReason
SESSION_STATE_UNSPECIFIED: SessionState
SESSION_STATE_LIVE: SessionState
SESSION_STATE_PARKED: SessionState
SESSION_STATE_FAILED: SessionState
SPAN_KIND_UNSPECIFIED: SpanKind
SPAN_KIND_GIVEN: SpanKind
SPAN_KIND_SAMPLED: SpanKind
SPAN_KIND_RECALLED: SpanKind

class CreateSessionRequest(_message.Message):
    __slots__ = ("client_label", "eos_token_ids", "token_ids", "pin_tokens", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CLIENT_LABEL_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    client_label: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    pin_tokens: int
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, client_label: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., pin_tokens: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CreateSessionResponse(_message.Message):
    __slots__ = ("session_id", "sink", "recent", "kv_reserved_bytes", "model_fingerprint", "history_length")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SINK_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    KV_RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    sink: int
    recent: int
    kv_reserved_bytes: int
    model_fingerprint: str
    history_length: int
    def __init__(self, session_id: _Optional[str] = ..., sink: _Optional[int] = ..., recent: _Optional[int] = ..., kv_reserved_bytes: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., history_length: _Optional[int] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("name", "fingerprint", "vocabulary_size", "eos_token_ids", "tokenizer_hash", "chat_template_hash", "sink", "recent", "max_pin_tokens", "context_length")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_HASH_FIELD_NUMBER: _ClassVar[int]
    SINK_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    MAX_PIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    vocabulary_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokenizer_hash: str
    chat_template_hash: str
    sink: int
    recent: int
    max_pin_tokens: int
    context_length: int
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., tokenizer_hash: _Optional[str] = ..., chat_template_hash: _Optional[str] = ..., sink: _Optional[int] = ..., recent: _Optional[int] = ..., max_pin_tokens: _Optional[int] = ..., context_length: _Optional[int] = ...) -> None: ...

class AppendTokensRequest(_message.Message):
    __slots__ = ("session_id", "token_ids", "expected_history_length")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    expected_history_length: int
    def __init__(self, session_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., expected_history_length: _Optional[int] = ...) -> None: ...

class AppendTokensResponse(_message.Message):
    __slots__ = ("history_length", "prefilled_tokens", "prefill_duration_seconds")
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DURATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    history_length: int
    prefilled_tokens: int
    prefill_duration_seconds: float
    def __init__(self, history_length: _Optional[int] = ..., prefilled_tokens: _Optional[int] = ..., prefill_duration_seconds: _Optional[float] = ...) -> None: ...

class SamplingOptions(_message.Message):
    __slots__ = ("seed", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop_token_ids", "top_logprobs", "speculation")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: int
    speculation: bool
    def __init__(self, seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[int] = ..., speculation: _Optional[bool] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("session_id", "max_tokens", "expected_history_length", "sampling", "batch_tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    max_tokens: int
    expected_history_length: int
    sampling: SamplingOptions
    batch_tokens: bool
    def __init__(self, session_id: _Optional[str] = ..., max_tokens: _Optional[int] = ..., expected_history_length: _Optional[int] = ..., sampling: _Optional[_Union[SamplingOptions, _Mapping]] = ..., batch_tokens: _Optional[bool] = ...) -> None: ...

class TurnRequest(_message.Message):
    __slots__ = ("session_id", "token_ids", "max_tokens", "expected_history_length", "sampling", "batch_tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    expected_history_length: int
    sampling: SamplingOptions
    batch_tokens: bool
    def __init__(self, session_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., expected_history_length: _Optional[int] = ..., sampling: _Optional[_Union[SamplingOptions, _Mapping]] = ..., batch_tokens: _Optional[bool] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("token_id", "logprob", "sampling_logprob", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    sampling_logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., sampling_logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class HistoryTruncated(_message.Message):
    __slots__ = ("from_position", "to_position")
    FROM_POSITION_FIELD_NUMBER: _ClassVar[int]
    TO_POSITION_FIELD_NUMBER: _ClassVar[int]
    from_position: int
    to_position: int
    def __init__(self, from_position: _Optional[int] = ..., to_position: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("stop_reason", "generated_token_count", "prefill_tokens", "prefill_duration_seconds", "total_duration_seconds", "accepted_draft_tokens", "proposed_draft_tokens", "dropped_token_count", "seed", "history_length")
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DURATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_DURATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    stop_reason: StopReason
    generated_token_count: int
    prefill_tokens: int
    prefill_duration_seconds: float
    total_duration_seconds: float
    accepted_draft_tokens: int
    proposed_draft_tokens: int
    dropped_token_count: int
    seed: int
    history_length: int
    def __init__(self, stop_reason: _Optional[_Union[StopReason, str]] = ..., generated_token_count: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., prefill_duration_seconds: _Optional[float] = ..., total_duration_seconds: _Optional[float] = ..., accepted_draft_tokens: _Optional[int] = ..., proposed_draft_tokens: _Optional[int] = ..., dropped_token_count: _Optional[int] = ..., seed: _Optional[int] = ..., history_length: _Optional[int] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("token", "truncated", "done", "tokens")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    token: Token
    truncated: HistoryTruncated
    done: Done
    tokens: TokenBatch
    def __init__(self, token: _Optional[_Union[Token, _Mapping]] = ..., truncated: _Optional[_Union[HistoryTruncated, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., tokens: _Optional[_Union[TokenBatch, _Mapping]] = ...) -> None: ...

class ForkSessionRequest(_message.Message):
    __slots__ = ("session_id", "at_position", "client_label")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AT_POSITION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_LABEL_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    at_position: int
    client_label: str
    def __init__(self, session_id: _Optional[str] = ..., at_position: _Optional[int] = ..., client_label: _Optional[str] = ...) -> None: ...

class ForkSessionResponse(_message.Message):
    __slots__ = ("session_id", "history_length", "recomputed_tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    history_length: int
    recomputed_tokens: int
    def __init__(self, session_id: _Optional[str] = ..., history_length: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ...) -> None: ...

class RewindSessionRequest(_message.Message):
    __slots__ = ("session_id", "to_position")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TO_POSITION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    to_position: int
    def __init__(self, session_id: _Optional[str] = ..., to_position: _Optional[int] = ...) -> None: ...

class RewindSessionResponse(_message.Message):
    __slots__ = ("history_length", "recomputed_tokens")
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    history_length: int
    recomputed_tokens: int
    def __init__(self, history_length: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ...) -> None: ...

class SpansSummary(_message.Message):
    __slots__ = ("given_spans", "given_tokens", "sampled_spans", "sampled_tokens")
    GIVEN_SPANS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_SPANS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    given_spans: int
    given_tokens: int
    sampled_spans: int
    sampled_tokens: int
    def __init__(self, given_spans: _Optional[int] = ..., given_tokens: _Optional[int] = ..., sampled_spans: _Optional[int] = ..., sampled_tokens: _Optional[int] = ...) -> None: ...

class GetSessionInfoRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("session_id", "client_label", "state", "busy", "history_length", "dropped_token_count", "kv_live_bytes", "kv_reserved_bytes", "inv1_violations", "inv2_violations", "idle_seconds", "spans", "metadata", "failure", "sink", "recent", "rewind_count")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_LABEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_LIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    INV1_VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    INV2_VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SINK_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    REWIND_COUNT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    client_label: str
    state: SessionState
    busy: bool
    history_length: int
    dropped_token_count: int
    kv_live_bytes: int
    kv_reserved_bytes: int
    inv1_violations: int
    inv2_violations: int
    idle_seconds: float
    spans: SpansSummary
    metadata: _containers.ScalarMap[str, str]
    failure: str
    sink: int
    recent: int
    rewind_count: int
    def __init__(self, session_id: _Optional[str] = ..., client_label: _Optional[str] = ..., state: _Optional[_Union[SessionState, str]] = ..., busy: _Optional[bool] = ..., history_length: _Optional[int] = ..., dropped_token_count: _Optional[int] = ..., kv_live_bytes: _Optional[int] = ..., kv_reserved_bytes: _Optional[int] = ..., inv1_violations: _Optional[int] = ..., inv2_violations: _Optional[int] = ..., idle_seconds: _Optional[float] = ..., spans: _Optional[_Union[SpansSummary, _Mapping]] = ..., metadata: _Optional[_Mapping[str, str]] = ..., failure: _Optional[str] = ..., sink: _Optional[int] = ..., recent: _Optional[int] = ..., rewind_count: _Optional[int] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "client_label", "state")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CLIENT_LABEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    client_label: str
    state: SessionState
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., client_label: _Optional[str] = ..., state: _Optional[_Union[SessionState, str]] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    next_page_token: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetHistoryRequest(_message.Message):
    __slots__ = ("session_id", "from_position", "to_position")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_POSITION_FIELD_NUMBER: _ClassVar[int]
    TO_POSITION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    from_position: int
    to_position: int
    def __init__(self, session_id: _Optional[str] = ..., from_position: _Optional[int] = ..., to_position: _Optional[int] = ...) -> None: ...

class HistoryChunk(_message.Message):
    __slots__ = ("from_position", "kind", "token_ids", "logprobs", "sampling_logprobs", "stop_reason", "weight_version")
    FROM_POSITION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    from_position: int
    kind: SpanKind
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    sampling_logprobs: _containers.RepeatedScalarFieldContainer[float]
    stop_reason: StopReason
    weight_version: str
    def __init__(self, from_position: _Optional[int] = ..., kind: _Optional[_Union[SpanKind, str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., sampling_logprobs: _Optional[_Iterable[float]] = ..., stop_reason: _Optional[_Union[StopReason, str]] = ..., weight_version: _Optional[str] = ...) -> None: ...

class SearchHistoryRequest(_message.Message):
    __slots__ = ("session_id", "query", "query_token_ids", "limit", "include_in_view")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    QUERY_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_IN_VIEW_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    query: str
    query_token_ids: _containers.RepeatedScalarFieldContainer[int]
    limit: int
    include_in_view: bool
    def __init__(self, session_id: _Optional[str] = ..., query: _Optional[str] = ..., query_token_ids: _Optional[_Iterable[int]] = ..., limit: _Optional[int] = ..., include_in_view: _Optional[bool] = ...) -> None: ...

class SearchHistoryResponse(_message.Message):
    __slots__ = ("passages",)
    PASSAGES_FIELD_NUMBER: _ClassVar[int]
    passages: _containers.RepeatedCompositeFieldContainer[Passage]
    def __init__(self, passages: _Optional[_Iterable[_Union[Passage, _Mapping]]] = ...) -> None: ...

class Passage(_message.Message):
    __slots__ = ("turn", "role", "text", "from_position", "to_position", "score")
    TURN_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FROM_POSITION_FIELD_NUMBER: _ClassVar[int]
    TO_POSITION_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    turn: int
    role: str
    text: str
    from_position: int
    to_position: int
    score: float
    def __init__(self, turn: _Optional[int] = ..., role: _Optional[str] = ..., text: _Optional[str] = ..., from_position: _Optional[int] = ..., to_position: _Optional[int] = ..., score: _Optional[float] = ...) -> None: ...

class ExportSessionRequest(_message.Message):
    __slots__ = ("session_id", "without_snapshot")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    without_snapshot: bool
    def __init__(self, session_id: _Optional[str] = ..., without_snapshot: _Optional[bool] = ...) -> None: ...

class SessionChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ImportSessionResponse(_message.Message):
    __slots__ = ("session_id", "reused_tokens", "recomputed_tokens", "history_length")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    reused_tokens: int
    recomputed_tokens: int
    history_length: int
    def __init__(self, session_id: _Optional[str] = ..., reused_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., history_length: _Optional[int] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("final_history_length",)
    FINAL_HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    final_history_length: int
    def __init__(self, final_history_length: _Optional[int] = ...) -> None: ...

class GetClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClusterResponse(_message.Message):
    __slots__ = ("members", "this_member", "is_cluster")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    THIS_MEMBER_FIELD_NUMBER: _ClassVar[int]
    IS_CLUSTER_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[ClusterMember]
    this_member: str
    is_cluster: bool
    def __init__(self, members: _Optional[_Iterable[_Union[ClusterMember, _Mapping]]] = ..., this_member: _Optional[str] = ..., is_cluster: _Optional[bool] = ...) -> None: ...

class ClusterMember(_message.Message):
    __slots__ = ("name", "state", "lease_left_seconds", "epoch", "sessions", "room", "version", "http", "grpc")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    GRPC_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    lease_left_seconds: float
    epoch: int
    sessions: int
    room: int
    version: str
    http: str
    grpc: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., lease_left_seconds: _Optional[float] = ..., epoch: _Optional[int] = ..., sessions: _Optional[int] = ..., room: _Optional[int] = ..., version: _Optional[str] = ..., http: _Optional[str] = ..., grpc: _Optional[str] = ...) -> None: ...
