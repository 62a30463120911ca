"""The two raw mutating ops of prefix attention (tpkernels::prefix_attention_forward, _backward) and their checks.

They resolve where the slice starts, check the order of slices (slice_order.py), pick the backend and run it. Neither
has an autograd formula (torch refuses one on an op that mutates its inputs): attention_autograd.py ties them together.
They are registered by torch.library.define, not custom_op, which costs 0.1 ms a call for so many arguments.

The one trap: nothing may be moved or written before the last check, so that an error leaves cache and accumulator as
they were; and no check may move out of the ops, because under torch.compile the positions are known only here.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels import backends
from tpkernels.backends import RawSettings
from tpkernels.mask import RawMask
from tpkernels.memory import readable
from tpkernels.prefix_cache import accumulator_dtype
from tpkernels.slice_order import Slice, appended, claim, gone_back, place, starts_backward


class Settings(NamedTuple):
    """The scalars of a call, in the order of both schemas; windows are -1 for none, backend "" for automatic."""

    causal: bool
    window_left: int
    window_right: int
    scale: float
    softcap: float
    deterministic: bool
    backend: str


SETTINGS_SCHEMA = (
    "bool causal, SymInt window_left, SymInt window_right, float scale, float softcap, bool deterministic, str backend"
)


# ---- forward ---------------------------------------------------------------------------------------------------------


torch.library.define(
    "tpkernels::prefix_attention_forward",
    (
        "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? document_starts, Tensor(a!)? cache_k, "
        "Tensor(b!)? cache_v, Tensor(c!)? position, Tensor? progress, SymInt? start, "
        f"{SETTINGS_SCHEMA}) -> (Tensor, Tensor, Tensor)"
    ),
)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    document_starts: Tensor | None,
    cache_k: Tensor | None,
    cache_v: Tensor | None,
    position: Tensor | None,
    progress: Tensor | None,
    start: int | None,
    *scalars: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> out [B, T, Hq, Dv], lse [B, Hq, T], record int64 CPU [start, cache generation]."""
    settings = Settings(*scalars)
    batch, tokens, query_heads, _ = q.shape
    if position is None:
        piece, append, generation = Slice(k.shape[1] - tokens, k.shape[1]), False, 0
    else:
        assert progress is not None and cache_k is not None and cache_v is not None
        piece, append, generation = place(position, progress, start, tokens, capacity=cache_k.shape[1])
    mask = raw_mask(settings, document_starts, piece, batch)
    backend = backends.select(_call(q, k, v, sinks, mask, settings), settings.backend)

    if cache_k is not None and cache_v is not None:
        if append:
            cache_k[:, piece.start : piece.end].copy_(k)
            cache_v[:, piece.start : piece.end].copy_(v)
        k, v = cache_k[:, : piece.end], cache_v[:, : piece.end]
    out = q.new_empty(batch, tokens, query_heads, v.shape[3])
    lse = torch.empty(batch, query_heads, tokens, dtype=accumulator_dtype(q.dtype), device=q.device)
    if lse.numel() and not k.shape[1]:  # no key at all: every row is empty
        out.zero_()
        lse.copy_(lse.new_tensor(-math.inf) if sinks is None else sinks[:, None])
    elif lse.numel():
        with no_autocast(q.device.type):
            backend.forward(
                readable(q),
                readable(k),
                readable(v),
                out=out,
                lse=lse,
                settings=_raw_settings(settings, piece, mask, sinks),
            )
    if append:
        assert position is not None
        appended(position, piece)
    return out, lse, torch.tensor([piece.start, generation], dtype=torch.int64, device="cpu")


torch.library.impl("tpkernels::prefix_attention_forward", "CompositeExplicitAutograd", torch.no_grad()(_forward))


@torch.library.register_fake("tpkernels::prefix_attention_forward")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, query_heads, _head_dim = q.shape
    lse = torch.empty(batch, query_heads, tokens, dtype=accumulator_dtype(q.dtype), device=q.device)
    record = torch.empty(2, dtype=torch.int64, device="cpu")
    return q.new_empty(batch, tokens, query_heads, v.shape[3]), lse, record


# ---- backward --------------------------------------------------------------------------------------------------------


