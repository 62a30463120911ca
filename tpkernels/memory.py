"""What a kernel may be given a tensor's address of."""

from __future__ import annotations

from torch import Tensor


def readable(x: Tensor) -> Tensor:
    """x [..., columns], or a copy, as memory whose address and strides say all: the last dimension contiguous, no sign
    (torch._neg_view, z.conj().imag) or zeros (torch._efficientzerotensor) that are only noted."""
    if x._is_zerotensor():
        return x.new_zeros(x.shape)
    return (x if x.stride(-1) == 1 else x.contiguous()).resolve_neg()
