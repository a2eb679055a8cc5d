"""Builds the engine and its worker from the settings: which device, which dtype, who drafts tokens."""

import dataclasses
import importlib.util
import os
import platform
from functools import partial
from pathlib import Path
from typing import Literal

from holdfast.config import EngineConfig
from holdfast.engine import native
from holdfast.engine.interface import Engine
from holdfast.engine.lora import is_lora
from holdfast.engine.slab import SlabShape
from holdfast.engine.speculation import DraftModel, NGram, Proposer, Speculator
from holdfast.engine.update import checked, open_weights_at, write
from holdfast.engine.weights import open_weights
from holdfast.engine.window import Window
from holdfast.engine.worker import OnStep, Worker, ignore_step
from holdfast.errors import ConfigError
from holdfast.extras import HOW_TO_BUILD, how_to_install
from holdfast.models import Architecture, ModelSource, open_model

Device = Literal["cpu", "cuda", "mlx"]

DRAFT_PIN = 4  # tokens that the engine which drafts may pin
_MAX_THREADS_A_CORE = 16


def build_engine(source: ModelSource, config: EngineConfig) -> Engine:
    """Load the model and reserve its slabs. Blocks for seconds."""
    if config.sink > config.max_pin:
        raise ConfigError(f"sink {config.sink} is more than max_pin {config.max_pin}; raise --max-pin or lower --sink")
    Window(sink=config.sink, recent=config.recent)  # raises InvalidArgument where they do not fit together
    if config.threads > (limit := _MAX_THREADS_A_CORE * (os.cpu_count() or 1)):
        raise ConfigError(f"threads must be {limit} or less on this machine, got {config.threads}")
    build = {"mlx": _on_mlx, "cuda": _on_cuda, "cpu": _on_cpu}[device_of(config)]
    engine = build(source, config, slab_shape(config))
    engine.base_weights = partial(open_weights, source, for_mlx=device_of(config) == "mlx")
    if config.lora:
        _merge_adapter(engine, Path(config.lora).expanduser())
    return engine


def _merge_adapter(engine: Engine, folder: Path) -> None:
    """As new weights for an engine that has not computed anything."""
    if not is_lora(folder):
        raise ConfigError(f"--lora {folder} is not a LoRA adapter: it has no adapter_config.json")
    write(engine, checked(open_weights_at(folder, engine), engine), version="", keeps_caches=False)


def device_of(config: EngineConfig) -> Device:
    """The device that `--device` means on this machine."""
    if config.device == "mlx" or (config.device == "auto" and _is_apple_silicon() and _has_mlx()):
        return "mlx"
    return "cuda" if config.device == "cuda" or (config.device == "auto" and _has_cuda()) else "cpu"


def slab_shape(config: EngineConfig) -> SlabShape:
    return SlabShape(
        recent=config.recent,
        max_pin=config.max_pin,
        prefill_chunk=config.prefill_chunk,
        draft_length=config.draft_length,
        rewind_tokens=config.rewind_tokens,
    )


def draft_config(config: EngineConfig) -> EngineConfig:
    """The settings of the engine that drafts tokens: as many slabs, but no more in them than a draft needs."""
    return dataclasses.replace(config, max_pin=min(config.max_pin, DRAFT_PIN), rewind_tokens=0, dtype="auto", lora="")


def resolved_dtype(asked: str, arch: Architecture, device: str) -> str:
    """The dtype that `--dtype` means for a model on cpu, cuda or mlx."""
    if asked != "auto":
        return asked
    return "int8" if device == "cpu" and is_native(arch, "int8") else "bfloat16"


def has_exact_engine(source: ModelSource, config: EngineConfig) -> bool:
    """Whether the engine has `--deterministic`: only the native and the Triton engine do."""
    device = device_of(config)
    if device == "cuda":
        return importlib.util.find_spec("triton") is not None and _has_cuda()
    return device == "cpu" and is_native(source.architecture, "int8")


def is_native(arch: Architecture, dtype: str) -> bool:
    """Whether the native engine runs such a model on the CPU."""
    return native.is_available() and native.fits(arch, dtype)


