"""The plain truth: a dense forward over the whole history under the window's mask, in float64.

Written from the papers' formulas, sharing no code with the engine: weights by their Hugging Face names,
one matrix of scores, no cache.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from holdfast.engine.window import Window
from holdfast.models import Architecture


def weight_names(arch: Architecture) -> list[str]:
    parts = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    parts += [f"self_attn.{p}_proj.weight" for p in "qkvo"] + [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    parts += [f"self_attn.{p}_proj.bias" for p in "qkv"] if arch.has_qkv_bias else []
    parts += [f"self_attn.{p}_norm.weight" for p in "qk"] if arch.has_qk_norm else []
    names = [f"model.layers.{i}.{part}" for i in range(arch.num_layers) for part in parts]
    head = [] if arch.has_tied_embeddings else ["lm_head.weight"]
    return ["model.embed_tokens.weight", "model.norm.weight", *head, *names]


@torch.inference_mode()
def dense_logits(
    state: Mapping[str, Tensor],
    arch: Architecture,
    tokens: Sequence[int],
    window: Window,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Logits for every position: [tokens, vocabulary]."""
    w = {name: state[name].to(dtype) for name in weight_names(arch)}
    t = torch.arange(len(tokens))
    far = torch.clamp(t, max=window.sink + window.recent - 1)
    query, key = t[:, None], t[None, :]
    is_sink = key < window.sink
    visible = (key <= query) & (is_sink | (key > query - window.recent))

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + arch.norm_epsilon).sqrt() * w[name]

    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        angle = positions.double()[:, None] * torch.tensor(arch.inverse_frequencies, dtype=torch.float64)
        cos, sin = (
            torch.cat([angle, angle], -1).cos().to(dtype),
            torch.cat([angle, angle], -1).sin().to(dtype),
        )
        half = arch.head_dim // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def project(h: Tensor, at: str, kind: str, heads: int) -> Tensor:
        y = h @ w[f"{at}.self_attn.{kind}_proj.weight"].T
        if arch.has_qkv_bias:
            y = y + w[f"{at}.self_attn.{kind}_proj.bias"]
        y = y.view(len(tokens), heads, arch.head_dim)
        if arch.has_qk_norm and kind in "qk":
            y = norm(y, f"{at}.self_attn.{kind}_norm.weight")
        y = y.transpose(0, 1)  # [heads, tokens, dim]
        return y.repeat_interleave(arch.num_heads // heads, dim=0)

    x = w["model.embed_tokens.weight"][torch.tensor(tokens)]
    for i in range(arch.num_layers):
        at = f"model.layers.{i}"
        h = norm(x, f"{at}.input_layernorm.weight")
        q, k, v = (project(h, at, kind, arch.num_heads if kind == "q" else arch.num_kv_heads) for kind in "qkv")
        k = rotated(k, t).transpose(1, 2)
        scores = torch.where(is_sink, rotated(q, far) @ k, rotated(q, t) @ k) / arch.head_dim**0.5
        attended = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v
        x = x + attended.transpose(0, 1).reshape(len(tokens), -1) @ w[f"{at}.self_attn.o_proj.weight"].T
        h = norm(x, f"{at}.post_attention_layernorm.weight")
        gated = torch.nn.functional.silu(h @ w[f"{at}.mlp.gate_proj.weight"].T) * (h @ w[f"{at}.mlp.up_proj.weight"].T)
        x = x + gated @ w[f"{at}.mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if arch.has_tied_embeddings else "lm_head.weight"
    return norm(x, "model.norm.weight") @ w[head].T
