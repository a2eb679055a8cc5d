"""Samples in the layouts of trainers: TRL, verl, SkyRL and miles. Pure: no trainer is imported.

Each function gives the values that the trainer's own code takes, for samples of any number of sessions. A response is
everything from the first sampled token on, so given tokens of later turns are in it with a mask of 0. What a trainer
has no place for is refused (SamplesUnusable), never left out: see `Layout`.
"""

import io
import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from holdfast.chats.samples.sample import FORMAT_VERSION, Sample, meta_of, totals
from holdfast.errors import SamplesUnusable

_EXPERTS = "rollout_routed_experts"
_INDEXER = "rollout_indexer_topk"

# What torch.load reads where no torch has written it: pickles of a magic number, a protocol, the machine, the content,
# and the storages that follow, of which there are none.
_TORCH_MAGIC, _TORCH_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_TORCH_MACHINE = {
    "protocol_version": _TORCH_PROTOCOL,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}


class Trainer(StrEnum):
    TRL = "trl"
    VERL = "verl"
    MILES = "miles"
    SKYRL = "skyrl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a converted file is like. `has_experts`: routed experts and indexer choices are kept; False leaves them out.
    The lengths are those that verl pads to; None: the longest there is. `has_version_spans` is for miles."""

    has_experts: bool = True
    has_version_spans: bool = False
    pad_token_id: int = 0
    prompt_length: int | None = None
    response_length: int | None = None


PLAIN = Layout()


def to_trl(samples: Sequence[Sample], layout: Layout = PLAIN) -> dict[str, list[Any]]:
    """What a `rollout_func` of TRL's GRPOTrainer returns. `env_mask` is the loss mask; TRL passes further fields to its
    reward functions, and `reward` is one of them."""
    _refuse(samples, (_EXPERTS, _INDEXER), "TRL", layout)
    return {
        "prompt_ids": [_prompt(sample) for sample in samples],
        "completion_ids": [_response(sample) for sample in samples],
        "logprobs": [sample.rollout_log_probs.tolist() for sample in samples],
        "env_mask": [sample.loss_mask.tolist() for sample in samples],
        "reward": [sample.reward for sample in samples],
        "group": [_group(sample) for sample in samples],
        "session_id": [sample.session_id for sample in samples],
        "branch": [sample.branch for sample in samples],
        "status": [sample.status.value for sample in samples],
        "weight_versions": [meta_of(sample).weight_versions for sample in samples],
        "logprob_kind": [sample.logprob_kind for sample in samples],
    }


def to_skyrl(samples: Sequence[Sample], layout: Layout = PLAIN) -> dict[str, Any]:
    """SkyRL's GeneratorOutput. `trajectory_ids` has the members of its TrajectoryID."""
    _refuse(samples, (_INDEXER,), "SkyRL", layout)
    for index, sample in enumerate(samples):
        if sample.reward is None:
            raise SamplesUnusable(f"sample {index} has no reward, and SkyRL needs one for each", reason="reward")
    numbers: dict[str, itertools.count[int]] = {}
    experts = [getattr(sample, _EXPERTS) for sample in samples] if layout.has_experts else []
    times = [totals(sample).get("total_s") for sample in samples]
    return {
        "prompt_token_ids": [_prompt(sample) for sample in samples],
        "response_ids": [_response(sample) for sample in samples],
        "rewards": [sample.reward for sample in samples],
        "loss_masks": [sample.loss_mask.tolist() for sample in samples],
        "stop_reasons": [sample.turns[-1].finish_reason for sample in samples],
        "rollout_metrics": None,
        "rollout_logprobs": [sample.rollout_log_probs.tolist() for sample in samples],
        "trajectory_ids": [
            {
                "instance_id": _group(sample),
                "repetition_id": next(numbers.setdefault(_group(sample), itertools.count())),
            }
            for sample in samples
        ],
        "trajectory_generation_times": None if None in times else times,
        "rollout_expert_indices": [rows.tolist() for rows in experts] if _all_or_none(experts, "experts") else None,
        "is_last_step": None,
    }