def _on_cpu(source: ModelSource, config: EngineConfig, shape: SlabShape) -> Engine:
    """The native engine; torch where it was not built or cannot compute the model."""
    dtype = resolved_dtype(config.dtype, source.architecture, "cpu")
    if "fp8" in (dtype, config.kv_dtype):
        flag = "--dtype" if dtype == "fp8" else "--kv-dtype"
        raise ConfigError(f"{flag} fp8 needs a CUDA device; on the CPU leave it out")
    if is_native(source.architecture, dtype):
        return native.load_engine(
            source,
            num_slabs=config.sessions,
            shape=shape,
            dtype=dtype,
            deterministic=config.deterministic,
            num_threads=config.threads,
        )
    if setting := _special_setting(dtype, config):
        raise ConfigError(f"on this CPU {setting} needs the native engine; {HOW_TO_BUILD}")
    return _on_torch(source, config, shape, dtype=dtype, device="cpu")


def _on_cuda(source: ModelSource, config: EngineConfig, shape: SlabShape) -> Engine:
    """The engine with Triton kernels; torch where Triton is not installed."""
    dtype = resolved_dtype(config.dtype, source.architecture, "cuda")
    if dtype in ("int8", "int4"):
        raise ConfigError(f"dtype {dtype} is for the CPU; with --device cuda use --dtype fp8 or bfloat16")
    if importlib.util.find_spec("triton") and _has_cuda():
        from holdfast.engine.cuda import load_engine

        return load_engine(
            source,
            num_slabs=config.sessions,
            shape=shape,
            dtype=dtype,
            kv_dtype=config.kv_dtype,
            deterministic=config.deterministic,
        )
    if setting := _special_setting(dtype, config):
        raise ConfigError(f"on CUDA {setting} needs Triton: pip install triton")
    return _on_torch(source, config, shape, dtype=dtype, device="cuda")


def _on_torch(source: ModelSource, config: EngineConfig, shape: SlabShape, *, dtype: str, device: str) -> Engine:
    try:
        from holdfast.engine.torch import load_engine
    except ImportError as exc:
        hint = "; on a Mac, --device mlx needs no torch" if _is_apple_silicon() else ""
        raise ConfigError(f"this engine needs torch; {how_to_install('torch')}{hint}") from exc
    return load_engine(source, num_slabs=config.sessions, shape=shape, dtype=dtype, device=device)


def _on_mlx(source: ModelSource, config: EngineConfig, shape: SlabShape) -> Engine:
    if setting := _special_setting(config.dtype, config):
        raise ConfigError(f"device mlx does not support {setting}; use --device cpu")
    try:
        from holdfast.engine.mlx import load_engine
    except ImportError as exc:
        raise ConfigError(f"device mlx needs MLX; {how_to_install('mlx')}") from exc
    dtype = resolved_dtype(config.dtype, source.architecture, "mlx")
    return load_engine(source, num_slabs=config.sessions, shape=shape, dtype=dtype)


def _special_setting(dtype: str, config: EngineConfig) -> str | None:
    """The setting that only the native or the Triton engine supports, if there is one."""
    if dtype in ("int8", "int4", "fp8"):
        return f"dtype {dtype}"
    if config.kv_dtype != "auto":
        return f"--kv-dtype {config.kv_dtype}"
    return "--deterministic" if config.deterministic else None


def _has_cuda() -> bool:
    """Imports torch only where there may be a device: the native engine does not need that second."""
    if importlib.util.find_spec("torch") is None or not any(Path("/dev").glob("nvidia[0-9]*")):
        return False
    import torch

    return torch.cuda.is_available()


def _is_apple_silicon() -> bool:
    return platform.system() == "Darwin" and platform.machine() == "arm64"


def _has_mlx() -> bool:
    return importlib.util.find_spec("mlx") is not None


def build_speculator(engine: Engine, config: EngineConfig) -> Speculator | None:
    """The configured source of drafts for `engine`; None: no speculation."""
    proposer: Proposer
    wanted = config.proposer
    if wanted == "auto":
        wanted = "ngram" if isinstance(engine, native.NativeEngine) else "none"
    if wanted == "none" or not config.draft_length:
        return None
    if wanted == "draft_model":
        if not config.draft_model:
            raise ConfigError("--proposer draft_model needs --draft-model, a smaller model with the same vocabulary")
        small = build_engine(open_model(config.draft_model), draft_config(config))
        proposer = DraftModel(small, vocab_size=engine.info.vocab_size)
    else:
        proposer = NGram()
    return Speculator(proposer, draft_length=config.draft_length, row_cost=engine.info.row_cost)


def build_worker(source: ModelSource, config: EngineConfig, on_step: OnStep = ignore_step) -> Worker:
    """The engine on a thread of its own, not started yet."""
    engine = build_engine(source, config)
    return Worker(
        engine,
        max_batch=config.max_batch,
        max_recompute_tokens=config.max_recompute_tokens,
        speculator=build_speculator(engine, config),
        on_step=on_step,
    )
