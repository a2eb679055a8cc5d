"""The CUDA engine beside transformers, on random weights at Qwen3's shapes: `make bench-gpu`.

Needs a CUDA device and nothing but torch, triton, transformers, safetensors and numpy. Contestants take turns within
each round; the tables show medians over the rounds, and ratios within this run.
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
from holdfast.bench.device_peer import Peer, make_model
from holdfast.bench.summary import summarize
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
_CONTESTANTS = {  # dtype, and whether it is deterministic
    "bfloat16": ("bfloat16", False),
    "int8": ("int8", False),
    "bfloat16 deterministic": ("bfloat16", True),
}
SHAPE = SlabShape(recent=WINDOW, max_pin=512, prefill_chunk=CHUNK, rewind_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRate:
    """One contestant's decoding at one batch size and history."""

    model: str
    contestant: str
    batch: int
    history: int
    tokens_per_s: float
    low: float
    high: float
    limit_share: float  # of (weights + keys and values) / bandwidth
    ratio: float  # to the faster transformers, in this run


class Ours:
    """Sessions with a full window, all decoding at once."""

    def __init__(self, name: str, model: Any, dtype: str, num_slabs: int, *, deterministic: bool = False) -> None:
        self.name = name
        arch = from_hf_config(model.config.to_dict())
        self._engine = CudaEngine(
            name,
            arch,
            StateDictReader(model.state_dict()),
            digest=name,
            num_slabs=num_slabs,
            shape=SHAPE,
            dtype=dtype,
            deterministic=deterministic,
        )
        pool = SlabPool(num_slabs, SHAPE)
        self._slabs = [pool.acquire(SINK) for _ in range(num_slabs)]
        self._tokens: list[int] = np.random.default_rng(0).integers(0, arch.vocab_size, 9 * CHUNK).tolist()

    def prefill(self) -> float:
        """Tokens per second, in chunks; leaves every slab with a full window."""
        first = self._slabs[0]
        for _ in range(2):  # the first time records the graphs
            first.reset()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for start in range(0, len(self._tokens), CHUNK):
                self._forward(first, self._tokens[start : start + CHUNK], 0)
            torch.cuda.synchronize()
            duration = time.perf_counter() - started
        for slab in self._slabs[1:]:
            self._engine.copy_slab(first, slab)
        return len(self._tokens) / duration

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


def timed(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def bandwidth() -> float:
    """Bytes per second of a large copy, those read and those written."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    best = min(timed(partial(target.copy_, source)) for _ in range(5))
    return 2 * source.nbytes / best


def decode_rates(ours: Ours, peers: Sequence[Peer], batch: int, rounds: int) -> dict[tuple[str, int], list[float]]:
    """Tokens per second by contestant and history, over rounds in which every one decodes STEPS tokens a row."""
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


def profile(ours: Ours, batch: int) -> list[dict[str, float | str]]:
    """Device time by kernel, a step. Kernels overlap, so a kernel's time holds some of its wait."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        ours.decode(batch, HISTORIES[0], 4)
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    return [
        {"kernel": event.key[:80], "us_per_step": event.self_device_time_total / 4, "calls_per_step": event.count / 4}
        for event in events[:10]
        if event.self_device_time_total
    ]


def make_peers(model: Any, batch: int) -> list[Peer]:
    """transformers as it is and compiled, where that works."""
    peers = [Peer(model, batch, WINDOW, STEPS, is_compiled=False)]
    try:
        peers.append(Peer(model, batch, WINDOW, STEPS, is_compiled=True))
    except Exception as exc:  # noqa: BLE001 - whatever its compiler raises, the plain graph is still there
        print(f"transformers does not compile here: {type(exc).__name__}: {exc}"[:300])
    return peers


def measure(
    size: str, contestants: Sequence[str], batches: Sequence[int], *, rounds: int, bytes_per_s: float
) -> dict[str, Any]:
    """Everything about one model size. Prints as it goes. The peers run beside the first; ratios are to the faster."""
    model = make_model(size)
    result: dict[str, Any] = {"decode": [], "prefill": {}, "profiles": {}, "notes": {}}
    theirs: dict[int, float] = {}
    for name in contestants:
        dtype, deterministic = _CONTESTANTS[name]
        ours = Ours(name, model, dtype, max(batches), deterministic=deterministic)
        result["notes"][f"logits off transformers, {name}"] = _agreement(ours, model)
        result["prefill"][name] = ours.prefill()
        for batch in batches:
            peers = [] if batch in theirs else make_peers(model, batch)
            rates = decode_rates(ours, peers, batch, rounds)
            if peers:
                theirs[batch] = max(summarize(rates[peer.name, WINDOW]).median for peer in peers)
                result["notes"][f"transformers eager, batch {batch}"] = peers[0].eager_rate()
                result["profiles"][f"batch {batch}"] = profile(ours, batch)
            for (contestant, history), values in rates.items():
                found = summarize(values)
                figure = DeviceRate(
                    model=size,
                    contestant=contestant,
                    batch=batch,
                    history=history,
                    tokens_per_s=found.median,
                    low=found.low,
                    high=found.high,
                    limit_share=ours.limit_s(batch, bytes_per_s) * found.median / batch,
                    ratio=found.median / theirs[batch],
                )
                result["decode"].append(asdict(figure))
                _print_figure(figure)
            del peers
            torch.cuda.empty_cache()
        print(f"{size:5} {name:24} prefill in chunks of {CHUNK}: {result['prefill'][name]:,.0f} tok/s", flush=True)
        del ours
        gc.collect()
        torch.cuda.empty_cache()
    return result


@torch.inference_mode()
def _agreement(ours: Ours, model: Any) -> dict[str, float]:
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


def _print_figure(figure: DeviceRate) -> None:
    print(
        f"{figure.model:5} {figure.contestant:24} batch {figure.batch:3} history {figure.history:7,}: "
        f"{figure.tokens_per_s:9,.0f} tok/s ({figure.low:,.0f} to {figure.high:,.0f}) {figure.ratio:5.2f}x "
        f"{100 * figure.limit_share:3.0f}% of the limit",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="0.6B,8B")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--contestants", default=",".join(_CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured", file=sys.stderr)
        return 2
    bytes_per_s = bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bytes_per_s / 1e12:.2f} TB/s")
    batches = [int(batch) for batch in options.batches.split(",")]
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "bandwidth_bytes_per_s": bytes_per_s}
    result |= {"versions": machine.versions(), "commit": machine.commit(), "window": WINDOW, "steps": STEPS}
    for size in options.sizes.split(","):
        result[size] = measure(
            size, options.contestants.split(","), batches, rounds=options.rounds, bytes_per_s=bytes_per_s
        )
        if options.json:
            options.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
