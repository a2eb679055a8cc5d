"""How a generation draws its tokens, as keyword arguments of `generate` and `turn`."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypedDict

from holdfast_sdk.flow import build
from holdfast_sdk.gen import runtime_pb2 as pb


class SamplingOptions(TypedDict, total=False):
    """What is left out or None is decided by the server."""

    seed: int | None
    temperature: float | None
    """0 takes the likeliest token."""
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    stop_token_ids: Iterable[int]
    top_logprobs: int
    """How many of the likeliest tokens to report with each one."""
    speculation: bool | None
    """Whether drafts may be proposed."""


def to_message(options: SamplingOptions) -> pb.SamplingOptions:
    known = SamplingOptions.__annotations__
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise TypeError(f"no sampling option {name!r}; {hint}")
    return build(pb.SamplingOptions, **options)
