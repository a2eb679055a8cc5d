"""Token-level streams, checked event by event: bytes in, sampled tokens out. Pure; raises UpstreamError only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from holdfast.backends.refusal import refusal
from holdfast.backends.validation import Entry, check_names, check_sampled, decoded
from holdfast.errors import UpstreamAborted, UpstreamInvalid
from holdfast.generation import Sampled

_MAX_DIGITS = 10

Top = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPiece:
    """What one event adds. `finish` says that the generation is over, and `matched` by which token."""

    sampled: Sequence[Sampled] = ()
    finish: str | None = None
    matched: int | None = None
    num_cached: int = 0


class StreamReader(Protocol):
    """Follows one stream from its beginning."""

    def read(self, data: bytes) -> StreamPiece: ...


class _Finish(Struct):
    type: str
    matched: Any = None
    message: Any = None


class _StreamMeta(Struct):
    completion_tokens: int
    output_token_logprobs: list[Entry]
    output_top_logprobs: list[list[Entry] | None] | None = None
    finish_reason: _Finish | None = None
    prompt_tokens: Any = None
    cached_tokens: Any = None


class _Generated(Struct):
    meta_info: _StreamMeta


class SGLangReader:
    """`/generate`: each event repeats all tokens so far, or has the new ones alone, as the server was started."""

    def __init__(self, *, vocab_size: int, num_prompt: int, num_top: int) -> None:
        self._vocab_size = vocab_size
        self._num_prompt = num_prompt
        self._num_top = num_top
        self._num_seen = 0
        self._last: int | None = None

    def read(self, data: bytes) -> StreamPiece:
        # Only what it finds wrong with a request comes as an error here.
        meta = read_event(data, _GENERATED, status=400).meta_info
        if meta.finish_reason and meta.finish_reason.type == "abort":
            raise UpstreamAborted(f"the upstream gave up: {meta.finish_reason.message or 'no reason given'}")
        if type(meta.prompt_tokens) is int and meta.prompt_tokens != self._num_prompt:
            raise UpstreamInvalid(f"{self._num_prompt} prompt tokens were sent, but it read {meta.prompt_tokens}")
        entries, tops = meta.output_token_logprobs, meta.output_top_logprobs or []
        num_new = meta.completion_tokens - self._num_seen
        repeats = len(entries) == meta.completion_tokens
        if num_new < 0 or not (repeats or len(entries) == num_new):
            raise UpstreamInvalid(f"completion_tokens is {meta.completion_tokens}, but {len(entries)} logprobs came")
        if repeats and self._num_seen:
            if entries[self._num_seen - 1].token != self._last:
                raise UpstreamInvalid("the stream takes back a token")
            entries, tops = entries[self._num_seen :], tops[self._num_seen :]
        tokens, logprobs = [e.token for e in entries], [e.logprob for e in entries]
        check_sampled(tokens, logprobs, self._vocab_size)
        self._num_seen = meta.completion_tokens
        self._last = tokens[-1] if tokens else self._last
        best = [tuple((e.token, e.logprob) for e in top or [])[: self._num_top] for top in tops]
        matched = meta.finish_reason.matched if meta.finish_reason else None
        return StreamPiece(
            sampled=_sampled(tokens, logprobs, best),
            finish=meta.finish_reason.type if meta.finish_reason else None,
            matched=matched if type(matched) is int else None,
            num_cached=meta.cached_tokens if type(meta.cached_tokens) is int else 0,
        )


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


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Chunk(Struct):
    prompt_token_ids: list[int] | None = None
    usage: _Usage | None = None


class _GenerateChunk(_Chunk, kw_only=True):
    choices: list[_GenerateChoice]


class _CompletionChunk(_Chunk, kw_only=True):
    choices: list[_CompletionChoice]


class VLLMReader:
    """`/inference/v1/generate`, or `/v1/completions` where the former is not served."""

    def __init__(self, *, vocab_size: int, prompt: Sequence[int], num_top: int, has_generate: bool) -> None:
        self._vocab_size = vocab_size
        self._prompt: list[int] | None = list(prompt)  # until the upstream has told that it read this
        self._num_top = num_top
        self._decoder = _GENERATE_CHUNK if has_generate else _COMPLETION_CHUNK
        self._num_seen = 0

    def read(self, data: bytes) -> StreamPiece:
        chunk: Any = read_event(data, self._decoder)
        if len(chunk.choices) > 1:
            raise UpstreamInvalid(f"the stream has {len(chunk.choices)} choices, not 1")
        piece = self._choice(chunk, chunk.choices[0]) if chunk.choices else StreamPiece()
        self._num_seen += len(piece.sampled)
        if chunk.usage is None:
            return piece
        if chunk.usage.completion_tokens != self._num_seen:
            raise UpstreamInvalid(
                f"completion_tokens is {chunk.usage.completion_tokens}, but {self._num_seen} tokens came"
            )
        details = chunk.usage.prompt_tokens_details
        cached = details.cached_tokens or 0 if details else 0
        return StreamPiece(sampled=piece.sampled, finish=piece.finish, matched=piece.matched, num_cached=cached)

    def _choice(self, chunk: _Chunk, choice: _GenerateChoice | _CompletionChoice) -> StreamPiece:
        if choice.finish_reason == "abort":
            raise UpstreamAborted("the upstream gave up on this generation")
        told = chunk.prompt_token_ids or choice.prompt_token_ids
        if self._prompt is not None and told != self._prompt:
            raise UpstreamInvalid("prompt_token_ids are not the ones that were sent")
        self._prompt = None
        tokens = choice.token_ids or []
        logprobs, tops = self._logprobs(tokens, choice.logprobs)
        check_sampled(tokens, logprobs, self._vocab_size)
        return StreamPiece(
            sampled=_sampled(tokens, logprobs, tops),
            finish=choice.finish_reason,
            matched=choice.stop_reason if type(choice.stop_reason) is int else None,
        )

    def _logprobs(self, tokens: list[int], found: _Positions | _Lists | None) -> tuple[list[float], list[Top]]:
        if isinstance(found, _Lists):
            check_names(tokens, found.tokens)
            pairs = [[(_id(name), p) for name, p in (top or {}).items()] for top in found.top_logprobs or []]
            return found.token_logprobs, [self._best(pair) for pair in pairs]
        content = (found.content or []) if found else []
        if [position.token_id for position in content] != tokens:
            raise UpstreamInvalid("the logprobs belong to other tokens than token_ids")
        tops = [self._best([(c.token_id, c.logprob) for c in position.top_logprobs]) for position in content]
        return [position.logprob for position in content], tops

    def _best(self, pairs: list[tuple[int, float]]) -> Top:
        return tuple(sorted(set(pairs), key=lambda pair: -pair[1])[: self._num_top])


def read_event(data: bytes, decoder: "msgspec.json.Decoder[Any]", *, status: int = 500) -> Any:
    """The event as the decoder's type; an error in its place is told as if it had come with its code, or `status`."""
    try:
        return decoded(data, decoder)
    except UpstreamInvalid as exc:
        try:
            error = decoded(data, _ERROR).error
        except UpstreamInvalid:
            raise exc from exc.__cause__
        code = error.get("code") if isinstance(error, dict) else None
        raise refusal(code if type(code) is int else status, msgspec.json.encode(error)) from exc


class _Error(Struct):
    error: Any


_GENERATED = msgspec.json.Decoder(_Generated)
_GENERATE_CHUNK = msgspec.json.Decoder(_GenerateChunk)
_COMPLETION_CHUNK = msgspec.json.Decoder(_CompletionChunk)
_ERROR = msgspec.json.Decoder(_Error)


def _id(name: str) -> int:
    number = name.removeprefix("token_id:")
    if not (number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS):
        raise UpstreamInvalid(f"a logprob belongs to {name!r}, which is no token id")
    return int(number)


def _sampled(tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Top]) -> list[Sampled]:
    """An upstream tells one logprob a token; which kind it is, its backend knows."""
    tops = tops if len(tops) == len(tokens) else [()] * len(tokens)
    return [
        Sampled(token=token, logprob=logprob, sampling_logprob=logprob, top=top)
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    ]
