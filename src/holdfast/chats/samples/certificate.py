"""Certificates: what a sample was when it was exported, as hashes that anyone can compute again.

Each turn's link hashes the link before it, what is said of the turn, and its part of tokens, mask and logprobs. The
digest closes the chain over lengths, weight versions and the hashes of all other arrays.
"""

import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.chats.samples.sample import RECORDED, Certificate, Sample, TurnSpan

VERSION = 1
_PAYLOADS = (*RECORDED, "rollout_routed_experts", "rollout_indexer_topk")
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
    """A reward may come later, so it is none of this."""
    said = asdict(turn)
    del said["reward"]
    return said


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _hash_array(array: NDArray[Any]) -> str:
    little = array.astype(array.dtype.newbyteorder("<"))
    return hashlib.sha256(_canonical([little.dtype.str, array.shape]) + little.tobytes()).hexdigest()
