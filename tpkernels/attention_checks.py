"""What prefix attention refuses before anything runs, with values and remedy, and what autocast makes of its inputs.

Checks that need a position (order of slices, capacity, documents) are in the raw ops: under torch.compile the positions
are known only there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.mask import Mask
from tpkernels.prefix_cache import PrefixCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LARGEST = 2.0**126  # scale and softcap: kernels take them times log2(e) in fp32


def check_types(q: Any, k: Any, v: Any, cache: Any, sinks: Any, mask: Any) -> None:
    """TypeError for an argument of another type."""
    for name, value in (("q", q), ("k", k), ("v", v)):
        if not isinstance(value, Tensor):
            raise TypeError(f"prefix_attention: {name} is a {type(value).__name__}; it must be a torch.Tensor")
    if cache is not None and not isinstance(cache, PrefixCache):
        raise TypeError(f"prefix_attention: cache is a {type(cache).__name__}; it must be a PrefixCache or None")
    if sinks is not None and not isinstance(sinks, Tensor):
        raise TypeError(f"prefix_attention: sinks is a {type(sinks).__name__}; it must be a torch.Tensor or None")
    if not isinstance(mask, Mask):
        raise TypeError(
            f"prefix_attention: mask is a {type(mask).__name__}; it must be a tpkernels.Mask (for boolean masks see "
            "tpkernels.compat.scaled_dot_product_attention)"
        )


def check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: PrefixCache | None,
    sinks: Tensor | None,
    mask: Mask,
    scale: float | None,
    softcap: float,
) -> None:
    """ValueError for shapes, dtypes and devices that do not fit each other, the cache or the mask, and for numbers that
    fp32 cannot hold."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not (q.dim() == k.dim() == v.dim() == 4):
        raise ValueError(f"prefix_attention: q, k and v must be [batch, tokens, heads, head_dim], got {shapes}")
    if q.dtype not in DTYPES or not (q.dtype == k.dtype == v.dtype):
        raise ValueError(
            f"prefix_attention: q, k and v must share one dtype out of float32, bfloat16, float16 and float64, got "
            f"{q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not (q.device == k.device == v.device):
        raise ValueError(
            f"prefix_attention: q, k and v are on {q.device}, {k.device}, {v.device}; move them to one device"
        )
    if (
        q.shape[0] != k.shape[0]
        or k.shape[:3] != v.shape[:3]
        or q.shape[3] != k.shape[3]
        or not q.shape[3] * v.shape[3]
    ):
        raise ValueError(
            f"prefix_attention: shapes do not fit: {shapes}; q and k share batch and head_dim, k and v share batch, "
            "tokens and heads, and every head_dim is 1 or more"
        )
    query_heads, kv_heads = q.shape[2], k.shape[2]
    if (query_heads % kv_heads if kv_heads else query_heads) != 0:
        raise ValueError(
            f"prefix_attention: {query_heads} query heads cannot be shared out over {kv_heads} KV heads; the number of "
            "query heads must be a multiple of the number of KV heads"
        )
    # Comparisons, since torch.compile(dynamic=True) makes numbers symbolic, and math.isfinite takes no such number.
    if scale is not None and not -LARGEST < scale < LARGEST:
        raise ValueError(f"prefix_attention: scale is {scale}; it must be finite in fp32, below {LARGEST:.2g}")
    if not (softcap == 0 or 1 / LARGEST < softcap < LARGEST):
        raise ValueError(
            f"prefix_attention: softcap is {softcap}; it must be 0 (off) or positive and finite in fp32, from "
            f"{1 / LARGEST:.2g} to {LARGEST:.2g}"
        )
    if sinks is not None and (list(sinks.shape) != [query_heads] or sinks.device != q.device):
        raise ValueError(
            f"prefix_attention: sinks is {list(sinks.shape)} on {sinks.device}; it needs one value per query head, "
            f"[{query_heads}] on {q.device}"
        )
    starts = mask.document_starts
    if starts is not None and ((starts.shape[0] != 1 and starts.shape[0] != q.shape[0]) or starts.device != q.device):
        raise ValueError(
            f"prefix_attention: the mask's document_starts has {starts.shape[0]} rows on {starts.device}; it needs "
            f"{q.shape[0]} (the batch) or 1 on {q.device}"
        )
    if cache is None:
        return
    if k.shape[1] != q.shape[1]:
        raise ValueError(
            f"prefix_attention: with a cache, q, k and v are the same slice, got {q.shape[1]} queries and {k.shape[1]} "
            "keys"
        )
    for name, own, stored in (("k", k, cache.k), ("v", v, cache.v)):
        if own.shape[0] != stored.shape[0] or own.shape[2:] != stored.shape[2:]:
            raise ValueError(
                f"prefix_attention: {name} is {list(own.shape)} but the cache holds {list(stored.shape)}; batch, heads "
                "and head_dim must be equal"
            )
        if own.dtype != stored.dtype or own.device != stored.device:
            raise ValueError(
                f"prefix_attention: {name} is {own.dtype} on {own.device} but the cache holds {stored.dtype} on "
                f"{stored.device}; make PrefixCache with dtype={own.dtype}, device={str(own.device)!r}"
            )


def autocast_inputs(q: Tensor, k: Tensor, v: Tensor, cache: PrefixCache | None) -> list[Tensor]:
    """What autocast does to scaled_dot_product_attention: 32-bit inputs take the autocast dtype, or the cache's."""
    dtype = torch.get_autocast_dtype(q.device.type) if cache is None else cache.dtype
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v)]
