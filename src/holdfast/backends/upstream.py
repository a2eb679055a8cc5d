"""What all upstream servers have in common: the chat turn, and parts of the wire formats."""

import asyncio
import json
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from holdfast.backends.fields import left_out, parse_fields
from holdfast.backends.passthrough import affinity, client_headers
from holdfast.backends.probe import PROBE, ProbeReport, TokenSample, probe
from holdfast.backends.servers import Server, Servers
from holdfast.backends.transport import accepted, forward, refusal
from holdfast.backends.upstream_sequences import UpstreamSequences
from holdfast.backends.validation import PAYLOADS, Asked, CheckedReply, decoded
from holdfast.config import UpstreamConfig
from holdfast.errors import ConfigError, HoldfastError, UpstreamInvalid
from holdfast.generation import Sampled, SamplingParams
from holdfast.metrics import Metrics
from holdfast.sessions.payload import expert_rows, parse_expert_shape, payload_shape
from holdfast.sessions.ports import LogprobKind, ModelInfo, UpstreamReply

CHAT = "/v1/chat/completions"
DEFAULT_CONTEXT = 1 << 20  # where neither the model nor the server tells
INLINE_BYTES = 64 << 10  # about 50 microseconds of decoding, not worth a pass of the loop

_CLOSE_TIMEOUT_S = 5.0

TopLogprobs = tuple[tuple[int, float], ...]
T = TypeVar("T")

logger = logging.getLogger(__name__)


class DecodeQueue:
    """Decodes large replies one at a time, one in each pass of the loop, so that the loop stays responsive.

    Decoding holds the interpreter lock, so threads would only add switches (`holdfast bench responsiveness`).
    """

    def __init__(self, *, inline_bytes: int = INLINE_BYTES) -> None:
        self._inline_bytes = inline_bytes
        self._turn = asyncio.Lock()

    async def decode(self, work: Callable[[], T], num_bytes: int) -> T:
        """The result of `work` on a body of `num_bytes`; a small one is decoded at once."""
        if num_bytes <= self._inline_bytes:
            return work()
        async with self._turn:
            await asyncio.sleep(0)  # let other tasks run first
            return work()


