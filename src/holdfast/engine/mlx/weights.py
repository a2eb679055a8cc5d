"""Fills a decoder from any source of named arrays, quantised the mlx-lm way or not."""

from typing import Any, Protocol

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.mlx.decoder import MLXDecoder
from holdfast.errors import ModelError
from holdfast.models import Architecture, GGUFSource, HFSource, ModelSource


class ArrayReader(Protocol):
    """Weights by their Hugging Face names."""

    def read(self, name: str) -> mx.array: ...

    def __contains__(self, name: str) -> bool: ...


class GGUFReader:
    def __init__(self, source: GGUFSource) -> None:
        self._file = source.file

    def __contains__(self, name: str) -> bool:
        return name.endswith((".weight", ".bias")) and name in self._file

    def read(self, name: str) -> mx.array:
        return mx.array(self._file.tensor(name))


class SafetensorsReader:
    """A Hugging Face or an mlx-lm directory."""

    def __init__(self, source: HFSource) -> None:
        self._checkpoint = Checkpoint(source, "numpy")

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def read(self, name: str) -> mx.array:
        path, _ = self._checkpoint.find(name)
        content: Any = mx.load(str(path))  # lazy, and not kept: an array is read when it is evaluated, and then freed
        array: mx.array = content[name]
        return array


def reader_for(source: ModelSource) -> ArrayReader:
    return GGUFReader(source) if isinstance(source, GGUFSource) else SafetensorsReader(source)


def load_decoder(reader: ArrayReader, arch: Architecture, *, dtype: mx.Dtype) -> MLXDecoder:
    """A decoder with all its weights in memory; any thread may use it. A wrong shape is refused by name.

    Norms are float32, and so is what makes logits: a bfloat16 logit is off by up to a sixteenth.
    """
    decoder = MLXDecoder(arch, dtype)
    nn.quantize(decoder, class_predicate=lambda path, module: _quantisation(reader, path, module))
    head = "model.embed_tokens." if arch.has_tied_embeddings else "lm_head."
    loaded: list[tuple[str, mx.array]] = []
    parameters: Any = tree_flatten(decoder.parameters())
    for name, expected in parameters:
        array = reader.read(name)
        if array.shape != expected.shape:
            raise ModelError(f"tensor {name} has shape {array.shape}, expected {expected.shape}")
        if mx.issubdtype(array.dtype, mx.floating):
            array = array.astype(mx.float32 if "norm." in name or name.startswith(head) else dtype)
        mx.eval(array)  # one by one, so that no more than one is in memory twice
        loaded.append((name, array))
    decoder.load_weights(loaded)
    return decoder


def _quantisation(reader: ArrayReader, path: str, module: Any) -> dict[str, int] | bool:
    """How a module's weights are packed, read off their shapes: layers may differ. False where they are plain."""
    if f"{path}.scales" not in reader:
        return False
    if f"{path}.biases" not in reader:
        raise ModelError(f"{path} is quantised in a way that is not supported; known: mlx-lm's affine")
    width = module.weight.shape[-1]
    num_groups, num_words = (reader.read(f"{path}.{part}").shape[-1] for part in ("scales", "weight"))
    return {"group_size": width // num_groups, "bits": num_words * 32 // width}
