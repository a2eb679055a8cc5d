"""What an engine says about itself: the same for the same weights, whatever computes with them."""

import hashlib
import json

from holdfast.engine.interface import EngineInfo
from holdfast.engine.slab import SlabShape
from holdfast.errors import InvalidArgument
from holdfast.models import Architecture

_CACHE_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "int8": "bfloat16"}  # by the dtype of the weights
_ITEMSIZES = {"float32": 4, "bfloat16": 2}


def engine_info(
    name: str, arch: Architecture, *, digest: str, dtype: str, shape: SlabShape, row_invariant: bool = False
) -> EngineInfo:
    """The facts about an engine to be built; refuses what cannot be. `digest` is that of the model's files."""
    if dtype not in _CACHE_DTYPES:
        raise InvalidArgument(f"dtype {dtype!r} is not supported; choose one of {', '.join(_CACHE_DTYPES)}")
    if shape.max_pin + shape.recent > arch.context:
        raise InvalidArgument(
            f"max_pin {shape.max_pin} and recent {shape.recent} add up to more than the model's "
            f"context of {arch.context}; lower recent to {arch.context - shape.max_pin} or less"
        )
    return EngineInfo(
        name=name,
        vocab_size=arch.vocab_size,
        context=arch.context,
        num_layers=arch.num_layers,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        kv_dtype=_CACHE_DTYPES[dtype],
        kv_itemsize=_ITEMSIZES[_CACHE_DTYPES[dtype]],
        fingerprint=_fingerprint(digest, dtype, arch),
        row_invariant=row_invariant,
    )


def _fingerprint(digest: str, dtype: str, arch: Architecture) -> str:
    facts = [digest, dtype, arch.family, arch.norm_epsilon, arch.inverse_frequencies]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
