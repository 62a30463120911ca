"""The fused kernels over rows, without autograd: what fused.py and the autograd.Functions of larger pieces are made of.

Rows [rows, columns] in, rows out; `out=` may be any rows of contiguous elements, also an input's. On a CPU, in fp32,
bf16 and fp16, a call is one pass of a C++ kernel (csrc/cpu/fused*), and on a GPU norms are CUDA kernels by request
(cuda_fused.py); in fp64 and elsewhere it is the formulas of fused_reference.py. A row's result never depends on the
rows beside it.

The one trap: the extension sees raw addresses, so rows must be `readable` (memory.py; `as_rows` sees to it), and shapes
and dtypes agree; only gradients of norm weights, and statistics, are fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels import fused_reference as formulas
from tpkernels.cuda_fused import norms_for
from tpkernels.dtypes import DTYPE_CODES
from tpkernels.fused_reference import Activation, GatedGradients, NormGradients, NormValues
from tpkernels.memory import norm_gradients_memory, norm_values_memory, readable

try:
    from tpkernels import _core
except ImportError:  # not built: plain torch computes, and `terapipe env` tells why the cpu backend is missing
    _core = None  # type: ignore[assignment]

_ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1}
_NONE = (0, 0)


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
    total, out, mean, rstd = norm_values_memory(x, rms=rms, delta=delta, total=total, out=out)
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
    dx, dweight, dbias = norm_gradients_memory(x, rms=mean is None, dx=dx, dweight=dweight, dbias=dbias)
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


def turns_fit(turns: Tensor | None, batch: int, tokens: int, *, head_dim: int) -> bool:
    """Whether `rotate` takes these turns as rows: none, or [batch or 1, tokens, 1, head_dim / 2] on the CPU."""
    if turns is None:
        return True
    shape = turns.shape
    return shape[:1] in ((1,), (batch,)) and shape[1:] == (tokens, 1, head_dim // 2) and turns.is_cpu


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
                f"tpkernels.fused_rows: {list(other.shape)} {other.dtype} on {other.device} beside {list(x.shape)} "
                f"{x.dtype} on {x.device}; they must be alike (run backward() outside autocast, and before parameters "
                "change)"
            )


def _channels(x: Tensor, values: Tensor) -> Tensor:
    """A norm's weight or bias, one value for each column of x, as memory that a kernel can read."""
    if values.shape != x.shape[1:] or values.dtype != x.dtype or values.is_cpu != x.is_cpu:
        raise RuntimeError(
            f"tpkernels.fused_rows: a norm's weight or bias is {list(values.shape)} {values.dtype} on {values.device}; "
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