class UpstreamBackend(UpstreamSequences):
    """Chat and sessions on an upstream server. Used on one event loop; `aclose` it there."""

    default_kind: LogprobKind

    def __init__(
        self,
        config: UpstreamConfig,
        model: ModelInfo,
        *,
        capacity: int = 65536,
        metrics: Metrics | None = None,
        routing: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__(model, capacity)
        self._metrics = metrics or Metrics()
        self.servers = Servers(config, lambda server: probe(self, server), self._metrics)
        self.decode_queue = DecodeQueue()
        self.config = config
        self.logprob_kind = self.default_kind if config.logprob_kind == "auto" else LogprobKind(config.logprob_kind)
        self._extra = _extra(config.upstream_extra)
        self._forwarded = parse_fields(config.forward_fields)
        self._row_shapes: dict[str, tuple[int, ...]] = {}  # of training payloads; the probe finds them
        self._routing = routing  # layers of the model that route, experts per token, and all layers, if known
        self._expert_shape = parse_expert_shape(config.routed_experts_shape)
        self._known: ProbeReport | None = None  # what the first probe found
        self._loop: asyncio.AbstractEventLoop | None = None

    _check: Callable[[bytes, Asked], CheckedReply]
    sample: TokenSample | None = None  # whose tokens the upstream must agree with

    @abstractmethod
    def _chat_fields(self, body: Mapping[str, Any], input_ids: list[int], known: Mapping[str, int]) -> dict[str, Any]:
        """The fields that we set, whatever the client sent."""

    @abstractmethod
    async def best_logprobs(self, server: Server, prompt: list[int], temperature: float) -> list[float]:
        """The logprobs of the two likeliest next tokens, as the server returns them at `temperature`."""

    def left_out(self, body: Mapping[str, Any], *, may_ignore: bool) -> list[str]:
        return left_out(body, self._forwarded, may_ignore=may_ignore)

    async def complete(
        self,
        body: Mapping[str, Any],
        input_ids: Sequence[int],
        *,
        session_id: str,
        known: Mapping[str, int] = MappingProxyType({}),
    ) -> UpstreamReply:
        reply, num_aborted = await self.servers.run(
            session_id,
            lambda server: self.complete_on(server, body, input_ids, session_id=session_id, known=known),
            num_retries=self.config.retry_aborted,
        )
        return replace(reply, num_aborted=num_aborted)

    async def complete_on(
        self,
        server: Server,
        body: Mapping[str, Any],
        input_ids: Sequence[int],
        *,
        session_id: str,
        known: Mapping[str, int] = MappingProxyType({}),
    ) -> UpstreamReply:
        """As `complete`, on this server and once."""
        ids = list(input_ids)
        sent = {name: value for name, value in body.items() if name in self._forwarded}
        if server.model:  # whatever name the client uses: there is only one model
            sent["model"] = server.model
        sent |= self._chat_fields(body, ids, known) | self._extra
        is_rest = self.config.routing_replay == "additional"
        asked = Asked(
            input_ids=ids,
            vocab_size=self._model.vocab_size,
            max_tokens=_max_tokens(sent),
            payloads={name: known.get(name, 0) if is_rest else 0 for name in self.asked_payloads},
            row_shapes=self._row_shapes,
            keep_payloads=self.config.keep_training_payloads,
            kind=self.logprob_kind,
        )
        started, outcome = time.perf_counter(), "cancelled"
        try:
            answer = await server.transport.post(CHAT, sent, affinity(session_id))
            outcome = str(answer.status)
            if answer.status >= 500:
                await self.servers.confirm(server, was_turned_away=answer.status == 503)
            checked = None
            if answer.status == 200:
                checked = await self.decode_queue.decode(lambda: self._check(answer.body, asked), len(answer.body))
            elif answer.status < 400:  # not a success that could be recorded, and redirects are not followed
                raise refusal(answer.status, answer.body)
        except HoldfastError as exc:
            outcome = exc.code
            raise
        finally:
            self._metrics.observe_upstream(server.index, outcome, time.perf_counter() - started)
        return UpstreamReply(
            status=answer.status,
            headers=client_headers(answer.headers),
            body=checked.body if checked else answer.body,
            received=answer.body,
            request=sent,
            completion=checked.completion if checked else None,
        )

    @property
    def asked_payloads(self) -> frozenset[str]:
        """The training payloads that the operator's settings request, not the client."""
        asked = {name for name in PAYLOADS if self._extra.get(f"return_{name}")}
        return frozenset(asked | ({"routed_experts"} if self.config.routing_replay != "off" else set()))

    def learn_row_shapes(self, reply: UpstreamReply) -> None:
        """All later payloads must have rows like those of this reply, so that they fit together in a sample."""
        done = reply.completion
        assert done is not None
        num_rows = (done.prompt_tokens or 0) + done.completion_tokens - 1
        for name in self.asked_payloads:
            shape = payload_shape(reply.received[slice(*getattr(done, name))])
            row = shape[1:] or (shape[0] // num_rows,)
            if name == "routed_experts":
                try:
                    row = expert_rows(row, shape=self._expert_shape, routing=self._routing)
                except ValueError as exc:
                    raise UpstreamInvalid(f"{name} {exc}; set --routed-experts-shape LAYERS,TOPK") from exc
            self._row_shapes[name] = row
        if len(self._row_shapes.get("routed_experts", (0, 0))) == 1:
            logger.warning(
                "routed experts come without a shape, and the model's files do not tell it: samples will have flat "
                "rows; set --routed-experts-shape LAYERS,TOPK"
            )

    def expert_shape(self) -> tuple[int, int] | None:
        learned = self._row_shapes.get("routed_experts", ())
        return (learned[0], learned[1]) if len(learned) == 2 else self._expert_shape

    async def forward(
        self,
        method: str,
        path: str,
        *,
        query: str = "",
        headers: Iterable[tuple[str, str]] = (),
        body: bytes = b"",
        session_id: str,
    ) -> UpstreamReply:
        reply, _ = await self.servers.run(
            session_id,
            lambda server: forward(
                server.transport, method, path, query=query, headers=headers, body=body, session_id=session_id
            ),
        )
        return reply

    @property
    def known_model(self) -> str:
        """What the upstream calls its model; "" before the first probe has succeeded."""
        return self._known.model if self._known else ""

    def check_model(self, name: str) -> None:
        if self.known_model not in ("", name):
            raise UpstreamInvalid(f"the upstream serves {name!r}, but {self.known_model!r} is expected; it is not used")

    def adopt(self, found: ProbeReport) -> None:
        """What the first probe found is how the model is from now on; whatever contradicts it later is refused."""
        self.check_model(found.model)  # again: another server may have been probed meanwhile
        setting, known = self.config.logprob_kind, self._known
        if setting not in ("auto", "unknown", found.logprob_kind) and found.logprob_kind is not LogprobKind.UNKNOWN:
            raise ConfigError(
                f"logprob_kind is {setting}, but the upstream returns {found.logprob_kind} logprobs; "
                f"use auto or {found.logprob_kind}"
            )
        if known is not None:
            kinds = {known.logprob_kind, found.logprob_kind} - {LogprobKind.UNKNOWN}
            if len(kinds) > 1:
                raise UpstreamInvalid("the upstream has another kind of logprobs than before; it is not used")
        if known is None or known.logprob_kind is LogprobKind.UNKNOWN:
            self._known = found
            self.logprob_kind = found.logprob_kind if setting == "auto" else LogprobKind(setting)
        context = min(found.context or self._model.context, self._model.context)
        self._model = replace(self._model, recent=context, max_pin=context, context=context)

    async def one_token(self, server: Server, prompt: list[int]) -> None:
        """Generate one token from `prompt`, checked as any other."""
        events, reader = await self._open_stream(server, prompt, SamplingParams(seed=0, max_tokens=1), affinity(PROBE))
        try:
            data = await events.next()
            if data is None or not reader.read(data).sampled:
                raise UpstreamInvalid("the upstream returned no tokens")
        finally:
            events.close()

    async def prepare(self) -> None:
        """Probe the servers; see `probe`. Those that are not there yet are waited for."""
        await self.servers.prepare()

    @property
    def num_busy_cores(self) -> int:
        return 0

    @property
    def not_ready(self) -> str | None:
        return self.servers.problem

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """As `aclose`, from another thread than the event loop's. Blocks."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self.aclose(), self._loop).result(_CLOSE_TIMEOUT_S)

    async def aclose(self) -> None:
        await self.servers.close()

    @property
    def failure(self) -> BaseException | None:
        return None

    async def _ask(self, server: Server, path: str, request: dict[str, Any], decoder: "msgspec.json.Decoder[T]") -> T:
        answer = await server.transport.post(path, request | self._extra, {})
        return decoded(accepted(answer), decoder)


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """The sampling fields that SGLang and vLLM have in common."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()} or None,
        "skip_special_tokens": False,
    }


class _ErrorEvent(msgspec.Struct):
    error: Any


_ERROR = msgspec.json.Decoder(_ErrorEvent)


def read_event(data: bytes, decoder: "msgspec.json.Decoder[Any]", *, status: int = 500) -> Any:
    """The event as the decoder's type. An error event raises as a response with its code, or `status`, would."""
    try:
        return decoded(data, decoder)
    except UpstreamInvalid as exc:
        try:
            error = decoded(data, _ERROR).error
        except UpstreamInvalid:
            raise exc from exc.__cause__
        code = error.get("code") if isinstance(error, dict) else None
        raise refusal(code if type(code) is int else status, msgspec.json.encode(error)) from exc


def with_logprobs(tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopLogprobs]) -> list[Sampled]:
    """An upstream returns one logprob for each token; only its backend knows which kind that is."""
    tops = tops if len(tops) == len(tokens) else [()] * len(tokens)
    return [
        Sampled(token=token, logprob=logprob, sampling_logprob=logprob, top=top)
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    ]


def upstream_model_info(
    *,
    name: str,
    vocab_size: int,
    eos_token_ids: frozenset[int] = frozenset(),
    tokenizer_hash: str = "",
    chat_template_hash: str = "",
    context: int = DEFAULT_CONTEXT,
) -> ModelInfo:
    """A model on an upstream: its window is the whole context, so pinning takes no room from it."""
    return ModelInfo(
        name=name,
        fingerprint=f"upstream:{name}",
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        tokenizer_hash=tokenizer_hash,
        chat_template_hash=chat_template_hash,
        sink=0,
        recent=context,
        max_pin=context,
        context=context,
    )


def _max_tokens(request: Mapping[str, Any]) -> int | None:
    """The most tokens that the request allows. If it has both limits, servers differ in which one counts."""
    limits = [request.get(name) for name in ("max_tokens", "max_completion_tokens")]
    return max((limit for limit in limits if type(limit) is int), default=None)


def _extra(text: str) -> dict[str, Any]:
    try:
        extra = json.loads(text or "{}")
    except ValueError as exc:
        raise ConfigError(f"upstream_extra is not JSON: {exc}") from exc
    if not isinstance(extra, dict):
        raise ConfigError("upstream_extra must be a JSON object")
    return extra
