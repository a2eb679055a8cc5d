"""The sessions of the fake server: histories of spans, and what has left their window."""

from dataclasses import dataclass, field

from holdfast_sdk.gen import runtime_pb2 as pb

SINK, RECENT, MAX_PIN = 4, 64, 16


@dataclass
class Span:
    kind: pb.SpanKind
    start: int
    tokens: list[pb.Token] = field(default_factory=list)
    stop_reason: pb.StopReason = pb.STOP_REASON_UNSPECIFIED


@dataclass
class FakeSession:
    id: str
    label: str
    sink: int
    eos: tuple[int, ...]
    metadata: dict[str, str]
    tokens: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    reported: int = 0
    busy: bool = False
    num_rewinds: int = 0
    lingering: int = 0  # how many more times it says that it is busy after a client left

    @property
    def is_busy(self) -> bool:
        return self.busy or self.lingering > 0

    @property
    def dropped_end(self) -> int:
        return max(self.sink, len(self.tokens) - RECENT)

    def give(self, ids: list[int]) -> None:
        if ids:
            span = Span(pb.SPAN_KIND_GIVEN, len(self.tokens), [pb.Token(token_id=token) for token in ids])
            self.spans.append(span)
            self.tokens.extend(ids)

    def cut(self, length: int) -> None:
        del self.tokens[length:]
        self.spans = [span for span in self.spans if span.start < length]
        for span in self.spans:
            del span.tokens[length - span.start :]
        self.reported = min(self.reported, self.dropped_end)

    def fork(self, session_id: str, label: str, length: int) -> "FakeSession":
        spans = [Span(span.kind, span.start, list(span.tokens), span.stop_reason) for span in self.spans]
        tokens, metadata = list(self.tokens), dict(self.metadata)
        fork = FakeSession(session_id, label, self.sink, self.eos, metadata, tokens, spans, self.reported)
        fork.cut(length)
        return fork


def session_info(session: FakeSession) -> pb.SessionInfo:
    given = [span for span in session.spans if span.kind == pb.SPAN_KIND_GIVEN]
    sampled = [span for span in session.spans if span.kind == pb.SPAN_KIND_SAMPLED]
    return pb.SessionInfo(
        session_id=session.id,
        client_label=session.label,
        state=pb.SESSION_STATE_LIVE,
        busy=session.is_busy,
        history_length=len(session.tokens),
        dropped_token_count=session.dropped_end - session.sink,
        kv_live_bytes=512,
        spans=pb.SpansSummary(
            given_spans=len(given),
            given_tokens=sum(len(span.tokens) for span in given),
            sampled_spans=len(sampled),
            sampled_tokens=sum(len(span.tokens) for span in sampled),
        ),
        metadata=session.metadata,
        sink=session.sink,
        recent=RECENT,
        rewind_count=session.num_rewinds,
    )
