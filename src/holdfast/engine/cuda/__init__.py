"""The engine on CUDA: Triton kernels over the slabs, one CUDA graph per bucket of rows."""

from holdfast.engine.cuda.engine import CudaEngine, load_engine

__all__ = ["CudaEngine", "load_engine"]
