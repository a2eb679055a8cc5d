"""The engine on PyTorch: CPU and CUDA."""

from holdfast.engine.torch.engine import TorchEngine, load_engine

__all__ = ["TorchEngine", "load_engine"]
