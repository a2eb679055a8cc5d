"""The CUDA engine compared with transformers, on random weights at Qwen3's shapes: `make bench-gpu`.

Needs a CUDA device and only torch, triton, transformers, safetensors and numpy. Contestants take turns within each
round; the tables show medians over the rounds, and ratios within this run.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.bench import machine
from holdfast.bench.gates import summarize
from holdfast.engine.cuda import CudaEngine
from holdfast.engine.interface import Row
from holdfast.engine.sampling import Pick
from holdfast.engine.slab import Slab, SlabPool, SlabShape
from holdfast.engine.torch.weights import StateDictReader
from holdfast.generation import SamplingParams
from holdfast.models.architecture import from_hf_config

WINDOW, SINK, CHUNK = 2048, 4, 256
HISTORIES = (WINDOW + SINK, 100_000)
STEPS = 64
SHAPE = SlabShape(recent=WINDOW, max_pin=512, prefill_chunk=CHUNK, rewind_tokens=0)
_CONTESTANTS: dict[str, dict[str, Any]] = {  # how the engine is made
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "fp8"},
    "fp8, cache too": {"dtype": "fp8", "kv_dtype": "fp8"},
    "bfloat16 deterministic": {"dtype": "bfloat16", "deterministic": True},
}
_SIZES = {  # hidden size, intermediate size, layers, heads, whether the embeddings are tied
    "0.6B": (1024, 3072, 28, 16, True),
    "8B": (4096, 12288, 36, 32, False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRate:
    """How fast one contestant decodes at one batch size and history."""

    model: str
    contestant: str
    batch: int
    history: int
    tokens_per_s: float
    low: float
    high: float
    limit_share: float  # of (weights + keys and values) / bandwidth
    ratio: float | None  # to the faster transformers, in this run


def timed(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def make_model(size: str) -> Any:
    """Random bfloat16 weights at the shape of Qwen3's `size`, on the device."""
    import transformers

    hidden, intermediate, layers, heads, is_tied = _SIZES[size]
    config = transformers.Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        tie_word_embeddings=is_tied,
        vocab_size=151936,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    build: Any = transformers.Qwen3ForCausalLM
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # a cast afterwards would also cast the rotary frequencies
    try:
        with torch.device("cuda"):
            return build(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


class TransformersPeer:
    """transformers with a full static cache and one decoding step as a CUDA graph.

    Decodes greedily `batch` rows behind `window` tokens, up to `num_steps` at a time.
    """

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
        for layer in self._cache.layers:  # zeros would be faster than real values
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

        def steps() -> None:
            for _ in range(num_steps):
                self._step()

        self._rewind()
        return self._batch * num_steps / timed(steps)

    def _step(self) -> None:
        """Mask and positions are given, so that transformers need not make them: its cheapest step."""
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


class CudaContestant:
    """Our engine: sessions with a full window, all decoding at once."""

    def __init__(self, name: str, model: Any, num_slabs: int, **options: Any) -> None:
        self.name = name
        arch = from_hf_config(model.config.to_dict())
        self._engine = CudaEngine(
            name,
            arch,
            StateDictReader(model.state_dict()),
            digest=name,
            num_slabs=num_slabs,
            shape=SHAPE,
            **options,
        )
        pool = SlabPool(num_slabs, SHAPE)
        self._slabs = [pool.acquire(SINK) for _ in range(num_slabs)]
        self._tokens: list[int] = np.random.default_rng(0).integers(0, arch.vocab_size, 9 * CHUNK).tolist()

    def prefill(self) -> float:
        """Tokens per second, in chunks; leaves every slab with a full window."""
        first = self._slabs[0]

        def read() -> None:
            first.reset()
            for start in range(0, len(self._tokens), CHUNK):
                self._forward(first, self._tokens[start : start + CHUNK], 0)

        read()  # records the graphs
        took_s = timed(read)
        for slab in self._slabs[1:]:
            self._engine.copy_slab(first, slab)
        return len(self._tokens) / took_s

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        self._slabs[0].reset()
        return torch.from_numpy(self._engine.read_logits(self._forward(self._slabs[0], tokens, len(tokens))))

    def decode(self, batch: int, history: int, num_steps: int = STEPS) -> None:
        slabs = self._slabs[:batch]
        for slab in slabs:
            slab.adopt(length=history, lowest=max(SINK, history - WINDOW))
        params = SamplingParams(seed=1, temperature=0.0)
        picks = [Pick(row=row, position=history + 1, params=params) for row in range(batch)]
        self._engine.burst([Row(slab, [7], 1) for slab in slabs], picks, num_steps)

    def limit_s(self, batch: int, bandwidth: float) -> float:
        """The least time of one step: every weight and every visible key and value read once."""
        kv_bytes = batch * (WINDOW + SINK) * self._engine.info.kv_bytes_per_position
        return (self._engine.weight_bytes_per_step + kv_bytes) / bandwidth

    def _forward(self, slab: Slab, tokens: Sequence[int], num_logits: int) -> torch.Tensor:
        slab.begin_write(len(tokens))
        logits = self._engine.forward([Row(slab, tokens, num_logits)])
        slab.end_write(len(tokens))
        return logits


def bandwidth() -> float:
    """Bytes per second of a large copy, read and written bytes together."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    best = min(timed(partial(target.copy_, source)) for _ in range(5))
    return 2 * source.nbytes / best


def decode_rates(
    ours: CudaContestant, peers: Sequence[TransformersPeer], batch: int, rounds: int
) -> dict[tuple[str, int], list[float]]:
    """Tokens per second by contestant and history, one value per round of STEPS tokens a row."""
    runs: dict[tuple[str, int], Callable[[], None]] = {
        (ours.name, history): partial(ours.decode, batch, history) for history in HISTORIES
    }
    runs |= {(peer.name, WINDOW): partial(peer.decode, STEPS) for peer in peers}
    for run in runs.values():
        run()
    rates: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            rates[key].append(batch * STEPS / timed(run))
    return rates


def profile(ours: CudaContestant, batch: int) -> list[dict[str, float | str]]:
    """Device time of one step by kernel. Kernels overlap, so a kernel's time includes some waiting."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        ours.decode(batch, HISTORIES[0], 4)
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    return [
        {"kernel": event.key[:80], "us_per_step": event.self_device_time_total / 4, "calls_per_step": event.count / 4}
        for event in events[:10]
        if event.self_device_time_total
    ]


def make_peers(model: Any, batch: int) -> list[TransformersPeer]:
    """transformers as it is, and compiled if that works."""
    peers = [TransformersPeer(model, batch, WINDOW, STEPS, is_compiled=False)]
    try:
        peers.append(TransformersPeer(model, batch, WINDOW, STEPS, is_compiled=True))
    except Exception as exc:  # noqa: BLE001 - whatever its compiler raises, the plain graph is still there
        print(f"transformers cannot be compiled here: {type(exc).__name__}: {exc}"[:300])
    return peers


def measure(
    size: str, contestants: Sequence[str], batches: Sequence[int], *, rounds: int, bytes_per_s: float, is_alone: bool
) -> dict[str, Any]:
    """Everything about one model size. Prints as it goes. The peers run beside the first; ratios are to the faster."""
    model = make_model(size)
    result: dict[str, Any] = {"decode": [], "prefill": {}, "profiles": {}, "notes": {}}
    theirs: dict[int, float] = {}
    for name in contestants:
        ours = CudaContestant(name, model, max(batches), **_CONTESTANTS[name])
        result["notes"][f"logits off transformers, {name}"] = _agreement(ours, model)
        result["prefill"][name] = ours.prefill()
        for batch in batches:
            peers = [] if batch in theirs or is_alone else make_peers(model, batch)
            rates = decode_rates(ours, peers, batch, rounds)
            if peers:
                theirs[batch] = max(summarize(rates[peer.name, WINDOW]).median for peer in peers)
                result["notes"][f"transformers eager, batch {batch}"] = peers[0].eager_rate()
            result["profiles"][f"{name}, batch {batch}"] = profile(ours, batch)
            for (contestant, history), values in rates.items():
                found = summarize(values)
                rate = DeviceRate(
                    model=size,
                    contestant=contestant,
                    batch=batch,
                    history=history,
                    tokens_per_s=found.median,
                    low=found.low,
                    high=found.high,
                    limit_share=ours.limit_s(batch, bytes_per_s) * found.median / batch,
                    ratio=None if is_alone else found.median / theirs[batch],
                )
                result["decode"].append(asdict(rate))
                _print_rate(rate)
            del peers
            torch.cuda.empty_cache()
        print(f"{size:5} {name:24} prefill in chunks of {CHUNK}: {result['prefill'][name]:,.0f} tok/s", flush=True)
        del ours
        gc.collect()
        torch.cuda.empty_cache()
    return result


@torch.inference_mode()
def _agreement(ours: CudaContestant, model: Any) -> dict[str, float]:
    """How far our logits are from transformers', both in the same low precision, over one short prompt."""
    tokens = np.random.default_rng(3).integers(0, model.config.vocab_size, 200).tolist()
    theirs = model(torch.tensor([tokens], device="cuda")).logits[0].float().cpu()
    mine = ours.logits(tokens)
    flips = (mine.argmax(-1) != theirs.argmax(-1)).float().mean()
    return {
        "max": float((mine - theirs).abs().max()),
        "spread": float(theirs.std()),
        "flips_per_1000": 1000 * float(flips),
    }


def _print_rate(rate: DeviceRate) -> None:
    ratio = "" if rate.ratio is None else f"{rate.ratio:5.2f}x "
    print(
        f"{rate.model:5} {rate.contestant:24} batch {rate.batch:3} history {rate.history:7,}: "
        f"{rate.tokens_per_s:9,.0f} tok/s ({rate.low:,.0f} to {rate.high:,.0f}) {ratio}"
        f"{100 * rate.limit_share:3.0f}% of the limit",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="0.6B,8B")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--contestants", default=";".join(_CONTESTANTS))
    parser.add_argument("--alone", action="store_true", help="without transformers, which takes minutes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file to write the result to")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device: nothing was measured", file=sys.stderr)
        return 2
    bytes_per_s = bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bytes_per_s / 1e12:.2f} TB/s")
    batches = [int(batch) for batch in options.batches.split(",")]
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "bandwidth_bytes_per_s": bytes_per_s}
    result |= {"versions": machine.versions(), "commit": machine.commit(), "window": WINDOW, "steps": STEPS}
    for size in options.sizes.split(","):
        result[size] = measure(
            size,
            options.contestants.split(";"),
            batches,
            rounds=options.rounds,
            bytes_per_s=bytes_per_s,
            is_alone=options.alone,
        )
        if options.json:
            options.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
