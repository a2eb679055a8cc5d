"""A chat reply's bytes, checked: what may be recorded of it and what its client gets. Pure; raises UpstreamError only.

Typed decoding skips whatever is not named here, so a reply costs little more than finding its end.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.backends.json_members import members_at, place_of, without
from holdfast.errors import UpstreamAborted, UpstreamInvalid
from holdfast.sessions.ports import ByteRange, LogprobKind, UpstreamCompletion

PAYLOADS = ("routed_experts", "indexer_topk")
MAX_DEPTH = 100
ROUNDING = 1e-4  # how far above 0 the logprob of a certain token may come out

_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CheckedReply:
    """A reply that is right. `body` is the client's copy."""

    completion: UpstreamCompletion
    body: bytes


class Entry(Struct, array_like=True):
    """`[logprob, token_id]`; a text or more behind them is not read."""

    logprob: float
    token: int


class _Payloads(Struct):
    routed_experts: Raw | UnsetType = UNSET
    indexer_topk: Raw | UnsetType = UNSET


class _Meta(_Payloads, kw_only=True):
    output_token_logprobs: list[Entry]
    completion_tokens: int
    prompt_tokens: Any = None
    weight_version: Any = None


class _SGLangChoice(Struct):
    message: dict[str, Any]
    finish_reason: str
    meta_info: _Meta


class _SGLangReply(Struct):
    choices: list[_SGLangChoice]
    sglext: _Payloads | None = None


class _VLLMToken(Struct):
    token: str
    logprob: float


class _VLLMLogprobs(Struct):
    content: list[_VLLMToken]


class _VLLMUsage(Struct):
    completion_tokens: int


class _VLLMChoice(Struct):
    message: dict[str, Any]
    finish_reason: str
    token_ids: list[int]
    logprobs: _VLLMLogprobs
    routed_experts: Raw | UnsetType = UNSET


class _VLLMReply(Struct):
    choices: list[_VLLMChoice]
    prompt_token_ids: list[int]
    usage: _VLLMUsage


class _Ending(Struct):
    finish_reason: Any = None


class _Endings(Struct):
    choices: list[_Ending]


def check_sglang(
    body: bytes,
    *,
    vocab_size: int,
    asked: Collection[str] = (),
    keep_payloads: bool = False,
    kind: LogprobKind = LogprobKind.UNKNOWN,
) -> CheckedReply:
    """`asked` are the payloads that the request asked for on our own account."""
    reply = _decoded(body, _SGLANG)
    choice = _only(reply.choices)
    meta = choice.meta_info
    _not_aborted(choice.finish_reason)
    places: list[_Payloads] = [meta, *([reply.sglext] if reply.sglext else [])]
    found = {name: [raw for place in places if (raw := getattr(place, name)) is not UNSET] for name in asked}
    members = members_at(body, [place_of(raw, body) for raws in found.values() for raw in raws])
    client_body = without(body, members)
    _check_depth(client_body)
    tokens = tuple(entry.token for entry in meta.output_token_logprobs)
    logprobs = tuple(entry.logprob for entry in meta.output_token_logprobs)
    check_sampled(tokens, logprobs, vocab_size)
    _check_count(meta.completion_tokens, len(tokens))
    completion = UpstreamCompletion(
        token_ids=tokens,
        logprobs=logprobs,
        message=_message(choice.message),
        finish_reason=choice.finish_reason,
        prompt_tokens=meta.prompt_tokens if type(meta.prompt_tokens) is int else None,
        completion_tokens=len(tokens),
        weight_version=None if meta.weight_version is None else str(meta.weight_version),
        logprob_kind=kind,
        cut=() if keep_payloads else members,
        **{name: _payload(name, raws, body) for name, raws in found.items()},
    )
    return CheckedReply(completion, body if keep_payloads else client_body)


def check_vllm(
    body: bytes,
    *,
    input_ids: Sequence[int],
    vocab_size: int,
    asked: Collection[str] = (),
    keep_payloads: bool = False,
    kind: LogprobKind = LogprobKind.UNKNOWN,
) -> CheckedReply:
    """As `check_sglang`; the prompt must be the one that was sent, since vLLM may quietly render its own."""
    reply = _decoded(body, _VLLM)
    choice = _only(reply.choices)
    _not_aborted(choice.finish_reason)
    has_routing = "routed_experts" in asked and choice.routed_experts is not UNSET
    raws = [choice.routed_experts] if has_routing and isinstance(choice.routed_experts, Raw) else []
    members = members_at(body, [place_of(raw, body) for raw in raws])
    client_body = without(body, members)
    _check_depth(client_body)
    if reply.prompt_token_ids != list(input_ids):
        raise UpstreamInvalid("prompt_token_ids are not the ones that were sent")
    tokens = tuple(choice.token_ids)
    content = choice.logprobs.content
    logprobs = tuple(entry.logprob for entry in content)
    check_sampled(tokens, logprobs, vocab_size)
    _check_count(reply.usage.completion_tokens, len(tokens))
    check_names(tokens, [entry.token for entry in content])
    completion = UpstreamCompletion(
        token_ids=tokens,
        logprobs=logprobs,
        message=_message(choice.message),
        finish_reason=choice.finish_reason,
        prompt_tokens=len(reply.prompt_token_ids),
        completion_tokens=len(tokens),
        routed_experts=_payload("routed_experts", raws, body),
        cut=() if keep_payloads else members,
        logprob_kind=kind,
    )
    return CheckedReply(completion, body if keep_payloads else client_body)


