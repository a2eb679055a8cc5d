"""Models on disk: names, files, architecture, vocabulary. No tensors on a device, no torch."""

from holdfast.models.architecture import Architecture
from holdfast.models.bundled import BUNDLED, BundledModel
from holdfast.models.source import GGUFSource, HFSource, ModelSource, open_model

__all__ = [
    "BUNDLED",
    "Architecture",
    "BundledModel",
    "GGUFSource",
    "HFSource",
    "ModelSource",
    "open_model",
]
