"""An upstream's chat reply, checked: what is recorded of it and what the client gets. Pure; raises UpstreamError only.

Typed decoding skips every field that is not named here, so checking costs little more than finding the reply's end.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.errors import UpstreamAborted, UpstreamInvalid
from holdfast.sessions.payload import payload_shape
from holdfast.sessions.ports import LogprobKind, UpstreamCompletion
from holdfast.sessions.record import ByteRange, may_overflow, members_at, place_of, without

PAYLOADS = ("routed_experts", "indexer_topk")
FINISHED = frozenset({"stop", "length", "tool_calls", "repetition"})  # what ends a generation whose tokens are whole
MAX_DEPTH = 100
ROUNDING = 1e-4  # how far above 0 the logprob of a certain token may be rounded

_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a chat reply must fit. `payloads`: those that we requested (not the client), each with the number of
    positions that it may leave out; `row_shapes`: the shape of their rows, where it is known."""

    input_ids: Sequence[int]
    vocab_size: int
    max_tokens: int | None = None
    payloads: Mapping[str, int] = field(default_factory=dict)
    row_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    keep_payloads: bool = False
    kind: LogprobKind = LogprobKind.UNKNOWN


@dataclass(frozen=True, slots=True)
class CheckedReply:
    """A valid reply. `body` is the client's copy."""

    completion: UpstreamCompletion
    body: bytes


class Entry(Struct, array_like=True):
    """`[logprob, token_id]`; whatever follows is ignored."""

    logprob: float
    token: int


class _Details(Struct):
    cached_tokens: Any = None


class Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Payloads(Struct):
    routed_experts: Raw | UnsetType = UNSET
    indexer_topk: Raw | UnsetType = UNSET


class Finish(Struct):
    type: str
    matched: Any = None
    message: Any = None


class _Meta(_Payloads, kw_only=True):
    output_token_logprobs: list[Entry]
    completion_tokens: int
    prompt_tokens: int | None = None
    finish_reason: Finish | None = None
    weight_version: Any = None
    cached_tokens: Any = None
    spec_verify_ct: Any = None
    spec_draft_token_num: Any = None
    spec_accept_token_num: Any = None
    spec_num_proposed_drafts: Any = None  # the newer names of the two
    spec_num_correct_drafts: Any = None


class _Choice(_Payloads, kw_only=True):
    message: dict[str, Any]
    finish_reason: str
    prompt_token_ids: list[int] | None = None


class _SGLangChoice(_Choice, kw_only=True):
    meta_info: _Meta
    token_ids: list[int] | None = None


class _SGLangReply(Struct):
    choices: list[_SGLangChoice]
    sglext: _Payloads | None = None
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class _VLLMToken(Struct):
    token: str
    logprob: float


class _VLLMLogprobs(Struct):
    content: list[_VLLMToken]


class _VLLMUsage(Usage, kw_only=True):
    completion_tokens: int


class _VLLMChoice(_Choice, kw_only=True):
    token_ids: list[int]
    logprobs: _VLLMLogprobs


class _VLLMReply(Struct):
    choices: list[_VLLMChoice]
    prompt_token_ids: list[int]
    usage: _VLLMUsage


class _Ending(Struct):
    finish_reason: Any = None


class _Endings(Struct):
    choices: list[_Ending]


def check_sglang(body: bytes, asked: Asked) -> CheckedReply:
    reply = _decoded(body, _SGLANG)
    choice = _only(reply.choices)
    meta, usage = choice.meta_info, reply.usage or Usage()
    tokens = tuple(entry.token for entry in meta.output_token_logprobs)
    check_finish(choice.finish_reason)
    if meta.finish_reason is not None:
        check_finish(meta.finish_reason.type)
        if choice.finish_reason not in (meta.finish_reason.type, "tool_calls"):
            raise UpstreamInvalid(
                f"finish_reason is {choice.finish_reason}, but {meta.finish_reason.type} in meta_info"
            )
    echoes = (reply.prompt_token_ids, choice.prompt_token_ids)
    check_prompt(asked.input_ids, echoes=echoes, counts=(meta.prompt_tokens, usage.prompt_tokens))
    check_count(len(tokens), meta.completion_tokens, usage.completion_tokens)
    if choice.token_ids not in (None, list(tokens)):
        raise UpstreamInvalid("token_ids are not the tokens of output_token_logprobs")
    return _checked(
        body,
        asked,
        choice,
        [meta, *([reply.sglext] if reply.sglext else [])],
        tokens=tokens,
        logprobs=tuple(entry.logprob for entry in meta.output_token_logprobs),
        weight_version=None if meta.weight_version is None else str(meta.weight_version),
        effort=_effort(
            asked,
            cached_tokens=[
                meta.cached_tokens,
                usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens,
            ],
            spec_steps=[meta.spec_verify_ct],
            spec_drafted=[meta.spec_draft_token_num, meta.spec_num_proposed_drafts],
            spec_accepted=[meta.spec_accept_token_num, meta.spec_num_correct_drafts],
        ),
    )


