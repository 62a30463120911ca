"""What the engine and a layer tell each other, beside `forward(hidden, cache, mask, positions)`.

Gradients: the engine owns the `.grad` of the parameters it runs and says so (`own_gradients`); a layer's backward may
then add to one in place (`owned_gradient`). A stage's border: a first layer with an `entry_norm` takes `entry=`, since
its norm can start while rows still arrive; a last one that `adds_out` takes `out=`, which adds its two summands where
the next stage reads them (`residual_sum` for a layer made of plain ops, on any device).

The one trap: hooks on a parameter, and torch.autograd.grad, see only what comes while an owned `.grad` is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels import fused
from tpkernels.fused_reference import NormValues
from tpkernels.prefix_cache import accumulator_dtype

_OWNERS = "gradient_owners"  # attribute of a parameter: how many have said so

Out = Callable[[Tensor, Tensor], Tensor]
"""Where a sum is wanted: (x, residual) -> x + residual."""


def residual_sum(x: Tensor, residual: Tensor, out: Out | None) -> Tensor:
    """x + residual of any shape, differentiable; by `out`, if there is one and neither broadcasts nor changes dtype."""
    same = (x.shape, x.dtype, x.device) == (residual.shape, residual.dtype, residual.device)
    if out is None or not same or torch.compiler.is_compiling():
        return x + residual
    total: Tensor = _ResidualSum.apply(x, residual, out)
    return total


class _ResidualSum(torch.autograd.Function):
    """`out` knows nothing of graphs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, out: Out) -> Tensor:
        return out(x, residual)

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor, Tensor, None]:
        return dtotal, dtotal, None


@dataclass
class Entry:
    """What a stage's first layer is told about its input. normed: its norm, computed as the rows came; gradient: gives
    the memory for the input's gradient, asked for in the backward; either may be None."""

    normed: NormValues | None = None
    gradient: Callable[[], Tensor] | None = None


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension, statistics in fp32 at least."""

    def __init__(
        self,
        columns: int,
        *,
        rms: bool,
        bias: bool,
        eps: float,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.rms, self.eps = rms, eps
        self.weight = nn.Parameter(torch.empty(columns, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(columns, dtype=dtype, device=device)) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        return fused.norm(hidden, self.weight, self.bias, eps=self.eps, rms=self.rms)


def own_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Says that the caller alone reads and replaces their `.grad`, in fp32 for 16-bit parameters, until
    `disown_gradients`."""
    for parameter in parameters:
        setattr(parameter, _OWNERS, getattr(parameter, _OWNERS, 0) + 1)
        if parameter.dtype.itemsize < 4:
            parameter.grad_dtype = torch.float32


def disown_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Takes one `own_gradients` back; gradients stay as they are. A later owner keeps its own."""
    for parameter in parameters:
        setattr(parameter, _OWNERS, max(0, getattr(parameter, _OWNERS, 0) - 1))


def owns_gradient(parameter: Tensor) -> bool:
    """Whether somebody owns it."""
    return getattr(parameter, _OWNERS, 0) > 0


def owned_gradient(parameter: Tensor | None) -> Tensor | None:
    """The gradient that a backward may add to: there already, owned, of the parameter's size, and fp32 (fp64 for
    fp64)."""
    if parameter is None or not owns_gradient(parameter):
        return None
    gradient = parameter.grad
    if gradient is None or gradient.dtype != accumulator_dtype(parameter.dtype) or gradient.shape != parameter.shape:
        return None
    return gradient if gradient.is_contiguous() and not gradient.is_neg() else None
