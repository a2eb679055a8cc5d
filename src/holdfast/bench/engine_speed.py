"""How fast our engine decodes and reads prompts, by dtype, batch and history, compared with llama.cpp.

Each contestant is a process with its own copy of the model. All of them are loaded at once and take turns, so what
slows down the machine slows down all of them. This module is also the program of our own contestants.
"""

import contextlib
import functools
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.bench import llama_peer
from holdfast.bench.gates import Gate, median_at_least
from holdfast.bench.processes import Child, ProcessFailed, obey, run_helper, started
from holdfast.bench.quality import log_softmax, long_text
from holdfast.bench.report import Report, Results
from holdfast.bench.runner import Chart, Scenario
from holdfast.bench.streams import LEAST, measure_streams
from holdfast.chat.tokenizer import load_tokenizer
from holdfast.config import DEFAULT_MODEL, EngineConfig, option
from holdfast.engine.factory import build_engine
from holdfast.engine.run import Run
from holdfast.engine.sequences import Sequences
from holdfast.engine.slab import SlabPool
from holdfast.errors import ConfigError
from holdfast.generation import SamplingParams
from holdfast.models import GGUFSource, open_model
from holdfast.testing.fake_engine import run_chunks

BATCHES = (2, 4, 8)
_DTYPES = ("int8", "int4", "bfloat16")
_TASK_TIMEOUT_S = 600.0
_DIVERGENCE_TOKENS = 512
_DIVERGENCE_CHUNK = 64
_LLAMA_VERSION = "import llama_cpp; print(llama_cpp.__version__)"
_QUANTIZE = """
import ctypes, sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.allow_requantize = int(sys.argv[3]), True
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params)))
"""
_QUANTISED = {"llama_q8_0": "7", "llama_q4_0": "2"}  # llama.cpp's numbers of the file types

_cpu_engine = functools.partial(EngineConfig, device="cpu", recent=4096, sessions=8)


@dataclass(frozen=True, slots=True)
class EngineTask:
    """`decode`: `tokens` more for each of `batch` sequences of `history` tokens. `prefill`: a prompt of `tokens`."""

    what: Literal["decode", "prefill"]
    tokens: int
    history: int = 0
    batch: int = 1
    temperature: float = 0.0


class Contestant:
    """Our engine, driven step by step without a worker."""

    def __init__(self, model: str, config: EngineConfig) -> None:
        self._engine = build_engine(open_model(model), config)
        self._sequences = Sequences(self._engine, max_batch=64, max_recompute_tokens=0)
        self._ids = itertools.count(1)
        self._ready: tuple[int, list[int]] = (0, [])  # a length of history, and the sequences that have it

    def run(self, task: EngineTask) -> float:
        """How many seconds the task took."""
        if task.what == "prefill":
            self._prepare(0, 0)
            (sequence_id,) = self._opened(1, task.tokens)
            took_s = self._generate([sequence_id], max_tokens=1)
            self._sequences.close(sequence_id)
            return took_s
        self._prepare(task.history, task.batch)
        ids = self._ready[1][: task.batch]
        took_s = self._generate(ids, max_tokens=task.tokens, temperature=task.temperature)
        for sequence_id in ids:
            self._sequences.rewind(sequence_id, task.history)
        return took_s

    def _prepare(self, history: int, batch: int) -> None:
        """Have `batch` sequences of `history` tokens, all but the last token computed; reuses those of that length."""
        if self._ready[0] == history and len(self._ready[1]) >= batch:
            return
        for sequence_id in self._ready[1]:
            self._sequences.close(sequence_id)
        self._ready = history, self._opened(batch, history)
        for sequence_id in self._ready[1]:
            self._run([Run(self._sequences.get(sequence_id), lambda event: None)])

    def _opened(self, num: int, length: int) -> list[int]:
        ids = list(itertools.islice(self._ids, num))
        for sequence_id in ids:
            self._sequences.open(sequence_id, 4)
            self._sequences.get(sequence_id).append(_tokens(length, self._engine.info.vocab_size))
        return ids

    def _generate(self, ids: list[int], *, max_tokens: int, temperature: float = 0.0) -> float:
        params = SamplingParams(seed=1, temperature=temperature, max_tokens=max_tokens, speculation=False)
        started_at = time.perf_counter()
        self._run([Run(self._sequences.get(sequence_id), lambda event: None, params) for sequence_id in ids])
        return time.perf_counter() - started_at

    def _run(self, runs: list[Run]) -> None:
        for run in runs:
            self._sequences.start(run)
        while len(self._sequences.scheduler):
            self._sequences.end_finished()
            self._sequences.step()