def check_vllm(body: bytes, asked: Asked) -> CheckedReply:
    """As `check_sglang`; the reply must name its prompt, because vLLM may silently render its own."""
    reply = _decoded(body, _VLLM)
    choice = _only(reply.choices)
    tokens, content = tuple(choice.token_ids), choice.logprobs.content
    check_finish(choice.finish_reason)
    echoes = (reply.prompt_token_ids, choice.prompt_token_ids)
    check_prompt(asked.input_ids, echoes=echoes, counts=(reply.usage.prompt_tokens,))
    check_count(len(tokens), reply.usage.completion_tokens)
    check_names(tokens, [entry.token for entry in content])
    return _checked(
        body,
        asked,
        choice,
        [choice],
        tokens=tokens,
        logprobs=tuple(entry.logprob for entry in content),
        effort=_effort(asked, cached_tokens=[_cached(reply.usage)]),
    )


def _cached(usage: Usage) -> Any:
    return usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens


def _effort(asked: Asked, **told: Sequence[Any]) -> dict[str, int]:
    """Of each count the first value that is one. What is not a count is unknown; counters are no part of the reply."""
    counts = {name: [value for value in values if type(value) is int and value >= 0] for name, values in told.items()}
    found = {name: values[0] for name, values in counts.items() if values}
    if "cached_tokens" in found:
        cached_count(found["cached_tokens"], len(asked.input_ids))
    return found if found.get("spec_steps") else {name: num for name, num in found.items() if name == "cached_tokens"}


def _checked(
    body: bytes,
    asked: Asked,
    choice: _Choice,
    places: Sequence[_Payloads],
    *,
    tokens: tuple[int, ...],
    logprobs: tuple[float, ...],
    weight_version: str | None = None,
    effort: Mapping[str, int],
) -> CheckedReply:
    """What the formats have in common. `places`: where payloads may be; the first one that has it counts."""
    found = {name: [raw for place in places if isinstance(raw := getattr(place, name), Raw)] for name in asked.payloads}
    members = members_at(body, [place_of(raw, body) for raws in found.values() for raw in raws])
    client_body = without(body, members)
    _check_depth(client_body)
    if may_overflow(client_body):
        decoded(client_body, _ANY)
    check_sampled(tokens, logprobs, asked.vocab_size)
    if not tokens:
        raise UpstreamInvalid("the upstream returned no tokens")
    check_limit(len(tokens), asked.max_tokens)
    completion = UpstreamCompletion(
        token_ids=tokens,
        logprobs=logprobs,
        message=_message(choice.message),
        finish_reason=choice.finish_reason,
        prompt_tokens=len(asked.input_ids),
        completion_tokens=len(tokens),
        weight_version=weight_version,
        logprob_kind=asked.kind,
        cut=() if asked.keep_payloads else members,
        effort=effort,
        **{name: _payload(name, raws, body, asked, len(tokens)) for name, raws in found.items()},
    )
    return CheckedReply(completion, body if asked.keep_payloads else client_body)


def check_prompt(
    input_ids: Sequence[int], *, echoes: Sequence[Sequence[int] | None] = (), counts: Sequence[int | None] = ()
) -> None:
    """Whatever a reply says about its prompt must be true of the one that was sent; None: it says nothing."""
    if any(echo is not None and list(echo) != list(input_ids) for echo in echoes):
        raise UpstreamInvalid("prompt_token_ids are not the ones that were sent")
    for count in counts:
        if count not in (None, len(input_ids)):
            raise UpstreamInvalid(
                f"the upstream ignores our token ids: {len(input_ids)} were sent, but it read {count}"
            )


def check_tops(tops: Sequence[Sequence[tuple[int, float]]], vocab_size: int) -> None:
    """The likeliest tokens at each position are tokens with logprobs too."""
    for top in tops:
        check_sampled([token for token, _ in top], [logprob for _, logprob in top], vocab_size)


def cached_count(count: Any, num_prompt: int) -> int:
    """How many tokens of the prompt the upstream had cached; 0 where it does not say."""
    if type(count) is not int:
        return 0
    if not 0 <= count <= num_prompt:
        raise UpstreamInvalid(f"the upstream reports {count} cached tokens of a prompt of {num_prompt}")
    return count


def check_finish(finish_reason: Any) -> None:
    if finish_reason == "abort":
        raise UpstreamAborted("the upstream aborted the generation")
    if finish_reason not in FINISHED:
        raise UpstreamInvalid(f"the upstream's finish_reason must be one of {', '.join(sorted(FINISHED))}")


def check_count(num_sampled: int, *counts: int | None) -> None:
    for count in counts:
        if count not in (None, num_sampled):
            raise UpstreamInvalid(f"completion_tokens is {count}, but there are {num_sampled} tokens")


def check_limit(num_sampled: int, max_tokens: int | None) -> None:
    if max_tokens is not None and num_sampled > max_tokens:
        raise UpstreamInvalid(f"the upstream sampled {num_sampled} tokens, but at most {max_tokens} were requested")


