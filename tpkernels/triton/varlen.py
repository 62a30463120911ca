"""Packed sequences of unequal lengths, with query and key lengths of their own (flash-attn's varlen layout).

q [total_q, Hq, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv]; sequence b is tokens cu_q[b] .. cu_q[b + 1] of q and
cu_k[b] .. cu_k[b + 1] of k, v, and its last query sees its last key. out [total_q, Hq, Dv], lse [Hq, total_q]. These
are the raw kernels: no autograd, no check of the values of cu_q and cu_k, which stay on the device.

Sequences may be empty. Rows behind the last sequence (and keys no query sees) come back as 0, lse -inf.
The one trap: max_q and max_k decide the grid; rows of a longer sequence would not be computed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.backends import RawSettings
from tpkernels.mask import RawMask
from tpkernels.triton import launch, tiles
from tpkernels.triton.plan_backward import plan_backward
from tpkernels.triton.plan_forward import plan_forward
from tpkernels.triton.problem import Lengths, fp32


class VarlenResult(NamedTuple):
    """out [total_q, Hq, Dv] and lse fp32 [Hq, total_q]."""

    out: Tensor
    lse: Tensor


class VarlenGradients(NamedTuple):
    """dq in the dtype of q; dk, dv fp32; dsinks fp32 [Hq] or None."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None


def _check(lengths: Lengths) -> None:
    for name, cu in (("cu_q", lengths.cu_q), ("cu_k", lengths.cu_k)):
        if cu.dtype != torch.int32 or cu.dim() != 1 or not cu.is_contiguous():
            raise ValueError(f"varlen attention: {name} must be contiguous int32 [sequences + 1], got {cu.dtype} "
                             f"{list(cu.shape)}")  # fmt: skip
    if lengths.cu_q.shape != lengths.cu_k.shape or lengths.cu_q.shape[0] < 1:
        raise ValueError(
            f"varlen attention: cu_q is {list(lengths.cu_q.shape)} and cu_k {list(lengths.cu_k.shape)}; both need one "
            "value more than there are sequences"
        )


def _architecture(device: torch.device) -> str:
    return tiles.INTERPRETER if launch.INTERPRETED else tiles.architecture(device)


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Lengths,
    mask: RawMask,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> VarlenResult:
    """Forward; `mask` without document_starts, its positions (and windows, in tokens) counted within each sequence.

    Raises ValueError for cu_q and cu_k of another type or of unequal shapes, and where rows or programs exceed 32 bits.
    """
    _check(lengths)
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -float("inf"), dtype=torch.float32, device=q.device)
    if out.numel() and lengths.cu_q.shape[0] > 1 and lengths.max_q > 0:
        launches = plan_forward(
            q[None],
            k[None],
            v[None],
            out=out[None],
            lse=lse[None],
            settings=RawSettings(0, mask, scale, softcap, fp32(sinks), True),
            architecture=_architecture(q.device),
            processors=launch.processors_of(q.device),
            lengths=lengths,
        )
        launch.run(launches, q.device)
    return VarlenResult(out, lse)


def varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    lengths: Lengths,
    mask: RawMask,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
) -> VarlenGradients:
    """Gradients from the forward's out and lse, into fresh tensors. deterministic: dq and dk, dv the same bits in each
    run. Raises ValueError as varlen_forward does."""
    _check(lengths)
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    dv = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    dsinks = None if sinks is None else torch.zeros(q.shape[1], dtype=torch.float32, device=q.device)
    if out.numel() and k.numel() and lengths.cu_q.shape[0] > 1 and min(lengths.max_q, lengths.max_k) > 0:
        launches = plan_backward(
            dout[None],
            q[None],
            k[None],
            v[None],
            out[None],
            lse[None],
            dq=dq[None],
            dk=dk[None],
            dv=dv[None],
            dsinks=dsinks,
            settings=RawSettings(0, mask, scale, softcap, fp32(sinks), deterministic),
            architecture=_architecture(q.device),
            processors=launch.processors_of(q.device),
            lengths=lengths,
        )
        launch.run(launches, q.device)
    return VarlenGradients(dq, dk, dv, dsinks)
