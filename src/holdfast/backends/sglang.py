"""SGLang as the upstream: the fields of its requests, the format of its replies and streams.

What a server must have (0.5.13 or later; `make test-sglang` checks one): `/v1/models`; `/v1/chat/completions` with
`input_ids`, `logprobs` and `return_meta_info`, whose `meta_info` has `output_token_logprobs` as [logprob, id, ...];
`/generate` with `input_ids` and `return_logprob`, streamed; with --routing-replay `return_routed_experts` and
`routed_experts_start_len`, for which it is started with --enable-return-routed-experts. `/tokenize` and `/health`
are used where they are there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.backends.servers import Server
from holdfast.backends.upstream import UpstreamBackend, read_event, sampling_fields, with_logprobs
from holdfast.backends.upstream_sequences import Opened, StreamPiece
from holdfast.backends.validation import (
    Entry,
    Finish,
    cached_count,
    check_finish,
    check_prompt,
    check_sampled,
    check_sglang,
    check_tops,
)
from holdfast.errors import UpstreamAborted, UpstreamInvalid
from holdfast.generation import SamplingParams
from holdfast.sessions.ports import LogprobKind

GENERATE = "/generate"


class SGLangBackend(UpstreamBackend):
    default_kind = LogprobKind.SAMPLING
    _check = staticmethod(check_sglang)

    def _chat_fields(self, body: Mapping[str, Any], input_ids: list[int], known: Mapping[str, int]) -> dict[str, Any]:
        fields = {"input_ids": input_ids, "logprobs": True, "return_meta_info": True, "no_stop_trim": False}
        if self.config.routing_replay != "off":
            start = known.get("routed_experts", 0) if self.config.routing_replay == "additional" else 0
            fields |= {"return_routed_experts": True, "routed_experts_start_len": min(start, len(input_ids))}
        return fields

    async def _open_stream(
        self, server: Server, prompt: list[int], params: SamplingParams, headers: Mapping[str, str]
    ) -> Opened:
        request = {
            "input_ids": prompt,
            "sampling_params": _sampling(params),
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": params.top_logprobs,
            "stream": True,
        }
        events = await server.transport.stream(GENERATE, request | self._extra, headers)
        reader = SGLangReader(vocab_size=self._model.vocab_size, prompt=prompt, num_top=params.top_logprobs)
        return events, reader

    async def best_logprobs(self, server: Server, prompt: list[int], temperature: float) -> list[float]:
        request = {
            "input_ids": prompt,
            "sampling_params": {"temperature": temperature, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        tops = (await self._ask(server, GENERATE, request, _EVENT)).meta_info.output_top_logprobs
        return [entry.logprob for entry in (tops and tops[0]) or []]


def _sampling(params: SamplingParams) -> dict[str, Any]:
    ends = sorted(params.eos_token_ids | params.stop_token_ids)
    return sampling_fields(params) | {
        "max_new_tokens": params.max_tokens,
        "top_k": params.top_k or -1,
        "sampling_seed": (params.seed + params.choice) % 2**63,
        "stop_token_ids": ends or None,
        "ignore_eos": not ends,  # with it SGLang would ignore stop tokens too
    }


class _StreamMeta(Struct):
    completion_tokens: int
    output_token_logprobs: list[Entry]
    output_top_logprobs: list[list[Entry] | None] | None = None
    finish_reason: Finish | None = None
    prompt_tokens: int | None = None
    cached_tokens: Any = None


class _SGLangEvent(Struct):
    meta_info: _StreamMeta
    prompt_token_ids: list[int] | None = None


_EVENT = msgspec.json.Decoder(_SGLangEvent)


class SGLangReader:
    """`/generate`: each event has all tokens so far, or only the new ones, depending on how the server was started."""

    def __init__(self, *, vocab_size: int, prompt: Sequence[int], num_top: int) -> None:
        self._vocab_size = vocab_size
        self._prompt = prompt
        self._num_top = num_top
        self._num_seen = 0
        self._last: int | None = None

    def read(self, data: bytes) -> StreamPiece:
        event = read_event(data, _EVENT, status=400)  # SGLang sends an error event only for a wrong request
        meta = event.meta_info
        if meta.finish_reason and meta.finish_reason.type == "abort":
            reason = meta.finish_reason.message or "no reason given"
            raise UpstreamAborted(f"the upstream aborted the generation: {reason}")
        if meta.finish_reason:
            check_finish(meta.finish_reason.type)
        check_prompt(self._prompt, counts=(meta.prompt_tokens,), echoes=(event.prompt_token_ids,))
        entries, tops = meta.output_token_logprobs, meta.output_top_logprobs or []
        num_new = meta.completion_tokens - self._num_seen
        repeats = len(entries) == meta.completion_tokens
        if num_new < 0 or not (repeats or len(entries) == num_new):
            raise UpstreamInvalid(f"completion_tokens is {meta.completion_tokens}, but {len(entries)} logprobs came")
        if repeats and self._num_seen:
            if entries[self._num_seen - 1].token != self._last:
                raise UpstreamInvalid("the upstream changed a token that it had already streamed")
            entries, tops = entries[self._num_seen :], tops[self._num_seen :]
        tokens, logprobs = [e.token for e in entries], [e.logprob for e in entries]
        check_sampled(tokens, logprobs, self._vocab_size)
        self._num_seen = meta.completion_tokens
        self._last = tokens[-1] if tokens else self._last
        best = [tuple((e.token, e.logprob) for e in top or [])[: self._num_top] for top in tops]
        check_tops(best, self._vocab_size)
        matched = meta.finish_reason.matched if meta.finish_reason else None
        return StreamPiece(
            sampled=with_logprobs(tokens, logprobs, best),
            finish=meta.finish_reason.type if meta.finish_reason else None,
            matched=matched if type(matched) is int else None,
            num_cached=cached_count(meta.cached_tokens, len(self._prompt)),
        )
