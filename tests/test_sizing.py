"""The sizing table of docs/operations/sizing.md is what the code computes."""

from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.models import Sizes
from holdfast.config import EngineConfig
from holdfast.engine.interface import kv_bytes_per_position
from holdfast.engine.slab import SlabShape
from holdfast.models import Architecture, GGUFSource
from holdfast.models.architecture import from_hf_config

DOCUMENT = Path(__file__).parents[1] / "docs/operations/sizing.md"
WINDOWS = (512, 2048, 8192)
HEADER = "| model | dtype | a token | 4 + 512 | 4 + 2048 | 4 + 8192 | a slab | snapshots in 1 GB |"

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _config(family: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """What config.json says of these models. Sizes: layers, hidden, MLP, heads, vocabulary, context."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    known = dict(zip((*names, "max_position_embeddings"), sizes, strict=True))
    common = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6}
    return {"model_type": family, **known, **common, **more}


CONFIGS = {
    "Qwen3-0.6B": _config("qwen3", 28, 1024, 3072, 16, 151_936, 40_960, tie_word_embeddings=True),
    "Qwen3-4B": _config("qwen3", 36, 2560, 9728, 32, 151_936, 40_960, tie_word_embeddings=True),
    "Qwen3-8B": _config("qwen3", 36, 4096, 12_288, 32, 151_936, 40_960),
    "Llama-3.1-8B": _config("llama", 32, 4096, 14_336, 32, 128_256, 131_072, rope_scaling=_LLAMA3),
    "Mistral-7B-v0.3": _config("mistral", 32, 4096, 14_336, 32, 32_768, 32_768),
}


def _row(name: str, arch: Architecture, dtype: str) -> str:
    config = EngineConfig()
    shape = SlabShape(
        recent=config.recent,
        max_pin=config.max_pin,
        prefill_chunk=config.prefill_chunk,
        rewind_tokens=config.rewind_tokens,
    )
    each = kv_bytes_per_position(arch, dtype)
    slab = Sizes(weight_bytes=0, token_bytes=each, memory_bytes=None).slab_bytes(shape)
    num_snapshots = 10**9 // ((config.sink + shape.recent) * each)
    windows = [_megabytes(size) for size in _windows(arch, dtype)]
    return f"| {' | '.join([name, dtype, f'{each:,} B', *windows, _megabytes(slab), str(num_snapshots)])} |"


def _windows(arch: Architecture, dtype: str) -> list[int | None]:
    """Full windows beside the default sink; None: beyond the model's context."""
    lengths = [EngineConfig().sink + recent for recent in WINDOWS]
    return [length * kv_bytes_per_position(arch, dtype) if length <= arch.context else None for length in lengths]


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:,.1f} MB"


def test_the_sizing_table_is_what_the_code_computes(default_source: GGUFSource) -> None:
    architectures = {default_source.name: default_source.architecture}
    architectures |= {name: from_hf_config(config) for name, config in CONFIGS.items()}
    rows = [_row(name, arch, dtype) for name, arch in architectures.items() for dtype in ("bfloat16", "float32")]
    table = "\n".join([HEADER, "|---" * 8 + "|", *rows])
    assert table in DOCUMENT.read_text(encoding="utf-8"), f"the table should be\n\n{table}"


def test_the_default_window_takes_47_mb(default_source: GGUFSource) -> None:
    assert kv_bytes_per_position(default_source.architecture, "bfloat16") == 23_040
    windows = _windows(default_source.architecture, "bfloat16")
    assert windows[1] == pytest.approx(47e6, rel=0.01)
    assert windows[2] is None  # with the sinks it is beyond the model's context
