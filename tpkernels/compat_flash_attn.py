"""flash-attn 2's functions over this package's op, on any device and dtype that a backend serves.

Names, argument order, defaults, layouts ([batch, tokens, heads, head_dim], packed [tokens, heads, head_dim]) and return
values are those of flash_attn 2.8; causal and windows are aligned bottom-right: the last query sees the last key. A
query that sees no key has out 0 and lse -inf (there: +inf). An argument that is not served raises ValueError.

The one trap: a plain cache of flash_attn_with_kvcache is written to again before its backward runs. So a call that
needs gradients copies the tokens it reads, and takes k and v from the arguments. A PrefixCache needs no copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels import attention_ops
from tpkernels.attention import prefix_attention
from tpkernels.attention_checks import check_shapes
from tpkernels.compat_intervals import interval_attention
from tpkernels.compat_pieces import Sequences, Window, aligned_intervals
from tpkernels.mask import CAUSAL, Mask, window_bound
from tpkernels.prefix_cache import PrefixCache

_REMEDIES = {
    "dropout_p": "pass 0.0; dropout on the hidden states is up to the model",
    "alibi_slopes": "biases on scores are not served; use rotary or learned positions",
    "block_table": "gather the pages into contiguous k and v, or keep the sequence in a PrefixCache",
    "rotary_cos": "rotate q and k before the call",
    "rotary_sin": "rotate q and k before the call",
}


def _refuse(function: str, **given: Any) -> None:
    """ValueError for the first argument that is set but not served."""
    for name, value in given.items():
        if value is not None and (isinstance(value, Tensor) or value != 0):
            shown = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else value
            raise ValueError(f"{function}: {name} is {shown}, which is not served; {_REMEDIES[name]}")


def _window(function: str, causal: bool, window_size: tuple[int, int]) -> Window:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"{function}: window_size is {window_size!r}; it must be (left, right), -1 for no bound")
    return Window(causal, *(window_bound(size) for size in window_size))


def _mask(window: Window) -> Mask:
    left, right = (None if size < 0 else size for size in (window.left, window.right))
    return Mask(causal=window.causal, window=(left, right))


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_func: q [batch, tokens, heads, head_dim]; k [batch, keys, kv_heads, head_dim], v [batch,
    keys, kv_heads, value_head_dim] -> out [batch, tokens, heads, value_head_dim], differentiable in q, k and v.

    softmax_scale: default head_dim ** -0.5. window_size: (left, right) in tokens, -1 for no bound. return_attn_probs:
    (out, softmax_lse fp32 [batch, heads, tokens], natural log, not differentiable, and S_dmask, which is empty, as it
    is in flash-attn without dropout).

    Raises ValueError for dropout_p and alibi_slopes, and for what prefix_attention refuses (shapes, dtypes, devices).
    """
    _refuse("flash_attn_func", dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    mask = _mask(_window("flash_attn_func", causal, window_size))
    settings: dict[str, Any] = {"scale": softmax_scale, "softcap": softcap, "deterministic": deterministic}
    out, lse = prefix_attention(q, k, v, mask=mask, return_lse=True, **settings)
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """flash_attn.flash_attn_varlen_func: packed q [total_q, heads, head_dim]; k [total_k, kv_heads, head_dim],
    v [total_k, kv_heads, value_head_dim] -> out [total_q, heads, value_head_dim], differentiable in q, k and v.

    cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], running totals in tokens that start with 0; max_seqlen_q,
    max_seqlen_k: no sequence is longer. A sequence may have no queries or no keys, and rows behind the last one have
    out 0, lse -inf and gradients 0. return_attn_probs: as flash_attn_func, softmax_lse [heads, total_q]; so are the
    other arguments. On a GPU the triton backend leaves the totals unread: no sync, and no check of them.

    Raises ValueError for dropout_p, alibi_slopes and block_table, for totals of another type or shape, and, on the
    CPU, for totals that fall, end behind the tokens or exceed the maxima.
    """
    name = "flash_attn_varlen_func"
    _refuse(name, dropout_p=dropout_p, alibi_slopes=alibi_slopes, block_table=block_table)
    if not (q.dim() == k.dim() == v.dim() == 3):
        shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        raise ValueError(f"{name}: q, k and v must be [total tokens, heads, head_dim], got {shapes}")
    for which, totals in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(totals, Tensor):
            raise ValueError(f"{name}: {which} is a {type(totals).__name__}; it must be an int32 tensor")
    out, lse = interval_attention(
        q[None],
        k[None],
        v[None],
        sequences=Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        window=_window(name, causal, window_size),
        scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=True,
    )
    return (out[0], lse[0], q.new_empty(0)) if return_attn_probs else out[0]


# ---- with a cache ----------------------------------------------------------------------------------------------------


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor | PrefixCache,
    v_cache: Tensor | PrefixCache | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """flash_attn.flash_attn_with_kvcache, with the backward that it lacks: q [batch, tokens, heads, head_dim] against a
    cache [rows, capacity, kv_heads, head_dim] -> out [batch, tokens, heads, value_head_dim]; with return_softmax_lse
    (out, softmax_lse fp32 [batch, heads, tokens]).

    Plain cache tensors: k, v [batch, new, kv_heads, head_dim], if given, are written in place at cache_seqlens, an int
    or int32 [batch] of any values; without them cache_seqlens are the valid tokens (default: all). cache_batch_idx
    [batch]: the cache row of each row of q; cache_leftpad [batch]: the first valid token. Gradients flow to q, k and v.
    The prefix is a constant, and a cache tensor that requires a gradient is refused. Lengths in a tensor are read on
    the host: a sync on a GPU.

    k_cache a PrefixCache, v_cache None or the same one: k and v, required, are its next slice (cache_seqlens, an int:
    where it starts), and the backward adds to the gradients of all earlier slices; see prefix_attention.

    num_splits and rotary_interleaved (without rotary_cos) change no result.

    Raises ValueError, before anything is written, for rotary_cos, rotary_sin, block_table and alibi_slopes, a cache
    tensor that requires a gradient, k without v, shapes and dtypes that do not fit the cache, and lengths that exceed
    its capacity; NotImplementedError under torch.vmap.
    """
    name = "flash_attn_with_kvcache"
    _refuse(name, rotary_cos=rotary_cos, rotary_sin=rotary_sin, block_table=block_table, alibi_slopes=alibi_slopes)
    if (k is None) != (v is None):
        raise ValueError(f"{name}: give both k and v, or neither")
    window = _window(name, causal, window_size)
    settings: dict[str, Any] = {"scale": softmax_scale, "softcap": softcap, "return_lse": True}
    if isinstance(k_cache, PrefixCache):
        if v_cache is not None and v_cache is not k_cache:
            raise ValueError(f"{name}: with a PrefixCache as k_cache, v_cache is None or the same PrefixCache")
        if k is None or v is None:
            raise ValueError(f"{name}: with a PrefixCache, q, k and v are one slice; pass k and v too")
        if cache_batch_idx is not None or cache_leftpad is not None or isinstance(cache_seqlens, Tensor):
            raise ValueError(
                f"{name}: the rows of a PrefixCache are equally long; pass cache_seqlens as an int or leave it out, "
                "and no cache_batch_idx or cache_leftpad"
            )
        out, lse = prefix_attention(q, k, v, k_cache, start=cache_seqlens, mask=_mask(window), **settings)
    elif not isinstance(v_cache, Tensor):
        raise ValueError(f"{name}: v_cache is a {type(v_cache).__name__}; beside k_cache it needs a tensor")
    else:
        places: dict[str, Any] = {"lengths": cache_seqlens, "rows": cache_batch_idx, "leftpad": cache_leftpad}
        out, lse = _attend_plain_cache(q, k_cache, v_cache, k, v, **places, window=window, settings=settings)
    return (out, lse) if return_softmax_lse else out


def _attend_plain_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    lengths: int | Tensor | None,
    rows: Tensor | None,
    leftpad: Tensor | None,
    window: Window,
    settings: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Writes k and v at `lengths` into the rows of the caches and attends to what is there then -> out, lse."""
    if attention_ops.autocasts(q.device.type):
        q = q.to(k_cache.dtype)
        k, v = (x if x is None else x.to(k_cache.dtype) for x in (k, v))
    _check_cache(q, k_cache, v_cache, k, v, settings["scale"], settings["softcap"], rows)
    capacity = k_cache.shape[1]
    _check_numbers("cache_seqlens", lengths, batch=q.shape[0])
    _check_numbers("cache_batch_idx", rows, batch=q.shape[0], most=k_cache.shape[0] - 1)
    _check_numbers("cache_leftpad", leftpad, batch=q.shape[0], most=capacity)
    if lengths is None:
        if k is not None:
            raise ValueError(
                "flash_attn_with_kvcache: k and v are given without cache_seqlens, which says where to write them"
            )
        lengths = capacity
    written = 0 if k is None else k.shape[1]
    needs_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v))
    if isinstance(lengths, int) and rows is None and leftpad is None:
        _check_room([lengths], written, capacity)
        stop = lengths + written
        place = (slice(None), slice(lengths, stop))
        # Two calls: a slice in a generator's closure makes torch 2.11 compile once a length.
        keys = _updated(k_cache, k, place, place, rows, stop, needs_gradient)
        values = _updated(v_cache, v, place, place, rows, stop, needs_gradient)
        return prefix_attention(q, keys, values, mask=_mask(window), **settings)

    batch, device = q.shape[0], q.device
    old = torch.as_tensor(lengths, device=device).to(torch.int64).expand(batch)
    stop = capacity
    if not torch.compiler.is_compiling():
        _check_room(old.tolist(), written, capacity)
        stop = max(old.tolist(), default=0) + written
    own_rows = torch.arange(batch, device=device)
    places = old[:, None] + torch.arange(written, device=device)
    cache_rows = own_rows if rows is None else rows.to(torch.int64)
    keys, values = (
        _updated(cache, new, (cache_rows[:, None], places), (own_rows[:, None], places), rows, stop, needs_gradient)
        for cache, new in ((k_cache, k), (v_cache, v))
    )
    begin = 0 if leftpad is None else leftpad.to(device, torch.int64)[:, None]
    numbers = torch.arange(q.shape[1], device=device)
    intervals = aligned_intervals(numbers, q.shape[1], begin, (old + written)[:, None], window)
    return interval_attention(q, keys, values, intervals, **settings)


def _updated(
    cache: Tensor, new: Tensor | None, place: Any, own_place: Any, rows: Tensor | None, stop: int, copy: bool
) -> Tensor:
    """Write `new` at cache[place]; -> the cache rows in use, tokens [0, stop). With copy a copy of them, in which `new`
    stands at [own_place] with its graph."""
    if new is not None:
        with torch.no_grad():
            cache[place] = new.detach()
    held = cache[:, :stop] if rows is None else cache[rows.to(torch.int64), :stop]
    if not copy:
        return held
    held = held.clone()
    if new is not None:
        held[own_place] = new
    return held


def _check_numbers(argument: str, given: Any, *, batch: int, most: int | None = None) -> None:
    """Integers [batch] from 0 to `most`; without `most` also one for all rows, and the values are not looked at."""
    if given is None or (most is None and isinstance(given, int)):
        return
    numbers = torch.as_tensor(given)
    whole = not (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool)
    for_all = most is None and numbers.dim() <= 1 and numbers.numel() == 1
    if not whole or not (for_all or (numbers.dim() == 1 and numbers.shape[0] == batch)):
        raise ValueError(
            f"flash_attn_with_kvcache: {argument} is {numbers.dtype} {list(numbers.shape)}; it must be int32 "
            f"[{batch}], a number for each row of q"
        )
    if most is None or torch.compiler.is_compiling():
        return
    for row, number in enumerate(numbers.tolist()):
        if not 0 <= number <= most:
            raise ValueError(
                f"flash_attn_with_kvcache: {argument} is {number} in row {row}; for this cache it is from 0 to {most}"
            )


def _check_room(lengths: list[int], written: int, capacity: int) -> None:
    for row, length in enumerate(lengths):
        if length < 0 or length + written > capacity:
            raise ValueError(
                f"flash_attn_with_kvcache: cache_seqlens is {length} in row {row} and {written} tokens are to be "
                f"written, but the cache holds {capacity}; make it larger or start it anew"
            )


def _check_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    scale: float | None,
    softcap: float,
    rows: Tensor | None,
) -> None:
    """Everything that can be refused before the cache is written to."""
    name = "flash_attn_with_kvcache"
    no_vmap = torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is None
    if not no_vmap and any(
        torch._C._functorch.is_batchedtensor(x) for x in (q, k_cache, v_cache, k, v) if x is not None
    ):
        raise NotImplementedError(f"{name} does not run under torch.vmap: it writes its cache; use the batch dimension")
    for cache_name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: {cache_name} requires a gradient, but the prefix is a constant here; pass "
                f"{cache_name}.detach(), or a PrefixCache, whose backward reaches every earlier token"
            )
    four = q.dim() == k_cache.dim() == v_cache.dim() == 4
    if not four or k_cache.shape[:3] != v_cache.shape[:3] or (rows is None and q.shape[0] != k_cache.shape[0]):
        raise ValueError(
            f"{name}: q {list(q.shape)}, k_cache {list(k_cache.shape)} and v_cache {list(v_cache.shape)} must be "
            "[batch, tokens, heads, head_dim] with the same batch, and the caches equal but for head_dim; "
            "cache_batch_idx picks rows of a larger cache"
        )
    for new_name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if new is None:
            continue
        if new.dim() != 4 or new.shape[0] != q.shape[0] or new.shape[2:] != cache.shape[2:] or new.dtype != cache.dtype:
            raise ValueError(
                f"{name}: {new_name} is {new.dtype} {list(new.shape)}; for this q and cache it must be {cache.dtype} "
                f"[{q.shape[0]}, tokens, {cache.shape[2]}, {cache.shape[3]}]"
            )
    if k is not None and v is not None and k.shape[1] != v.shape[1]:
        raise ValueError(f"{name}: k has {k.shape[1]} tokens and v {v.shape[1]}; they must be equally many")
    sample_k, sample_v = (x[:1].expand(q.shape[0], -1, -1, -1) for x in (k_cache, v_cache))
    check_shapes(q, sample_k, sample_v, None, None, CAUSAL, scale, softcap)
    attention_ops.refuse_unserved(q, k_cache, v_cache, softcap=softcap)
