"""What narrower weights change: the Kullback-Leibler divergence of their next-token distributions from float32's."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.bench.quality import long_text
from holdfast.chat.tokenizer import load_tokenizer
from holdfast.config import EngineConfig
from holdfast.engine.factory import build_engine
from holdfast.engine.slab import SlabPool
from holdfast.models import open_model
from holdfast.testing.engine_driver import run_chunks

_NUM_TOKENS = 512
_CHUNK = 64


def divergence(model: str, dtypes: Sequence[str]) -> dict[str, float]:
    """Mean nats over 512 tokens of an English text, by dtype. Blocks for seconds."""
    source = open_model(model)
    tokens = load_tokenizer(source).encode(long_text()[: 8 * _NUM_TOKENS])[:_NUM_TOKENS]
    exact = _logprobs(model, "float32", tokens)
    return {dtype: _mean_divergence(exact, _logprobs(model, dtype, tokens)) for dtype in dtypes}


def _logprobs(model: str, dtype: str, tokens: list[int]) -> NDArray[np.float64]:
    config = EngineConfig(device="cpu", dtype=dtype, sessions=1, recent=_NUM_TOKENS, rewind_tokens=0)
    engine = build_engine(open_model(model), config)
    logits = run_chunks(engine, SlabPool(1, engine.shape).acquire(4), tokens, [_CHUNK]).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    normed: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normed


def _mean_divergence(exact: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float((np.exp(exact) * (exact - other)).sum(axis=1).mean())
