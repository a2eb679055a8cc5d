"""Builds the embedded engine from its settings."""

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
    try:
        from holdfast.engine.torch import load_engine
    except ImportError as exc:
        raise ConfigError("the embedded engine needs torch: pip install 'holdfast[torch]'") from exc
    return load_engine(source, num_slabs=config.sessions, shape=shape, dtype=config.dtype, device=config.device)


def build_worker(source: ModelSource, config: EngineConfig, on_step: OnStep = ignore_step) -> Worker:
    """The engine on a thread of its own, not started yet."""
    return Worker(
        build_engine(source, config),
        max_batch=config.max_batch,
        max_recompute_tokens=config.max_recompute_tokens,
        on_step=on_step,
    )
