"""vLLM as the upstream: the fields of its requests, the format of its replies and streams."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.backends.servers import Server
from holdfast.backends.transport import NotServed
from holdfast.backends.upstream import TopLogprobs, UpstreamBackend, read_event, sampling_fields, with_logprobs
from holdfast.backends.upstream_sequences import Opened, StreamPiece
from holdfast.backends.validation import (
    Usage,
    cached_count,
    check_count,
    check_finish,
    check_names,
    check_prompt,
    check_sampled,
    check_tops,
    check_vllm,
)
from holdfast.errors import UpstreamInvalid
from holdfast.generation import SamplingParams
from holdfast.sessions.ports import LogprobKind

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"

_MAX_DIGITS = 10


class VLLMBackend(UpstreamBackend):
    default_kind = LogprobKind.RAW
    _check = staticmethod(check_vllm)

    def _chat_fields(self, body: Mapping[str, Any], input_ids: list[int], known: Mapping[str, int]) -> dict[str, Any]:
        return {
            "kv_transfer_params": {"prompt_token_ids": input_ids},
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logprobs": True,
            "top_logprobs": body.get("top_logprobs") or 0,
        }

    async def _open_stream(
        self, server: Server, prompt: list[int], params: SamplingParams, headers: Mapping[str, str]
    ) -> Opened:
        streamed = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        events = None
        if GENERATE not in server.unserved:
            request = {"token_ids": prompt, "sampling_params": _sampling(params), **streamed}
            try:
                events = await server.transport.stream(GENERATE, self._named(server, request), headers)
            except NotServed:  # started without --enable-scale-out
                server.unserved.add(GENERATE)
        if events is None:
            request = {"prompt": prompt, "return_tokens_as_token_ids": True, **_sampling(params), **streamed}
            events = await server.transport.stream(COMPLETIONS, self._named(server, request), headers)
        reader = VLLMReader(
            vocab_size=self._model.vocab_size,
            prompt=prompt,
            num_top=params.top_logprobs,
            has_generate=GENERATE not in server.unserved,
        )
        return events, reader

    async def best_logprobs(self, server: Server, prompt: list[int], temperature: float) -> list[float]:
        request = {"prompt": prompt, "max_tokens": 1, "temperature": temperature, "logprobs": 2}
        choices = (await self._ask(server, COMPLETIONS, self._named(server, request), _COMPLETION_CHUNK)).choices
        tops = choices[0].logprobs.top_logprobs if choices and choices[0].logprobs else None
        return sorted(((tops and tops[0]) or {}).values(), reverse=True)

    def _named(self, server: Server, request: dict[str, Any]) -> dict[str, Any]:
        name = {"model": server.model} if server.model else {}
        return name | request | self._extra


def _sampling(params: SamplingParams) -> dict[str, Any]:
    return sampling_fields(params) | {
        "max_tokens": params.max_tokens,
        "top_k": params.top_k,
        "seed": (params.seed + params.choice) % 2**63,
        "stop_token_ids": sorted(params.eos_token_ids | params.stop_token_ids),
        "ignore_eos": True,  # the session decides which tokens end it
        "logprobs": params.top_logprobs,
    }


class _Candidate(Struct):
    token_id: int
    logprob: float


class _Position(_Candidate):
    top_logprobs: list[_Candidate] = []


class _Positions(Struct):
    content: list[_Position] | None = None


class _Lists(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None] | None = None


class _StreamChoice(Struct):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: Any = None


class _GenerateChoice(_StreamChoice):
    logprobs: _Positions | None = None


class _CompletionChoice(_StreamChoice):
    logprobs: _Lists | None = None


class _StreamUsage(Usage, kw_only=True):
    completion_tokens: int


class _Chunk(Struct):
    prompt_token_ids: list[int] | None = None
    usage: _StreamUsage | None = None


class _GenerateChunk(_Chunk, kw_only=True):
    choices: list[_GenerateChoice]


class _CompletionChunk(_Chunk, kw_only=True):
    choices: list[_CompletionChoice]


_GENERATE_CHUNK = msgspec.json.Decoder(_GenerateChunk)
_COMPLETION_CHUNK = msgspec.json.Decoder(_CompletionChunk)


class VLLMReader:
    """`/inference/v1/generate`, or `/v1/completions` if the former is not served."""

    def __init__(self, *, vocab_size: int, prompt: Sequence[int], num_top: int, has_generate: bool) -> None:
        self._vocab_size = vocab_size
        self._prompt = prompt
        self._is_confirmed = False  # that the upstream read this prompt
        self._num_top = num_top
        self._decoder = _GENERATE_CHUNK if has_generate else _COMPLETION_CHUNK
        self._num_seen = 0

    def read(self, data: bytes) -> StreamPiece:
        chunk: Any = read_event(data, self._decoder)
        if len(chunk.choices) > 1:
            raise UpstreamInvalid(f"the stream has {len(chunk.choices)} choices, expected 1")
        piece = self._choice(chunk, chunk.choices[0]) if chunk.choices else StreamPiece()
        self._num_seen += len(piece.sampled)
        if chunk.usage is None:
            return piece
        check_prompt(self._prompt, counts=(chunk.usage.prompt_tokens,))
        check_count(self._num_seen, chunk.usage.completion_tokens)
        details = chunk.usage.prompt_tokens_details
        return replace(piece, num_cached=cached_count(details and details.cached_tokens, len(self._prompt)))

    def _choice(self, chunk: _Chunk, choice: _GenerateChoice | _CompletionChoice) -> StreamPiece:
        if choice.finish_reason is not None:
            check_finish(choice.finish_reason)
        told = [ids for ids in (chunk.prompt_token_ids, choice.prompt_token_ids) if ids]
        check_prompt(self._prompt, echoes=told if self._is_confirmed else told or [[]])
        self._is_confirmed = True
        tokens = choice.token_ids or []
        logprobs, tops = self._logprobs(tokens, choice.logprobs)
        check_sampled(tokens, logprobs, self._vocab_size)
        check_tops(tops, self._vocab_size)
        return StreamPiece(
            sampled=with_logprobs(tokens, logprobs, tops),
            finish=choice.finish_reason,
            matched=choice.stop_reason if type(choice.stop_reason) is int else None,
        )

    def _logprobs(self, tokens: list[int], found: _Positions | _Lists | None) -> tuple[list[float], list[TopLogprobs]]:
        if isinstance(found, _Lists):
            check_names(tokens, found.tokens)
            pairs = [[(_id(name), p) for name, p in (top or {}).items()] for top in found.top_logprobs or []]
            return found.token_logprobs, [self._best(pair) for pair in pairs]
        content = (found.content or []) if found else []
        if [position.token_id for position in content] != tokens:
            raise UpstreamInvalid("the logprobs belong to other tokens than token_ids")
        tops = [self._best([(c.token_id, c.logprob) for c in position.top_logprobs]) for position in content]
        return [position.logprob for position in content], tops

    def _best(self, pairs: list[tuple[int, float]]) -> TopLogprobs:
        return tuple(sorted(set(pairs), key=lambda pair: -pair[1])[: self._num_top])


def _id(name: str) -> int:
    number = name.removeprefix("token_id:")
    if not (number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS):
        raise UpstreamInvalid(f"top_logprobs has {name!r}, which is not a token id")
    return int(number)
