# mypy: allow-incomplete-defs, allow-untyped-calls
"""Forward kernels: attention of a tile of query rows over its key tiles, and the combination of key splits.

q [B,T,Hq,D], k [B,S,Hkv,D], v [B,S,Hkv,Dv] -> out [B,T,Hq,Dv], lse fp32 [B,Hq,T] (natural log). One program owns
BLOCK_M packed query rows of one KV head and walks its key tiles in ascending order: partial ones at the left, full ones
without any mask arithmetic, partial ones at the right. With splits, a program takes a share of the tile's key tiles and
writes fp32 partial results, which `combine` merges.

The one trap: key tiles start at multiples of BLOCK_N from key 0, whatever the slice or window, and full and partial
tiles do the same arithmetic (explicit fma): that makes results bitwise independent of the slicing.
"""

import triton
import triton.language as tl

from tpkernels.triton.pieces import (
    ANYWHERE,
    LN2,
    LOG2E,
    key_tiles,
    load_tile,
    locate,
    program,
    query_rows,
    row_offsets,
    sees,
    tanh,
    token_and_member,
)

_INTEGERS = (  # taken as they are: a kernel a value of `start` or `tokens` would be a compilation a slice
    "q_batch q_token q_head k_batch k_token k_head v_batch v_token v_head out_split out_batch out_token out_head "
    "lse_split lse_batch lse_head documents_batch batch tokens keys start kv_heads row_tiles splits left right zero"
)


