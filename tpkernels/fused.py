"""Fused ops of a transformer block: norms with the residual's addition, rotary positions, SwiGLU and GELU.

`norm`, `add_norm`, `rotary`, `swiglu`, `gelu_tanh` are differentiable. In fp32, bf16 and fp16 on a CPU each is one pass
of a C++ kernel (csrc/cpu/fused*), and on a GPU the norms are CUDA kernels by request (cuda_fused.py); under
torch.compile or autocast, in fp64 and elsewhere each is plain torch.
The rest are the kernels themselves, for autograd.Functions of larger pieces: rows in, rows out, no autograd; `out=` may
be any rows of contiguous elements, also an input's. A row's result never depends on the rows beside it.

The one trap: the extension sees raw addresses, so rows must be `readable` (memory.py; `as_rows` sees to it), and shapes
and dtypes agree; only gradients of norm weights, and statistics, are fp32. What broadcasts is plain torch's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels import cuda_fused
from tpkernels import fused_reference as formulas
from tpkernels.cuda_fused import norms_for
from tpkernels.dtypes import DTYPE_CODES
from tpkernels.fused_reference import Activation, GatedGradients, NormGradients, NormValues
from tpkernels.memory import readable

try:
    from tpkernels import _core
except ImportError:  # not built: plain torch computes, and `terapipe env` tells why the cpu backend is missing
    _core = None  # type: ignore[assignment]

_ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1}
_NONE = (0, 0)
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


# ---- differentiable --------------------------------------------------------------------------------------------------


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
    if _served(x) and turns_fit(turns, *x.shape[:2], head_dim=x.shape[-1]):
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
    if first is None or _core is None or first.dtype not in DTYPE_CODES:
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


def turns_fit(turns: Tensor, batch: int, tokens: int, *, head_dim: int) -> bool:
    """Whether kernels take these turns: complex64 [batch or 1, tokens, 1, head_dim / 2] on the CPU."""
    shape = turns.shape
    fits = shape[:1] in ((1,), (batch,)) and shape[1:] == (tokens, 1, head_dim // 2)
    return fits and turns.dtype == torch.complex64 and turns.is_cpu


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


# ---- rows, without autograd ------------------------------------------------------------------------------------------


def as_rows(x: Tensor) -> Tensor:
    """x [..., columns] as [rows, columns] that kernels can read; a view where possible."""
    return readable(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))


def norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    rms: bool,
    delta: Tensor | None = None,
    total: Tensor | None = None,
    out: Tensor | None = None,
) -> NormValues:
    """norm(x + delta) * weight + bias of rows x, delta; written to `total` and `out` where they are given."""
    kernels, code = norms_for(x, delta, total, out), _code(x)
    if kernels is None and code is None:
        values = formulas.norm_forward(x, weight, bias, eps=eps, rms=rms, delta=delta)
        placed = values.total if delta is None else _placed(values.total, total)
        return values._replace(total=placed, out=_placed(values.out, out))
    _check_alike(x, delta, total, out)
    weight, bias = _channels(x, weight), None if bias is None else _channels(x, bias)
    if kernels is not None:
        return kernels.norm_forward(x, weight, bias, eps=eps, rms=rms, delta=delta, total=total, out=out)
    assert code is not None
    rows, columns = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if delta is None:
        total = x
    elif total is None:
        total = torch.empty_like(out)
    assert total is not None
    mean = None if rms else x.new_empty(rows, 1, dtype=torch.float32)
    rstd = x.new_empty(rows, 1, dtype=torch.float32)
    _core.norm_forward(
        code,
        rms,
        rows,
        columns,
        eps,
        _view(x),
        _NONE if delta is None else _view(delta),
        _view(total),
        _view(out),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if mean is None else mean.data_ptr(),
        rstd.data_ptr(),
        torch.get_num_threads(),
    )
    return NormValues(total, out, mean, rstd)


def norm_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    dresidual: Tensor | None = None,
    dx: Tensor | None = None,
    dweight: Tensor | None = None,
    dbias: Tensor | None = None,
) -> NormGradients:
    """Gradients of norm_forward; x is its `total`, dx may be dout.

    dweight and dbias, where given, are added to: [columns], fp32 (fp64 for fp64), contiguous."""
    kernels, code = norms_for(x, dout, dresidual, dx), _code(x)
    if kernels is None and code is None:
        found = formulas.norm_backward(dout, x, weight, mean, rstd, dresidual=dresidual)
        of_weight = found.dweight if dweight is None else dweight.add_(found.dweight)
        of_bias = found.dbias if dbias is None or found.dbias is None else dbias.add_(found.dbias)
        return NormGradients(_placed(found.dx, dx), of_weight, of_bias)
    _check_alike(x, dout, dresidual, dx)
    weight = _channels(x, weight)
    if kernels is not None:
        sums = {"dweight": dweight, "dbias": dbias}
        return kernels.norm_backward(dout, x, weight, mean, rstd, dresidual=dresidual, dx=dx, **sums)
    assert code is not None
    rows, columns = x.shape
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if dx is None else dx
    dweight = x.new_zeros(columns, dtype=torch.float32) if dweight is None else dweight
    if mean is not None and dbias is None:
        dbias = x.new_zeros(columns, dtype=torch.float32)
    _core.norm_backward(
        code,
        mean is None,
        rows,
        columns,
        _view(dout),
        _view(x),
        _NONE if dresidual is None else _view(dresidual),
        _view(dx),
        weight.data_ptr(),
        0 if mean is None else mean.data_ptr(),
        rstd.data_ptr(),
        dweight.data_ptr(),
        0 if dbias is None else dbias.data_ptr(),
        torch.get_num_threads(),
    )
    return NormGradients(dx, dweight, dbias)


def rotate(x: Tensor, turns: Tensor, *, head_dim: int, inverse: bool = False, out: Tensor | None = None) -> Tensor:
    """Rows x [rows, heads * head_dim] times turns, complex [turn rows, head_dim / 2]: row r by row r % turn rows.

    inverse turns back. out may be x."""
    code = _code(x)
    if code is None or turns.dtype != torch.complex64:
        return _placed(formulas.rotate(x.unflatten(1, (-1, head_dim)), turns, inverse=inverse).flatten(1), out)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    turns = turns.resolve_conj().resolve_neg().contiguous()
    rows, columns = x.shape
    turn_rows = turns.shape[0]
    if turns.shape[1] * 2 != head_dim or not turns.is_cpu or (rows and (not turn_rows or rows % turn_rows)):
        raise ValueError(
            f"rotary: turns are {list(turns.shape)} on {turns.device}; {rows} rows with head_dim {head_dim} need "
            f"[rows, {head_dim // 2}] on cpu, their number a divisor of {rows}"
        )
    threads = torch.get_num_threads()
    heads = columns // head_dim
    _core.rotary(
        code, inverse, rows, heads, head_dim, max(1, turn_rows), _view(x), _view(out), turns.data_ptr(), threads
    )
    return out


def gated_forward(gate: Tensor, up: Tensor | None, *, activation: Activation, out: Tensor | None = None) -> Tensor:
    """activation(gate) * up of rows, or activation(gate) without up."""
    code = _code(gate)
    if code is None:
        return _placed(formulas.gated_forward(gate, up, activation=activation), out)
    _check_alike(gate, up, out)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format) if out is None else out
    ups = _NONE if up is None else _view(up)
    threads = torch.get_num_threads()
    rows, columns = gate.shape
    _core.gated_forward(code, _ACTIVATION_CODES[activation], rows, columns, _view(gate), ups, _view(out), threads)
    return out


def gated_backward(
    dout: Tensor, gate: Tensor, up: Tensor | None, *, activation: Activation, out: Tensor | None = None
) -> GatedGradients:
    """Gradients of gated_forward, and its out again, for the next linear's weight gradient. out may be dout."""
    code = _code(gate)
    if code is None:
        found = formulas.gated_backward(dout, gate, up, activation=activation)
        return found._replace(out=_placed(found.out, out))
    _check_alike(gate, dout, up, out)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format) if out is None else out
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    dup = None if up is None else torch.empty_like(dgate)
    rows, columns = gate.shape
    _core.gated_backward(
        code,
        _ACTIVATION_CODES[activation],
        rows,
        columns,
        _view(dout),
        _view(gate),
        _NONE if up is None else _view(up),
        _view(out),
        _view(dgate),
        _NONE if dup is None else _view(dup),
        torch.get_num_threads(),
    )
    return GatedGradients(out, dgate, dup)


