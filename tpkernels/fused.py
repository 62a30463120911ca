"""Fused ops of a transformer block: norms with the residual's addition, rotary positions, SwiGLU and GELU.

`norm`, `add_norm`, `rotary`, `swiglu`, `gelu_tanh` are differentiable. Where kernels serve them each is one pass over
memory (fused_rows.py); under torch.compile or autocast, in fp64, where shapes broadcast, and elsewhere each is plain
torch. The rest is for autograd.Functions of larger pieces.

The one trap: they have first derivatives only; under torch.func they are plain torch, which has all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels import cuda_fused
from tpkernels import fused_reference as formulas
from tpkernels.cuda_fused import norms_for
from tpkernels.fused_reference import Activation
from tpkernels.fused_rows import (
    as_rows,
    gated_backward,
    gated_forward,
    kernel_code,
    norm_backward,
    norm_forward,
    rotate,
    turns_fit,
)

_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float, rms: bool) -> Tensor:
    """RMSNorm (rms=True) or LayerNorm of x [..., columns] over the last dimension, times weight [columns], plus bias
    [columns]: [..., columns] in x's dtype. Statistics in fp32 at least; eps is added to the mean square or variance."""
    if _normed_by_kernels(x, None, weight, bias):
        out: Tensor = _Norm.apply(x, None, weight, bias, eps, rms)[1]
        return out
    if rms:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add_norm(
    x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float, rms: bool
) -> tuple[Tensor, Tensor]:
    """total = x + delta, both [..., columns], and the norm of total, as `norm` gives it."""
    if _normed_by_kernels(x, delta, weight, bias):
        total, out = _Norm.apply(x, delta, weight, bias, eps, rms)
        return total, out
    total = x + delta
    return total, norm(total, weight, bias, eps=eps, rms=rms)


def rotary(x: Tensor, turns: Tensor) -> Tensor:
    """Pairs of neighbouring channels of x [batch, tokens, heads, head_dim] times turns, complex [batch or 1, tokens, 1,
    head_dim / 2]. 16-bit tensors are turned in fp32. ValueError for turns that do not fit."""
    if _served(x) and turns.dtype == torch.complex64 and turns_fit(turns, *x.shape[:2], head_dim=x.shape[-1]):
        out: Tensor = _Rotary.apply(x, turns)
        return out
    batch, tokens, _, head_dim = x.shape
    rows_fit = turns.shape[0] == 1 or turns.shape[0] == batch  # not `in`: Dynamo finds a symbolic size in no tuple
    if not rows_fit or turns.shape[1:] != (tokens, 1, head_dim // 2) or turns.device != x.device:
        raise ValueError(
            f"rotary: turns are {list(turns.shape)} on {turns.device}; {list(x.shape)} on {x.device} needs "
            f"[{batch} or 1, {tokens}, 1, {head_dim // 2}] there"
        )
    pairs = torch.view_as_complex(formulas.wide(x).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of two tensors of one shape and dtype, elementwise (Shazeer, arXiv 2002.05202)."""
    if _served(gate, up) and gate.shape == up.shape:
        out: Tensor = _Gated.apply(gate, up, "silu")
        return out
    return F.silu(gate) * up


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU of x of any shape in its tanh form, as GPT-2 has it: torch's gelu(approximate="tanh")."""
    if _served(x):
        out: Tensor = _Gated.apply(x, None, "gelu_tanh")
        return out
    return F.gelu(x, approximate="tanh")


def eager(*tensors: Tensor | None) -> bool:
    """Whether an autograd.Function over plain rows may replace a chain of torch ops here: nothing traces, no autocast,
    no tensor subclass, one dtype, all on the CPU."""
    first = tensors[0]
    return first is not None and first.is_cpu and _plain(*tensors)


def _plain(*tensors: Tensor | None) -> bool:
    first = tensors[0]
    assert first is not None
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(first.device.type):
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    dtype, on_cpu = first.dtype, first.is_cpu
    for x in tensors:  # not all(): a generator takes twice as long, and this runs three times a block and slice
        if x is not None and (type(x) not in _PLAIN_TENSORS or x.dtype != dtype or x.is_cpu != on_cpu):
            return False
    return True


def parameter_gradient(total: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """A parameter's gradient, summed in fp32, as a backward returns it. Autograd rounds it to the parameter's
    `grad_dtype`; where that is None, which takes any, it gets the parameter's dtype, as from torch's own layers."""
    if total is None or parameter is None or not parameter.is_leaf or parameter.grad_dtype is not None:
        return total
    return total.to(parameter.dtype)


def _served(*tensors: Tensor | None) -> bool:
    first = tensors[0]
    if first is None or kernel_code(first.dtype) is None:
        return False
    return first.dim() > 0 and first.numel() > 0 and eager(*tensors)


def _normed_by_kernels(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None) -> bool:
    columns = x.shape[-1:]
    if weight.shape != columns or (bias is not None and bias.shape != columns):
        return False
    if delta is not None and delta.shape != x.shape:
        return False
    return _served(x, delta, weight, bias) or _served_by_cuda(x, delta, weight, bias)


def _served_by_cuda(x: Tensor, *others: Tensor | None) -> bool:
    return x.device.type == cuda_fused.DEVICE_TYPE and _plain(x, *others) and norms_for(as_rows(x)) is not None


def refuse_second_derivative() -> None:
    """NotImplementedError in a backward whose gradient is to be differentiated again, also where its own gradient is a
    constant (a gradient penalty on a sum): autograd would take the result for a constant."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "tpkernels: fused ops have first derivatives only, as prefix_attention has; leave create_graph=True out, "
            "or use torch's own ops"
        )


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, rms: bool
    ) -> tuple[Tensor, Tensor]:
        deltas = None if delta is None else as_rows(delta)
        values = norm_forward(as_rows(x), weight, bias, eps=eps, rms=rms, delta=deltas)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(values.total, weight, values.mean, values.rstd)
        ctx.bias = bias  # not its values
        return (x if delta is None else values.total.view(x.shape)), values.out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor | None, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        if dout is None:
            return dtotal, dtotal, None, None, None, None
        total, weight, mean, rstd = ctx.saved_tensors
        beside = None if dtotal is None else as_rows(dtotal)
        gradients = norm_backward(as_rows(dout), total, weight, mean, rstd, dresidual=beside)
        dx = gradients.dx.view(dout.shape)
        needs = ctx.needs_input_grad
        dweight, dbias = parameter_gradient(gradients.dweight, weight), parameter_gradient(gradients.dbias, ctx.bias)
        return dx, dx if needs[1] else None, dweight, dbias if needs[3] else None, None, None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: Tensor) -> Tensor:
        ctx.save_for_backward(turns)
        return _turned(x, turns, inverse=False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative()
        return _turned(dout, ctx.saved_tensors[0], inverse=True), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        ups = None if up is None else as_rows(up)
        return gated_forward(as_rows(gate), ups, activation=activation).view(gate.shape)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor | None, None]:
        refuse_second_derivative()
        gate, up = ctx.saved_tensors
        ups = None if up is None else as_rows(up)
        gradients = gated_backward(as_rows(dout), as_rows(gate), ups, activation=ctx.activation)
        dup = None if gradients.dup is None else gradients.dup.view(gate.shape)
        return gradients.dgate.view(gate.shape), dup, None


def _turned(x: Tensor, turns: Tensor, *, inverse: bool) -> Tensor:
    rows = as_rows(x.reshape(*x.shape[:2], -1))
    return rotate(rows, turns.flatten(0, 2), head_dim=x.shape[3], inverse=inverse).view(x.shape)
