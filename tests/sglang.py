"""The upstream contract against a real SGLang, on the default model as a Hugging Face directory.

    .venv/bin/python -m tests.vllm convert build/smollm2           write the directory
    .venv/bin/python -m tests.sglang run http://127.0.0.1:30000    run the suite against a server that is up

How SGLang is installed and started: see `INSTALL` and `START` below; `python -m tests.sglang` prints them.
"""

import sys

from tests.vllm import run_contract

URL_VARIABLE = "HOLDFAST_TEST_SGLANG"

INSTALL = """\
# On a machine with an NVIDIA GPU. The chat API takes input_ids since 0.5.13.
python3 -m venv build/sglang
build/sglang/bin/pip install 'sglang>=0.5.13'"""

START = """\
# Deterministic inference: without it SGLang ignores sampling_seed, and the test of seeds fails.
build/sglang/bin/python -m sglang.launch_server --model-path build/smollm2 --served-model-name smollm2 \\
  --host 127.0.0.1 --port 30000 --context-length 2048 --enable-deterministic-inference
# For a model with experts and --routing-replay, add --enable-return-routed-experts.
# Not --skip-tokenizer-init: the chat API needs the tokenizer. SGLANG_RETURN_ORIGINAL_LOGPROB must not be set:
# the suite expects logprobs after temperature."""


def main() -> int:
    match sys.argv[1:]:
        case ["run", url]:
            return run_contract("real_sglang", URL_VARIABLE, url)
    print(__doc__, INSTALL, START, sep="\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
