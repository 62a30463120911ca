"""Prefix attention in plain torch: explicit formulas, any float dtype, any device. The oracle of every other backend.

q [B, T, Hq, D], k [B, S, Hkv, D], v [B, S, Hkv, Dv]; query i sits at absolute position start + i.
    s = scale * q.k,  s = softcap * tanh(s / softcap),  lse = log(sum_j exp(s_j) + exp(sink)),  p = exp(s - lse)
    out = p v     dv = p^T dout     ds = p * (dout v^T - rowsum(dout * out))     dq = scale ds k     dk = scale ds^T q

The one trap: it builds the dense score matrix, so memory grows with T * S. `compute_dtype` picks the arithmetic: fp32
for 16-bit tensors by default; tests also run it IN 16 bits, as the yardstick of the tolerance rule (testing.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.mask import RawMask
from tpkernels.prefix_cache import accumulator_dtype

if TYPE_CHECKING:
    from tpkernels.backends import AttentionCall, RawSettings


class ForwardResult(NamedTuple):
    """out [B, T, Hq, Dv] and lse [B, Hq, T], both in the compute dtype."""

    out: Tensor
    lse: Tensor


class BackwardResult(NamedTuple):
    """Gradients in the compute dtype; dsinks [Hq] or None."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None


def dense_mask(mask: RawMask, *, start: int, tokens: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
    """bool [B or 1, tokens, keys], True where the query sees the key."""
    position = torch.arange(start, start + tokens, device=device)[None, :, None]
    key = torch.arange(keys, device=device)[None, None, :]
    visible = (position == position) & (key >= 0)
    if mask.causal:
        visible = visible & (key <= position)
    if mask.window_left >= 0:
        visible = visible & (key >= position - mask.window_left)
    if mask.window_right >= 0:
        visible = visible & (key <= position + mask.window_right)
    if mask.document_starts is not None:
        visible = visible & (key >= mask.document_starts[:, :, None])
    return visible


@contextlib.contextmanager
def _no_tf32() -> Iterator[None]:
    """fp32 products in fp32, whatever the user chose for the rest of the model."""
    precision = torch.get_float32_matmul_precision()
    if precision == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


class _Scores(NamedTuple):
    capped: Tensor  # [B, Hkv, G, T, S], -inf where invisible
    slope: Tensor | None  # d capped / d raw, None without softcap
    visible: Tensor  # [B or 1, 1, 1, T, S]


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[B, T, Hq, D] -> [B, T, Hkv, G, D]: query head h uses KV head h // G."""
    return x.unflatten(2, (kv_heads, x.shape[2] // kv_heads))


def _scores(q: Tensor, k: Tensor, mask: RawMask, start: int, scale: float, softcap: float) -> _Scores:
    raw = torch.einsum("btkgd,bskd->bkgts", _grouped(q, k.shape[2]), k) * scale
    slope = None
    if softcap:
        tanh = torch.tanh(raw / softcap)
        raw, slope = softcap * tanh, 1 - tanh * tanh
    visible = dense_mask(mask, start=start, tokens=q.shape[1], keys=k.shape[1], device=q.device)[:, None, None]
    return _Scores(raw.masked_fill(~visible, float("-inf")), slope, visible)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    start: int,
    mask: RawMask,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> ForwardResult:
    """out and lse of the formulas above. A row that sees no key: out 0, lse -inf (with a sink: the sink)."""
    compute = compute_dtype or accumulator_dtype(q.dtype)
    q, k, v = q.to(compute), k.to(compute), v.to(compute)
    with _no_tf32():
        scores, _, visible = _scores(q, k, mask, start, scale, softcap)
        largest = scores.amax(-1, keepdim=True)
        sink = None
        if sinks is not None:
            sink = sinks.to(compute).view(1, k.shape[2], -1, 1, 1)
            largest = torch.maximum(largest, sink)
        # Only a mask empties a row: a row of visible -inf scores stays NaN, as softmax has it.
        empty = ~visible.any(-1, keepdim=True) & (largest == float("-inf"))
        largest = largest.masked_fill(empty, 0.0)
        weights = torch.exp(scores - largest).masked_fill(~visible, 0.0)
        total = weights.sum(-1, keepdim=True)
        if sink is not None:
            total = total + torch.exp(sink - largest)
        lse = largest + torch.log(total)
        weights = weights / total.masked_fill(empty, 1.0)
        out = torch.einsum("bkgts,bskd->btkgd", weights, v)
    return ForwardResult(out.flatten(2, 3), lse.squeeze(-1).flatten(1, 2))


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    start: int,
    mask: RawMask,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> BackwardResult:
    """Gradients of `attention_forward` from its own out and lse. lse itself is not differentiable."""
    compute = compute_dtype or accumulator_dtype(q.dtype)
    dout, q, k, v, out, lse = (x.to(compute) for x in (dout, q, k, v, out, lse))
    kv_heads = k.shape[2]
    with _no_tf32():
        scores, slope, visible = _scores(q, k, mask, start, scale, softcap)
        lse = lse.unflatten(1, (kv_heads, -1)).unsqueeze(-1)
        weights = torch.exp(scores - lse).masked_fill(~visible, 0.0)
        dout_grouped = _grouped(dout, kv_heads)
        dv = torch.einsum("bkgts,btkgd->bskd", weights, dout_grouped)
        dweights = torch.einsum("btkgd,bskd->bkgts", dout_grouped, v)
        delta = (dout * out).sum(-1)  # [B, T, Hq]
        delta_grouped = delta.transpose(1, 2).unflatten(1, (kv_heads, -1)).unsqueeze(-1)
        dscores = (weights * (dweights - delta_grouped)).masked_fill(~visible, 0.0)
        if slope is not None:
            dscores = dscores * slope
        dq = torch.einsum("bkgts,bskd->btkgd", dscores, k).flatten(2, 3) * scale
        dk = torch.einsum("bkgts,btkgd->bskd", dscores, _grouped(q, kv_heads)) * scale
        dsinks = None
        if sinks is not None:
            sink = sinks.to(compute).view(1, kv_heads, -1, 1, 1)
            share = torch.exp(sink - lse).masked_fill(sink == float("-inf"), 0.0)
            dsinks = -(share * delta_grouped).sum((0, 3, 4)).flatten()
    return BackwardResult(dq, dk, dv, dsinks)


class ReferenceBackend:
    """The oracle behind the backend interface (backends.py)."""

    name = "reference"

    def unusable(self) -> str | None:
        return None

    def refuses(self, call: AttentionCall) -> str | None:
        if call.deterministic:
            return (
                "deterministic=True promises slice invariance, and torch.matmul sums in an order that depends on the "
                "slice's length"
            )
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, settings: RawSettings) -> None:
        result = attention_forward(q, k, v, **_arguments(settings))
        out.copy_(result.out)
        lse.copy_(result.lse)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dsinks: Tensor | None,
        settings: RawSettings,
    ) -> None:
        result = attention_backward(dout, q, k, v, out, lse, **_arguments(settings))
        dq.copy_(result.dq)
        dk.add_(result.dk)
        dv.add_(result.dv)
        if dsinks is not None:
            assert result.dsinks is not None
            dsinks.add_(result.dsinks)

    def invariance_unit(self, call: AttentionCall) -> int:
        raise ValueError(f"invariance_unit: backend reference is not slice invariant: {self.refuses(call)}")


def _arguments(settings: RawSettings) -> dict[str, Any]:
    return {name: value for name, value in settings._asdict().items() if name != "deterministic"}
