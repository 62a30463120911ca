"""prefix_attention: attention of a slice over the prefix in a cache; its backward works through the cache.

q [batch, tokens, query_heads, head_dim], k and v [batch, tokens, kv_heads, head_dim | value_head_dim] ->
out [batch, tokens, query_heads, value_head_dim]. The checks that need no position are here; the rest, and the choice of
the backend, is in the two raw ops (attention_ops.py), tied together by one autograd.Function.

The one trap: cache tensors are plain ctx attributes. save_for_backward would refuse them in the backward, since the
next slice has written to them; the ops' own checks of positions and generations stand in for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from tpkernels import backends
from tpkernels.attention_ops import Settings, autocasts, backward_op, forward_op
from tpkernels.mask import CAUSAL, Mask
from tpkernels.prefix_cache import PrefixCache, accumulator_dtype

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LARGEST = 2.0**126  # scale and softcap: kernels take them times log2(e) in fp32


class _CacheTensors(NamedTuple):
    """The tensors of a cache as arguments of the autograd.Function; all None without a cache.

    seen_* are what backwards read (prefix_cache.BackwardView). dk, dv and state are None in eager mode, where the
    backward asks the cache for its accumulator.
    """

    k: Tensor | None = None
    v: Tensor | None = None
    position: Tensor | None = None
    progress: Tensor | None = None
    seen_k: Tensor | None = None
    seen_v: Tensor | None = None
    seen_position: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    state: Tensor | None = None


_NO_CACHE = _CacheTensors()


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        document_starts: Tensor | None,
        owner: PrefixCache | None,
        start: int | None,
        *rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        cache, settings = _CacheTensors(*rest[: len(_NO_CACHE)]), rest[len(_NO_CACHE) :]
        return forward_op(
            q, k, v, sinks, document_starts, cache.k, cache.v, cache.position, cache.progress, start, *settings
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, sinks, document_starts, owner, _, *rest = inputs
        out, lse, record = output
        cache = _CacheTensors(*rest[: len(_NO_CACHE)])
        ctx.mark_non_differentiable(lse, record)
        ctx.cached = cache.progress is not None
        if ctx.cached:
            ctx.save_for_backward(q, out, lse, sinks, document_starts)
        else:
            ctx.save_for_backward(q, out, lse, sinks, document_starts, k, v)
        ctx.k, ctx.v, ctx.position, ctx.progress = cache.seen_k, cache.seen_v, cache.seen_position, cache.progress
        ctx.dk, ctx.dv, ctx.state = cache.dk, cache.dv, cache.state
        ctx.owner, ctx.record, ctx.settings = owner, record, rest[len(_NO_CACHE) :]

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
        return _gradients(ctx, dout, backward_op)


def _gradients(ctx: Any, dout: Tensor, op: Callable[..., Any]) -> tuple[Tensor | None, ...]:
    """Of every input of the Function; `op` is the raw backward op, or what stands for it."""
    if ctx.cached:
        q, out, lse, sinks, document_starts = ctx.saved_tensors
        k, v = ctx.k, ctx.v
    else:
        q, out, lse, sinks, document_starts, k, v = ctx.saved_tensors
    sums = (ctx.dk, ctx.dv, ctx.state)
    if ctx.owner is not None:
        accumulator = ctx.owner.require_accumulator()
        sums = (accumulator.dk, accumulator.dv, accumulator.state)
    where = (ctx.record, sinks, document_starts, ctx.position, ctx.progress)
    gradients = op(dout, q, k, v, out, lse, *where, *sums, *ctx.settings)
    needs = ctx.needs_input_grad
    wanted = [gradient if needed else None for gradient, needed in zip(gradients, needs[:4], strict=True)]
    return (*wanted, *[None] * (len(needs) - 4))


class _Transformed(_PrefixAttention):
    """_PrefixAttention where torch.func transforms look on. What cannot be had is refused by name."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
        # With create_graph, torch.func (whose tensors are wrapped; apply unwraps them) and batched gradients.
        watched = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
        try:
            return _gradients(ctx, dout, _Gradient.apply if watched else backward_op)
        except RuntimeError:
            if "Batched" in str(torch._C._dispatch_keys(dout)):  # is_grads_batched: nothing else shows it
                _Transformed.vmap(None, None)
            raise

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(
            "prefix_attention does not run under torch.vmap (nor jacrev, nor batched gradients): it writes its cache "
            "in place; use the batch dimension"
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            "prefix_attention has no forward-mode derivative (jvp, jacfwd, hessian); use backward(), torch.func.grad "
            "or torch.func.vjp"
        )


