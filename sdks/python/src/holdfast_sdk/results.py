"""What calls give back: frozen values of plain Python types. Knows nothing of gRPC."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class StopReason(StrEnum):
    """Why a generation ended. UNSPECIFIED: it has not, or for a reason this version does not know."""

    UNSPECIFIED = "UNSPECIFIED"
    MAX_TOKENS = "MAX_TOKENS"
    EOS = "EOS"
    STOP_TOKEN = "STOP_TOKEN"
    CANCELLED = "CANCELLED"


class SessionState(StrEnum):
    """Where a session's cache is: in a slab, set aside, or lost."""

    UNSPECIFIED = "UNSPECIFIED"
    LIVE = "LIVE"
    PARKED = "PARKED"
    FAILED = "FAILED"


class SpanKind(StrEnum):
    """Where the tokens of a span came from: the client, the model, or the server, which quoted earlier passages."""

    UNSPECIFIED = "UNSPECIFIED"
    GIVEN = "GIVEN"
    SAMPLED = "SAMPLED"
    RECALLED = "RECALLED"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    name: str
    fingerprint: str
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_hash: str
    chat_template_hash: str
    sink: int
    recent: int
    max_pin_tokens: int
    context_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A server of a cluster. `state` is serving, draining or dead; `lease_left_s` is None without a cluster, and 0 or
    less where the lease has expired. `room`: how many more sessions it can take without parking one."""

    name: str
    state: str
    lease_left_s: float | None
    epoch: int
    sessions: int
    room: int
    version: str
    http: str
    grpc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`this_member` is the name of the member that answered. Where `is_cluster` is False it is the only one."""

    members: tuple[Member, ...]
    this_member: str
    is_cluster: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """`kv_reserved_bytes` is None where the cache is not the server's own."""

    session_id: str
    sink: int
    recent: int
    kv_reserved_bytes: int | None
    model_fingerprint: str
    history_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    session_id: str
    history_length: int
    recomputed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """`reused_tokens` came with their cache, `recomputed_tokens` were computed; together they are the history."""

    session_id: str
    reused_tokens: int
    recomputed_tokens: int
    history_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """The prefill figures are None where the tokens had arrived but the answer was lost on its way."""

    history_length: int
    prefilled_tokens: int | None
    prefill_duration_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound:
    history_length: int
    recomputed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    final_history_length: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token. `logprob` is the model's own, before temperature and filters; `sampling_logprob` is
    under the distribution that the token was drawn from."""

    id: int
    logprob: float
    sampling_logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a generation ended. `seed` is the one that was used, also where none was asked for."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SpansSummary:
    given_spans: int
    given_tokens: int
    sampled_spans: int
    sampled_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """`kv_*` are None where the cache is not the server's own, `failure` where the session did not fail."""

    session_id: str
    label: str
    state: SessionState
    busy: bool
    history_length: int
    dropped_token_count: int
    kv_live_bytes: int | None
    kv_reserved_bytes: int | None
    inv1_violations: int
    inv2_violations: int
    idle_seconds: float
    spans: SpansSummary
    metadata: Mapping[str, str]
    failure: str | None
    sink: int
    recent: int
    rewind_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A part of a history that a search has found, among the tokens from `start` up to, not including, `end`. `role` is
    `given` or `sampled` in a session of raw tokens. `score`: greater is better, within one answer."""

    turn: int
    role: str
    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryChunk:
    """Tokens of one span, from position `start` on; a long span comes in several chunks.

    The logprobs are one for each token of a sampled span, none for others. `stop_reason` is the span's, on its
    last chunk.
    """

    start: int
    kind: SpanKind
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    stop_reason: StopReason

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.token_ids)
