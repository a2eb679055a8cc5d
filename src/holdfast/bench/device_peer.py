"""transformers on the same device: a static cache that is full, one decoding step as a CUDA graph."""

import time
from typing import Any

import torch

_SIZES: dict[str, dict[str, Any]] = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}


def make_model(size: str) -> Any:
    """Random bfloat16 weights at the shape of Qwen3's `size`, on the device."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=151936,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **_SIZES[size],
    )
    build: Any = transformers.Qwen3ForCausalLM
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # a cast afterwards would take the rotary frequencies along
    try:
        with torch.device("cuda"):
            return build(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


class Peer:
    """Greedy decoding of `batch` rows behind `window` tokens, up to `num_steps` at a time."""

    @torch.inference_mode()
    def __init__(self, model: Any, batch: int, window: int, num_steps: int, *, is_compiled: bool) -> None:
        import transformers

        self.name = "transformers, compiled" if is_compiled else "transformers"
        self._forward = torch.compile(model.forward, dynamic=False) if is_compiled else model.forward
        self._batch = batch
        self._window = window
        length = window + num_steps
        build: Any = transformers.StaticCache
        self._cache = build(config=model.config, max_cache_len=length)
        self._token = torch.full((batch, 1), 7, device="cuda")
        self._positions = torch.full((batch, 1), window, device="cuda")
        self._mask = {"full_attention": torch.ones(batch, 1, 1, length, dtype=torch.bool, device="cuda")}
        model(input_ids=self._token, past_key_values=self._cache, use_cache=True)  # makes the cache
        for layer in self._cache.layers:  # zeros would be too kind to the device
            layer.keys.normal_()
            layer.values.normal_()
        self._graph = torch.cuda.CUDAGraph()
        self._rewind()
        for _ in range(3):
            self._step()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            self._step()

    @torch.inference_mode()
    def decode(self, num_steps: int) -> None:
        self._rewind()
        for _ in range(num_steps):
            self._graph.replay()
        self._token.cpu()

    @torch.inference_mode()
    def eager_rate(self, num_steps: int = 8) -> float:
        """Tokens per second without the graph."""
        self._rewind()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(num_steps):
            self._step()
        torch.cuda.synchronize()
        return self._batch * num_steps / (time.perf_counter() - started)

    def _step(self) -> None:
        """Mask and positions are given, so that it need not make them: the cheapest step it has."""
        out = self._forward(
            input_ids=self._token,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        self._token.copy_(out.logits[:, -1:].argmax(-1))

    def _rewind(self) -> None:
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(self._window)