def to_verl(samples: Sequence[Sample], layout: Layout = PLAIN) -> tuple[dict[str, NDArray[Any]], dict[str, list[Any]]]:
    """The tensors and the other values of verl's DataProto, as its agent loop makes them: prompts padded on the left,
    responses on the right, each reward on the last token of its response."""
    _refuse(samples, (_INDEXER,), "verl", layout)
    prompts, responses = [_prompt(one) for one in samples], [_response(one) for one in samples]
    width = _width("prompt", prompts, layout.prompt_length)
    length = _width("response", responses, layout.response_length)
    batch = {
        "prompts": _padded(prompts, width, layout.pad_token_id, np.int64, is_left=True),
        "responses": _padded(responses, length, layout.pad_token_id, np.int64),
        "response_mask": _padded([one.loss_mask for one in samples], length, 0, np.int64),
        "rollout_log_probs": _padded([one.rollout_log_probs for one in samples], length, 0.0, np.float32),
    }
    batch["input_ids"] = np.concatenate([batch["prompts"], batch["responses"]], axis=1)
    present = [_padded([[1] * len(row) for row in prompts], width, 0, np.int64, is_left=True)]
    present.append(_padded([[1] * len(row) for row in responses], length, 0, np.int64))
    batch["attention_mask"] = np.concatenate(present, axis=1)
    batch["position_ids"] = np.clip(np.cumsum(batch["attention_mask"], axis=1) - 1, 0, None)
    rewards = [sample.reward for sample in samples]
    if _all_or_none(rewards, "rewards"):
        batch["rm_scores"] = np.zeros((len(samples), length), np.float32)
        for row, reward, response in zip(batch["rm_scores"], rewards, responses, strict=True):
            row[len(response) - 1] = reward
    experts = [getattr(sample, _EXPERTS) for sample in samples] if layout.has_experts else []
    if _all_or_none(experts, "routed experts"):
        shapes = {rows.shape[1:] for rows in experts}
        if len(shapes) > 1 or len(next(iter(shapes))) != 2:
            raise SamplesUnusable(
                "verl needs routed experts of one shape, layers and experts per token, in all samples", reason=_EXPERTS
            )
        batch["routed_experts"] = np.zeros((len(samples), width + length, *shapes.pop()), np.int32)
        for row, rows, prompt in zip(batch["routed_experts"], experts, prompts, strict=True):
            row[width - len(prompt) :][: len(rows)] = rows
    others: dict[str, list[Any]] = {
        "__num_turns__": [len(sample.turns) for sample in samples],
        "uid": [_group(sample) for sample in samples],
        "session_id": [sample.session_id for sample in samples],
        "branch": [sample.branch for sample in samples],
        "weight_versions": [meta_of(sample).weight_versions for sample in samples],
        "logprob_kind": [sample.logprob_kind for sample in samples],
    }
    return batch, others


def to_miles(samples: Sequence[Sample], layout: Layout = PLAIN) -> list[dict[str, Any]]:
    """The members of miles' Sample, as its `from_dict` takes them. Samples of one group share `group_index`, branches
    of one session `rollout_id`."""
    groups = {name: index for index, name in enumerate(dict.fromkeys(map(_group, samples)))}
    sessions = {name: index for index, name in enumerate(dict.fromkeys(one.session_id for one in samples))}
    found = []
    for index, sample in enumerate(samples):
        said = meta_of(sample, has_version_spans=layout.has_version_spans)
        payloads = {name: getattr(sample, name) if layout.has_experts else None for name in (_EXPERTS, _INDEXER)}
        found.append(
            {
                "group_index": groups[_group(sample)],
                "index": index,
                "rollout_id": sessions[sample.session_id],
                "tokens": sample.tokens.tolist(),
                "response": sample.response,
                "response_length": len(sample.loss_mask),
                "label": sample.label or None,
                "reward": sample.reward,
                "loss_mask": sample.loss_mask.tolist(),
                "weight_versions": said.weight_versions,
                "rollout_log_probs": sample.rollout_log_probs.tolist(),
                "status": sample.status.value,
                "metadata": dict(sample.metadata),
                "spec_info": said.spec_info,
                "prefix_cache_info": said.prefix_cache_info,
                **payloads,
            }
        )
    return found


