"""What a transformer block does before and after attention, each piece as one node of the graph.

`norm_linears`: norm, then linears (q, k, v; or the head's), rotary on the first ones. `add_linear`: residual + linear.
`mlp`: residual + down(activation(gate(norm)) * up(norm)). Autograd would see some ten small ops in each, and pay for
their nodes, views and memory once a slice; here the ops between the GEMMs are one pass each (tpkernels.fused), the
residual is added by a GEMM, weights' gradients are added in place (layer.py), and the backward keeps fewer tensors.
At a stage's border the first norm waits for its rows, and the residual is added where the sum is wanted, row by row
(`Entry`, `Out` of layer.py).

In fp32 whole_block.py runs all of a block as one node. Each piece has its plain form beside it, which serves
torch.compile, autocast, other devices and modules with hooks; the sum for the next stage goes by `Out` there too. The
one trap: an autograd.Function here must not write to its inputs nor to the gradients it is given; buffers that it made
itself it reuses freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from terapipe.layer import Entry, Norm, Out, owned_gradient, residual_sum
from terapipe.models.linear import Linear, weight_gradient
from tpkernels import fused, fused_rows
from tpkernels.fused_reference import Activation
from tpkernels.fused_rows import as_rows

TURNED = 2  # linears whose outputs turn with the position: q and k


def norm_linears(
    hidden: Tensor,
    norm: Norm,
    linears: Sequence[Linear],
    *,
    head_dim: int | None = None,
    turns: Tensor | None = None,
    entry: Entry | None = None,
) -> tuple[Tensor, ...]:
    """hidden [batch, tokens, hidden] -> itself, to be added to later, and each linear of its norm.

    Those are [batch, tokens, out], with head_dim [batch, tokens, heads, head_dim]. turns, complex [batch or 1, tokens,
    1, head_dim / 2], turn the first two (q and k)."""
    parameters = parameters_of(hidden, norm, *linears)
    if parameters is not None and fused_rows.turns_fit(turns, *hidden.shape[:2], head_dim=head_dim or 0):
        outputs: tuple[Tensor, ...] = _NormLinears.run(hidden, (norm, entry), head_dim, turns, *parameters)
        return outputs
    normed = norm(hidden)
    outs = [linear(normed) for linear in linears]
    if head_dim is not None:
        outs = [out.unflatten(-1, (-1, head_dim)) for out in outs]
    if turns is not None:
        outs[:TURNED] = [fused.rotary(out, turns) for out in outs[:TURNED]]
    return (hidden, *outs)


def add_linear(residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
    """residual + linear(x); x [batch, tokens, ...] is flattened behind its tokens."""
    parameters = parameters_of(x, linear)
    if parameters is not None and type(residual) is Tensor and residual.dtype == x.dtype:
        out: Tensor = _AddLinear.run(residual, x, *parameters)
        return out
    return residual + linear(x.flatten(2))


def mlp(hidden: Tensor, norm: Norm, gate: Linear | None, up: Linear, down: Linear, *, out: Out | None = None) -> Tensor:
    """hidden + down(silu(gate(n)) * up(n)) with n = norm(hidden); without a gate hidden + down(gelu_tanh(up(n))).

    out: adds the two summands [batch, tokens, hidden] in memory of its own, without a gradient, that nothing saves."""
    parameters = parameters_of(hidden, norm, *([] if gate is None else [gate]), up, down)
    if parameters is not None:
        result: Tensor = _Mlp.run(hidden, _MlpSettings(norm.eps, norm.rms, out), *parameters)
        return result
    normed = norm(hidden)
    active = fused.gelu_tanh(up(normed)) if gate is None else fused.swiglu(gate(normed), up(normed))
    return residual_sum(down(active), hidden, out)


def parameters_of(hidden: Tensor, *modules: nn.Module | None) -> list[Any] | None:
    """Weight and bias of each module, if the piece may run as one autograd.Function: plain eager CPU tensors of one
    dtype, and modules whose own forward nobody replaced or watches. A module that is None has neither."""
    if not hidden.is_cpu or hidden.dim() < 3:
        return None
    found: list[Any] = []
    for module in modules:
        if module is None:
            found += (None, None)
            continue
        if type(module) not in (Norm, Linear) or _hooked(module):
            return None
        held = module._parameters
        found += (held["weight"], held.get("bias"))
    return found if fused.eager(hidden, *found) else None


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class Piece(torch.autograd.Function):
    """What the pieces share. `run` is `apply` without its look for functorch, which `fused.eager` has done."""

    @classmethod
    def run(cls, *inputs: Any) -> Any:
        return super(torch.autograd.Function, cls).apply(*inputs)  # type: ignore[misc]


class _NormLinears(Piece):
    """(hidden, (norm, entry), head_dim, turns, weight and bias of the norm and each linear) -> (hidden, *outputs)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        settings: tuple[Norm, Entry | None],
        head_dim: int | None,
        turns: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        x, (norm, entry) = as_rows(hidden), settings
        if entry is None or entry.normed is None:
            values = fused_rows.norm_forward(x, norm_weight, norm_bias, eps=norm.eps, rms=norm.rms)
        else:
            values = entry.normed
        normed = as_rows(values.out)
        outs = [_linear(normed, weight, bias) for weight, bias in _pairs(parameters)]
        if turns is not None:
            assert head_dim is not None
            turns = turns.flatten(0, 2)
            for out in outs[:TURNED]:
                fused_rows.rotate(out, turns, head_dim=head_dim, out=out)
        ctx.save_for_backward(x, normed, values.mean, values.rstd, norm_weight, norm_bias, *parameters)
        ctx.shape, ctx.head_dim, ctx.turns, ctx.entry = hidden.shape, head_dim, turns, entry
        ctx.set_materialize_grads(False)
        shape = (*hidden.shape[:-1], -1) if head_dim is None else (*hidden.shape[:-1], -1, head_dim)
        return (hidden, *(out.view(shape) for out in outs))

    @staticmethod
    def backward(ctx: Any, dhidden: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        fused.refuse_second_derivative()
        x, normed, mean, rstd, norm_weight, norm_bias, *parameters = ctx.saved_tensors
        needs = ctx.needs_input_grad
        of_normed: Tensor | None = None
        of_parameters: list[Tensor | None] = []
        for index, (gradient, (weight, _)) in enumerate(zip(gradients, _pairs(parameters), strict=True)):
            if gradient is None:
                of_parameters += [None, None]
                continue
            dout = as_rows(gradient if ctx.head_dim is None else gradient.flatten(2))
            if ctx.turns is not None and index < TURNED:
                dout = fused_rows.rotate(dout, ctx.turns, head_dim=ctx.head_dim, inverse=True)
            of_parameters += _parameter_gradients(dout, normed, weight, needs[6 + 2 * index : 8 + 2 * index])
            of_normed = torch.mm(dout, weight) if of_normed is None else of_normed.addmm_(dout, weight)
        memory = ctx.entry.gradient() if ctx.entry is not None and ctx.entry.gradient is not None else None
        dx, *of_norm = _through_norm(of_normed, x, norm_weight, norm_bias, mean, rstd, dhidden, needs[4:6], out=memory)
        return (None if dx is None else dx.view(ctx.shape), None, None, None, *of_norm, *of_parameters)


class _AddLinear(Piece):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, weight.shape[1])
        ctx.save_for_backward(rows, weight)
        ctx.shape = x.shape
        return _add_linear(as_rows(residual), rows, weight, bias).view(residual.shape)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        fused.refuse_second_derivative()
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        rows = as_rows(dout)
        of_x = torch.mm(rows, weight).view(ctx.shape) if needs[1] else None
        return (dout if needs[0] else None, of_x, *_parameter_gradients(rows, x, weight, needs[2:]))