class _Gradient(torch.autograd.Function):
    """The raw backward op as something that autograd sees, and that has no derivative."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return backward_op(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("prefix_attention has first derivatives only: its gradient cannot be differentiated")

    vmap, jvp = staticmethod(_Transformed.vmap), staticmethod(_Transformed.jvp)


class _Eager(torch.autograd.Function):
    """_Transformed without setup_context, whose binding of arguments by signature takes 0.1 ms a call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = _PrefixAttention.forward(*inputs)
        _PrefixAttention.setup_context(ctx, inputs, output)
        return output

    backward, jvp = staticmethod(_Transformed.backward), staticmethod(_Transformed.jvp)


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
    deterministic: any slicing gives bitwise the same out, lse and dq; see invariance_unit for dk and dv.
    backend: a name of the registry, else TPK_BACKEND, else the first that fits.

    Backward: run the slices last to first, every one: each adds to the cache's accumulators for all keys it saw, and
    returns the final gradient of its own k and v, rounded once to the model dtype. A loss that leaves out the first
    slices must take them in with weight 0 (`loss + 0 * out.sum()`), or what later slices add for their keys is lost.

    Raises ValueError, with the values, for shapes, dtypes, devices or heads that do not fit, slices or backwards out of
    order, exceeded capacity, or when no backend serves the call. After an error the cache is unchanged.
    NotImplementedError for what has no meaning here: torch.vmap, forward-mode and second derivatives, torch.func.grad
    through a cache.
    """
    _check_types(q, k, v, cache, sinks, mask)
    if start is None and cache is not None:
        start = cache.recomputed_start
    if autocasts(q.device.type):
        q, k, v = _autocast(q, k, v, cache)
    _check_shapes(q, k, v, cache, sinks, mask, scale, softcap)
    if cache is None and start is not None and start != k.shape[1] - q.shape[1]:
        raise ValueError(
            f"prefix_attention: start={start} without a cache, where it is keys - queries = {k.shape[1]} - "
            f"{q.shape[1]} = {k.shape[1] - q.shape[1]}; leave it out, or pass the prefix in a PrefixCache"
        )
    if sinks is not None:
        sinks = sinks.to(accumulator_dtype(q.dtype))
    compiling = torch.compiler.is_compiling()
    if compiling:  # Dynamo refuses the same tensor twice among the inputs of an autograd.Function
        k = k.view_as(k) if k is q else k
        v = v.view_as(v) if v is q or v is k else v
    needs_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    owner = None
    tensors = _NO_CACHE
    if cache is not None:
        tensors = _CacheTensors(cache.k, cache.v, cache.position, cache.progress, *cache.backward_view)
        if not compiling:
            owner = cache
        elif needs_gradient:  # the accumulator must be an input of the graph: no graph can make it
            accumulator = cache.accumulator
            if accumulator is None:
                raise ValueError(
                    "prefix_attention: compiled code cannot make the cache's accumulator; call "
                    "cache.require_accumulator() before it, or pass accumulator= to PrefixCache"
                )
            tensors = tensors._replace(dk=accumulator.dk, dv=accumulator.dv, state=accumulator.state)
    settings = Settings(
        mask.causal,
        mask.window_left,
        mask.window_right,
        q.shape[3] ** -0.5 if scale is None else float(scale),
        float(softcap),
        deterministic,
        backend or "",
    )
    if compiling and not needs_gradient:  # Dynamo cannot trace an autograd.Function with setup_context there
        places = (tensors.k, tensors.v, tensors.position, tensors.progress)
        out, lse, _ = forward_op(q, k, v, sinks, mask.document_starts, *places, start, *settings)
    else:
        function: type[torch.autograd.Function] = _PrefixAttention
        if not compiling:
            transformed = torch._C._are_functorch_transforms_active()
            function = _Transformed if transformed else _Eager
            if transformed and cache is not None:
                raise NotImplementedError(
                    "prefix_attention runs with a cache neither under torch.func's grad and vjp nor under torch.vmap, "
                    "which cannot follow writes to the cache; use backward(), and the batch dimension"
                )
        out, lse, _ = function.apply(q, k, v, sinks, mask.document_starts, owner, start, *tensors, *settings)
    return (out, lse) if return_lse else out


def _autocast(q: Tensor, k: Tensor, v: Tensor, cache: PrefixCache | None) -> list[Tensor]:
    """What autocast does to scaled_dot_product_attention: 32-bit inputs take the autocast dtype, or the cache's."""
    dtype = torch.get_autocast_dtype(q.device.type) if cache is None else cache.dtype
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v)]


def _check_types(q: Any, k: Any, v: Any, cache: Any, sinks: Any, mask: Any) -> None:
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
        window=mask.window != (None, None),
        softcap=softcap != 0,
        sinks=sinks,
        documents=mask.document_starts is not None,
        deterministic=True,
        device_index=index or 0,
    )
    return backends.select(call, backend).invariance_unit(call)