torch.library.define(
    "tpkernels::prefix_attention_backward",
    (
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor record, Tensor? sinks, "
        "Tensor? document_starts, Tensor? position, Tensor(a!)? progress, Tensor(b!)? dk_sum, Tensor(c!)? dv_sum, "
        f"Tensor(d!)? state, {SETTINGS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    record: Tensor,
    sinks: Tensor | None,
    document_starts: Tensor | None,
    position: Tensor | None,
    progress: Tensor | None,
    dk_sum: Tensor | None,
    dv_sum: Tensor | None,
    state: Tensor | None,
    *scalars: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> dq; dk, dv of the slice's own tokens (without a cache: of all keys); dsinks [Hq], empty without sinks.

    With a cache, k and v are the whole cache.
    """
    settings = Settings(*scalars)
    start, generation = record.tolist()
    cached = position is not None
    piece = Slice(start, start + q.shape[1] if cached else k.shape[1])
    if cached and piece.start == piece.end:  # it has no place in the order of slices: nothing to check, nothing to add
        return q.new_empty(q.shape), k.new_empty(k[:, :0].shape), v.new_empty(v[:, :0].shape), new_dsinks(q, sinks)
    first = False
    if cached:
        assert position is not None and progress is not None and state is not None
        first = starts_backward(piece, generation, position, progress, state)
        k, v = k[:, : piece.end], v[:, : piece.end]
    mask = raw_mask(settings, document_starts, piece, q.shape[0])
    backend = backends.select(_call(q, k, v, sinks, mask, settings), settings.backend)

    if cached:
        assert position is not None and dk_sum is not None and dv_sum is not None and state is not None
        dk, dv = dk_sum[:, : piece.end], dv_sum[:, : piece.end]
        if dk.shape != k.shape or dv.shape != v.shape:
            raise ValueError(
                f"prefix_attention: backward of slice {piece}: the accumulator's dk {list(dk_sum.shape)} and dv "
                f"{list(dv_sum.shape)} do not fit the cache's k {list(k.shape)} and v {list(v.shape)} there; was the "
                "cache given other tensors since the forward?"
            )
        if first:
            claim(state, position, dk, dv)
    else:
        dk = torch.zeros(k.shape, dtype=accumulator_dtype(k.dtype), device=k.device)
        dv = torch.zeros(v.shape, dtype=accumulator_dtype(v.dtype), device=v.device)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dsinks = new_dsinks(q, sinks)
    if dq.numel() and k.shape[1]:
        with no_autocast(q.device.type):
            backend.backward(
                readable(dout),
                readable(q),
                readable(k),
                readable(v),
                readable(out),
                lse.contiguous(),
                dq=dq,
                dk=dk,
                dv=dv,
                dsinks=None if sinks is None else dsinks,
                settings=_raw_settings(settings, piece, mask, sinks),
            )
    else:
        dq.zero_()
    if not cached:
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks
    assert progress is not None and state is not None
    gone_back(piece, generation, progress, state)
    # These rows are final, because every later slice has added to them; rounded once.
    return dq, _rounded_copy(dk[:, piece.start :], k.dtype), _rounded_copy(dv[:, piece.start :], v.dtype), dsinks


torch.library.impl("tpkernels::prefix_attention_backward", "CompositeExplicitAutograd", torch.no_grad()(_backward))


@torch.library.register_fake("tpkernels::prefix_attention_backward")
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    record: Tensor,
    sinks: Tensor | None,
    document_starts: Tensor | None,
    position: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = k.shape[1] if position is None else q.shape[1]
    dk = k.new_empty(k.shape[0], rows, *k.shape[2:])
    dv = v.new_empty(v.shape[0], rows, *v.shape[2:])
    return q.new_empty(q.shape), dk, dv, new_dsinks(q, sinks)


def _rounded_copy(sums: Tensor, dtype: torch.dtype) -> Tensor:
    return sums.to(dtype, memory_format=torch.contiguous_format, copy=True)


def new_dsinks(q: Tensor, sinks: Tensor | None) -> Tensor:
    return torch.zeros(0 if sinks is None else q.shape[2], dtype=accumulator_dtype(q.dtype), device=q.device)


def _plain(q: Tensor) -> bool:
    """Whether nothing but this process's eager mode looks on: no tracing or dispatch mode, a tensor of plain values."""
    watched = q.is_meta or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    return not watched and type(q) in _PLAIN_TENSORS


_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def refuse_unserved(q: Tensor, k: Tensor, v: Tensor, *, softcap: float) -> None:
    """ValueError if no backend serves a causal call of these tensors, for callers that write before it. What is traced
    or of another tensor type passes: there the op itself refuses."""
    if _plain(q):
        settings = Settings(True, -1, -1, 1.0, softcap, False, "")
        backends.select(_call(q, k, v, None, RawMask(True, -1, -1, None), settings))


def forward_op(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The raw forward op. In plain eager mode the function behind it: the dispatcher takes 40 us for such a list."""
    if _plain(q):
        with torch.no_grad():
            return _forward(q, *rest)
    return torch.ops.tpkernels.prefix_attention_forward.default(q, *rest)


def backward_op(dout: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The raw backward op, as forward_op."""
    if _plain(q) and type(dout) in _PLAIN_TENSORS:
        with torch.no_grad():
            return _backward(dout, q, *rest)
    return torch.ops.tpkernels.prefix_attention_backward.default(dout, q, *rest)


# ---- both ------------------------------------------------------------------------------------------------------------


def _call(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: RawMask, settings: Settings
) -> backends.AttentionCall:
    return backends.AttentionCall(
        device_type=q.device.type,
        dtype=q.dtype,
        query_heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        value_head_dim=v.shape[3],
        window=mask.window_left >= 0 or mask.window_right >= 0,
        softcap=settings.softcap != 0,
        sinks=sinks is not None,
        documents=mask.document_starts is not None,
        deterministic=settings.deterministic,
        device_index=q.device.index or 0,
    )


def _raw_settings(settings: Settings, piece: Slice, mask: RawMask, sinks: Tensor | None) -> RawSettings:
    sinks = None if sinks is None else readable(sinks)
    return RawSettings(piece.start, mask, settings.scale, settings.softcap, sinks, settings.deterministic)


def raw_mask(settings: Settings, document_starts: Tensor | None, piece: Slice, batch: int) -> RawMask:
    """The mask of the slice's query rows. Rows before position 0 (more queries than keys) see no key anyway."""
    rows = None
    if document_starts is not None:
        if piece.end > document_starts.shape[1]:
            raise ValueError(
                f"prefix_attention: queries end at position {piece.end}, but the mask's document_starts covers "
                f"{document_starts.shape[1]} positions"
            )
        rows = document_starts[:, max(piece.start, 0) : piece.end]
        if piece.start < 0:
            rows = torch.nn.functional.pad(rows, (-piece.start, 0))
        rows = rows.expand(batch, -1).contiguous()
    return RawMask(settings.causal, settings.window_left, settings.window_right, rows)


def autocasts(device_type: str) -> bool:
    """Whether autocast is on. Meta tensors know none; torch 2.11 cannot compile a call of is_autocast_available."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def no_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Backends compute in the dtypes they are given."""
    if autocasts(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