@functools.cache
def _tokens(num: int, vocab_size: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(0).integers(0, vocab_size, num).tolist()
    return tokens


@dataclass(frozen=True, slots=True)
class Peers:
    """llama.cpp's files of one model, by name; empty if llama.cpp does not take part."""

    python: str
    files: Mapping[str, Path]


def find_peers(python: str, model: str, folder: Path, results: Results) -> Peers:
    """What `python` (empty: this one) can run of `model` with llama.cpp: the file itself, and it in Q8_0 and Q4_0.

    The report gets llama.cpp's version, or a note that it was not measured.
    """
    chosen = python or sys.executable
    source = open_model(model)
    asked = subprocess.run([chosen, "-c", _LLAMA_VERSION], capture_output=True, text=True, check=False)
    if not isinstance(source, GGUFSource) or asked.returncode:
        if python:
            raise ConfigError(f"{python} has no llama_cpp, or the model is not a GGUF file; leave out --llama-python")
        results.note("llama.cpp was not measured: it is not installed, or the model is not a GGUF file")
        return Peers(chosen, {})
    files = {"llama_file": source.path}
    for name, kind in _QUANTISED.items():
        files[name] = folder / f"{name}.gguf"
        command = [chosen, "-c", _QUANTIZE, str(source.path), str(files[name]), kind]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            raise ProcessFailed(f"llama.cpp could not quantize {source.path}:\n{made.stderr[-500:]}")
    results.report.versions["llama_cpp"] = asked.stdout.strip()
    return Peers(chosen, files)


@contextlib.contextmanager
def _contestants(
    model: str, ours: Mapping[str, EngineConfig], peers: Peers, context: int
) -> Iterator[dict[str, Child]]:
    """All contestants by name, loaded and waiting for tasks."""
    threads = str(len(os.sched_getaffinity(0)))
    with contextlib.ExitStack() as stack:
        children: dict[str, Child] = {}
        for name, config in ours.items():
            children[name] = stack.enter_context(started("engine_speed", model, config))
            children[name].read(str)
        for name, path in peers.files.items():
            command = [peers.python, llama_peer.__file__, str(path), threads, str(context)]
            children[name] = stack.enter_context(Child(name, command))
            children[name].read(str)
        yield children


def _tokens_per_s(child: Child, task: EngineTask) -> float:
    return task.tokens * task.batch / child.ask(task, float, timeout_s=_TASK_TIMEOUT_S)


def _judge(report: Report, required: Mapping[str, float]) -> list[Gate]:
    """The ratios that were measured; those to llama.cpp are missing if it is not installed."""
    measured = [(name, least) for name, least in required.items() if report.values(name)]
    return [median_at_least(name, report.values(name), least, "times") for name, least in measured]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpeedSettings:
    tokens: int = option(48, "tokens to decode in each measurement", least=1)
    history: int = option(512, "tokens of history", least=1)
    long: int = option(4096, "tokens of a long history; 0: not measured")
    rounds: int = option(8, "rounds, in each of which every contestant is measured once", least=1)
    model: str = option(DEFAULT_MODEL, "model; llama.cpp takes part if it is a GGUF file")
    llama_python: str = option("", "Python interpreter that has llama_cpp, if this one has not")
    stream: int = option(192, "tokens of a stream through each endpoint; 0: not measured")


def _measure_decode(settings: DecodeSpeedSettings, results: Results) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results.step("loading")
        peers = find_peers(settings.llama_python, settings.model, Path(folder), results)
        ours = {dtype: _cpu_engine(dtype=dtype) for dtype in _DTYPES}
        longest = max(settings.history, settings.long) + settings.tokens + 8
        with _contestants(settings.model, ours, peers, longest) as children:
            for name, child in children.items():
                results.step(f"warming up {name}")
                _tokens_per_s(child, EngineTask("decode", settings.tokens, settings.history))
            for index in range(settings.rounds):
                results.step(f"round {index + 1}")
                _decode_round(settings, children, results)
                results.on_round()
        if settings.long:
            _measure_long_history(settings, peers, results)
    results.step("divergence")
    for dtype, value in divergence(settings.model, _DTYPES).items():
        results.figure(f"kl_{dtype}", "nats", value, "lower")
    if settings.stream:
        _measure_streams(settings, results)
    results.on_round()


def _decode_round(settings: DecodeSpeedSettings, children: Mapping[str, Child], results: Results) -> None:
    task = EngineTask("decode", settings.tokens, settings.history)
    for name, child in children.items():
        results.figure(name, "tokens/s", _tokens_per_s(child, task), "higher")
    for batch in BATCHES:
        task = EngineTask("decode", settings.tokens // 2 or 1, settings.history, batch)
        for dtype in ("int8", "int4"):
            results.figure(f"{dtype}_batch_{batch}", "tokens/s", _tokens_per_s(children[dtype], task), "higher")
            name = f"batch_{batch}_to_1" if dtype == "int8" else f"{dtype}_batch_{batch}_to_1"
            results.ratio(name, f"{dtype}_batch_{batch}", dtype, "higher")
    for peer in ("llama_file", *_QUANTISED):
        for dtype in _DTYPES:
            results.ratio(f"{dtype}_to_{peer}", dtype, peer, "higher")


def _measure_long_history(settings: DecodeSpeedSettings, peers: Peers, results: Results) -> None:
    """With processes of its own, as filling the history takes longer than everything else."""
    ours = {"int8": _cpu_engine(dtype="int8", recent=settings.long, sessions=1)}
    peers = Peers(peers.python, {name: path for name, path in peers.files.items() if name == "llama_q8_0"})
    with _contestants(settings.model, ours, peers, settings.long + settings.tokens + 8) as children:
        task = EngineTask("decode", settings.tokens // 2 or 1, settings.long)
        for name, child in children.items():
            results.step(f"{settings.long} tokens of history, {name}")
            _tokens_per_s(child, task)
        for index in range(settings.rounds):
            results.step(f"{settings.long} tokens of history, round {index + 1}")
            for name, child in children.items():
                results.figure(f"{name}_long", "tokens/s", _tokens_per_s(child, task), "higher")
            results.ratio("int8_to_llama_q8_0_long", "int8_long", "llama_q8_0_long", "higher")
            results.on_round()


def _measure_streams(settings: DecodeSpeedSettings, results: Results) -> None:
    """Beside an engine of the same window as the server's."""
    task = EngineTask("decode", settings.stream, settings.history, temperature=1.0)
    config = EngineConfig(device="cpu", dtype="int8", sessions=1)
    with started("engine_speed", settings.model, config) as child:
        child.read(str)
        _tokens_per_s(child, task)
        measure_streams(
            settings.model,
            results,
            tokens=settings.stream,
            history=settings.history,
            rounds=settings.rounds,
            alone=lambda: _tokens_per_s(child, task),
        )


def divergence(model: str, dtypes: Sequence[str]) -> dict[str, float]:
    """The mean Kullback-Leibler divergence of the next-token distributions from float32's, in nats, by dtype.

    Over 512 tokens of English text. Blocks for seconds.
    """
    text = long_text()[: 8 * _DIVERGENCE_TOKENS]
    tokens = load_tokenizer(open_model(model)).encode(text)[:_DIVERGENCE_TOKENS]
    exact = _logprobs(model, "float32", tokens)
    return {
        dtype: float((np.exp(exact) * (exact - _logprobs(model, dtype, tokens))).sum(axis=1).mean()) for dtype in dtypes
    }


def _logprobs(model: str, dtype: str, tokens: list[int]) -> NDArray[np.float64]:
    config = EngineConfig(device="cpu", dtype=dtype, sessions=1, recent=_DIVERGENCE_TOKENS, rewind_tokens=0)
    engine = build_engine(open_model(model), config)
    return log_softmax(run_chunks(engine, SlabPool(1, engine.shape).acquire(4), tokens, [_DIVERGENCE_CHUNK]))


def _judge_decode(report: Report) -> list[Gate]:
    required = {
        "batch_8_to_1": 3.0,
        "int8_to_llama_q8_0": 1.7,
        "int4_to_llama_q4_0": 1.5,
        "int4_to_llama_file": 1.5,
    }
    return _judge(report, required | {"int8_to_llama_q8_0_long": 1.7} | LEAST)


DECODE = Scenario(
    name="decode",
    needs=lambda settings: ("holdfast_sdk",) if settings.stream else (),
    about="decoded tokens/s by dtype, batch and history, compared with llama.cpp if it is installed",
    settings=DecodeSpeedSettings,
    quick={"rounds": 2, "tokens": 16, "history": 128, "long": 0, "stream": 64},
    quick_s=60,
    num_rounds=lambda settings: settings.rounds * (1 + bool(settings.long) + bool(settings.stream)) + 1,
    measure=_measure_decode,
    judge=_judge_decode,
    charts=lambda settings: [
        Chart("one stream", "bars", (*_DTYPES, "llama_q8_0", "llama_q4_0", "llama_file"), "tokens/s"),
        Chart("several streams", "bars", ("int8", *(f"int8_batch_{batch}" for batch in BATCHES)), "tokens/s"),
        Chart("one stream through an endpoint", "bars", ("engine_alone", "grpc_stream", "http_stream"), "tokens/s"),
        Chart("a long history", "bars", ("int8_long", "llama_q8_0_long"), "tokens/s"),
    ],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpeedSettings:
    tokens: int = option(512, "tokens of the prompt", least=1)
    rounds: int = option(8, "rounds, in each of which every contestant is measured once", least=1)
    model: str = option(DEFAULT_MODEL, "model; llama.cpp takes part if it is a GGUF file")
    llama_python: str = option("", "Python interpreter that has llama_cpp, if this one has not")


def _measure_prefill(settings: PrefillSpeedSettings, results: Results) -> None:
    ours = {dtype: _cpu_engine(dtype=dtype) for dtype in _DTYPES}
    ours["deterministic"] = _cpu_engine(dtype="int8", deterministic=True)
    task = EngineTask("prefill", settings.tokens)
    with tempfile.TemporaryDirectory() as folder:
        results.step("loading")
        peers = find_peers(settings.llama_python, settings.model, Path(folder), results)
        with _contestants(settings.model, ours, peers, settings.tokens + 8) as children:
            for child in children.values():
                _tokens_per_s(child, task)
            for index in range(settings.rounds):
                for name, child in children.items():
                    results.step(f"round {index + 1}, {name}")
                    results.figure(name, "tokens/s", _tokens_per_s(child, task), "higher")
                for peer in peers.files:
                    for dtype in ("int8", "int4"):
                        results.ratio(f"{dtype}_to_{peer}", dtype, peer, "higher")
                results.on_round()


PREFILL = Scenario(
    name="prefill",
    about="prompt tokens/s by dtype, compared with llama.cpp if it is installed",
    settings=PrefillSpeedSettings,
    quick={"rounds": 3, "tokens": 256},
    quick_s=20,
    num_rounds=lambda settings: settings.rounds,
    measure=_measure_prefill,
    judge=lambda report: _judge(report, {"int8_to_llama_q8_0": 3.0, "int4_to_llama_q4_0": 3.0}),
    charts=lambda settings: [
        Chart("prompt", "bars", (*_DTYPES, "deterministic", "llama_q8_0", "llama_q4_0", "llama_file"), "tokens/s")
    ],
)


async def _main(model: str, config: EngineConfig) -> None:
    contestant = Contestant(model, config)

    async def run(line: bytes) -> float:
        return contestant.run(msgspec.json.decode(line, type=EngineTask))

    await obey("ready", run)


if __name__ == "__main__":
    run_helper(_main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=EngineConfig)))
