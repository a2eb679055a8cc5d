"""`holdfast.testing.oracle` for weights that are torch's."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from holdfast.engine.window import Window
from holdfast.models import Architecture
from holdfast.testing import oracle
from holdfast.testing.oracle import weight_names

__all__ = ["dense_logits", "weight_names"]


def dense_logits(
    state: Mapping[str, Tensor],
    arch: Architecture,
    tokens: Sequence[int],
    window: Window,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Logits for every position: [tokens, vocabulary]."""
    weights = {name: state[name].detach().to("cpu", dtype).numpy() for name in weight_names(arch)}
    kind = np.float64 if dtype == torch.float64 else np.float32
    return torch.from_numpy(oracle.dense_logits(weights, arch, tokens, window, kind))
