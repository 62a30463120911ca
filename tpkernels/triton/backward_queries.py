# mypy: allow-incomplete-defs, allow-untyped-calls
"""Backward kernels that own query rows: the deterministic dq, the rounding of the fast one, and dsinks.

dq = sum over keys of ds k (backward.py has the formulas). `attention_backward_queries` is the forward's walk over key
tiles, ascending from absolute tiles, so dq is bitwise the same for any slicing. `round_rows` turns the packed fp32
rows that attention_backward_keys reduced into dq. `sink_gradient` adds the sum over rows of exp(sink - lse) * delta
into dsinks, one program a head, in one order.
"""

import triton
import triton.language as tl

from tpkernels.triton.backward import _INTEGERS, _packed_base, _weights
from tpkernels.triton.pieces import (
    ANYWHERE,
    LOG2E,
    key_tiles,
    load_tile,
    locate,
    program,
    query_rows,
    row_offsets,
    sees,
    token_and_member,
)


@triton.jit
def _walk_keys(
    dq,
    q,
    dout,
    lse,
    delta,
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
    scale,
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
    columns = tl.arange(0, BLOCK_D)
    value_columns = tl.arange(0, BLOCK_V)
    for tile in range(begin, end):
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (key >= see_begin) & (key < see_end)
        k = load_tile(k_pointers + tl.cast(tile, tl.int64) * k_step, inside, columns, MASKED, HEAD_DIM, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        p, slope = _weights(s, lse[:, None], multiplier, cap, cap_scale, SOFTCAP, SIGN)
        v = load_tile(v_pointers + tl.cast(tile, tl.int64) * v_step, inside, value_columns, MASKED, VALUE_DIM, BLOCK_V)
        dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
        ds = p * (dp + delta[:, None]) * slope * scale
        if MASKED:
            ds = tl.where(sees(key[None, :], lo[:, None], hi[:, None], HAS_LEFT, HAS_DOCUMENTS), ds, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=_INTEGERS.split(), do_not_specialize_on_alignment=ANYWHERE)
def attention_backward_queries(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    packed_lse_ptr,
    packed_delta_ptr,
    dq_ptr,
    documents_ptr,
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
    dout_batch,
    dout_token,
    dout_head,
    dq_batch,
    dq_token,
    dq_head,
    documents_batch,
    tokens,
    keys,
    start,
    kv_heads,
    tiles,
    left,
    right,
    shift,
    total_tiles,
    batch_tiles,
    zero,
    scale,
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
    ALIGN: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SIGN: tl.constexpr,
    VARLEN: tl.constexpr,
):
    most_tokens = tokens
    row_tile, _, kv_head, batch, q_begin, tokens = locate(0, cu_q_ptr, most_tokens, kv_heads, tiles, 1, VARLEN)
    if VARLEN:
        k_begin = tl.load(cu_k_ptr + batch)
        keys = tl.load(cu_k_ptr + batch + 1) - k_begin
        start = keys - tokens
        q_ptr += row_offsets(q_begin, q_token, UNIT)
        dout_ptr += row_offsets(q_begin, dout_token, UNIT)
        k_ptr += row_offsets(k_begin, k_token, UNIT)
        v_ptr += row_offsets(k_begin, v_token, UNIT)
    else:
        q_ptr += row_offsets(batch, q_batch, UNIT)
        dout_ptr += row_offsets(batch, dout_batch, UNIT)
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
    q_rows = q_ptr + (row_offsets(token, q_token, UNIT) + row_offsets(head, q_head, UNIT))[:, None]
    dout_rows = dout_ptr + (row_offsets(token, dout_token, UNIT) + row_offsets(head, dout_head, UNIT))[:, None]
    q = load_tile(q_rows + columns, valid, columns, True, HEAD_DIM, BLOCK_D)
    dout = load_tile(dout_rows + value_columns, valid, value_columns, True, VALUE_DIM, BLOCK_V)
    base = _packed_base(batch, kv_head, q_begin, total_tiles, batch_tiles, GROUP, ALIGN, VARLEN) + shift
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    lse = tl.load(packed_lse_ptr + base + row, mask=valid, other=float("inf"))
    delta = tl.load(packed_delta_ptr + base + row, mask=valid, other=0.0)

    begin, full_begin, full_end, end, see_begin, see_end = key_tiles(
        row_tile, 0, 1, start, tokens, keys, documents_ptr, left, right, GROUP, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT,
        HAS_DOCUMENTS, False,
    )  # fmt: skip
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    within = tl.arange(0, BLOCK_N)
    k_pointers = k_ptr + row_offsets(kv_head, k_head, UNIT) + row_offsets(within, k_token, UNIT)[:, None] + columns
    v_pointers = v_ptr + row_offsets(kv_head, v_head, UNIT) + row_offsets(within, v_token, UNIT)[:, None]
    v_pointers = v_pointers + value_columns
    k_step = k_token.to(tl.int64) * (UNIT * BLOCK_N)
    v_step = v_token.to(tl.int64) * (UNIT * BLOCK_N)
    if HAS_LEFT or HAS_DOCUMENTS:
        dq = _walk_keys(
            dq, q, dout, lse, delta, k_pointers, v_pointers, k_step, v_step, begin, full_begin, lo, hi, see_begin,
            see_end, scale, multiplier, cap, cap_scale, True, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N, HAS_LEFT,
            HAS_DOCUMENTS, SOFTCAP, SIGN,
        )  # fmt: skip
    dq = _walk_keys(
        dq, q, dout, lse, delta, k_pointers, v_pointers, k_step, v_step, full_begin, full_end, lo, hi, see_begin,
        see_end, scale, multiplier, cap, cap_scale, False, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N, HAS_LEFT,
        HAS_DOCUMENTS, SOFTCAP, SIGN,
    )  # fmt: skip
    dq = _walk_keys(
        dq, q, dout, lse, delta, k_pointers, v_pointers, k_step, v_step, full_end, end, lo, hi, see_begin,
        see_end, scale, multiplier, cap, cap_scale, True, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N, HAS_LEFT,
        HAS_DOCUMENTS, SOFTCAP, SIGN,
    )  # fmt: skip
    row_tile, _, kv_head, batch, q_begin, tokens = locate(zero, cu_q_ptr, most_tokens, kv_heads, tiles, 1, VARLEN)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < tokens * GROUP
    token, member = token_and_member(row, GROUP)
    head = kv_head * GROUP + member
    if VARLEN:
        dq_ptr += row_offsets(q_begin, dq_token, UNIT)
    else:
        dq_ptr += row_offsets(batch, dq_batch, UNIT)
    dq_rows = dq_ptr + (row_offsets(token, dq_token, UNIT) + row_offsets(head, dq_head, UNIT))[:, None]
    stored = valid[:, None] & (columns < HEAD_DIM)[None, :] if HEAD_DIM < BLOCK_D else valid[:, None]
    tl.store(dq_rows + columns, dq.to(dq_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=_INTEGERS.split())
def round_rows(
    packed_dq_ptr,
    dq_ptr,
    cu_q_ptr,
    dq_batch,
    dq_token,
    dq_head,
    tokens,
    kv_heads,
    tiles,
    shift,
    total_tiles,
    batch_tiles,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ALIGN: tl.constexpr,
    UNIT: tl.constexpr,
    VARLEN: tl.constexpr,
):
    tile, kv_head, batch = program(0, tiles, kv_heads)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_begin = tokens * 0
    if VARLEN:
        q_begin = tl.load(cu_q_ptr + batch)
        tokens = tl.load(cu_q_ptr + batch + 1) - q_begin
        dq_ptr += row_offsets(q_begin, dq_token, UNIT)
    else:
        dq_ptr += row_offsets(batch, dq_batch, UNIT)
    valid = row < tokens * GROUP
    token, member = token_and_member(row, GROUP)
    head = kv_head * GROUP + member
    columns = tl.arange(0, BLOCK_D)
    base = _packed_base(batch, kv_head, q_begin, total_tiles, batch_tiles, GROUP, ALIGN, VARLEN) + shift
    packed_rows = packed_dq_ptr + ((base + row) * BLOCK_D)[:, None]
    dq = tl.load(packed_rows + columns, mask=valid[:, None], other=0.0)
    dq_rows = dq_ptr + (row_offsets(token, dq_token, UNIT) + row_offsets(head, dq_head, UNIT))[:, None]
    stored = valid[:, None] & (columns < HEAD_DIM)[None, :] if HEAD_DIM < BLOCK_D else valid[:, None]
    tl.store(dq_rows + columns, dq.to(dq_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=_INTEGERS.split())
def sink_gradient(
    packed_lse_ptr,
    packed_delta_ptr,
    sinks_ptr,
    dsinks_ptr,
    cu_q_ptr,
    batch,
    tokens,
    shift,
    total_tiles,
    batch_tiles,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ALIGN: tl.constexpr,
    VARLEN: tl.constexpr,
):
    head = tl.program_id(0)
    kv_head, member = token_and_member(head, GROUP)
    kv_head = kv_head.to(tl.int64)
    sink = tl.load(sinks_ptr + head) * LOG2E
    total = tl.zeros([BLOCK_M], tl.float32)
    for row in range(0, batch):
        q_begin = tokens * 0
        length = tokens
        if VARLEN:
            q_begin = tl.load(cu_q_ptr + row)
            length = tl.load(cu_q_ptr + row + 1) - q_begin
        base = _packed_base(tl.cast(row, tl.int64), kv_head, q_begin, total_tiles, batch_tiles, GROUP, ALIGN, VARLEN)
        for first in range(0, length, BLOCK_M):
            token = first + tl.arange(0, BLOCK_M)
            valid = token < length
            place = base + shift + token.to(tl.int64) * GROUP + member
            lse = tl.load(packed_lse_ptr + place, mask=valid, other=float("inf"))
            delta = tl.load(packed_delta_ptr + place, mask=valid, other=0.0)
            share = tl.where(lse == float("inf"), 0.0, tl.exp2(sink - lse))
            total += share * delta
    tl.store(dsinks_ptr + head, tl.load(dsinks_ptr + head) + tl.sum(total, 0))
