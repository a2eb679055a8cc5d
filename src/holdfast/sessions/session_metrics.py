"""What sessions report to the metrics."""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import Gauge

from holdfast.generation import Done, Event, Sampled
from holdfast.observability.metrics import Metrics
from holdfast.sessions.view import SessionState, SessionView


def watch_sessions(metrics: Metrics, views: Callable[[], Iterable[SessionView]]) -> None:
    """Gauges that look when they are asked. Sessions may be many, so the first gauge looks at them for all."""
    seen: dict[Gauge, float] = {}

    def look() -> None:
        seen.clear()
        for view in views():
            is_parked = view.state is SessionState.PARKED
            for gauge, amount in (
                (metrics.session_parked if is_parked else metrics.session_active, 1),
                (metrics.session_kv_live_bytes, view.kv_live_bytes or 0),
                (metrics.session_kv_reserved_bytes, view.kv_reserved_bytes or 0),
                (metrics.session_history_tokens, view.history_length),
            ):
                seen[gauge] = seen.get(gauge, 0.0) + amount

    def total(gauge: Gauge) -> Callable[[], float]:
        def read() -> float:
            if gauge is metrics.session_active:  # which is read before the others
                look()
            return seen.get(gauge, 0.0)

        return read

    for gauge in (
        metrics.session_active,
        metrics.session_parked,
        metrics.session_kv_live_bytes,
        metrics.session_kv_reserved_bytes,
        metrics.session_history_tokens,
    ):
        gauge.set_function(total(gauge))


def observe_batch(metrics: Metrics, batch: Sequence[Event], since_s: float, *, is_first: bool) -> None:
    """Tokens that arrived together, `since_s` after the call began or after those before them."""
    num = sum(isinstance(event, Sampled) for event in batch)
    metrics.generated_tokens.inc(num)
    if num and is_first:
        metrics.time_to_first_token.observe(since_s)
    elif num:
        metrics.inter_token.observe(since_s / num)
    if isinstance(done := batch[-1], Done):
        metrics.generate_prefill_tokens.observe(done.prefill_tokens)
        metrics.generate_prefill_duration.observe(done.prefill_duration_s)
        if done.num_proposed:
            metrics.draft_tokens.labels("accepted").inc(done.num_accepted)
            metrics.draft_tokens.labels("rejected").inc(done.num_proposed - done.num_accepted)