def _check_alike(x: Tensor, *others: Tensor | None) -> None:
    for other in others:
        if other is not None and (other.shape != x.shape or other.dtype != x.dtype or other.is_cpu != x.is_cpu):
            raise RuntimeError(
                f"tpkernels.fused: {list(other.shape)} {other.dtype} on {other.device} beside {list(x.shape)} "
                f"{x.dtype} on {x.device}; they must be alike (run backward() outside autocast, and before parameters "
                "change)"
            )


def _channels(x: Tensor, values: Tensor) -> Tensor:
    """A norm's weight or bias, one value for each column of x, as memory that a kernel can read."""
    if values.shape != x.shape[1:] or values.dtype != x.dtype or values.is_cpu != x.is_cpu:
        raise RuntimeError(
            f"tpkernels.fused: a norm's weight or bias is {list(values.shape)} {values.dtype} on {values.device}; "
            f"for {list(x.shape)} {x.dtype} on {x.device} it must be {list(x.shape[1:])}, of that dtype and device"
        )
    return readable(values)


def kernel_code(dtype: torch.dtype) -> int | None:
    """The kernels' code of the dtype; None where plain torch computes."""
    return DTYPE_CODES.get(dtype) if _core is not None else None


def _code(x: Tensor) -> int | None:
    return kernel_code(x.dtype) if x.is_cpu else None


def _view(rows: Tensor) -> tuple[int, int]:
    return rows.data_ptr(), rows.stride(0)


def _placed(value: Tensor, out: Tensor | None) -> Tensor:
    return value if out is None else out.copy_(value)