class _MlpSettings(NamedTuple):
    eps: float
    rms: bool
    out: Out | None


class _Mlp(Piece):
    """(hidden, settings, weight and bias of the norm, of gate, if there is one, of up and of down)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        settings: _MlpSettings,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        *parameters: Tensor | None,
    ) -> Tensor:
        x = as_rows(hidden)
        values = fused_rows.norm_forward(x, norm_weight, norm_bias, eps=settings.eps, rms=settings.rms)
        *into, (down, down_bias) = _pairs(parameters)
        inner = [_linear(values.out, weight, bias) for weight, bias in into]
        gate, up = _gate_and_up(inner)
        active = fused_rows.gated_forward(gate, up, activation=_activation(up))
        ctx.save_for_backward(x, values.out, values.mean, values.rstd, norm_weight, norm_bias, *inner, *parameters)
        ctx.linears = len(into)
        if settings.out is not None:
            return settings.out(_linear(active, down, down_bias).view(hidden.shape), hidden)
        return _add_linear(x, active, down, down_bias).view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, dhidden: Tensor) -> tuple[Tensor | None, ...]:
        fused.refuse_second_derivative()
        x, normed, mean, rstd, norm_weight, norm_bias, *rest = ctx.saved_tensors
        inner, (*into, (down, _)) = rest[: ctx.linears], _pairs(rest[ctx.linears :])
        needs = ctx.needs_input_grad
        dout = as_rows(dhidden)
        gate, up = _gate_and_up(inner)
        of_active = torch.mm(dout, down)
        found = fused_rows.gated_backward(of_active, gate, up, activation=_activation(up), out=of_active)
        of_inner = [found.dgate] if found.dup is None else [found.dgate, found.dup]
        of_normed = torch.mm(of_inner[0], into[0][0])
        for gradient, (weight, _) in zip(of_inner[1:], into[1:], strict=True):
            of_normed.addmm_(gradient, weight)
        of_parameters: list[Tensor | None] = []
        for index, (gradient, (weight, _)) in enumerate(zip(of_inner, into, strict=True)):
            of_parameters += _parameter_gradients(gradient, normed, weight, needs[4 + 2 * index : 6 + 2 * index])
        of_parameters += _parameter_gradients(dout, found.out, down, needs[-2:])
        dx, *of_norm = _through_norm(of_normed, x, norm_weight, norm_bias, mean, rstd, dhidden, needs[2:4])
        return (None if dx is None else dx.view(dhidden.shape), None, *of_norm, *of_parameters)


def _pairs(parameters: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(parameters[::2], parameters[1::2], strict=True))


def _gate_and_up(inner: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    return inner[0], inner[1] if len(inner) == 2 else None


def _activation(up: Tensor | None) -> Activation:
    return "gelu_tanh" if up is None else "silu"


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())


def _add_linear(residual: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.addmm(residual, rows, weight.t())
    return out if bias is None else out.add_(bias)


def _parameter_gradients(
    dout: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Of a linear's weight, None if it was added in place, and of its bias."""
    return weight_gradient(dout, x, weight) if wanted[0] else None, dout.sum(0) if wanted[1] else None


def _through_norm(
    dout: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dresidual: Tensor | None,
    wanted: Sequence[bool],
    *,
    out: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the residual stream, with dresidual in it, in `out` or the memory of dout, and of the norm's
    parameters."""
    if dout is None:
        return dresidual, None, None
    if out is not None:
        fits = (out.dtype, out.numel(), out.device) == (dout.dtype, dout.numel(), dout.device) and out.is_contiguous()
        out = out if fits else None  # whoever wants the gradient will say what is wrong with it
    beside = None if dresidual is None else as_rows(dresidual)
    dx = dout if out is None else out.view(dout.shape)
    of_weight = owned_gradient(weight) if wanted[0] else None
    of_bias = owned_gradient(bias) if wanted[1] else None
    found = fused_rows.norm_backward(
        dout,
        x,
        weight,
        mean,
        rstd,
        dresidual=beside,
        dx=dx,
        dweight=of_weight,
        dbias=of_bias,
    )
    return (
        found.dx,
        fused.parameter_gradient(found.dweight, weight) if wanted[0] and of_weight is None else None,
        fused.parameter_gradient(found.dbias, bias) if wanted[1] and of_bias is None else None,
    )