@triton.jit
def _scores(q, k, cap, cap_scale, SOFTCAP: tl.constexpr, SIGN: tl.constexpr):
    """[rows, keys], to be multiplied by `multiplier` for base 2."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP:
        s = cap * tanh(s * cap_scale)
    elif SIGN != 1:
        s = s * SIGN
    return s


@triton.jit
def _walk(
    acc,
    total,
    peak,
    q,
    k_pointers,
    v_pointers,
    k_step,
    v_step,
    begin,
    end,
    lo,
    hi,
    see_begin,
    see_end,
    multiplier,
    cap,
    cap_scale,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SIGN: tl.constexpr,
):
    """Key tiles [begin, end). peak: largest score so far in base 2, as rounded; acc and total are relative to it.

    It is the rounded one that is kept: where it stays, acc and total are multiplied by exactly 1, however many tiles.
    """
    columns = tl.arange(0, BLOCK_D)
    value_columns = tl.arange(0, BLOCK_V)
    for tile in range(begin, end):
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (key >= see_begin) & (key < see_end)
        k = load_tile(k_pointers + tl.cast(tile, tl.int64) * k_step, inside, columns, MASKED, HEAD_DIM, BLOCK_D)
        s = _scores(q, k, cap, cap_scale, SOFTCAP, SIGN)
        if MASKED:
            s = tl.where(sees(key[None, :], lo[:, None], hi[:, None], HAS_LEFT, HAS_DOCUMENTS), s, -float("inf"))
        now = tl.maximum(peak, tl.max(s, 1) * multiplier)
        shift = tl.where(now == -float("inf"), 0.0, now)
        p = tl.exp2(tl.fma(s, multiplier, -shift[:, None]))
        fade = tl.exp2(peak - shift)
        v = load_tile(v_pointers + tl.cast(tile, tl.int64) * v_step, inside, value_columns, MASKED, VALUE_DIM, BLOCK_V)
        total = tl.fma(total, fade, tl.sum(p, 1))
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        peak = now
    return acc, total, peak


@triton.jit(do_not_specialize=_INTEGERS.split(), do_not_specialize_on_alignment=ANYWHERE)
def attention_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    documents_ptr,
    sinks_ptr,
    cu_q_ptr,
    cu_k_ptr,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    out_split,
    out_batch,
    out_token,
    out_head,
    lse_split,
    lse_batch,
    lse_head,
    documents_batch,
    tokens,
    keys,
    start,
    kv_heads,
    row_tiles,
    splits,
    left,
    right,
    zero,
    multiplier,
    cap,
    cap_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SIGN: tl.constexpr,
    VARLEN: tl.constexpr,
    SPLIT: tl.constexpr,
):
    most_tokens = tokens
    row_tile, split, kv_head, batch, q_begin, tokens = locate(
        0, cu_q_ptr, most_tokens, kv_heads, row_tiles, splits, VARLEN
    )
    if VARLEN:
        k_begin = tl.load(cu_k_ptr + batch)
        keys = tl.load(cu_k_ptr + batch + 1) - k_begin
        start = keys - tokens
        q_ptr += row_offsets(q_begin, q_token, UNIT)
        k_ptr += row_offsets(k_begin, k_token, UNIT)
        v_ptr += row_offsets(k_begin, v_token, UNIT)
    else:
        q_ptr += row_offsets(batch, q_batch, UNIT)
        k_ptr += row_offsets(batch, k_batch, UNIT)
        v_ptr += row_offsets(batch, v_batch, UNIT)
    if row_tile * BLOCK_M >= tokens * GROUP:
        return
    if HAS_DOCUMENTS:
        documents_ptr += batch * documents_batch

    valid, token, head, lo, hi = query_rows(
        row_tile, kv_head, start, tokens, keys, documents_ptr, left, right, GROUP, BLOCK_M, HAS_LEFT, HAS_RIGHT,
        HAS_DOCUMENTS,
    )  # fmt: skip
    columns = tl.arange(0, BLOCK_D)
    value_columns = tl.arange(0, BLOCK_V)
    q_pointers = q_ptr + (row_offsets(token, q_token, UNIT) + row_offsets(head, q_head, UNIT))[:, None] + columns
    q = load_tile(q_pointers, valid, columns, True, HEAD_DIM, BLOCK_D)

    begin, full_begin, full_end, end, see_begin, see_end = key_tiles(
        row_tile, split, splits, start, tokens, keys, documents_ptr, left, right, GROUP, BLOCK_M, BLOCK_N, HAS_LEFT,
        HAS_RIGHT, HAS_DOCUMENTS, SPLIT,
    )  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    within = tl.arange(0, BLOCK_N)
    k_pointers = k_ptr + row_offsets(kv_head, k_head, UNIT) + row_offsets(within, k_token, UNIT)[:, None] + columns
    v_pointers = v_ptr + row_offsets(kv_head, v_head, UNIT) + row_offsets(within, v_token, UNIT)[:, None]
    v_pointers = v_pointers + value_columns
    k_step = k_token.to(tl.int64) * (UNIT * BLOCK_N)
    v_step = v_token.to(tl.int64) * (UNIT * BLOCK_N)
    if HAS_LEFT or HAS_DOCUMENTS:
        acc, total, peak = _walk(
            acc, total, peak, q, k_pointers, v_pointers, k_step, v_step, begin, full_begin, lo, hi, see_begin,
            see_end, multiplier, cap, cap_scale, True, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N, HAS_LEFT,
            HAS_DOCUMENTS, SOFTCAP, SIGN,
        )  # fmt: skip
    acc, total, peak = _walk(
        acc, total, peak, q, k_pointers, v_pointers, k_step, v_step, full_begin, full_end, lo, hi, see_begin,
        see_end, multiplier, cap, cap_scale, False, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N, HAS_LEFT,
        HAS_DOCUMENTS, SOFTCAP, SIGN,
    )  # fmt: skip
    acc, total, peak = _walk(
        acc, total, peak, q, k_pointers, v_pointers, k_step, v_step, full_end, end, lo, hi, see_begin,
        see_end, multiplier, cap, cap_scale, True, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N, HAS_LEFT,
        HAS_DOCUMENTS, SOFTCAP, SIGN,
    )  # fmt: skip

    top = peak * LN2
    empty = hi <= tl.maximum(lo, 0)
    row_tile, split, kv_head, batch, q_begin, tokens = locate(
        zero, cu_q_ptr, most_tokens, kv_heads, row_tiles, splits, VARLEN
    )
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < tokens * GROUP
    token, member = token_and_member(row, GROUP)
    head = kv_head * GROUP + member
    if VARLEN:
        out_ptr += row_offsets(q_begin, out_token, UNIT)
        lse_ptr += q_begin
    else:
        out_ptr += row_offsets(batch, out_batch, UNIT)
        lse_ptr += batch * lse_batch
    out_ptr += row_offsets(split, out_split, UNIT)
    lse_ptr += tl.cast(split, tl.int64) * lse_split
    if SPLIT:
        nothing = total == 0
        lse = tl.where(nothing, -float("inf"), top + LN2 * tl.log2(total))
        out = acc / tl.where(nothing, 1.0, total)[:, None]
    else:
        out, lse = _finish(acc, total, top, empty, sinks_ptr, head, valid, SINKS)
    out_pointers = out_ptr + (row_offsets(token, out_token, UNIT) + row_offsets(head, out_head, UNIT))[:, None]
    stored = valid[:, None] & (value_columns < VALUE_DIM)[None, :] if VALUE_DIM < BLOCK_V else valid[:, None]
    tl.store(out_pointers + value_columns, out.to(out_ptr.dtype.element_ty), mask=stored)
    tl.store(lse_ptr + head * lse_head + token, lse, mask=valid)


@triton.jit
def _finish(acc, total, top, empty, sinks_ptr, head, valid, SINKS: tl.constexpr):
    """out and lse of rows with acc and total relative to exp(top). Only a mask makes a row empty: a row that sees keys,
    all with a score of -inf, is NaN, as softmax has it."""
    lse_empty = tl.where(empty, -float("inf"), float("nan"))
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=valid, other=0.0)
        peak = tl.maximum(top, sink)
        base = tl.where(peak == -float("inf"), 0.0, peak)
        fade = tl.exp2((top - base) * LOG2E)
        total = tl.fma(total, fade, tl.exp2((sink - base) * LOG2E))
        acc = acc * fade[:, None]
        top = base
        lse_empty = tl.where(empty, sink, float("nan"))
    nothing = (total == 0) | empty
    out = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
    lse = tl.where(nothing, lse_empty, top + LN2 * tl.log2(total))
    return out, lse


@triton.jit(do_not_specialize=_INTEGERS.split(), do_not_specialize_on_alignment=ANYWHERE)
def combine_splits(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    documents_ptr,
    sinks_ptr,
    out_split,
    out_batch,
    out_token,
    out_head,
    lse_split,
    lse_batch,
    lse_head,
    documents_batch,
    tokens,
    keys,
    start,
    kv_heads,
    row_tiles,
    splits,
    left,
    right,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """out = sum of exp(lse_s) * part_s over the splits, divided by the sum of exp(lse_s) and exp(sink)."""
    row_tile, kv_head, batch = program(0, row_tiles, kv_heads)
    if HAS_DOCUMENTS:
        documents_ptr += batch * documents_batch
    valid, token, head, lo, hi = query_rows(
        row_tile, kv_head, start, tokens, keys, documents_ptr, left, right, GROUP, BLOCK_M, HAS_LEFT, HAS_RIGHT,
        HAS_DOCUMENTS,
    )  # fmt: skip
    value_columns = tl.arange(0, BLOCK_V)
    stored = valid[:, None] & (value_columns < VALUE_DIM)[None, :]
    places = (
        row_offsets(batch, out_batch, UNIT) + row_offsets(token, out_token, UNIT) + row_offsets(head, out_head, UNIT)
    )
    lse_places = batch * lse_batch + head * lse_head + token

    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    for split in range(0, splits):
        lse = tl.load(part_lse_ptr + tl.cast(split, tl.int64) * lse_split + lse_places, mask=valid, other=-float("inf"))
        top = tl.maximum(top, lse)
    base = tl.where(top == -float("inf"), 0.0, top)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for split in range(0, splits):
        lse = tl.load(part_lse_ptr + tl.cast(split, tl.int64) * lse_split + lse_places, mask=valid, other=-float("inf"))
        part = tl.load(
            part_ptr + (row_offsets(split, out_split, UNIT) + places)[:, None] + value_columns, mask=stored, other=0.0
        )
        weight = tl.exp2((lse - base) * LOG2E)
        total += weight
        acc = tl.fma(part, tl.broadcast_to(weight[:, None], part.shape), acc)
    out, lse = _finish(acc, total, top, hi <= tl.maximum(lo, 0), sinks_ptr, head, valid, SINKS)
    tl.store(out_ptr + places[:, None] + value_columns, out.to(out_ptr.dtype.element_ty), mask=stored)
    tl.store(lse_ptr + lse_places, lse, mask=valid)
