"""What sessions report to the metrics."""

from collections.abc import Callable, Sequence

from holdfast.generation import Done, Event, Sampled
from holdfast.observability.metrics import Metrics
from holdfast.sessions.view import SessionState, SessionView


def watch_sessions(metrics: Metrics, views: Callable[[], Sequence[SessionView]]) -> None:
    """Gauges that look when they are asked."""

    def total(field: str) -> Callable[[], float]:
        return lambda: float(sum(getattr(view, field) or 0 for view in views()))

    def count(is_parked: bool) -> Callable[[], float]:
        return lambda: float(sum((view.state is SessionState.PARKED) is is_parked for view in views()))

    metrics.session_active.set_function(count(False))
    metrics.session_parked.set_function(count(True))
    metrics.session_kv_live_bytes.set_function(total("kv_live_bytes"))
    metrics.session_kv_reserved_bytes.set_function(total("kv_reserved_bytes"))
    metrics.session_history_tokens.set_function(total("history_length"))


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
