"""The ways to launch attention: split over the keys for a few queries, whole for many, and all in one for one token."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.engine.cuda.kernels.attention import (
    AttentionTile,
    Blocks,
    Splits,
    combine,
    split_attention,
    whole_attention,
)
from holdfast.engine.cuda.kernels.decode_attention import decode_attention
from holdfast.engine.cuda.kernels.launch import overlapped, power_of_two

Pair = tuple[Tensor, Tensor]
Places = tuple[Tensor, Tensor, Tensor]  # each token's position, slot and sink


class DecodeSettings(NamedTuple):
    """What a single token's attention needs to know beside its tensors."""

    recent: int
    epsilon: float
    tile: AttentionTile
    splits: Splits


_MOST_BLOCKS = 128  # in one launch: bounds the memory of partial results


def attend_split(
    queries: Pair, cache: Pair, places: Places, blocks: Blocks, splits: Splits, recent: int, tile: AttentionTile
) -> Tensor:
    """Answers [tokens, heads * dim] to queries [tokens, heads, dim], each split of the keys in a program of its own."""
    query, keys = queries[0], cache[0]
    num_tokens, heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    out = torch.empty(num_tokens, heads * dim, dtype=query.dtype, device=query.device)
    num_blocks = min(_MOST_BLOCKS, blocks.firsts.shape[0])
    parts = _parts((num_blocks, kv_heads, splits.num_places, blocks.size * group), dim, query.device)
    sizes = {"SIZE": blocks.size} | _head_sizes(heads, group, dim) | _split_sizes(tile, splits)
    for start in range(0, blocks.firsts.shape[0], num_blocks):
        firsts, counts = blocks.firsts[start : start + num_blocks], blocks.counts[start : start + num_blocks]
        split_attention[(splits.num_sink + splits.num_recent, kv_heads, firsts.shape[0])](
            *queries,
            *cache,
            *places,
            firsts,
            counts,
            *parts,
            keys.shape[2],
            recent,
            _scale(dim),
            ROWS=power_of_two(blocks.size * group, 16),
            KEYS=tile.keys,
            **sizes,
            **overlapped(tile.num_warps, tile.num_stages),
        )
        combine[(heads, blocks.size, firsts.shape[0])](
            *parts, out, *places, firsts, counts, recent, **sizes, **overlapped(4)
        )
    return out


def attend_decoded(
    qkv: Tensor,
    bias: Tensor | None,
    norms: Pair | None,
    rotations: Tensor,
    places: Places,
    cache: Pair,
    done: Tensor,
    window: DecodeSettings,
) -> Tensor:
    """Answers [rows, heads * dim] to one token a row, whose keys and values go into the slabs on the way.

    qkv: [rows, (heads + 2 kv_heads) * dim]. done: zeros, one for each row and group of heads; left as zeros.
    """
    keys = cache[0]
    num_rows, (kv_heads, capacity, dim) = qkv.shape[0], keys.shape[1:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    group, tile, splits = heads // kv_heads, window.tile, window.splits
    out = torch.empty(num_rows, heads * dim, dtype=keys.dtype, device=qkv.device)
    parts = _parts((num_rows, kv_heads, splits.num_places, group), dim, qkv.device)
    decode_attention[(splits.num_sink + splits.num_recent, kv_heads, num_rows)](
        qkv,
        qkv if bias is None else bias,
        *(norms or (qkv, qkv)),
        rotations,
        *places,
        *cache,
        *parts,
        done,
        out,
        capacity,
        window.recent,
        _scale(dim),
        window.epsilon,
        GROUP_BLOCK=power_of_two(group),
        ROWS=power_of_two(group, 16),
        KEYS=tile.keys,
        HAS_BIAS=bias is not None,
        HAS_NORM=norms is not None,
        **_head_sizes(heads, group, dim),
        **_split_sizes(tile, splits),
        **overlapped(tile.num_warps, tile.num_stages),
    )
    return out


def attend_whole(
    queries: Pair, cache: Pair, places: Places, blocks: Blocks, recent: int, tile: AttentionTile
) -> Tensor:
    """The same answers, all keys of a block in one program: for prompts, where there are blocks enough."""
    query, keys = queries[0], cache[0]
    num_tokens, heads, dim = query.shape
    group = heads // keys.shape[1]
    out = torch.empty(num_tokens, heads * dim, dtype=query.dtype, device=query.device)
    whole_attention[(keys.shape[1], blocks.firsts.shape[0])](
        *queries,
        *cache,
        *places,
        blocks.firsts,
        blocks.counts,
        out,
        keys.shape[2],
        recent,
        _scale(dim),
        ROWS=power_of_two(blocks.size * group, 16),
        KEYS=tile.keys,
        **_head_sizes(heads, group, dim),
        **overlapped(tile.num_warps, tile.num_stages),
    )
    return out


def _parts(rows: tuple[int, int, int, int], dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the mixed values, top scores and norms of splits: rows are [blocks, kv_heads, places, queries]."""
    mixed = torch.empty(*rows, dim, dtype=torch.float32, device=device)
    top, norm = torch.empty(2, *rows, dtype=torch.float32, device=device)
    return mixed, top, norm


def _head_sizes(heads: int, group: int, dim: int) -> dict[str, int]:
    return {"HEADS": heads, "GROUP": group, "DIM": dim, "DIM_BLOCK": power_of_two(dim, 16)}


def _split_sizes(tile: AttentionTile, splits: Splits) -> dict[str, int]:
    return {"SPLIT": tile.split, "NUM_SINK": splits.num_sink, "NUM_PLACES": splits.num_places}


def _scale(dim: int) -> float:
    """Scores are exponents of two."""
    return math.log2(math.e) / math.sqrt(dim)
