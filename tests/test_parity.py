"""While nothing has left the window, logits are those of `transformers` on the same weights."""

from typing import Any

import numpy as np
import pytest
import torch

from holdfast.engine.native import is_available
from holdfast.engine.native.build import compiler
from holdfast.engine.slab import SlabPool, SlabShape
from holdfast.engine.torch import load_engine
from holdfast.engine.window import Window
from holdfast.models import GGUFSource
from tests import tiny
from tests.driving import difference, run_chunks
from tests.oracle import dense_logits, weight_names

TOLERANCE = 5e-4
SHAPE = SlabShape(recent=200, max_pin=8, prefill_chunk=64, rewind_tokens=16)


def _random_tokens(num: int, vocabulary: int) -> list[int]:
    return np.random.default_rng(3).integers(0, vocabulary, num).tolist()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_equal_transformers_inside_the_window(family: str) -> None:
    tokens = _random_tokens(150, tiny.VOCABULARY)
    with torch.inference_mode():
        theirs = tiny.hf_model(family)(torch.tensor([tokens])).logits[0].numpy()
    engine = tiny.engine(family, num_slabs=1, shape=SHAPE)
    ours = run_chunks(engine, SlabPool(1, SHAPE).acquire(4), tokens, [64, 1, 7])
    assert difference(ours, theirs) <= TOLERANCE
    assert np.abs(theirs).max() > 1  # a model whose logits vanish would agree with anything


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_oracle_itself_equals_transformers_inside_the_window(family: str) -> None:
    tokens = _random_tokens(150, tiny.VOCABULARY)
    model = tiny.hf_model(family)
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    oracle = dense_logits(model.state_dict(), tiny.architecture(family), tokens, Window(sink=4, recent=200))
    assert difference(oracle.numpy(), theirs) <= TOLERANCE


def _check_default(source: GGUFSource, model: Any) -> None:
    tokens = _random_tokens(120, source.architecture.vocab_size)
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    engine = load_engine(source, num_slabs=1, shape=SHAPE, device="cpu")
    ours = run_chunks(engine, SlabPool(1, SHAPE).acquire(4), tokens, [50, 1, 30])
    assert difference(ours, theirs) <= TOLERANCE


def test_the_default_model_equals_transformers_inside_the_window(default_source: GGUFSource) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    arch = default_source.architecture
    config = LlamaConfig(
        vocab_size=arch.vocab_size,
        hidden_size=arch.hidden_size,
        intermediate_size=arch.mlp_size,
        num_hidden_layers=arch.num_layers,
        num_attention_heads=arch.num_heads,
        num_key_value_heads=arch.num_kv_heads,
        rms_norm_eps=arch.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {name: torch.from_numpy(default_source.file.tensor(name)) for name in weight_names(arch)}
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers were on the meta device
    _check_default(default_source, model.eval())


@pytest.mark.slow
def test_the_default_model_equals_what_transformers_reads_from_the_gguf_itself(default_source: GGUFSource) -> None:
    from transformers import AutoModelForCausalLM

    path = default_source.path
    _check_default(
        default_source, AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    )


def test_whoever_has_a_compiler_has_the_native_engine() -> None:
    """Installing goes on without it, with a warning; tests that need it would then be skipped unseen."""
    assert is_available() or compiler() is None
