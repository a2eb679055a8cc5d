"""What all upstream servers have in common: the chat turn, and sessions by token ids with the history kept here."""

import asyncio
import itertools
import json
import secrets
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.backends.decode_queue import DecodeQueue
from holdfast.backends.passthrough import affinity, client_headers
from holdfast.backends.transport import Transport
from holdfast.backends.upstream_probe import probe
from holdfast.backends.upstream_stream import Opened, UpstreamSequence, UpstreamStream
from holdfast.backends.validation import CheckedReply
from holdfast.config import UpstreamConfig
from holdfast.errors import (
    CapacityExhausted,
    ConfigError,
    HoldfastError,
    InvalidArgument,
    SessionBusy,
    SessionNotFound,
    SnapshotMismatch,
)
from holdfast.generation import Done, SamplingParams
from holdfast.sessions.ports import BackendView, LogprobKind, ModelInfo, UpstreamReply

CHAT = "/v1/chat/completions"
NEVER_UPSTREAM = frozenset({"stream", "stream_options", "input_ids", "kv_transfer_params"})

_CLOSE_TIMEOUT_S = 5.0

Observe = Callable[[str, float], None]  # outcome, seconds


class UpstreamBackend(ABC):
    """Sessions and chat on an upstream server. Used on one event loop; `aclose` it there."""

    default_kind: LogprobKind

    def __init__(
        self,
        config: UpstreamConfig,
        model: ModelInfo,
        *,
        capacity: int = 65536,
        observe: Observe = lambda outcome, seconds: None,
    ) -> None:
        self.transport = Transport(config)
        self.lane = DecodeQueue(config.cpu_workers)
        self.config = config
        self.upstream_model = ""
        self.logprob_kind = self.default_kind if config.logprob_kind == "auto" else LogprobKind(config.logprob_kind)
        self._model = model
        self._capacity = capacity
        self._observe = observe
        self._extra = _extra(config.upstream_extra)
        self._handles = itertools.count(1)
        self._sequences: dict[int, UpstreamSequence] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    # What servers differ in

    @abstractmethod
    def _chat_fields(self, body: Mapping[str, Any], input_ids: list[int], routed_from: int) -> dict[str, Any]:
        """The fields that we force."""

    @abstractmethod
    def _check(self, body: bytes, input_ids: Sequence[int]) -> CheckedReply: ...

    @abstractmethod
    async def _open_stream(self, prompt: list[int], params: SamplingParams, headers: Mapping[str, str]) -> Opened:
        """Begin to generate from `prompt`."""

    @abstractmethod
    async def two_best(self, prompt: list[int], temperature: float) -> tuple[float, float]:
        """The logprobs of the two likeliest next tokens, as the server tells them at `temperature`."""

    # Chat

    async def complete(
        self, body: Mapping[str, Any], input_ids: Sequence[int], *, session_id: str, routed_from: int = 0
    ) -> UpstreamReply:
        ids = list(input_ids)
        sent = {name: value for name, value in body.items() if name not in NEVER_UPSTREAM}
        if self.upstream_model:  # whatever the client calls it: there is one
            sent["model"] = self.upstream_model
        sent |= self._chat_fields(body, ids, routed_from) | self._extra
        started, outcome = time.perf_counter(), "cancelled"
        try:
            answer = await self.transport.post(CHAT, sent, affinity(session_id))
            outcome = str(answer.status)
            checked = None
            if answer.status == 200:
                checked = await self.lane.decode(lambda: self._check(answer.body, ids), len(answer.body))
        except HoldfastError as exc:
            outcome = exc.code
            raise
        finally:
            self._observe(outcome, time.perf_counter() - started)
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
        """The training payloads that requests ask for on the operator's account, not the client's."""
        asked = {name for name in ("routed_experts", "indexer_topk") if self._extra.get(f"return_{name}")}
        return frozenset(asked | ({"routed_experts"} if self.config.routing_replay != "off" else set()))

    # Sessions by token ids

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def capacity(self) -> int:
        return self._capacity

    async def open(self, *, sink: int) -> int:
        return self._add(UpstreamSequence(secrets.token_hex(16)))

    async def pin(self, handle: int, sink: int) -> None:
        """Nothing to do: no token leaves the upstream's sight."""
        self._idle(handle)

    async def append(self, handle: int, tokens: Sequence[int]) -> Done:
        sequence = self._idle(handle)
        self._check_tokens(tokens)
        sequence.tokens.extend(tokens)
        return Done(
            stop_reason=None,
            num_generated=0,
            history_length=len(sequence.tokens),
            num_dropped=0,
            prefill_tokens=0,  # the upstream computes when it generates
            prefill_duration_s=0.0,
            total_duration_s=0.0,
            seed=None,
        )

    def generate(self, handle: int, params: SamplingParams, tokens: Sequence[int] = ()) -> UpstreamStream:
        sequence = self._idle(handle)
        self._check_tokens(tokens)
        params.check_vocabulary(self._model.vocab_size)
        if params.constraint is not None:
            raise InvalidArgument(
                "response_format and forced tool calls need the embedded engine, or a session: an upstream enforces "
                "its own there",
                param="response_format",
            )
        if not (sequence.tokens or tokens):
            raise InvalidArgument("cannot generate from an empty history; append at least one token first")
        headers = affinity(sequence.routing_key)
        return UpstreamStream(sequence, params, tokens, lambda prompt: self._open_stream(prompt, params, headers))

    async def fork(self, handle: int) -> int:
        source = self._idle(handle)
        return self._add(UpstreamSequence(source.routing_key, array("i", source.tokens)))

    async def snapshot(self, handle: int) -> bytes | None:
        return None

    async def restore(self, content: bytes, tokens: Sequence[int]) -> int:
        raise SnapshotMismatch("an upstream keeps no snapshots")

    async def rewind(self, handle: int, length: int, *, is_limited: bool = True) -> int:
        sequence = self._idle(handle)
        if not 0 <= length <= len(sequence.tokens):
            raise InvalidArgument(f"cannot rewind a history of {len(sequence.tokens)} tokens to {length}")
        del sequence.tokens[length:]
        return 0

    async def close(self, handle: int) -> int:
        sequence = self._get(handle)
        if sequence.stream:
            sequence.stream.cancel()
        del self._sequences[handle]
        return len(sequence.tokens)

    def view(self, handle: int) -> BackendView:
        return BackendView(
            history_length=len(self._get(handle).tokens),
            num_dropped=0,
            kv_live_bytes=None,
            kv_reserved_bytes=None,
            inv1_violations=0,
            inv2_violations=0,
            failure=None,
        )

    # Start and stop

    async def prepare(self) -> None:
        """Ask the server who it is; see `probe`."""
        found = await probe(self)
        if found.context:
            self._model = replace(self._model, recent=found.context, max_pin=found.context, context=found.context)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """As `aclose`, from another thread than the loop's."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self.aclose(), self._loop).result(_CLOSE_TIMEOUT_S)

    async def aclose(self) -> None:
        self.lane.close()
        await self.transport.close()

    @property
    def failure(self) -> BaseException | None:
        return None

    # Inside

    def _add(self, sequence: UpstreamSequence) -> int:
        if len(self._sequences) >= self._capacity:
            raise CapacityExhausted(f"all {self._capacity} sequences are in use")
        handle = next(self._handles)
        self._sequences[handle] = sequence
        return handle

    def _get(self, handle: int) -> UpstreamSequence:
        try:
            return self._sequences[handle]
        except KeyError:
            raise SessionNotFound(handle) from None

    def _idle(self, handle: int) -> UpstreamSequence:
        sequence = self._get(handle)
        if sequence.stream:
            raise SessionBusy(f"sequence {handle} is busy")
        return sequence

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        vocab_size = self._model.vocab_size
        for index, token in enumerate(tokens):
            if type(token) is not int or not 0 <= token < vocab_size:
                raise InvalidArgument(
                    f"token {token!r} at index {index} is not an id of the vocabulary of {vocab_size}"
                )


def upstream_model_info(
    *,
    name: str,
    vocab_size: int,
    eos_token_ids: frozenset[int] = frozenset(),
    tokenizer_hash: str = "",
    chat_template_hash: str = "",
    context: int = 1 << 20,
) -> ModelInfo:
    """A model that others hold: nothing leaves its window before `context`, so pins cost nothing."""
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


def _extra(text: str) -> dict[str, Any]:
    try:
        extra = json.loads(text or "{}")
    except ValueError as exc:
        raise ConfigError(f"upstream_extra is not JSON: {exc}") from exc
    if not isinstance(extra, dict):
        raise ConfigError("upstream_extra must be a JSON object")
    return extra