def check_sampled(tokens: Sequence[int], logprobs: Sequence[float], vocab_size: int) -> None:
    """Each token is in the vocabulary and has one logprob, which is the logarithm of a probability."""
    if len(tokens) != len(logprobs):
        raise UpstreamInvalid(f"the upstream returned {len(tokens)} token ids, but {len(logprobs)} logprobs")
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise UpstreamInvalid(f"token id {token} at index {index} is outside the vocabulary of {vocab_size}")
    for index, logprob in enumerate(logprobs):
        if not (math.isfinite(logprob) and logprob <= ROUNDING):
            raise UpstreamInvalid(f"logprob {logprob} at index {index} is not the logarithm of a probability")


def check_names(tokens: Sequence[int], names: Sequence[str]) -> None:
    """vLLM names the token of each logprob; they must be the sampled tokens."""
    if len(tokens) != len(names):
        raise UpstreamInvalid(f"the upstream returned {len(tokens)} token ids, but {len(names)} token names")
    for index, (token, name) in enumerate(zip(tokens, names, strict=True)):
        if name != f"token_id:{token}":
            raise UpstreamInvalid(f"the logprob at index {index} belongs to {name!r}, not to token {token}")


def decoded(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """`body` as the decoder's type. The decoder does not check strings that it skips, so UTF-8 is checked first."""
    try:
        if not body.isascii():
            body.decode()
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise UpstreamInvalid(f"the upstream's reply has an unexpected format: {exc}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise UpstreamInvalid(f"the upstream's reply is not JSON: {exc}") from exc
    except RecursionError as exc:
        raise UpstreamInvalid("the upstream's reply is nested too deeply") from exc


_SGLANG = msgspec.json.Decoder(_SGLangReply)
_VLLM = msgspec.json.Decoder(_VLLMReply)
_ENDINGS = msgspec.json.Decoder(_Endings)
_ANY = msgspec.json.Decoder()


def _decoded(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """As `decoded`, but UpstreamAborted for an aborted generation, whose reply may lack the other fields."""
    try:
        return decoded(body, decoder)
    except UpstreamInvalid as exc:
        try:
            endings = decoded(body, _ENDINGS).choices
        except UpstreamInvalid:
            raise exc from exc.__cause__
        if any(ending.finish_reason == "abort" for ending in endings):
            check_finish("abort")
        raise


def _only(choices: list[T]) -> T:
    if len(choices) != 1:
        raise UpstreamInvalid(f"the upstream returned {len(choices)} choices, expected 1")
    return choices[0]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") != "assistant":
        raise UpstreamInvalid("the message's role must be assistant")
    content = message.get("content")
    if not isinstance(content, str | None):
        raise UpstreamInvalid("the message's content must be a string or null")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise UpstreamInvalid("the message's tool_calls must be a list of objects")
    return {**message, "content": content or ""}


def _payload(name: str, raws: Sequence[Raw], body: bytes, asked: Asked, num_sampled: int) -> ByteRange:
    """The first place that has the payload, which must have one row for each position that was computed."""
    for raw in raws:
        start, end = place = place_of(raw, body)
        if body[start : start + 1] == b"n":  # null
            continue
        if body[start : start + 1] not in (b"[", b'"'):
            raise UpstreamInvalid(f"{name} must be a string or a list")
        try:
            shape = payload_shape(body[start:end])
        except ValueError as exc:
            raise UpstreamInvalid(f"{name} {exc}") from exc
        _check_rows(name, shape, asked, len(asked.input_ids) + num_sampled - 1)
        return place
    raise UpstreamInvalid(f"the upstream did not return {name}, which was requested")


def _check_rows(name: str, shape: tuple[int, ...], asked: Asked, num_positions: int) -> None:
    num_asked, row_shape = num_positions - asked.payloads[name], asked.row_shapes.get(name)
    if len(shape) == 1:  # without a shape of its own: so many values to a row as the model has, else as fit
        width = math.prod(row_shape) if row_shape else max(1, shape[0] // max(1, num_asked))
        num_rows, rest = divmod(shape[0], width)
        is_whole = not rest
    else:
        num_rows, is_whole = shape[0] if shape else 0, shape[1:] == (row_shape or shape[1:])
    if not is_whole or not math.prod(shape) or num_rows not in (num_asked, num_positions):
        of = f" of shape {list(row_shape)}" if row_shape else ""
        raise UpstreamInvalid(f"{name} has the shape {list(shape)}, which does not make {num_asked} rows{of}")


def _check_depth(text: bytes) -> None:
    """Rejects nesting that later readers could not handle. Most replies have too few brackets to be that deep."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return
    marks = np.frombuffer(_STRINGS.sub(b"", text).translate(None, _NO_BRACKET), np.uint8)
    if int(np.where(marks & 2, 1, -1).cumsum().max()) > MAX_DEPTH:  # the second bit is set in opening ones
        raise UpstreamInvalid("the upstream's reply is nested too deeply")
