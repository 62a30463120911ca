"""The fused ops in plain torch: what their kernels compute, on any device, in any dtype, and the oracle of their tests.

Tensors are rows: [rows, columns], statistics [rows, 1]. 16-bit inputs are computed in fp32 and rounded once at the end.
The one trap: fp64 must stay fp64 throughout, since gradients of whole models are checked to 1e-12 through here.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]
GELU_SLOPE, GELU_CUBIC = 2 * (2 / torch.pi) ** 0.5, 0.044715


class NormValues(NamedTuple):
    """total [rows, columns] is what was normed, out its norm; mean (None for RMSNorm) and rstd are [rows, 1]."""

    total: Tensor
    out: Tensor
    mean: Tensor | None
    rstd: Tensor


class NormGradients(NamedTuple):
    """dx like x, dweight and dbias [columns] in fp32 at least; dbias is None for RMSNorm."""

    dx: Tensor
    dweight: Tensor
    dbias: Tensor | None


class GatedGradients(NamedTuple):
    """out: the forward's, again; dup is None without `up`."""

    out: Tensor
    dgate: Tensor
    dup: Tensor | None


def wide(x: Tensor) -> Tensor:
    """fp32 at least."""
    return x if x.dtype.itemsize >= 4 else x.float()


def norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, rms: bool, delta: Tensor | None = None
) -> NormValues:
    """norm(x + delta) * weight + bias; x + delta is rounded to the dtype of x before it is normed."""
    total = x if delta is None else (wide(x) + wide(delta)).to(x.dtype)
    values = wide(total)
    mean = None if rms else values.mean(1, keepdim=True)
    centred = values if mean is None else values - mean
    rstd = (centred.square().mean(1, keepdim=True) + eps).rsqrt()
    out = centred * rstd * wide(weight)
    return NormValues(total, (out if bias is None else out + wide(bias)).to(x.dtype), mean, rstd)


def norm_backward(
    dout: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, *, dresidual: Tensor | None = None
) -> NormGradients:
    """Gradients of norm_forward's out; dresidual, which reached x beside the norm, is added to dx."""
    upstream = wide(dout)
    normed = (wide(x) if mean is None else wide(x) - mean) * rstd
    inner = upstream * wide(weight)
    dx = inner - normed * (inner * normed).mean(1, keepdim=True)
    if mean is not None:
        dx = dx - inner.mean(1, keepdim=True)
    dx = dx * rstd
    dx = (dx if dresidual is None else dx + wide(dresidual)).to(x.dtype)
    return NormGradients(dx, (upstream * normed).sum(0), None if mean is None else upstream.sum(0))


def rotate(x: Tensor, turns: Tensor, *, inverse: bool = False) -> Tensor:
    """Pairs of neighbouring channels of x [rows, heads, head_dim] times turns, complex [turn rows, head_dim / 2].

    Row r takes row r % turn_rows of turns; inverse turns back (and is the backward)."""
    pairs = torch.view_as_complex(wide(x).unflatten(0, (-1, turns.shape[0])).unflatten(-1, (-1, 2)))
    turned = pairs * (turns.conj() if inverse else turns)[:, None]
    return torch.view_as_real(turned).flatten(-2).flatten(0, 1).to(x.dtype)


def gated_forward(gate: Tensor, up: Tensor | None, *, activation: Activation) -> Tensor:
    """activation(gate) * up, or activation(gate)."""
    values = wide(gate)
    out = values * _sigmoid_input(values, activation).sigmoid()
    return (out if up is None else out * wide(up)).to(gate.dtype)


def gated_backward(dout: Tensor, gate: Tensor, up: Tensor | None, *, activation: Activation) -> GatedGradients:
    """Gradients of gated_forward, and its out."""
    values, upstream = wide(gate), wide(dout)
    share = _sigmoid_input(values, activation).sigmoid()
    inner_slope = 1.0 if activation == "silu" else GELU_SLOPE * (1 + 3 * GELU_CUBIC * values.square())
    active = values * share
    slope = share + active * (1 - share) * inner_slope
    if up is None:
        return GatedGradients(active.to(gate.dtype), (upstream * slope).to(gate.dtype), None)
    out, dup = active * wide(up), upstream * active
    return GatedGradients(out.to(gate.dtype), (upstream * wide(up) * slope).to(gate.dtype), dup.to(gate.dtype))


def _sigmoid_input(x: Tensor, activation: Activation) -> Tensor:
    """Both activations are x * sigmoid(y): y = x, or for tanh-GELU 2 sqrt(2/pi) (x + 0.044715 x^3)."""
    return x if activation == "silu" else GELU_SLOPE * (x + GELU_CUBIC * x * x * x)