def convert(samples: Sequence[Sample], trainer: Trainer, layout: Layout = PLAIN) -> bytes:
    """The content of a file: JSON for TRL and SkyRL, safetensors for verl (other values are JSON in its header), and
    for miles what torch.load reads."""
    if not samples:
        raise SamplesUnusable("there are no samples to convert", reason="empty")
    encoders: dict[Trainer, Callable[[], bytes]] = {
        Trainer.TRL: lambda: msgspec.json.encode({"format_version": FORMAT_VERSION, **to_trl(samples, layout)}),
        Trainer.SKYRL: lambda: msgspec.json.encode({"format_version": FORMAT_VERSION, **to_skyrl(samples, layout)}),
        Trainer.VERL: lambda: _safetensors(*to_verl(samples, layout)),
        Trainer.MILES: lambda: _torch_file(
            {"format_version": FORMAT_VERSION, "rollout_id": 0, "samples": to_miles(samples, layout)}
        ),
    }
    return encoders[trainer]()


def _safetensors(batch: Mapping[str, NDArray[Any]], others: Mapping[str, list[Any]]) -> bytes:
    told = {"format_version": str(FORMAT_VERSION), "non_tensor_batch": msgspec.json.encode(others).decode()}
    return safetensors.numpy.save({name: np.ascontiguousarray(array) for name, array in batch.items()}, metadata=told)


def _torch_file(content: Any) -> bytes:
    file = io.BytesIO()
    parts: list[Any] = [_TORCH_MAGIC, _TORCH_PROTOCOL, _TORCH_MACHINE, content, []]
    for part in parts:
        pickle.dump(part, file, protocol=2)
    return file.getvalue()


def _prompt(sample: Sample) -> list[int]:
    tokens: list[int] = sample.tokens[: sample.response_start].tolist()
    return tokens


def _response(sample: Sample) -> list[int]:
    tokens: list[int] = sample.tokens[sample.response_start :].tolist()
    return tokens


def _group(sample: Sample) -> str:
    """Samples that are compared with one another; a session without a group is one of its own."""
    return sample.group or sample.session_id


def _refuse(samples: Sequence[Sample], names: Sequence[str], trainer: str, layout: Layout) -> None:
    for index, sample in enumerate(samples):
        for name in names if layout.has_experts else ():
            if getattr(sample, name) is not None:
                what = f"sample {index} has {name}, and {trainer} has no place for it"
                raise SamplesUnusable(f"{what}; pass --without-experts to leave it out", reason=name)


def _all_or_none(values: Sequence[Any], what: str) -> bool:
    """Whether every sample has the value. Raises if only some do."""
    missing = [index for index, value in enumerate(values) if value is None]
    if missing and len(missing) < len(values):
        raise SamplesUnusable(f"sample {missing[0]} has no {what}, but others have", reason="mixed")
    return bool(values) and not missing


def _width(what: str, rows: Sequence[Sequence[int]], limit: int | None) -> int:
    longest = max(map(len, rows))
    if limit is not None and longest > limit:
        raise SamplesUnusable(
            f"the longest {what} has {longest} tokens, more than {limit}; export with max_seq_len, or pass more",
            reason="length",
        )
    return limit if limit is not None else longest


def _padded(
    rows: Sequence[Any], width: int, value: float, kind: type[np.generic], *, is_left: bool = False
) -> NDArray[Any]:
    found = np.full((len(rows), width), value, kind)
    for target, row in zip(found, rows, strict=True):
        if len(row):
            target[slice(-len(row), None) if is_left else slice(len(row))] = row
    return found
