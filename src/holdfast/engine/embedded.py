"""Builds the embedded engine from its settings."""

import importlib.util
import platform

from holdfast.config import EngineConfig
from holdfast.engine.interface import Engine
from holdfast.engine.slab import SlabShape
from holdfast.engine.window import Window
from holdfast.engine.worker import OnStep, Worker, ignore_step
from holdfast.errors import ConfigError
from holdfast.models import ModelSource


def build_engine(source: ModelSource, config: EngineConfig) -> Engine:
    """Load the model and reserve its slabs. Blocks for seconds."""
    if config.sink > config.max_pin:
        raise ConfigError(f"sink {config.sink} is more than max_pin {config.max_pin}; raise --max-pin or lower --sink")
    Window(sink=config.sink, recent=config.recent)
    shape = SlabShape(
        recent=config.recent,
        max_pin=config.max_pin,
        prefill_chunk=config.prefill_chunk,
        rewind_tokens=config.rewind_tokens,
    )
    if config.device == "mlx" or (config.device == "auto" and _is_apple_silicon() and _has_mlx()):
        return _on_mlx(source, config, shape)
    return _on_torch(source, config, shape)


def _on_torch(source: ModelSource, config: EngineConfig, shape: SlabShape) -> Engine:
    try:
        from holdfast.engine.torch import load_engine
    except ImportError as exc:
        hint = ", or on a Mac 'holdfast[mlx]'" if _is_apple_silicon() else ""
        raise ConfigError(f"the embedded engine needs torch: pip install 'holdfast[torch]'{hint}") from exc
    return load_engine(source, num_slabs=config.sessions, shape=shape, dtype=config.dtype, device=config.device)


def _on_mlx(source: ModelSource, config: EngineConfig, shape: SlabShape) -> Engine:
    try:
        from holdfast.engine.mlx import load_engine
    except ImportError as exc:
        raise ConfigError("device mlx needs MLX: pip install 'holdfast[mlx]'") from exc
    return load_engine(source, num_slabs=config.sessions, shape=shape, dtype=config.dtype)


def _is_apple_silicon() -> bool:
    return platform.system() == "Darwin" and platform.machine() == "arm64"


def _has_mlx() -> bool:
    return importlib.util.find_spec("mlx") is not None


def build_worker(source: ModelSource, config: EngineConfig, on_step: OnStep = ignore_step) -> Worker:
    """The engine on a thread of its own, not started yet."""
    return Worker(
        build_engine(source, config),
        max_batch=config.max_batch,
        max_recompute_tokens=config.max_recompute_tokens,
        on_step=on_step,
    )
