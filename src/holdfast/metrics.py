"""All Prometheus metrics of a server, on their own registry."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_PREFIX = "holdfast"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
_BATCH = (1, 2, 4, 8, 16, 32, 64)
# Names that the metric of ignored fields tells apart; any other is "other", as clients may write what they like.
_WELL_KNOWN = {
    *("annotations", "cache_control", "extra_content", "provider_specific_fields", "reasoning_content"),
    *("reasoning_details", "reasoning_effort", "signature", "thinking", "thinking_blocks", "verbosity"),
    *("web_search_options", "prediction", "priority", "tools"),
}


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(name, about, labels, namespace=_PREFIX, registry=self.registry)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, labels, namespace=_PREFIX, registry=self.registry)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, about, namespace=_PREFIX, registry=self.registry, buckets=buckets)

        self.session_active = gauge("session_active", "sessions with a live cache")
        self.session_parked = gauge("session_parked", "sessions without a slab")
        self.session_woken = counter("session_woken_total", "parked sessions that came back, and from what", "how")
        self.journal_commit = histogram("journal_commit_seconds", "time a commit to disk takes", _SECONDS)
        self.journal_damaged = gauge("journal_damaged", "1 if damaged pages were found in the journal, otherwise 0")
        self.journal_cut_commits = gauge(
            "journal_cut_commits", "commits cut from the end of the journal's log at the last start, as incomplete"
        )
        self.member_renew = histogram(
            "member_renew_seconds", "time the database takes to renew this member's lease", _SECONDS
        )
        self.session_total = counter("session_total", "sessions by how they ended or began", "outcome")
        self.session_load = histogram("session_load_seconds", "time to read a resting session into memory", _SECONDS)
        self.session_evicted = counter("session_evicted_total", "sessions that had to go", "reason")
        self.session_kv_live_bytes = gauge("session_kv_live_bytes", "cache that is visible to some session")
        self.session_kv_reserved_bytes = gauge("session_kv_reserved_bytes", "cache that sessions hold")
        self.session_history_tokens = gauge("session_history_tokens", "tokens in all histories")
        self.generate_prefill_tokens = histogram(
            "generate_prefill_tokens", "tokens computed before a generation's first", _TOKENS
        )
        self.generate_prefill_duration = histogram(
            "generate_prefill_duration_seconds", "time to compute them", _SECONDS
        )
        self.time_to_first_token = histogram("time_to_first_token_seconds", "from call to first token", _SECONDS)
        self.inter_token = histogram("inter_token_seconds", "between two tokens of a generation", _SECONDS)
        self.generated_tokens = counter("generated_tokens_total", "sampled tokens")
        self.draft_tokens = counter("draft_tokens_total", "drafted tokens by what became of them", "result")
        self.invariant_violations = counter("cache_invariant_violations_total", "must stay 0", "kind")
        self.step_batch_size = histogram("step_batch_size", "sequences served by an engine step", _BATCH)
        self.step_duration = histogram("step_duration_seconds", "time an engine step takes", _SECONDS)
        self.queue_depth = gauge("queue_depth", "requests that wait to be admitted")
        self.admission = counter("admission_total", "requests by what became of them at the entrance", "outcome")
        self.http_requests = counter("http_requests_total", "requests by route and status", "route", "status")
        self.ignored_fields = counter("ignored_fields_total", "fields of requests that were left out", "field")
        self.http_duration = histogram("http_request_duration_seconds", "from request to last byte", _SECONDS)
        self.http_connections = gauge("http_connections", "open HTTP connections")
        self.http_connections_closed = counter(
            "http_connections_closed_total",
            "connections closed for being idle, for a new one (displaced), or at once for lack of room (refused)",
            "reason",
        )
        self.grpc_requests = counter("grpc_requests_total", "calls by method and result", "method", "code")
        self.upstream_requests = counter(
            "upstream_requests_total", "requests to upstreams by server and result", "upstream", "outcome"
        )
        self.upstream_duration = histogram("upstream_duration_seconds", "from request to its whole reply", _SECONDS)
        self.upstream_ready = gauge("upstream_ready", "1 where the server is used, 0 where it is gone", "upstream")
        self.upstream_sent_again = counter(
            "upstream_sent_again_total", "requests that were sent again after an abort or a broken connection", "reason"
        )
        self.cluster_forwards = counter(
            "cluster_forwards_total",
            "requests sent to the member that owns their session, by what became of them",
            *("door", "outcome"),
        )
        self.cluster_takeovers = counter("cluster_takeovers_total", "sessions that were taken over from a dead member")
        self.sessions_lost = counter(
            "cluster_sessions_lost_total", "sessions that another member took while this one had them in use"
        )
        self.cluster_fenced = gauge("cluster_fenced", "1 where others have taken this member for dead, and it stops")
        self.event_loop_lag = histogram("event_loop_lag_seconds", "how late the event loop runs", _SECONDS)

    def observe_ignored(self, paths: Iterable[str]) -> None:
        for path in paths:
            name = path.rpartition(".")[2].partition("[")[0]
            self.ignored_fields.labels(name if name in _WELL_KNOWN else "other").inc()

    def observe_upstream(self, upstream: int, outcome: str, duration_s: float) -> None:
        self.upstream_requests.labels(str(upstream), outcome).inc()
        self.upstream_duration.observe(duration_s)

    def observe_step(self, num_sequences: int, duration_s: float) -> None:
        self.step_batch_size.observe(num_sequences)
        self.step_duration.observe(duration_s)