def check_sampled(tokens: Sequence[int], logprobs: Sequence[float], vocab_size: int) -> None:
    """One logprob for each token, ids of the vocabulary, numbers that are logarithms of a probability."""
    if len(tokens) != len(logprobs):
        raise UpstreamInvalid(f"{len(tokens)} token ids come with {len(logprobs)} logprobs")
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise UpstreamInvalid(f"token id {token} at {index} is outside the vocabulary of {vocab_size}")
    for index, logprob in enumerate(logprobs):
        if not (math.isfinite(logprob) and logprob <= ROUNDING):
            raise UpstreamInvalid(f"logprob {logprob} at {index} is not that of a probability")


def check_names(tokens: Sequence[int], names: Sequence[str]) -> None:
    """vLLM says for each logprob which token it belongs to."""
    if len(tokens) != len(names):
        raise UpstreamInvalid(f"{len(tokens)} token ids come with {len(names)} names")
    for index, (token, name) in enumerate(zip(tokens, names, strict=True)):
        if name != f"token_id:{token}":
            raise UpstreamInvalid(f"the logprob at {index} belongs to {name!r}, not to token {token}")


def decoded(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """`body` as the decoder's type. Skipped strings are not looked at by it, so UTF-8 is checked apart."""
    try:
        if not body.isascii():
            body.decode()
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise UpstreamInvalid(f"the reply is not as it must be: {exc}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise UpstreamInvalid(f"the reply is not JSON: {exc}") from exc
    except RecursionError as exc:
        raise UpstreamInvalid("the reply is nested too deeply") from exc


_SGLANG = msgspec.json.Decoder(_SGLangReply)
_VLLM = msgspec.json.Decoder(_VLLMReply)
_ENDINGS = msgspec.json.Decoder(_Endings)
_TEXT = msgspec.json.Decoder(str)


def _decoded(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """As `decoded`; a generation that was given up may lack the rest, and is told apart."""
    try:
        return decoded(body, decoder)
    except UpstreamInvalid as exc:
        try:
            endings = decoded(body, _ENDINGS).choices
        except UpstreamInvalid:
            raise exc from exc.__cause__
        for ending in endings:
            _not_aborted(ending.finish_reason)
        raise


def _only(choices: list[T]) -> T:
    if len(choices) != 1:
        raise UpstreamInvalid(f"the reply has {len(choices)} choices, not 1")
    return choices[0]


def _not_aborted(finish_reason: Any) -> None:
    if finish_reason == "abort":
        raise UpstreamAborted("the upstream gave up on this generation")


def _check_count(count: int, num_sampled: int) -> None:
    if count != num_sampled:
        raise UpstreamInvalid(f"completion_tokens is {count}, but {num_sampled} tokens came")


def _message(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") != "assistant":
        raise UpstreamInvalid(f"the message's role is {message.get('role')!r}, not 'assistant'")
    content = message.get("content")
    if not isinstance(content, str | None):
        raise UpstreamInvalid(f"the message's content is of type {type(content).__name__}, not text")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise UpstreamInvalid("the message's tool_calls are not a list of objects")
    return {**message, "content": content or ""}


def _payload(name: str, raws: Sequence[Raw], body: bytes) -> ByteRange | None:
    """The first place that has the payload."""
    for raw in raws:
        start, end = place = place_of(raw, body)
        match body[start : start + 1]:
            case b"[":
                return place
            case b'"':
                if body.find(b"\\", start, end) >= 0:  # rare; most is base64, which has nothing to be wrong
                    decoded(body[start:end], _TEXT)
                return place
            case b"n":
                continue
        raise UpstreamInvalid(f"{name} is neither text nor a list")
    return None


def _check_depth(text: bytes) -> None:
    """Refuse what later readers could not walk through. Most replies have too few brackets to be deep."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return
    marks = np.frombuffer(_STRINGS.sub(b"", text).translate(None, _NO_BRACKET), np.uint8)
    if int(np.where(marks & 2, 1, -1).cumsum().max()) > MAX_DEPTH:  # the second bit is set in opening ones
        raise UpstreamInvalid("the reply is nested too deeply")
