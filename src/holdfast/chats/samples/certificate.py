"""Certificates: hashes of a sample at export, and the checks that verify a sample against them.

Each turn's link hashes the link before it, what is said of the turn, and its part of tokens, mask and logprobs. The
digest closes the chain over lengths, weight versions and the hashes of all other arrays.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.chats.samples.loss_mask import loss_mask, response_start
from holdfast.chats.samples.sample import RECORDED, Certificate, Export, Sample, Status, TurnSpan

VERSION = 1
_PAYLOADS = (*RECORDED, "rollout_routed_experts", "rollout_indexer_topk")
_ROUNDING = 1e-3  # how far above 0 rounding may put a logprob
_LATER = ("weight_spans", "effort", "recalled")
_FIRST = b"holdfast.samples.1"


def certify(sample: Sample) -> Sample:
    """The same sample with a certificate of what it is now."""
    return replace(sample, certificate=certificate_of(sample, payloads_of(sample)))


def certificate_of(sample: Sample, payloads: dict[str, str]) -> Certificate:
    links = tuple(_links(sample))
    lengths = {
        "num_tokens": len(sample.tokens),
        "num_response": len(sample.loss_mask),
        "num_trained": int(np.count_nonzero(sample.loss_mask)),
    }
    said = {
        "session_id": sample.session_id,
        "branch": sample.branch,
        "status": sample.status,
        "num_left_out": sample.num_left_out,
        "links": links,
        "weight_versions": sample.weight_versions,
        "payloads": payloads,
    }
    return Certificate(
        version=VERSION,
        links=links,
        weight_versions=sample.weight_versions,
        payloads=payloads,
        digest=hashlib.sha256(_FIRST + _canonical(said | lengths)).hexdigest(),
        **lengths,
    )


def payloads_of(sample: Sample) -> dict[str, str]:
    """Hashes of those arrays that a sample may or may not have."""
    return {name: _hash_array(array) for name in _PAYLOADS if (array := getattr(sample, name)) is not None}


def _links(sample: Sample) -> list[str]:
    links = []
    link = hashlib.sha256(_FIRST + sample.session_id.encode()).digest()
    for turn in sample.turns:
        of_response = slice(*(max(0, at - sample.response_start) for at in (turn.start, turn.end)))
        link = hashlib.sha256(
            link
            + hashlib.sha256(_canonical(_said(turn))).digest()
            + sample.tokens[turn.start : turn.end].astype("<i8").tobytes()
            + sample.loss_mask[of_response].astype("<u1").tobytes()
            + sample.rollout_log_probs[of_response].astype("<f8").tobytes()
        ).digest()
        links.append(link.hex())
    return links


def _said(turn: TurnSpan) -> dict[str, Any]:
    """A reward may come later, so it is none of this. What version 1 of the format had no place for is said only where
    there is some, so that certificates of such files still hold."""
    said = asdict(turn)
    return {name: value for name, value in said.items() if name != "reward" and (value or name not in _LATER)}


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _hash_array(array: NDArray[Any]) -> str:
    little = array.astype(array.dtype.newbyteorder("<"))
    return hashlib.sha256(_canonical([little.dtype.str, array.shape]) + little.tobytes()).hexdigest()


def problems(export: Export) -> list[str]:
    """What is wrong with each sample, and between them; empty where all is well."""
    found = []
    trained_in: dict[tuple[str, int], int] = {}
    for index, sample in enumerate(export.samples):
        found += [f"sample {index}: {problem}" for problem in problems_of(sample)]
        for turn in sample.turns:
            if turn.num_trained:
                earlier = trained_in.setdefault((sample.session_id, turn.number), index)
                if earlier != index:
                    found.append(f"sample {index}: turn {turn.number} is already trained in sample {earlier}")
    if bool(export.samples) == (export.empty_reason is not None):
        found.append(f"{len(export.samples)} samples, and the reason for there being none is {export.empty_reason}")
    return found


def problems_of(sample: Sample) -> list[str]:
    """What is wrong with one sample. If its turns do not fit its arrays, nothing else is checked."""
    return list(_misfits(sample)) or [*_untruths(sample), *_uncertified(sample)]


def _misfits(sample: Sample) -> Iterator[str]:
    if not sample.turns:
        yield "it has no turns"
        return
    at = 0
    for turn in sample.turns:
        if not at == turn.start <= turn.sampled_start <= turn.end:
            yield f"turn {turn.number} does not begin where the one before it ended, or ends before it begins"
        at = turn.end
    length = len(sample.tokens)
    if at != length:
        yield f"its turns end at token {at}, but it has {length} tokens"
        return
    expected = length - response_start(sample.turns)
    for name in ("loss_mask", "rollout_log_probs", *RECORDED):
        array = getattr(sample, name)
        if array is not None and array.shape != (expected,):
            yield f"{name} has shape {list(array.shape)}, but the response is {expected} tokens long"
    for name in ("rollout_routed_experts", "rollout_indexer_topk"):
        rows = getattr(sample, name)
        if rows is not None and len(rows) != length - 1:
            yield f"{name} has {len(rows)} rows for {length} tokens, not {length - 1}"


def _untruths(sample: Sample) -> Iterator[str]:
    expected = loss_mask(sample.turns)
    if (wrong := np.flatnonzero(sample.loss_mask != expected)).size:
        at = sample.response_start + int(wrong[0])
        yield f"the loss mask is wrong at token {at}: {sample.loss_mask[wrong[0]]}, not {expected[wrong[0]]}"
    if np.any(sample.tokens < 0):
        yield f"token {int(np.flatnonzero(sample.tokens < 0)[0])} has a negative id"
    logprobs, trained = sample.rollout_log_probs, sample.loss_mask != 0
    no_logprob = np.flatnonzero(trained & ~(logprobs <= _ROUNDING) | ~np.isfinite(logprobs))
    if no_logprob.size:
        at = int(no_logprob[0])
        yield f"the logprob of token {sample.response_start + at} is {logprobs[at]}, which is none"
    if np.any(logprobs[~trained]):
        yield "there are logprobs where the loss mask is 0"
    for turn in sample.turns:
        if turn.is_cut and turn.finish_reason != "length":
            yield f"turn {turn.number} was cut short, but claims to have ended by {turn.finish_reason!r}"
        if turn.weight_spans and sum(num for _, num in turn.weight_spans) != turn.num_sampled:
            yield f"the weight_spans of turn {turn.number} do not cover its {turn.num_sampled} sampled tokens"
    if sample.status is not Status.TRUNCATED and (sample.num_left_out or any(turn.is_cut for turn in sample.turns)):
        yield f"it was cut short, but its status is {sample.status.value}"


def _uncertified(sample: Sample) -> Iterator[str]:
    held = sample.certificate
    if held is None:
        yield "it has no certificate"
        return
    if held.version != VERSION:
        yield f"its certificate is of version {held.version}; this program knows {VERSION}"
        return
    payloads = payloads_of(sample)
    recorded = {name: digest for name, digest in held.payloads.items() if name in RECORDED}
    now = certificate_of(sample, recorded | payloads)
    if now == held:
        return
    yield from _differences(sample, held, now)


def _differences(sample: Sample, held: Certificate, now: Certificate) -> Iterator[str]:
    found = False
    for turn, one, other in zip(sample.turns, held.links, now.links, strict=False):
        if one != other:
            found = True
            yield f"turn {turn.number} is not what was certified"
            break  # every later link hangs on this one
    for name in sorted(held.payloads.keys() | now.payloads.keys()):
        if held.payloads.get(name) != now.payloads.get(name):
            found = True
            yield f"{name} is not what was certified"
    for name in ("num_tokens", "num_response", "num_trained", "weight_versions"):
        if (one := getattr(held, name)) != (other := getattr(now, name)):
            found = True
            yield f"its certificate says {name} {one}, but it is {other}"
    if not found:
        yield "its certificate does not belong to it"
