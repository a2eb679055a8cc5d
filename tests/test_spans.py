from hypothesis import given
from hypothesis import strategies as st

from holdfast.generation import Sampled, StopReason
from holdfast.sessions.history import History, SpanKind
from holdfast.sessions.record import Recalled

operations = st.lists(
    st.one_of(
        st.tuples(st.just("give"), st.lists(st.integers(0, 99), min_size=1, max_size=5)),
        st.tuples(st.just("recall"), st.lists(st.integers(0, 99), min_size=2, max_size=5)),
        st.tuples(st.just("sample"), st.lists(st.integers(0, 99), max_size=5)),
        st.tuples(st.just("rewind"), st.floats(0, 1)),
    ),
    max_size=12,
)


@given(operations, st.integers(1, 7), st.floats(0, 1), st.floats(0, 1))
def test_history_is_a_plain_list_with_kinds(
    steps: list[tuple[str, object]], limit: int, first: float, second: float
) -> None:
    history = History()
    plain: list[tuple[SpanKind, int, float]] = []
    for kind, value in steps:
        if kind == "give":
            history.give(value)  # type: ignore[arg-type]
            plain += [(SpanKind.GIVEN, token, 0.0) for token in value]  # type: ignore[attr-defined]
        elif kind == "recall":
            history.give(value, Recalled(start=1, length=2))  # type: ignore[arg-type]
            kinds = (SpanKind.GIVEN, SpanKind.RECALLED, SpanKind.RECALLED, SpanKind.GIVEN, SpanKind.GIVEN)
            plain += [(k, token, 0.0) for k, token in zip(kinds, value, strict=False)]  # type: ignore[call-overload]
        elif kind == "sample":
            span = history.begin_sampled()
            for token in value:  # type: ignore[attr-defined]
                history.sample(span, Sampled(token=token, logprob=-token / 7, sampling_logprob=-token / 3))
                plain.append((SpanKind.SAMPLED, token, -token / 7))
            span.stop_reason = StopReason.EOS
        else:
            length = int(value * len(plain))  # type: ignore[operator]
            history.rewind(length)
            del plain[length:]
    assert len(history) == len(plain)
    start, end = sorted((int(first * len(plain)), int(second * len(plain))))
    copy, again = history.copy(len(plain)), History()
    for entry in history.entries_since("s", 0):
        again.repeat(entry)  # type: ignore[arg-type]
    assert (again.tokens, again.spans) == (history.tokens, history.spans)
    for kind in SpanKind:
        assert history.count(kind)[1] == sum(one is kind for one, _, _ in plain)
        assert history.count(kind) == again.count(kind)
    history.rewind(0)
    seen: list[tuple[SpanKind, int, float]] = []
    for piece in copy.pieces(start, end, limit=limit):
        assert piece.start == start + len(seen)
        assert 1 <= len(piece.tokens) <= limit
        logprobs = piece.logprobs if piece.kind is SpanKind.SAMPLED else [0.0] * len(piece.tokens)
        assert len(piece.sampling_logprobs) == len(piece.logprobs)
        seen += [(piece.kind, token, lp) for token, lp in zip(piece.tokens, logprobs, strict=True)]
    assert seen == plain[start:end]


def test_only_a_spans_last_piece_has_its_stop_reason_and_a_cut_span_has_none() -> None:
    history = History()
    span = history.begin_sampled()
    for token in range(6):
        history.sample(span, Sampled(token=token, logprob=-1.0, sampling_logprob=-1.0))
    span.stop_reason = StopReason.EOS
    assert [piece.stop_reason for piece in history.pieces(0, 6, limit=4)] == [None, StopReason.EOS]
    history.rewind(5)
    assert [piece.stop_reason for piece in history.pieces(0, 5, limit=9)] == [None]
