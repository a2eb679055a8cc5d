"""Those who compute side by side: our engine in its dtypes and, where it is there, llama.cpp with the same weights."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.bench import llama_peer
from holdfast.bench.contestant import EngineSetup, EngineTask
from holdfast.bench.processes import Child, ProcessFailed
from holdfast.errors import ConfigError
from holdfast.models import GGUFSource, open_model

_START_S = 300.0
_ORDER_S = 600.0
_QUANTISE = """
import ctypes, sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.allow_requantize = int(sys.argv[3]), True
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params)))
"""
_Q8_0 = "7"

NO_PEERS = "llama.cpp is not installed here: no peer took part"


@dataclass(frozen=True, slots=True)
class Peers:
    """llama.cpp's builds of one model, by name; empty where it is not there."""

    python: str
    files: dict[str, Path]


def find_peers(python: str, model: str, folder: Path) -> Peers:
    """`python` (empty: this one) and what it can run of `model`: the file itself, and the same in eight bits."""
    chosen = python or sys.executable
    source = open_model(model)
    has_it = subprocess.run([chosen, "-c", "import llama_cpp"], capture_output=True, check=False).returncode == 0
    if not isinstance(source, GGUFSource) or not has_it:
        if python:
            raise ConfigError(f"{python} has no llama_cpp, or the model is no GGUF file; leave --llama-python out")
        return Peers(chosen, {})
    eight = folder / "q8_0.gguf"
    command = [chosen, "-c", _QUANTISE, str(source.path), str(eight), _Q8_0]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise ProcessFailed(f"llama.cpp could not make eight bits of {source.path}:\n{made.stderr[-500:]}")
    return Peers(chosen, {"llama_file": source.path, "llama_q8_0": eight})


@contextlib.contextmanager
def contesting(ours: dict[str, EngineSetup], peers: Peers, context: int) -> Iterator[dict[str, Child]]:
    """All of them, loaded and waiting for orders."""
    threads = str(len(os.sched_getaffinity(0)))
    commands = {
        name: [sys.executable, "-m", "holdfast.bench.contestant", msgspec.json.encode(setup).decode()]
        for name, setup in ours.items()
    }
    for name, path in peers.files.items():
        commands[name] = [peers.python, llama_peer.__file__, str(path), threads, str(context)]
    with contextlib.ExitStack() as stack:
        children = {}
        for name, command in commands.items():
            children[name] = stack.enter_context(_child(name, command))
            children[name].read(str, timeout_s=_START_S)
        yield children


@contextlib.contextmanager
def _child(name: str, command: list[str]) -> Iterator[Child]:
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
    )
    child = Child(name, process, errors)
    try:
        yield child
    finally:
        child.close()


def seconds(child: Child, order: EngineTask) -> float:
    return child.ask(order, float, timeout_s=_ORDER_S)


def what_runs(peers: Peers) -> str:
    """The version of llama.cpp's package, for the report."""
    asked = subprocess.run(
        [peers.python, "-c", "import json, llama_cpp; print(json.dumps(llama_cpp.__version__))"],
        capture_output=True,
        text=True,
        check=False,
    )
    return str(json.loads(asked.stdout)) if asked.returncode == 0 else ""
