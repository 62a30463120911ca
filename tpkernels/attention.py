"""prefix_attention: attention of a token slice over the prefix in a cache, with a backward that works through the cache.

q [batch, tokens, query_heads, head_dim], k and v [batch, tokens, kv_heads, head_dim | value_head_dim] -> out [batch, tokens,
query_heads, value_head_dim]. Two raw mutating ops in torch.library run the backend chosen by the registry; one
autograd.Function ties them together. A mutating op may not have an autograd formula, and cache tensors may not go
through save_for_backward (the next slice's write would fail its version check), hence the plain ctx attributes.

The one trap: where a slice starts is known only when the op runs (the cache's position is an int64 CPU tensor), so
everything that depends on it is checked inside the ops, which also makes torch.compile(fullgraph=True) work.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from tpkernels import backends
from tpkernels.mask import CAUSAL, Mask, RawMask
from tpkernels.prefix_cache import (
    BACKWARD_END,
    GENERATION,
    IDENTITY,
    LENGTH,
    OWNER,
    PRELOADED,
    PrefixCache,
    accumulator_dtype,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# --------------------------------------------------------------------------------------------------------------------
# What both ops share
# --------------------------------------------------------------------------------------------------------------------


def _call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: RawMask, softcap: float, deterministic: bool):
    return backends.AttentionCall(
        device_type=q.device.type,
        dtype=q.dtype,
        query_heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        value_head_dim=v.shape[3],
        window=mask.window_left >= 0 or mask.window_right >= 0,
        softcap=softcap != 0,
        sinks=sinks is not None,
        documents=mask.document_starts is not None,
        deterministic=deterministic,
    )


def _raw_mask(
    causal: bool, left: int, right: int, document_starts: Tensor | None, start: int, batch: int, tokens: int
) -> RawMask:
    """The mask of query rows [start, start + tokens). Rows before position 0 see no document start."""
    rows = None
    if document_starts is not None:
        if start + tokens > document_starts.shape[1]:
            raise ValueError(
                f"prefix_attention: queries end at position {start + tokens}, but the mask's document_starts covers "
                f"{document_starts.shape[1]} positions"
            )
        rows = document_starts[:, max(start, 0) : start + tokens]
        if start < 0:
            rows = torch.nn.functional.pad(rows, (tokens - rows.shape[1], 0))
        rows = rows.expand(batch, tokens).contiguous()
    return RawMask(causal, left, right, rows)


def _last_dim_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _range(start: int, tokens: int) -> str:
    return f"[{start}, {start + tokens})"


# --------------------------------------------------------------------------------------------------------------------
# Forward op
# --------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "tpkernels::prefix_attention_forward",
    mutates_args=("cache_k", "cache_v", "position"),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? document_starts, Tensor(a!)? cache_k, Tensor(b!)? cache_v,"
        " Tensor(c!)? position, SymInt? start, bool causal, SymInt window_left, SymInt window_right, float scale,"
        " float softcap, bool deterministic, str backend) -> (Tensor, Tensor, Tensor)"
    ),
)
def forward_op(
    q,
    k,
    v,
    sinks,
    document_starts,
    cache_k,
    cache_v,
    position,
    start,
    causal,
    window_left,
    window_right,
    scale,
    softcap,
    deterministic,
    backend,
):
    """-> out [B, T, Hq, Dv], lse [B, Hq, T], record int64 CPU [start, cache generation]. Errors leave the cache unchanged."""
    batch, tokens, query_heads, _ = q.shape
    generation = 0
    append = False
    if position is None:
        start = k.shape[1] - tokens
    else:
        start, append = _check_forward(position, start, tokens, cache_k.shape[1])
        generation = int(position[GENERATION])
    mask = _raw_mask(causal, window_left, window_right, document_starts, start, batch, tokens)
    chosen = backends.select(_call(q, k, v, sinks, mask, softcap, deterministic), backend)

    if position is not None:
        end = start + tokens
        if append:
            cache_k[:, start:end].copy_(k)
            cache_v[:, start:end].copy_(v)
        k, v = cache_k[:, :end], cache_v[:, :end]
    out = q.new_empty(batch, tokens, query_heads, v.shape[3])
    lse = torch.empty(batch, query_heads, tokens, dtype=accumulator_dtype(q.dtype), device=q.device)
    if out.numel() or lse.numel():
        if k.shape[1] == 0:  # no key at all: every row is empty
            out.zero_()
            lse.copy_(lse.new_tensor(-math.inf) if sinks is None else sinks[:, None])
        else:
            with torch.autocast(q.device.type, enabled=False):
                chosen.forward(
                    *(_last_dim_contiguous(x) for x in (q, k, v)),
                    out=out,
                    lse=lse,
                    start=start,
                    mask=mask,
                    scale=scale,
                    softcap=softcap,
                    sinks=sinks,
                    deterministic=deterministic,
                )
    if append:
        position[LENGTH] = start + tokens
        position[BACKWARD_END] = start + tokens
    return out, lse, torch.tensor([start, generation], dtype=torch.int64)


@forward_op.register_fake
def _(q, k, v, sinks, document_starts, cache_k, cache_v, position, start, *settings):
    batch, tokens, query_heads, _ = q.shape
    lse = torch.empty(batch, query_heads, tokens, dtype=accumulator_dtype(q.dtype), device=q.device)
    record = torch.empty(2, dtype=torch.int64, device="cpu")
    return q.new_empty(batch, tokens, query_heads, v.shape[3]), lse, record


def _check_forward(position: Tensor, start: int | None, tokens: int, capacity: int) -> tuple[int, bool]:
    """(start, whether the slice is appended; else it is a recomputation)."""
    length, backward_end, *_ = position.tolist()
    if start is None:
        if torch._C._current_graph_task_id() != -1:
            raise ValueError(
                "prefix_attention: a slice is recomputed inside a backward (activation checkpointing), where its place is "
                "not the cache's length any more; pass start= to prefix_attention"
            )
        start = length
    end = start + tokens
    if start < 0:
        raise ValueError(f"prefix_attention: slice starts at {start}; with a cache, positions start at 0")
    if end <= length and start < length:
        return start, False
    if start > length:
        raise ValueError(
            f"prefix_attention: slice starts at {start} but the cache holds {length} tokens; run the slices of a sequence "
            "in order"
        )
    if start < length:
        raise ValueError(
            f"prefix_attention: slice {_range(start, tokens)} is only partly in the cache, which holds {length} tokens; "
            f"start at {length} to append, or recompute a range inside [0, {length})"
        )
    if end > capacity:
        raise ValueError(
            f"prefix_attention: slice {_range(start, tokens)} needs {end} tokens but the cache's capacity is {capacity}; "
            "make PrefixCache with a larger capacity, or reset() it for the next sequence"
        )
    if backward_end < length:
        raise ValueError(
            f"prefix_attention: slice {_range(start, tokens)} would be appended to a cache whose backward has reached "
            f"{backward_end} of {length} tokens; finish the backward, then reset() the cache before the next forward"
        )
    return start, True


# --------------------------------------------------------------------------------------------------------------------
# Backward op
# --------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "tpkernels::prefix_attention_backward",
    mutates_args=("position", "dk_sum", "dv_sum", "state"),
    schema=(
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor record, Tensor? sinks,"
        " Tensor? document_starts, Tensor(a!)? position, Tensor(b!)? dk_sum, Tensor(c!)? dv_sum, Tensor(d!)? state,"
        " bool causal, SymInt window_left, SymInt window_right, float scale, float softcap, bool deterministic,"
        " str backend) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def backward_op(
    dout,
    q,
    k,
    v,
    out,
    lse,
    record,
    sinks,
    document_starts,
    position,
    dk_sum,
    dv_sum,
    state,
    causal,
    window_left,
    window_right,
    scale,
    softcap,
    deterministic,
    backend,
):
    """-> dq, dk, dv of the slice's own tokens, dsinks [Hq] (empty without sinks).

    With a cache, k and v are the whole cache. Errors leave cache and accumulator unchanged.
    """
    batch, tokens = q.shape[:2]
    start, generation = record.tolist()
    end = start + tokens
    first = False
    preloaded = 0
    if position is not None and tokens == 0:  # no place in the order of the slices: nothing to add, nothing to check
        return q.new_empty(q.shape), k.new_empty(k[:, :0].shape), v.new_empty(v[:, :0].shape), _new_dsinks(q, sinks)
    if position is not None:
        first = _check_backward(position, state, start, tokens, generation)
        preloaded = int(state[PRELOADED])
        k, v = k[:, :end], v[:, :end]
    mask = _raw_mask(causal, window_left, window_right, document_starts, start, batch, tokens)
    chosen = backends.select(_call(q, k, v, sinks, mask, softcap, deterministic), backend)

    sums = accumulator_dtype(q.dtype)
    if position is None:
        dk = torch.zeros(k.shape, dtype=sums, device=k.device)
        dv = torch.zeros(v.shape, dtype=sums, device=v.device)
    else:
        dk, dv = dk_sum[:, :end], dv_sum[:, :end]
        if first:
            dk[:, preloaded:].zero_()
            dv[:, preloaded:].zero_()
            state[OWNER] = position[IDENTITY]
            state[PRELOADED] = 0
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dsinks = _new_dsinks(q, sinks)
    if dq.numel() and k.shape[1]:
        with torch.autocast(q.device.type, enabled=False):
            chosen.backward(
                *(_last_dim_contiguous(x) for x in (dout, q, k, v)),
                out,
                lse,
                dq=dq,
                dk=dk,
                dv=dv,
                dsinks=None if sinks is None else dsinks,
                start=start,
                mask=mask,
                scale=scale,
                softcap=softcap,
                sinks=sinks,
                deterministic=deterministic,
            )
    else:
        dq.zero_()
    if position is None:
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks
    position[BACKWARD_END] = start
    if start == 0:
        state[OWNER] = 0
    # Rows of this slice are final: every later slice has added to them. Rounded once.
    own_k = dk[:, start:].to(k.dtype, memory_format=torch.contiguous_format, copy=True)
    own_v = dv[:, start:].to(v.dtype, memory_format=torch.contiguous_format, copy=True)
    return dq, own_k, own_v, dsinks


@backward_op.register_fake
def _(dout, q, k, v, out, lse, record, sinks, document_starts, position, dk_sum, dv_sum, state, *settings):
    keys = k.shape[1] if position is None else q.shape[1]
    dk = k.new_empty(k.shape[0], keys, *k.shape[2:])
    dv = v.new_empty(v.shape[0], keys, *v.shape[2:])
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), dk, dv, _new_dsinks(q, sinks)


def _new_dsinks(q: Tensor, sinks: Tensor | None) -> Tensor:
    return torch.zeros(0 if sinks is None else q.shape[2], dtype=accumulator_dtype(q.dtype), device=q.device)


def _check_backward(position: Tensor, state: Tensor, start: int, tokens: int, generation: int) -> bool:
    """Whether this is the first backward of the cache's tokens (the last slice's)."""
    length, backward_end, current, identity = position.tolist()
    owner, preloaded = state.tolist()
    end = start + tokens
    if generation != current:
        raise ValueError(
            f"prefix_attention: backward of slice {_range(start, tokens)}, whose cache was reset() after its forward; run "
            "the backward of every slice before reset()"
        )
    first = end == length and backward_end in (length, 0)
    if not first and end != backward_end:
        reached = f"[{backward_end}, ...)" if backward_end < length else "no slice"
        raise ValueError(
            f"prefix_attention: backward of slice {_range(start, tokens)} out of order: the next must be the slice that "
            f"ends at {backward_end or length}, [..., {backward_end or length}); backward has run for {reached} of "
            f"{length} tokens. Run the backward of the slices last to first, each once"
        )
    if first and owner not in (0, identity):
        raise ValueError(
            f"prefix_attention: backward of slice {_range(start, tokens)} of cache {identity} would start while the "
            f"backward of cache {owner} is unfinished in the same GradientAccumulator; finish that one first, or give it "
            "up with reset() of that cache or of the accumulator"
        )
    if not first and owner != identity:
        raise ValueError(
            f"prefix_attention: backward of slice {_range(start, tokens)} of cache {identity}: its GradientAccumulator "
            "was reset or used by another cache meanwhile; rerun the forward after reset() of the cache"
        )
    if first and preloaded > end:
        raise ValueError(
            f"prefix_attention: {preloaded} rows were preloaded into the GradientAccumulator but the cache holds {end} "
            "tokens; preload at most as many rows"
        )
    return first


# --------------------------------------------------------------------------------------------------------------------
# Autograd and the public function
# --------------------------------------------------------------------------------------------------------------------


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, sinks, document_starts, cache_k, cache_v, position, dk_sum, dv_sum, state, cache, start, *settings):
        return forward_op(q, k, v, sinks, document_starts, cache_k, cache_v, position, start, *settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, sinks, document_starts, cache_k, cache_v, position, dk_sum, dv_sum, state, cache, _, *settings = inputs
        out, lse, record = output
        ctx.mark_non_differentiable(lse, record)
        ctx.set_materialize_grads(True)
        ctx.cached = position is not None
        if ctx.cached:
            ctx.save_for_backward(q, out, lse, sinks, document_starts)
        else:
            ctx.save_for_backward(q, out, lse, sinks, document_starts, k, v)
        ctx.cache_k, ctx.cache_v, ctx.position = cache_k, cache_v, position
        ctx.dk_sum, ctx.dv_sum, ctx.state = dk_sum, dv_sum, state
        ctx.cache, ctx.record, ctx.settings = cache, record, settings

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
        if ctx.cached:
            q, out, lse, sinks, document_starts = ctx.saved_tensors
            k, v = ctx.cache_k, ctx.cache_v
        else:
            q, out, lse, sinks, document_starts, k, v = ctx.saved_tensors
        dk_sum, dv_sum, state = ctx.dk_sum, ctx.dv_sum, ctx.state
        if ctx.cache is not None:
            accumulator = ctx.cache.require_accumulator()
            dk_sum, dv_sum, state = accumulator.dk, accumulator.dv, accumulator.state
        dq, dk, dv, dsinks = backward_op(
            dout, q, k, v, out, lse, ctx.record, sinks, document_starts, ctx.position, dk_sum, dv_sum, state, *ctx.settings
        )
        needs = ctx.needs_input_grad
        gradients = [
            gradient if needed else None
            for gradient, needed in zip((dq, dk, dv, dsinks), needs[:4], strict=True)
        ]
        return (*gradients, *[None] * (len(needs) - 4))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(
            "prefix_attention does not run under torch.vmap: it writes its cache in place; use the batch dimension"
        )


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
    value_head_dim] -> out [batch, tokens, query_heads, value_head_dim]; with return_lse also lse fp32 [batch, query_heads,
    tokens] (natural log, includes the sink, not differentiable). fp32, bf16, fp16 (and fp64 in the oracle). Query head h
    uses KV head h // (query_heads // kv_heads).

    cache: k and v are written at `start` (default: the cache's length, an append). A range that is already present is a
        recomputation: it writes nothing and reads the cache. Without a cache k and v hold all keys, any number, and the
        last query sees the last key (start = keys - tokens, as flash-attn >= 2.1).
    mask: see Mask; scale: default head_dim ** -0.5; softcap: scores become softcap * tanh(score / softcap); sinks
        [query_heads]: adds exp(sink) to the softmax denominator, with a gradient in fp32.
    deterministic: any slicing gives bitwise the same out, lse and dq; see invariance_unit for dk and dv.
    backend: a name of the registry, else TPK_BACKEND, else the first that fits.

    Backward: run the slices last to first. Each adds to the cache's accumulators for all keys it saw, and returns the
    final gradient of its own k and v, rounded once to the model dtype.

    Raises ValueError, with the values, for shapes, dtypes, devices or heads that do not fit, slices or backwards out of
    order, exceeded capacity, or when no backend serves the call. After an error the cache is unchanged.
    """
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q, k, v, cache)
    _check_shapes(q, k, v, cache, sinks, mask, scale, softcap)
    if cache is None and start is not None and start != k.shape[1] - q.shape[1]:
        raise ValueError(
            f"prefix_attention: start={start} without a cache, where it is keys - queries = {k.shape[1]} - {q.shape[1]} = "
            f"{k.shape[1] - q.shape[1]}; leave it out, or pass the prefix in a PrefixCache"
        )
    if sinks is not None:
        sinks = sinks.to(accumulator_dtype(q.dtype))
    owner = None
    cache_k = cache_v = position = dk_sum = dv_sum = state = None
    if cache is not None:
        cache_k, cache_v, position = cache.k, cache.v, cache.position
        if torch.compiler.is_compiling():  # a traced backward cannot make the accumulator, so the forward does
            if torch.is_grad_enabled():
                accumulator = cache.require_accumulator()
                dk_sum, dv_sum, state = accumulator.dk, accumulator.dv, accumulator.state
        else:
            owner = cache
    out, lse, _ = _PrefixAttention.apply(
        q,
        k,
        v,
        sinks,
        mask.document_starts,
        cache_k,
        cache_v,
        position,
        dk_sum,
        dv_sum,
        state,
        owner,
        start,
        mask.causal,
        mask.window_left,
        mask.window_right,
        q.shape[3] ** -0.5 if scale is None else float(scale),
        float(softcap),
        deterministic,
        backend or "",
    )
    return (out, lse) if return_lse else out


