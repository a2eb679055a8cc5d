"""The engine on MLX: Apple silicon, and any CPU that MLX runs on."""

from holdfast.engine.mlx.engine import MLXEngine, load_engine

__all__ = ["MLXEngine", "load_engine"]
