"""Models on disk: names, files, architecture, vocabulary. No tensors on a device, no torch."""

from holdfast.models.architecture import Architecture
from holdfast.models.source import (
    BUNDLED,
    BundledModel,
    GGUFSource,
    HFSource,
    ModelSource,
    open_model,
    pull,
    require_plain_weights,
)

__all__ = [
    "BUNDLED",
    "Architecture",
    "BundledModel",
    "GGUFSource",
    "HFSource",
    "ModelSource",
    "open_model",
    "pull",
    "require_plain_weights",
]