def _autocast(q: Tensor, k: Tensor, v: Tensor, cache: PrefixCache | None) -> list[Tensor]:
    """What autocast does to scaled_dot_product_attention: 32-bit inputs take the autocast dtype, or the cache's."""
    dtype = torch.get_autocast_dtype(q.device.type) if cache is None else cache.dtype
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v)]


def _check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: PrefixCache | None,
    sinks: Tensor | None,
    mask: Mask,
    scale: float | None,
    softcap: float,
) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not (q.dim() == k.dim() == v.dim() == 4):
        raise ValueError(f"prefix_attention: q, k and v must be [batch, tokens, heads, head_dim], got {shapes}")
    if q.dtype not in DTYPES or not (q.dtype == k.dtype == v.dtype):
        raise ValueError(
            f"prefix_attention: q, k and v must share one dtype out of float32, bfloat16, float16 and float64, got "
            f"{q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not (q.device == k.device == v.device):
        raise ValueError(f"prefix_attention: q, k and v are on {q.device}, {k.device}, {v.device}; move them to one device")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3] or q.shape[3] < 1:
        raise ValueError(
            f"prefix_attention: shapes do not fit: {shapes}; q and k share batch and head_dim, k and v share batch, tokens "
            "and heads"
        )
    query_heads, kv_heads = q.shape[2], k.shape[2]
    if (query_heads % kv_heads if kv_heads else query_heads) != 0:
        raise ValueError(
            f"prefix_attention: {query_heads} query heads cannot be shared out over {kv_heads} KV heads; the number of "
            "query heads must be a multiple of the number of KV heads"
        )
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"prefix_attention: scale is {scale}; it must be finite")
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"prefix_attention: softcap is {softcap}; it must be 0 (off) or positive and finite")
    if sinks is not None and (list(sinks.shape) != [query_heads] or sinks.device != q.device):
        raise ValueError(
            f"prefix_attention: sinks is {list(sinks.shape)} on {sinks.device}; it needs one value per query head, "
            f"[{query_heads}] on {q.device}"
        )
    starts = mask.document_starts
    if starts is not None and (starts.shape[0] not in (1, q.shape[0]) or starts.device != q.device):
        raise ValueError(
            f"prefix_attention: the mask's document_starts has {starts.shape[0]} rows on {starts.device}; it needs "
            f"{q.shape[0]} (the batch) or 1 on {q.device}"
        )
    if cache is None:
        return
    if k.shape[1] != q.shape[1]:
        raise ValueError(
            f"prefix_attention: with a cache, q, k and v are the same slice, got {q.shape[1]} queries and {k.shape[1]} keys"
        )
    for name, own, stored in (("k", k, cache.k), ("v", v, cache.v)):
        if own.shape[0] != stored.shape[0] or own.shape[2:] != stored.shape[2:]:
            raise ValueError(
                f"prefix_attention: {name} is {list(own.shape)} but the cache holds {list(stored.shape)}; batch, heads and "
                "head_dim must be equal"
            )
        if own.dtype != stored.dtype or own.device != stored.device:
            raise ValueError(
                f"prefix_attention: {name} is {own.dtype} on {own.device} but the cache holds {stored.dtype} on "
                f"{stored.device}; make PrefixCache with dtype={own.dtype}, device={str(own.device)!r}"
            )


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
    call = backends.AttentionCall(
        device_type=torch.device(device).type,
        dtype=dtype,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim if value_head_dim is None else value_head_dim,
        window=mask.window != (None, None),
        softcap=softcap != 0,
        sinks=sinks,
        documents=mask.document_starts is not None,
        deterministic=True,
    )
    return backends.select(call, backend).invariance_unit(call)
