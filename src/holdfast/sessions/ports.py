"""The interface between sessions and backends: what a backend must implement, and the values that cross."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from holdfast.generation import Done, Event, SamplingParams
from holdfast.sessions.record import ByteRange, View


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model behind a backend, as clients may see it."""

    name: str
    fingerprint: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer_hash: str
    chat_template_hash: str
    sink: int
    recent: int
    max_pin: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendView:
    """How a backend sees one session right now. The kv fields are None where the cache is not ours."""

    history_length: int
    num_dropped: int
    num_uncomputed: int = 0  # tokens, besides the last one, that are to be computed again: the weights have changed
    kv_live_bytes: int | None
    kv_reserved_bytes: int | None
    inv1_violations: int
    inv2_violations: int
    failure: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    """New weights that the backend computes with from now on."""

    num_tensors: int
    duration_s: float


class EventStream(Protocol):
    """One generation. Leaving it early cancels, and waits until the backend has stopped."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> list[Event]: ...

    def rest(self) -> list[Event]:
        """Events that were not consumed; complete once the stream was closed."""


class Backend(Protocol):
    """Generation by handle. One operation at a time per handle; the session's gate sees to it."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def capacity(self) -> int:
        """How many sessions can be live at once."""

    async def open(self, *, sink: int) -> int: ...

    async def pin(self, handle: int, sink: int) -> None:
        """Keep the first `sink` tokens from now on; only while the history is empty."""

    async def append(self, handle: int, tokens: Sequence[int]) -> Done:
        """The tokens are in the history once this has begun; cancelling only delays their computation."""

    def generate(
        self, handle: int, params: SamplingParams, tokens: Sequence[int] = (), *, view: View | None = None
    ) -> EventStream:
        """Append `tokens`, then sample. They are in the history once the stream was entered without an error.

        `view`: what of the history an upstream's prompt is made of; None: all."""

    async def fork(self, handle: int) -> int: ...

    async def snapshot(self, handle: int) -> bytes | None:
        """What `restore` needs to continue without computing the history again; None if there is no such thing."""

    async def restore(self, content: bytes, tokens: Sequence[int]) -> int:
        """A new handle with the history `tokens`. Raises SnapshotMismatch where the content does not belong to it."""

    async def rewind(self, handle: int, length: int, *, is_limited: bool = True) -> int:
        """Forget from `length` on; returns how many tokens had to be computed again, of which there may be a limit."""

    async def close(self, handle: int) -> int:
        """Free what the handle holds, cancelling what runs on it; returns the final history length."""

    def view(self, handle: int) -> BackendView:
        """Never waits for the device."""

    async def label_weights(self, version: str) -> None:
        """Tokens that our engine samples from now on carry this version."""

    @property
    def max_weight_bytes(self) -> int:
        """The size of all weights in float32. Raises Unimplemented where they are not ours."""

    async def load_weights(self, path: Path, *, version: str, keeps_caches: bool) -> WeightsLoaded:
        """Overwrite the weights with those at `path`, all or none. Generations go on with them; unless the caches are
        kept, histories are computed again. Raises ModelError where they do not fit, Unimplemented where the weights are
        not ours."""


class ServedBackend(Backend, Protocol):
    """A backend that a server starts and stops."""

    @property
    def failure(self) -> BaseException | None:
        """Why nothing can be generated any more, where that is so."""

    @property
    def not_ready(self) -> str | None:
        """Why nothing can be generated at this moment, where that may pass."""

    @property
    def num_busy_cores(self) -> int:
        """How many cores of this machine compute tokens at this moment."""

    async def prepare(self) -> None:
        """Called once, on the server's loop, before anything else."""

    def start(self) -> None: ...

    def stop(self) -> None:
        """Called from a thread; may block for a moment."""


class LogprobKind(StrEnum):
    """Which distribution a logprob belongs to."""

    RAW = "raw"  # the model's own, before temperature
    SAMPLING = "sampling"  # the one the token was drawn from
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamCompletion:
    """What an upstream sampled, checked: `token_ids` and `logprobs` belong together, one by one.

    `message` is the assistant message as it came, its content never None. The payloads are large, so they are given by
    their place in the bytes that were received: a JSON text in base64, or a JSON array; None where we did not ask for
    them or it has none. `cut` are the members that the client's copy lacks. `effort`: what the upstream counted, under
    the names of a turn's record.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    message: Mapping[str, Any]
    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int
    weight_version: str | None = None
    routed_experts: ByteRange | None = None
    indexer_topk: ByteRange | None = None
    cut: tuple[ByteRange, ...] = ()
    logprob_kind: LogprobKind = LogprobKind.UNKNOWN
    effort: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamReply:
    """An upstream's answer. `completion` is None where the status is not 200: passed on, never recorded.

    `body` is the client's copy and `received` what came: the same bytes unless training payloads were cut.
    `headers` may go to the client as they are, each name once. `request` is the body as it went upstream.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    received: bytes
    request: Mapping[str, Any]
    completion: UpstreamCompletion | None = None
    num_aborted: int = 0  # replies before this one that were aborted or cut off, after which the request was sent again


class ChatUpstream(Protocol):
    """A chat server that takes token ids for the prompt and tells the ids that it sampled."""

    @property
    def logprob_kind(self) -> LogprobKind: ...

    def left_out(self, body: Mapping[str, Any], *, may_ignore: bool) -> list[str]:
        """The fields that this upstream does not get. Raises InvalidArgument for one that must not be ignored."""

    def expert_shape(self) -> tuple[int, int] | None:
        """Layers and experts per token of routed experts, where that is known."""

    async def complete(
        self, body: Mapping[str, Any], input_ids: Sequence[int], *, session_id: str, known: Mapping[str, int]
    ) -> UpstreamReply:
        """One reply to the client's request `body`, with `input_ids` as its prompt whatever the messages say.

        Raises UpstreamError where there is none that may be used. `known`: for each training payload, how many
        positions have theirs on record already. Cancelling closes the upstream request.
        """

    async def forward(
        self,
        method: str,
        path: str,
        *,
        query: str,
        headers: Iterable[tuple[str, str]],
        body: bytes,
        session_id: str,
    ) -> UpstreamReply:
        """The response to any other request of a client, which is never recorded."""
