"""interval_attention: attention in which every query names its own interval of keys; under all of compat.py.

q [B, T, Hq, D], k [B, S, Hkv, D], v [B, S, Hkv, Dv]; query i of row b sees keys [lo, hi) = intervals[b, i]. Padded,
packed and masked batches all come down to this. One op, tpkernels::interval_attention, opaque to torch.compile, runs
the pieces of compat_pieces.py on a backend; packed sequences may come as cu_seqlens, which the triton backend takes
without reading them.

The one trap: cutting pieces needs the values on the host: on a GPU one sync a call, unless `intervals` is on the CPU.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tpkernels import attention_ops, backends
from tpkernels.attention_checks import autocast_inputs, check_shapes
from tpkernels.attention_ops import Settings
from tpkernels.backends import RawSettings
from tpkernels.compat_pieces import Piece, Sequences, Window, check_sequences, pieces_of, sequence_intervals
from tpkernels.mask import CAUSAL, RawMask
from tpkernels.memory import readable
from tpkernels.prefix_cache import accumulator_dtype


def interval_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Tensor | None = None,
    *,
    sequences: Sequences | None = None,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    return_lse: bool = False,
) -> Any:
    """out [B, T, Hq, Dv], with return_lse also lse fp32 [B, Hq, T]; a query that sees no key: out 0, lse -inf.

    intervals: int32 [B or 1, T, 2]. Or sequences, with B = 1: all of q's and all of k's tokens packed, the last query
    of each sequence sees its last key, within `window`. Queries behind the last sequence see no key.
    Raises ValueError for what does not fit, and, when it runs, for intervals outside the keys or marked
    NOT_AN_INTERVAL, and for running totals (on the CPU) that fall or exceed the tokens or the bounds.
    """
    if not torch.compiler.is_compiling() and (torch._C._are_functorch_transforms_active() or _has_tangent(q, k, v)):
        raise NotImplementedError(
            "tpkernels' attention over masks and packed sequences runs neither under torch.func's grad, vjp and jvp "
            "nor under torch.vmap nor with forward-mode derivatives; use backward(), and the batch dimension"
        )
    if attention_ops.autocasts(q.device.type):
        q, k, v = autocast_inputs(q, k, v, None)
    check_shapes(q, k, v, None, sinks, CAUSAL, scale, softcap)
    assert (intervals is None) != (sequences is None)
    if intervals is not None:
        expected = [1 if intervals.shape[0] == 1 else q.shape[0], q.shape[1], 2]
        if list(intervals.shape) != expected or intervals.dtype != torch.int32:
            raise ValueError(
                f"interval_attention: intervals must be int32 [{q.shape[0]} or 1, {q.shape[1]}, 2] for q "
                f"{list(q.shape)}, got {intervals.dtype} {list(intervals.shape)}"
            )
    elif q.shape[0] != 1:
        raise ValueError(f"interval_attention: packed sequences are one batch row, got {q.shape[0]}; flatten the batch")
    cu_q, cu_k, max_q, max_k = sequences or (None, None, 0, 0)
    if sinks is not None:
        sinks = sinks.to(accumulator_dtype(q.dtype))
    settings = Settings(
        *(window or Window()),
        q.shape[3] ** -0.5 if scale is None else float(scale),
        float(softcap),
        deterministic,
        backend or "",
    )
    out, lse = torch.ops.tpkernels.interval_attention(q, k, v, sinks, intervals, cu_q, cu_k, max_q, max_k, *settings)
    return (out, lse) if return_lse else out


def _has_tangent(*tensors: Tensor) -> bool:
    """Whether forward-mode AD looks on, which an op without a formula for it takes for a constant."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


# ---- the op ----------------------------------------------------------------------------------------------------------

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, {more}Tensor? sinks, Tensor? intervals, Tensor? cu_q, Tensor? cu_k, SymInt max_q, "
    "SymInt max_k, " + attention_ops.SETTINGS_SCHEMA
)
_NAME = "tpkernels::interval_attention"
torch.library.define(_NAME, f"({_ARGUMENTS.format(more='')}) -> (Tensor, Tensor)")
torch.library.define(
    f"{_NAME}_backward",
    f"(Tensor dout, {_ARGUMENTS.format(more='Tensor out, Tensor lse, ')}) -> (Tensor, Tensor, Tensor, Tensor)",
)


class _Keys(NamedTuple):
    """What says which keys a query sees: intervals, or the four values of Sequences."""

    intervals: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    max_q: int
    max_k: int


class _Work(NamedTuple):
    """What both directions need: the backend, and the pieces, or None where it takes the sequences themselves."""

    backend: backends.Backend
    pieces: list[Piece] | None
    arguments: dict[str, Any]


def _work(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, which: _Keys, settings: Settings) -> _Work:
    window = Window(settings.causal, settings.window_left, settings.window_right)
    arguments: dict[str, Any] = {"scale": settings.scale, "softcap": settings.softcap}
    arguments["sinks"] = None if sinks is None else readable(sinks)
    intervals = which.intervals
    if intervals is None:
        assert which.cu_q is not None and which.cu_k is not None
        sequences = Sequences(which.cu_q.contiguous(), which.cu_k.contiguous(), which.max_q, which.max_k)
        check_sequences(sequences, tokens=q.shape[1], keys=k.shape[1])
        mask = RawMask(*window, None)
        backend = _packed_backend(attention_ops._call(q, k, v, sinks, mask, settings), settings.backend)
        if backend.name == "triton":
            from tpkernels.triton.problem import Lengths

            return _Work(backend, None, {**arguments, "lengths": Lengths(*sequences), "mask": mask})
        intervals = sequence_intervals(sequences, q.shape[1], window)
    pieces = pieces_of(intervals.cpu(), batch=q.shape[0], keys=k.shape[1])
    starts = next((piece.starts for piece in pieces if piece.starts is not None), None)
    call = attention_ops._call(q, k, v, sinks, RawMask(True, -1, -1, starts), settings)
    arguments["deterministic"] = settings.deterministic
    return _Work(backends.select(call, settings.backend), pieces, arguments)


