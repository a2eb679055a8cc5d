"""An upstream's chat reply, checked: what is recorded of it and what the client gets. Pure; raises UpstreamError only.

Typed decoding skips every field that is not named here, so checking costs little more than finding the reply's end.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.errors import UpstreamAborted, UpstreamInvalid
from holdfast.sessions.ports import LogprobKind, UpstreamCompletion
from holdfast.sessions.record import ByteRange, members_at, place_of, without

PAYLOADS = ("routed_experts", "indexer_topk")
MAX_DEPTH = 100
ROUNDING = 1e-4  # how far above 0 the logprob of a certain token may be rounded

_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CheckedReply:
    """A valid reply. `body` is the client's copy."""

    completion: UpstreamCompletion
    body: bytes


class Entry(Struct, array_like=True):
    """`[logprob, token_id]`; whatever follows is ignored."""

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
    """`asked` are the payloads that we requested, not the client."""
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
    """As `check_sglang`; the prompt must be the one that was sent, because vLLM may silently render its own."""
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
_TEXT = msgspec.json.Decoder(str)


def _decoded(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """As `decoded`, but UpstreamAborted for an aborted generation, whose reply may lack the other fields."""
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
        raise UpstreamInvalid(f"the upstream returned {len(choices)} choices, expected 1")
    return choices[0]


def _not_aborted(finish_reason: Any) -> None:
    if finish_reason == "abort":
        raise UpstreamAborted("the upstream aborted the generation")


def _check_count(count: int, num_sampled: int) -> None:
    if count != num_sampled:
        raise UpstreamInvalid(f"completion_tokens is {count}, but there are {num_sampled} tokens")


def _message(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") != "assistant":
        raise UpstreamInvalid(f"the message's role must be 'assistant', got {message.get('role')!r}")
    content = message.get("content")
    if not isinstance(content, str | None):
        raise UpstreamInvalid(f"the message's content must be a string or null, got {type(content).__name__}")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise UpstreamInvalid("the message's tool_calls must be a list of objects")
    return {**message, "content": content or ""}


def _payload(name: str, raws: Sequence[Raw], body: bytes) -> ByteRange | None:
    """The first place that has the payload."""
    for raw in raws:
        start, end = place = place_of(raw, body)
        match body[start : start + 1]:
            case b"[":
                return place
            case b'"':
                if body.find(b"\\", start, end) >= 0:  # rare: most payloads are base64, without escapes to check
                    decoded(body[start:end], _TEXT)
                return place
            case b"n":
                continue
        raise UpstreamInvalid(f"{name} must be a string or a list")
    return None


def _check_depth(text: bytes) -> None:
    """Rejects nesting that later readers could not handle. Most replies have too few brackets to be that deep."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return
    marks = np.frombuffer(_STRINGS.sub(b"", text).translate(None, _NO_BRACKET), np.uint8)
    if int(np.where(marks & 2, 1, -1).cumsum().max()) > MAX_DEPTH:  # the second bit is set in opening ones
        raise UpstreamInvalid("the upstream's reply is nested too deeply")
