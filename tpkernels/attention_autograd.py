"""The autograd.Functions of prefix attention: one node of the graph a slice, over the raw ops of attention_ops.py.

`attend` takes a call that has been checked (attention_checks.py) and chooses among them: under torch.compile the one
that Dynamo can trace, under torch.func's transforms one that refuses by name what it cannot have, else the fastest.

The one trap: cache tensors are plain ctx attributes. save_for_backward would refuse them in the backward, since the
next slice has written to them; the ops' own checks of positions and generations stand in for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.attention_ops import Settings, backward_op, forward_op
from tpkernels.prefix_cache import PrefixCache


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    document_starts: Tensor | None,
    cache: PrefixCache | None,
    *,
    start: int | None,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """out [batch, tokens, query_heads, value_head_dim] with its graph, and lse fp32 [batch, query_heads, tokens]."""
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
    if compiling and not needs_gradient:  # Dynamo cannot trace an autograd.Function with setup_context there
        places = (tensors.k, tensors.v, tensors.position, tensors.progress)
        out, lse, _ = forward_op(q, k, v, sinks, document_starts, *places, start, *settings)
        return out, lse
    function: type[torch.autograd.Function] = _PrefixAttention
    if not compiling:
        transformed = torch._C._are_functorch_transforms_active()
        function = _Transformed if transformed else _Eager
        if transformed and cache is not None:
            raise NotImplementedError(
                "prefix_attention runs with a cache neither under torch.func's grad and vjp nor under torch.vmap, "
                "which cannot follow writes to the cache; use backward(), and the batch dimension"
            )
    out, lse, _ = function.apply(q, k, v, sinks, document_starts, owner, start, *tensors, *settings)
    return out, lse


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
        return _gradients(ctx, dout, _Gradient.apply)  # torch.func's tensors are wrapped; apply unwraps them

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

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
        # With create_graph, and where a transform of torch.func looks on only now.
        watched = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
        try:
            return _gradients(ctx, dout, _Gradient.apply if watched else backward_op)
        except RuntimeError:
            if "Batched" in str(torch._C._dispatch_keys(dout)):  # is_grads_batched: nothing else shows it
                _Transformed.vmap(None, None)
            raise

    jvp = staticmethod(_Transformed.jvp)
