"""A linear layer for slices, whose backward adds the weight's gradient to `.grad` in place, and a table of embeddings.

hidden [batch, tokens, in] -> [batch, tokens, out], as nn.Linear. Every slice of a sequence adds to the same weight's
gradient. Autograd would write each slice's share to new memory and then add it, four passes over a matrix as large as
the weight; one GEMM that accumulates needs two. That happens only where the engine owns the gradient (layer.py) and the
dtypes agree; elsewhere it is a plain linear.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terapipe.layer import owned_gradient, owns_gradient
from tpkernels.fused import eager, parameter_gradient


class Linear(nn.Linear):
    """nn.Linear with `_AccumulatingLinear` in training."""

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.weight
        if not owns_gradient(weight) or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return F.linear(hidden, weight, self.bias)
        return _AccumulatingLinear.apply(hidden, weight, self.bias)


class _AccumulatingLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return F.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        of_hidden = torch.mm(rows, weight).view(hidden.shape) if wants_hidden else None
        of_bias = rows.sum(0) if wants_bias else None
        of_weight = weight_gradient(rows, hidden.flatten(0, -2), weight) if wants_weight else None
        return of_hidden, of_weight, of_bias


class Table(nn.Embedding):
    """nn.Embedding whose gradient of 16-bit weights is summed in fp32 on a CPU too. torch sums it in 16 bits there, in
    which the 300th occurrence of a token in a slice hardly counts."""

    def __init__(self, rows: int, columns: int, *, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(rows, columns, dtype=dtype, device=device)

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if weight.element_size() > 2 or not torch.is_grad_enabled() or not eager(weight):
            return F.embedding(input, weight)
        found: Tensor = _Gather.apply(input, weight)
        return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight  # not its values
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        (ids,) = ctx.saved_tensors
        total = torch.ops.aten.embedding_dense_backward(gradient.float(), ids, ctx.weight.shape[0], -1, False)
        return None, parameter_gradient(total, ctx.weight)


def weight_gradient(dout: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
    """dout^T x, of rows dout [rows, out] and x [rows, in]; None if it was added to the weight's gradient in place."""
    before = owned_gradient(weight)
    if before is None or before.dtype != dout.dtype:
        return torch.mm(dout.t(), x)
    before.addmm_(dout.t(), x)
    return None
