"""The engine in native code: CPU only, numpy for the tensors, nothing else to install."""

from holdfast.engine.native.engine import NativeEngine, fits, load_engine
from holdfast.engine.native.library import is_available

__all__ = ["NativeEngine", "fits", "is_available", "load_engine"]
