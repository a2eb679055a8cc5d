"""The reference: a dense forward over the whole history under the window's mask, in float64 by default.

Written from the papers' formulas, sharing no code with the engines: weights by their Hugging Face names,
one matrix of scores, no cache.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from holdfast.engine.window import Window
from holdfast.models import Architecture

Array = Any  # a numpy array of the requested dtype


def weight_names(arch: Architecture) -> list[str]:
    parts = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    parts += [f"self_attn.{p}_proj.weight" for p in "qkvo"] + [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    parts += [f"self_attn.{p}_proj.bias" for p in "qkv"] if arch.has_qkv_bias else []
    parts += [f"self_attn.{p}_norm.weight" for p in "qk"] if arch.has_qk_norm else []
    names = [f"model.layers.{i}.{part}" for i in range(arch.num_layers) for part in parts]
    head = [] if arch.has_tied_embeddings else ["lm_head.weight"]
    return ["model.embed_tokens.weight", "model.norm.weight", *head, *names]


def dense_logits(
    state: Mapping[str, Array],
    arch: Architecture,
    tokens: Sequence[int],
    window: Window,
    dtype: DTypeLike = np.float64,
) -> Array:
    """Logits for every position: [tokens, vocabulary]."""
    w = {name: np.asarray(state[name], dtype) for name in weight_names(arch)}
    t = np.arange(len(tokens))
    far = np.minimum(t, window.sink + window.recent - 1)
    query, key = t[:, None], t[None, :]
    is_sink = key < window.sink
    hidden = ~((key <= query) & (is_sink | (key > query - window.recent)))

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + arch.norm_epsilon) * w[name]

    def rotated(x: Array, positions: Array) -> Array:
        angle = positions.astype(np.float64)[:, None] * np.array(arch.inverse_frequencies)
        whole = np.concatenate([angle, angle], -1)
        half = arch.head_dim // 2
        turned = np.concatenate([-x[..., half:], x[..., :half]], -1)
        return x * np.cos(whole).astype(dtype) + turned * np.sin(whole).astype(dtype)

    def project(h: Array, at: str, kind: str, heads: int) -> Array:
        y = h @ w[f"{at}.self_attn.{kind}_proj.weight"].T
        if arch.has_qkv_bias:
            y = y + w[f"{at}.self_attn.{kind}_proj.bias"]
        y = y.reshape(len(tokens), heads, arch.head_dim)
        if arch.has_qk_norm and kind in "qk":
            y = norm(y, f"{at}.self_attn.{kind}_norm.weight")
        return y.swapaxes(0, 1).repeat(arch.num_heads // heads, axis=0)  # [heads, tokens, dim]

    x = w["model.embed_tokens.weight"][list(tokens)]
    for i in range(arch.num_layers):
        at = f"model.layers.{i}"
        h = norm(x, f"{at}.input_layernorm.weight")
        q, k, v = (project(h, at, kind, arch.num_heads if kind == "q" else arch.num_kv_heads) for kind in "qkv")
        k = rotated(k, t).swapaxes(1, 2)
        scores = np.where(is_sink, rotated(q, far) @ k, rotated(q, t) @ k) / arch.head_dim**0.5
        attended = _softmax(np.where(hidden, -np.inf, scores)).astype(dtype) @ v
        x = x + attended.swapaxes(0, 1).reshape(len(tokens), -1) @ w[f"{at}.self_attn.o_proj.weight"].T
        h = norm(x, f"{at}.post_attention_layernorm.weight")
        gate = h @ w[f"{at}.mlp.gate_proj.weight"].T
        gated = gate / (1 + np.exp(-gate)) * (h @ w[f"{at}.mlp.up_proj.weight"].T)
        x = x + gated @ w[f"{at}.mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if arch.has_tied_embeddings else "lm_head.weight"
    return norm(x, "model.norm.weight") @ w[head].T


def _softmax(scores: Array) -> Array:
    """Every row has a finite score: a query sees itself."""
    raised = np.exp(scores - scores.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)
