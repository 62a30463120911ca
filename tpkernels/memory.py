"""Memory for kernels, which are given addresses: what may be read at one, and what a norm is written to."""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.fused_reference import NormGradients, NormValues


def readable(x: Tensor) -> Tensor:
    """x [..., columns], or a copy, as memory whose address and strides say all: the last dimension contiguous, no sign
    (torch._neg_view, z.conj().imag) or zeros (torch._efficientzerotensor) that are only noted."""
    if x._is_zerotensor():
        return x.new_zeros(x.shape)
    return (x if x.stride(-1) == 1 else x.contiguous()).resolve_neg()


def norm_values_memory(
    x: Tensor, *, rms: bool, delta: Tensor | None, total: Tensor | None, out: Tensor | None
) -> NormValues:
    """Where a kernel writes what norm_forward gives for rows x: `total` and `out` where they are given, else new."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if delta is None:
        total = x
    elif total is None:
        total = torch.empty_like(out)
    mean = None if rms else x.new_empty(x.shape[0], 1, dtype=torch.float32)
    return NormValues(total, out, mean, x.new_empty(x.shape[0], 1, dtype=torch.float32))


def norm_gradients_memory(
    x: Tensor, *, rms: bool, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None
) -> NormGradients:
    """Where a kernel writes dx, and adds dweight and dbias: what is given, else new memory, of sums zeros."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if dx is None else dx
    dweight = x.new_zeros(x.shape[1], dtype=torch.float32) if dweight is None else dweight
    if not rms and dbias is None:
        dbias = x.new_zeros(x.shape[1], dtype=torch.float32)
    return NormGradients(dx, dweight, dbias)
