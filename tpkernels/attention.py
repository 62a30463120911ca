"""prefix_attention: attention of a slice over the prefix in a cache; its backward works through the cache.

q [batch, tokens, query_heads, head_dim], k and v [batch, tokens, kv_heads, head_dim | value_head_dim] ->
out [batch, tokens, query_heads, value_head_dim]. From here down: what is refused (attention_checks.py), the nodes of
the graph (attention_autograd.py), and the two raw ops that choose a backend and run it (attention_ops.py).
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from tpkernels import backends
from tpkernels.attention_autograd import attend
from tpkernels.attention_checks import autocast_inputs, check_shapes, check_types
from tpkernels.attention_ops import Settings, autocasts
from tpkernels.mask import CAUSAL, Mask
from tpkernels.prefix_cache import PrefixCache, accumulator_dtype


@overload
def prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: PrefixCache | None = None,
    *,
    start: int | None = None,
    mask: Mask = CAUSAL,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: PrefixCache | None = None,
    *,
    start: int | None = None,
    mask: Mask = CAUSAL,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: PrefixCache | None = None,
    *,
    start: int | None = None,
    mask: Mask = CAUSAL,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a slice of tokens over the prefix in `cache` and over itself, differentiable through the cache.

    q [batch, tokens, query_heads, head_dim]; k [batch, tokens, kv_heads, head_dim], v [batch, tokens, kv_heads,
    value_head_dim] -> out [batch, tokens, query_heads, value_head_dim]; with return_lse also lse fp32 [batch,
    query_heads, tokens] (natural log, includes the sink, not differentiable). fp32, bf16, fp16 (fp64 in the oracle).
    Query head h uses KV head h // (query_heads // kv_heads).

    cache: k and v are written at `start` (default: the cache's length, an append; or see PrefixCache.recomputing). A
        range that is already present is a recomputation: it writes nothing and reads the cache. Without a cache k and v
        hold all keys, any number, and the last query sees the last key (start = keys - tokens, as flash-attn >= 2.1).
    mask: see Mask; scale: default head_dim ** -0.5; softcap: scores become softcap * tanh(score / softcap); sinks
        [query_heads]: adds exp(sink) to the softmax denominator, with a gradient in fp32.
    Scores are fp32: what they lose from 1e5 on their gradients lose too, and from about 1e9 on a row may be NaN.
    deterministic: any slicing gives bitwise the same out, lse and dq; see invariance_unit for dk and dv.
    backend: a name of the registry, else TPK_BACKEND, else the first that fits.

    Backward: run the slices last to first, every one: each adds to the cache's accumulators for all keys it saw, and
    returns the final gradient of its own k and v, rounded once to the model dtype. A loss that leaves out the first
    slices must take them in with weight 0 (`loss + 0 * out.sum()`), or what later slices add for their keys is lost.

    Raises ValueError, with the values, for shapes, dtypes, devices or heads that do not fit, slices or backwards out of
    order, exceeded capacity, or when no backend serves the call; TypeError for an argument of another type. After an
    error the cache is unchanged. NotImplementedError for what has no meaning here: torch.vmap, forward-mode and second
    derivatives, torch.func.grad through a cache.
    """
    check_types(q, k, v, cache, sinks, mask)
    if start is None and cache is not None:
        start = cache.recomputed_start
    if autocasts(q.device.type):
        q, k, v = autocast_inputs(q, k, v, cache)
    check_shapes(q, k, v, cache, sinks, mask, scale, softcap)
    if cache is None and start is not None and start != k.shape[1] - q.shape[1]:
        raise ValueError(
            f"prefix_attention: start={start} without a cache, where it is keys - queries = {k.shape[1]} - "
            f"{q.shape[1]} = {k.shape[1] - q.shape[1]}; leave it out, or pass the prefix in a PrefixCache"
        )
    if sinks is not None:
        sinks = sinks.to(accumulator_dtype(q.dtype))
    settings = Settings(
        mask.causal,
        mask.window_left,
        mask.window_right,
        q.shape[3] ** -0.5 if scale is None else float(scale),
        float(softcap),
        deterministic,
        backend or "",
    )
    out, lse = attend(q, k, v, sinks, mask.document_starts, cache, start=start, settings=settings)
    return (out, lse) if return_lse else out


def invariance_unit(
    *,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    value_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    mask: Mask = CAUSAL,
    softcap: float = 0.0,
    sinks: bool = False,
    backend: str | None = None,
) -> int:
    """Tokens: with deterministic=True, slicing at multiples of this gives bitwise the same dk and dv as no slicing.

    (out, lse and dq are bitwise the same for any slicing.) Raises ValueError when no backend serves such a call.
    """
    device = torch.device(device)
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    call = backends.AttentionCall(
        device_type=device.type,
        dtype=dtype,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim if value_head_dim is None else value_head_dim,
        window=mask.window_left >= 0 or mask.window_right >= 0,
        softcap=softcap != 0,
        sinks=sinks,
        documents=mask.document_starts is not None,
        deterministic=True,
        device_index=index or 0,
    )
    return backends.select(call, backend).invariance_unit(call)
