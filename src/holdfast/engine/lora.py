"""LoRA adapters as PEFT writes them, merged into the weights of their base model in float32."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.weights import TensorFile, WeightSource, as_float32
from holdfast.errors import ModelError

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
# What changes a merge and is not done here, with the values that mean that it is not used.
_REFUSED: dict[str, tuple[object, ...]] = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (None, False),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    # Others change the base model, too.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}


def is_lora(folder: Path) -> bool:
    return (folder / _CONFIG).is_file()


class LoraWeights:
    """The tensors of `base`, those that the adapter changes merged: W + scale * B @ A."""

    def __init__(self, base: WeightSource, folder: Path) -> None:
        """Raises ModelError where the adapter has something that cannot be merged."""
        self._base = base
        self._alpha, self._is_stabilised = _read_config(folder / _CONFIG)
        self._file = TensorFile(folder / _WEIGHTS, is_mapped=False)
        names = set(self._file.names)
        modules = {name.removesuffix(_A).removesuffix(_B) for name in names}
        for name in sorted(names ^ {module + part for module in modules for part in (_A, _B)}):
            raise ModelError(f"{folder}: tensor {name} has no counterpart, or is not part of a plain LoRA adapter")
        if not modules:
            raise ModelError(f"{folder / _WEIGHTS} has no tensors")
        self._modules = {f"{module.removeprefix(_PREFIX)}.weight": module for module in modules}

    @property
    def targets(self) -> list[str]:
        """The tensors of the base model that the adapter changes."""
        return sorted(self._modules)

    @property
    def digest(self) -> str:
        """Of the adapter alone."""
        return f"lora {self._file.checksum():08x} {self._alpha} {self._is_stabilised} {self.targets}"

    def __contains__(self, name: str) -> bool:
        return name in self._base

    def tensor(self, name: str) -> NDArray[np.generic]:
        if name not in self._modules:
            return self._base.tensor(name)
        if name not in self._base:
            raise ModelError(f"the adapter changes {name}, which is not one of this model's tensors")
        module = self._modules[name]
        down, up = (as_float32(self._file.tensor(module + part)) for part in (_A, _B))
        weight = as_float32(self._base.tensor(name))
        rank = len(down)
        if weight.ndim != 2 or (up.shape, down.shape) != ((len(weight), rank), (rank, weight.shape[1])):
            raise ModelError(
                f"the adapter's {module} has shapes {up.shape} and {down.shape}, which do not fit {name} {weight.shape}"
            )
        scale = self._alpha / (math.sqrt(rank) if self._is_stabilised else rank)
        return weight + np.float32(scale) * (up @ down)


def _read_config(path: Path) -> tuple[float, bool]:
    """lora_alpha, and whether it is divided by the root of the rank (rslora)."""
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
        kind, alpha = config.get("peft_type"), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ModelError(f"{path} is not a readable LoRA configuration: {exc}") from exc
    if kind != "LORA" or not math.isfinite(alpha):
        raise ModelError(f"{path}: peft_type {kind!r} with lora_alpha {alpha:g} cannot be merged; only LORA can")
    for name, unused in _REFUSED.items():
        if config.get(name) not in unused:
            raise ModelError(f"{path}: {name} {config[name]!r} is not supported; merge the adapter with PEFT first")
    return alpha, bool(config.get("use_rslora"))
