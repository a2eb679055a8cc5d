"""Models on disk: names, files, architecture, vocabulary. No tensors on a device, no torch."""

from holdfast.models.architecture import Architecture, Routing
from holdfast.models.bundled import BUNDLED, BundledModel, ChatDefaults, chat_defaults, pull
from holdfast.models.source import GGUFSource, HFSource, ModelSource, open_model, require_plain_weights

__all__ = [
    "BUNDLED",
    "Architecture",
    "BundledModel",
    "ChatDefaults",
    "GGUFSource",
    "HFSource",
    "ModelSource",
    "Routing",
    "chat_defaults",
    "open_model",
    "pull",
    "require_plain_weights",
]