def _packed_backend(call: backends.AttentionCall, requested: str) -> backends.Backend:
    """The backend of choice; but on a GPU, unless another is asked for, the one with kernels for packed sequences."""
    backend = backends.select(call, requested)
    if backend.name != "cuda" or requested or os.environ.get("TPK_BACKEND"):
        return backend
    try:
        packed = backends.get("triton")
    except ValueError:
        return backend
    return packed if packed.refuses(call) is None else backend


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    backend, pieces, arguments = _work(q, k, v, sinks, _Keys(*rest[:5]), Settings(*rest[5:]))
    q, k, v = (readable(x) for x in (q, k, v))
    if pieces is None:
        from tpkernels.triton.varlen import varlen_forward

        out, lse = varlen_forward(q[0], k[0], v[0], **arguments)
        return out[None], lse[None]
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulator_dtype(q.dtype), device=q.device)
    if sinks is None:
        lse.fill_(-math.inf)
    else:
        lse.copy_(sinks[:, None])
    if not out.numel():
        return out, lse
    with attention_ops.no_autocast(q.device.type):
        for piece in pieces:
            out_part = piece.queries(out)
            own_out = out_part if out_part.is_contiguous() else torch.empty_like(out_part)
            lse_part = lse[piece.row_begin : piece.row_end, :, piece.q_begin : piece.q_end]
            own_lse = torch.empty(lse_part.shape, dtype=lse.dtype, device=lse.device)
            backend.forward(
                piece.queries(q),
                piece.keys(k),
                piece.keys(v),
                out=own_out,
                lse=own_lse,
                settings=RawSettings(start=piece.start, mask=piece.mask(q.device), **arguments),
            )
            lse_part.copy_(own_lse)
            if own_out is not out_part:
                out_part.copy_(own_out)
    return out, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    settings = Settings(*rest[5:])
    backend, pieces, arguments = _work(q, k, v, sinks, _Keys(*rest[:5]), settings)
    dout, q, k, v = (readable(x) for x in (dout, q, k, v))
    if pieces is None:
        from tpkernels.triton.varlen import varlen_backward

        gradients = varlen_backward(
            dout[0], q[0], k[0], v[0], out[0], lse[0], deterministic=settings.deterministic, **arguments
        )
        dsinks = attention_ops.new_dsinks(q, sinks) if gradients.dsinks is None else gradients.dsinks
        return gradients.dq[None], gradients.dk.to(k.dtype)[None], gradients.dv.to(v.dtype)[None], dsinks
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.zeros(k.shape, dtype=accumulator_dtype(k.dtype), device=k.device)
    dv = torch.zeros(v.shape, dtype=accumulator_dtype(v.dtype), device=v.device)
    dsinks = attention_ops.new_dsinks(q, sinks)
    with attention_ops.no_autocast(q.device.type):
        for piece in pieces if dq.numel() else []:
            dq_part = piece.queries(dq)
            own_dq = dq_part if dq_part.is_contiguous() else torch.empty_like(dq_part)
            backend.backward(
                piece.queries(dout),
                piece.queries(q),
                piece.keys(k),
                piece.keys(v),
                piece.queries(out).contiguous(),
                lse[piece.row_begin : piece.row_end, :, piece.q_begin : piece.q_end].contiguous(),
                dq=own_dq,
                dk=piece.keys(dk),
                dv=piece.keys(dv),
                dsinks=None if sinks is None else dsinks,
                settings=RawSettings(start=piece.start, mask=piece.mask(q.device), **arguments),
            )
            if own_dq is not dq_part:
                dq_part.copy_(own_dq)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks


torch.library.impl(_NAME, "CompositeExplicitAutograd", torch.no_grad()(_forward))
torch.library.impl(f"{_NAME}_backward", "CompositeExplicitAutograd", torch.no_grad()(_backward))


@torch.library.register_fake(_NAME)
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulator_dtype(q.dtype), device=q.device)
    return q.new_empty(*q.shape[:3], v.shape[3]), lse


@torch.library.register_fake(f"{_NAME}_backward")
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = attention_ops.new_dsinks(q, sinks)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, sinks, intervals, cu_q, cu_k, *ctx.rest = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, sinks, intervals, cu_q, cu_k)


def _gradients(ctx: Any, dout: Tensor, *_: Any) -> Any:
    gradients = torch.ops.tpkernels.interval_attention_backward(dout, *ctx.saved_tensors, *ctx.rest)
    needs = ctx.needs_input_grad
    wanted = [gradient if needed else None for gradient, needed in zip(gradients, needs[:4], strict=True)]
    return (*wanted, *[None] * (len(needs) - 4))


torch.library.register_autograd(_NAME, _gradients, setup_context=_setup_context)


def _no_second_derivative(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError("tpkernels' attention has first derivatives only: its gradient cannot be differentiated")


torch.library.register_autograd(f"{_NAME}_backward", _no_second_derivative)
