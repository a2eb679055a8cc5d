"""Models on disk: names, files, architecture, vocabulary. No tensors on a device, no torch."""

from holdfast.models.architecture import Architecture
from holdfast.models.source import (
    BUNDLED,
    BundledModel,
    ChatDefaults,
    GGUFSource,
    HFSource,
    ModelSource,
    chat_defaults,
    open_model,
    pull,
    require_plain_weights,
)

__all__ = [
    "BUNDLED",
    "Architecture",
    "BundledModel",
    "ChatDefaults",
    "GGUFSource",
    "HFSource",
    "ModelSource",
    "chat_defaults",
    "open_model",
    "pull",
    "require_plain_weights",
]
