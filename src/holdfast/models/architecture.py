"""The decoder architecture that all supported model families share, and the options in which they differ."""

import math
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes and options of a decoder. Any rotary scaling is already part of `inverse_frequencies`."""

    family: str
    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    context: int
    inverse_frequencies: tuple[float, ...]
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_tied_embeddings: bool = False

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "mlp_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ModelError(f"invalid model: {name} is {getattr(self, name)}; it must be at least 1")
        if not (isinstance(self.norm_epsilon, float) and self.norm_epsilon > 0):
            raise ModelError(f"invalid model: norm epsilon is {self.norm_epsilon}; it must be a positive number")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"invalid model: {self.num_heads} attention heads cannot be divided among {self.num_kv_heads} key heads"
            )
        if self.head_dim % 2 or len(self.inverse_frequencies) != self.head_dim // 2:
            raise ModelError(
                f"invalid model: head_dim {self.head_dim} must be even and have half as many rotary frequencies, "
                f"got {len(self.inverse_frequencies)}"
            )

    @property
    def num_parameters(self) -> int:
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.mlp_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.has_tied_embeddings else 2)
        return self.num_layers * layer + embeddings


@dataclass(frozen=True, slots=True)
class Routing:
    """A mixture of experts: `num_layers` of the model's `depth` layers route each token to `top_k` experts."""

    num_layers: int
    top_k: int
    depth: int  # servers report experts for every layer, also for those that do not route


def routing_of(config: dict[str, Any]) -> Routing | None:
    """The routing that a Hugging Face `config.json` describes. None if it has no experts, or does not tell."""
    top_k = next((config[key] for key in _TOP_K if config.get(key)), None)
    try:
        depth = int(config["num_hidden_layers"])
        num_layers = sum(_routes(layer, config) for layer in range(depth))
        return Routing(num_layers, int(top_k), depth) if top_k and num_layers else None
    except (LookupError, TypeError, ValueError, ZeroDivisionError):
        return None


_TOP_K = ("num_experts_per_tok", "experts_per_token", "top_k_experts", "moe_topk", "moe_k")


def _routes(layer: int, config: dict[str, Any]) -> bool:
    """Whether this layer has experts. The families name the exceptions in different ways."""
    frequency = config.get("moe_layer_freq") or 1
    if isinstance(frequency, list):  # one number for each layer
        return bool(frequency[layer])
    if isinstance(listed := config.get("moe_layers"), list):
        return layer in listed
    return (
        layer >= (config.get("first_k_dense_replace") or 0)
        and layer % frequency == 0
        and layer not in (config.get("mlp_only_layers") or [])
        and (layer + 1) % (config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1) == 0
    )


def rotary_frequencies(head_dim: int, base: float, scaling: dict[str, Any] | None = None) -> tuple[float, ...]:
    """Radians per position for each pair of dimensions, in double precision, with any scaling applied."""
    plain = [base ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    kind = (scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default"
    if scaling is None or kind == "default":
        return tuple(plain)
    if kind == "linear":
        return tuple(frequency / scaling["factor"] for frequency in plain)
    if kind == "llama3":
        return tuple(_llama3_scaled(frequency, scaling) for frequency in plain)
    raise ModelError(f"rotary scaling {kind!r} is not supported; supported: default, linear, llama3")


def _llama3_scaled(frequency: float, scaling: dict[str, Any]) -> float:
    """Divide low frequencies by `factor`, keep high ones, and interpolate in between."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    if turns < low:
        return float(frequency / factor)
    if turns > high:
        return frequency
    blend = (turns - low) / (high - low)
    return float((1 - blend) * frequency / factor + blend * frequency)


def from_hf_config(config: dict[str, Any]) -> Architecture:
    """The architecture that a Hugging Face `config.json` describes."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"model type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"activation {config['hidden_act']!r} is not supported; supported: silu")
    for field in ("attention_bias", "mlp_bias") if family in ("llama", "mistral", "qwen3") else ():
        if config.get(field):
            raise ModelError(f"{field} is not supported in {family} models")
    try:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        # Older files store the base and the scaling separately, newer ones store both in rope_parameters.
        rope = config.get("rope_parameters") or config.get("rope_scaling")
        base = float(config.get("rope_theta") or (rope or {}).get("rope_theta") or 10000.0)
        return Architecture(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            mlp_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=head_dim,
            norm_epsilon=config["rms_norm_eps"],
            context=_trained_context(family, config),
            inverse_frequencies=rotary_frequencies(head_dim, base, rope),
            has_qkv_bias=family == "qwen2",
            has_qk_norm=family == "qwen3",
            has_tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as exc:
        raise ModelError(f"config.json lacks {exc.args[0]!r}") from exc
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as exc:
        raise ModelError(f"config.json has an invalid value: {exc}") from exc


def _trained_context(family: str, config: dict[str, Any]) -> int:
    """The longest distance at which the model was trained to attend: at most its sliding window."""
    context = int(config["max_position_embeddings"])
    slides = config.get("use_sliding_window", family == "mistral") and config.get("sliding_window")
    return min(context, int(config["sliding_window"])) if slides else context
