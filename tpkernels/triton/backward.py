# mypy: allow-incomplete-defs, allow-untyped-calls
"""Backward kernels: dk, dv in the owner of a key tile; dq in the owner of a query tile, or by fp32 reductions.

    p = exp(s - lse)   ds = scale * p * (dout v^T + delta)   dv += p^T dout   dk += ds^T q   dq = ds k
`prepare` packs delta = -rowsum(out * dout) and lse into fp32 rows; `attention_backward_keys` owns BLOCK_N keys of one
KV head, starts from the fp32 accumulators, adds query tiles from the last to the first (the group's heads are packed in
the rows) and stores once, without atomics; with REDUCE it also adds its share of dq into fp32 rows, which `round_rows`
rounds. `attention_backward_queries` is the deterministic dq: one owner a row, keys ascending.

Packed fp32 rows: [Hkv, total_tiles * ALIGN]; row r of batch row b lies at base(b) + r + shift. ALIGN is the row tile of
attention_backward_keys and shift = start * GROUP mod ALIGN, so that a tile is an absolute one: it holds the same rows
for any slicing at multiples of the invariance unit.

What the mask hides has p = ds = 0, and 0 times NaN is NaN: NaN or inf in a key, value, query or dout that no row (key)
of the call sees stays without effect, while in one that some see it can reach all others of the same partial tiles.

The one trap: scale goes into ds in fp32, before it is rounded; scaled at the end instead, the accumulator of earlier
slices could not be the starting value.
"""

import triton
import triton.language as tl

from tpkernels.triton.pieces import (
    ANYWHERE,
    LOG2E,
    end_key,
    first_key,
    first_token_at,
    load_tile,
    program,
    quotient,
    row_offsets,
    sees,
    tanh,
    token_and_member,
)

_INTEGERS = (  # taken as they are: a kernel a value of `start` or `tokens` would be a compilation a slice
    "q_batch q_token q_head k_batch k_token k_head v_batch v_token v_head out_batch out_token out_head dout_batch "
    "dout_token dout_head dk_batch dk_token dk_head dv_batch dv_token dv_head dq_batch dq_token dq_head lse_batch "
    "lse_head documents_batch batch tokens keys start kv_heads tiles left right shift total_tiles batch_tiles zero"
)


@triton.jit
def _packed_base(batch, kv_head, q_begin, total_tiles, batch_tiles, GROUP: tl.constexpr, ALIGN: tl.constexpr, VARLEN):
    """Where the packed rows of a batch row and KV head begin."""
    tile = q_begin.to(tl.int64) * GROUP // ALIGN + batch if VARLEN else batch * batch_tiles
    return (kv_head * total_tiles + tile) * ALIGN


@triton.jit(do_not_specialize=_INTEGERS.split())
def prepare(
    out_ptr,
    dout_ptr,
    lse_ptr,
    packed_lse_ptr,
    packed_delta_ptr,
    cu_q_ptr,
    out_batch,
    out_token,
    out_head,
    dout_batch,
    dout_token,
    dout_head,
    lse_batch,
    lse_head,
    tokens,
    kv_heads,
    tiles,
    shift,
    total_tiles,
    batch_tiles,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ALIGN: tl.constexpr,
    UNIT: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """delta, and lse in base 2; a row that is empty or not there has lse +inf, so that its p is 0."""
    tile, kv_head, batch = program(0, tiles, kv_heads)
    place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_begin = tokens * 0
    if VARLEN:
        q_begin = tl.load(cu_q_ptr + batch)
        tokens = tl.load(cu_q_ptr + batch + 1) - q_begin
        if tile * BLOCK_M >= tokens * GROUP:
            return
        out_ptr += row_offsets(q_begin, out_token, UNIT)
        dout_ptr += row_offsets(q_begin, dout_token, UNIT)
        lse_ptr += q_begin
    else:
        out_ptr += row_offsets(batch, out_batch, UNIT)
        dout_ptr += row_offsets(batch, dout_batch, UNIT)
        lse_ptr += batch * lse_batch
    valid = (place >= shift) & (place - shift < tokens * GROUP)
    row = tl.maximum(place - shift, 0)
    token, member = token_and_member(row, GROUP)
    head = kv_head * GROUP + member
    columns = tl.arange(0, BLOCK_V)
    out_rows = out_ptr + (row_offsets(token, out_token, UNIT) + row_offsets(head, out_head, UNIT))[:, None]
    dout_rows = dout_ptr + (row_offsets(token, dout_token, UNIT) + row_offsets(head, dout_head, UNIT))[:, None]
    out = load_tile(out_rows + columns, valid, columns, True, VALUE_DIM, BLOCK_V).to(tl.float32)
    dout = load_tile(dout_rows + columns, valid, columns, True, VALUE_DIM, BLOCK_V).to(tl.float32)
    lse = tl.load(lse_ptr + head * lse_head + token, mask=valid, other=-float("inf"))
    lse = tl.where(lse == -float("inf"), float("inf"), lse * LOG2E)
    base = _packed_base(batch, kv_head, q_begin, total_tiles, batch_tiles, GROUP, ALIGN, VARLEN)
    tl.store(packed_lse_ptr + base + place, lse)
    tl.store(packed_delta_ptr + base + place, -tl.sum(out * dout, 1))


@triton.jit
def _weights(s, lse, multiplier, cap, cap_scale, SOFTCAP: tl.constexpr, SIGN: tl.constexpr):
    """p, and d score / d (scale * q.k) (1 without softcap), from the products q.k; lse broadcasts against them."""
    slope = 1.0
    if SOFTCAP:
        t = tanh(s * cap_scale)
        s = cap * t
        slope = tl.fma(-t, t, tl.full(t.shape, 1.0, tl.float32))
    elif SIGN != 1:
        s = s * SIGN
    return tl.exp2(tl.fma(s, multiplier, -lse)), slope


@triton.jit
def _walk_rows(
    dk,
    dv,
    k,
    v,
    key,
    q_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    documents_ptr,
    q_token,
    q_head,
    dout_token,
    dout_head,
    begin,
    end,
    see_begin,
    see_end,
    start,
    keys,
    shift,
    left,
    right,
    scale,
    multiplier,
    cap,
    cap_scale,
    MASKED: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UNIT: tl.constexpr,
    NEAR: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SIGN: tl.constexpr,
    REDUCE: tl.constexpr,
):
    """Query tiles [begin, end), the last first. see_begin, see_end: the rows that see any key of the tile.

    NEAR: all offsets of rows of q and dout, in units, fit 32 bits.
    """
    columns = tl.arange(0, BLOCK_D)
    value_columns = tl.arange(0, BLOCK_V)
    # Where a tile holds whole tokens and no offset needs 64 bits, the rows of all full tiles lie alike: a sixth of the
    # loop's instructions less than with offsets from each row's number, and no more registers.
    WHOLE: tl.constexpr = NEAR and not MASKED and BLOCK_M % GROUP == 0
    within = tl.arange(0, BLOCK_M)
    token_within, member_within = token_and_member(within, GROUP)
    q_within = token_within * q_token + member_within * q_head
    dout_within = token_within * dout_token + member_within * dout_head
    for step in range(0, end - begin):
        tile_place = (end - 1 - step) * BLOCK_M
        place = tile_place + within
        # Either way is what keeps registers from spilling on Triton 3.6: from each row's place beside dq's addresses,
        # from the tile's without them.
        lse_rows = lse_ptr + place if REDUCE else lse_ptr + tile_place + within
        delta_rows = delta_ptr + place if REDUCE else delta_ptr + tile_place + within
        row = place - shift
        inside = (row >= see_begin) & (row < see_end)
        if MASKED:
            row = tl.maximum(row, 0)
        token, member = token_and_member(row, GROUP)
        if WHOLE:
            first = quotient((end - 1 - step) * BLOCK_M - shift, GROUP)
            q_rows = q_ptr + (tl.cast(q_within + first * q_token, tl.int64) * UNIT)[:, None]
            dout_rows = dout_ptr + (tl.cast(dout_within + first * dout_token, tl.int64) * UNIT)[:, None]
        else:
            q_rows = q_ptr + (row_offsets(token, q_token, UNIT) + row_offsets(member, q_head, UNIT))[:, None]
            dout_rows = (
                dout_ptr + (row_offsets(token, dout_token, UNIT) + row_offsets(member, dout_head, UNIT))[:, None]
            )
        q = load_tile(q_rows + columns, inside, columns, MASKED, HEAD_DIM, BLOCK_D)
        lse = tl.load(lse_rows)
        s = tl.dot(k, tl.trans(q), input_precision="ieee")  # [keys, rows]
        p, slope = _weights(s, lse[None, :], multiplier, cap, cap_scale, SOFTCAP, SIGN)
        if MASKED:
            lo = first_key(start + token, documents_ptr, token, inside, left, HAS_LEFT, HAS_DOCUMENTS)
            hi = end_key(start + token, keys, right, HAS_RIGHT)
            visible = inside[None, :] & sees(key[:, None], lo[None, :], hi[None, :], HAS_LEFT, HAS_DOCUMENTS)
            p = tl.where(visible, p, 0.0)
        dout = load_tile(dout_rows + value_columns, inside, value_columns, MASKED, VALUE_DIM, BLOCK_V)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        delta = tl.broadcast_to(tl.load(delta_rows)[None, :], p.shape)  # the product starts from it: no addition
        ds = p * tl.dot(v, tl.trans(dout), delta, input_precision="ieee") * slope * scale
        if MASKED:
            ds = tl.where(visible, ds, 0.0)
        ds = ds.to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision="ieee")
        if REDUCE:
            dq = tl.dot(tl.trans(ds), k, input_precision="ieee")
            dq_rows = dq_ptr + (place.to(tl.int64) * BLOCK_D)[:, None]
            tl.atomic_add(dq_rows + columns, dq, sem="relaxed")
    return dk, dv


@triton.jit
def _sum_rows(
    zero,
    dk_ptr,
    dv_ptr,
    cu_k_ptr,
    dk_batch,
    dk_token,
    dk_head,
    dv_batch,
    dv_token,
    dv_head,
    keys,
    tiles,
    kv_heads,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """Pointers [BLOCK_N, 1] to this program's rows of the accumulators, and which of them exist."""
    tile, kv_head, batch = program(zero, tiles, kv_heads)
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if VARLEN:
        begin = tl.load(cu_k_ptr + batch)
        keys = tl.load(cu_k_ptr + batch + 1) - begin
        dk_ptr += row_offsets(begin, dk_token, UNIT)
        dv_ptr += row_offsets(begin, dv_token, UNIT)
    else:
        dk_ptr += row_offsets(batch, dk_batch, UNIT)
        dv_ptr += row_offsets(batch, dv_batch, UNIT)
    dk_rows = dk_ptr + (row_offsets(key, dk_token, UNIT) + row_offsets(kv_head, dk_head, UNIT))[:, None]
    dv_rows = dv_ptr + (row_offsets(key, dv_token, UNIT) + row_offsets(kv_head, dv_head, UNIT))[:, None]
    return dk_rows, dv_rows, key < keys


@triton.jit(do_not_specialize=_INTEGERS.split(), do_not_specialize_on_alignment=ANYWHERE)
def attention_backward_keys(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    packed_lse_ptr,
    packed_delta_ptr,
    packed_dq_ptr,
    dk_ptr,
    dv_ptr,
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
    dk_batch,
    dk_token,
    dk_head,
    dv_batch,
    dv_token,
    dv_head,
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
    SUM_UNIT: tl.constexpr,
    NEAR: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SIGN: tl.constexpr,
    VARLEN: tl.constexpr,
    REDUCE: tl.constexpr,
):
    key_tile, kv_head, batch = program(0, tiles, kv_heads)  # the first keys are seen by most rows
    q_begin = tokens * 0
    if VARLEN:
        q_begin = tl.load(cu_q_ptr + batch)
        tokens = tl.load(cu_q_ptr + batch + 1) - q_begin
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
    if HAS_DOCUMENTS:
        documents_ptr += batch * documents_batch

    # Tokens [see_begin, see_end) see a key of the tile; tokens [all_begin, all_end) see all of it.
    key_begin = key_tile * BLOCK_N
    key_end = tl.minimum(key_begin + BLOCK_N, keys)
    see_begin = tokens * 0
    see_end = tl.where(key_begin < keys, tokens, 0)
    all_begin = tl.where(key_begin + BLOCK_N <= keys, 0, tokens)
    all_end = tokens
    if HAS_RIGHT:
        see_begin = tl.maximum(key_begin - right - start, see_begin)
        all_begin = tl.maximum(key_begin + BLOCK_N - 1 - right - start, all_begin)
    if HAS_LEFT:
        see_end = tl.minimum(key_end + left - start, see_end)
        all_end = tl.minimum(key_begin + left - start + 1, all_end)
    if HAS_DOCUMENTS:
        see_end = tl.minimum(first_token_at(documents_ptr, tokens, key_end), see_end)
        all_end = tl.minimum(first_token_at(documents_ptr, tokens, key_begin + 1), all_end)
    if see_begin >= see_end:
        return
    key = key_begin + tl.arange(0, BLOCK_N)
    exists = key < keys
    used = exists
    if REDUCE:  # ds is 0 where a key is hidden, and 0 times NaN would reach dq; all else is masked behind its product
        lo = first_key(start + see_begin, documents_ptr, see_begin, True, left, HAS_LEFT, HAS_DOCUMENTS)
        hi = end_key(start + see_end - 1, keys, right, HAS_RIGHT)
        used = sees(key, lo, hi, HAS_LEFT, HAS_DOCUMENTS)
    see_begin = see_begin * GROUP
    see_end = see_end * GROUP
    begin = quotient(see_begin + shift, BLOCK_M)
    end = quotient(see_end + shift + BLOCK_M - 1, BLOCK_M)
    all_begin = tl.minimum(all_begin, tokens) * GROUP
    all_end = tl.maximum(all_end, 0) * GROUP
    full_begin = tl.minimum(tl.maximum(quotient(all_begin + shift + BLOCK_M - 1, BLOCK_M), begin), end)
    full_end = tl.maximum(tl.minimum(quotient(all_end + shift, BLOCK_M), end), full_begin)

    columns = tl.arange(0, BLOCK_D)
    value_columns = tl.arange(0, BLOCK_V)
    k_rows = k_ptr + (row_offsets(key, k_token, UNIT) + row_offsets(kv_head, k_head, UNIT))[:, None]
    v_rows = v_ptr + (row_offsets(key, v_token, UNIT) + row_offsets(kv_head, v_head, UNIT))[:, None]
    k = load_tile(k_rows + columns, used, columns, True, HEAD_DIM, BLOCK_D)
    v = load_tile(v_rows + value_columns, exists, value_columns, True, VALUE_DIM, BLOCK_V)
    dk_rows, dv_rows, exists = _sum_rows(
        0, dk_ptr, dv_ptr, cu_k_ptr, dk_batch, dk_token, dk_head, dv_batch, dv_token, dv_head, keys, tiles, kv_heads,
        BLOCK_N, SUM_UNIT, VARLEN,
    )  # fmt: skip
    dk = load_tile(dk_rows + columns, exists, columns, True, HEAD_DIM, BLOCK_D)
    dv = load_tile(dv_rows + value_columns, exists, value_columns, True, VALUE_DIM, BLOCK_V)

    q_ptr += row_offsets(kv_head * GROUP, q_head, UNIT)
    dout_ptr += row_offsets(kv_head * GROUP, dout_head, UNIT)
    base = _packed_base(batch, kv_head, q_begin, total_tiles, batch_tiles, GROUP, ALIGN, VARLEN)
    lse_ptr = packed_lse_ptr + base
    delta_ptr = packed_delta_ptr + base
    dq_ptr = packed_dq_ptr
    if REDUCE:
        dq_ptr += base * BLOCK_D
    dk, dv = _walk_rows(
        dk, dv, k, v, key, q_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, documents_ptr, q_token, q_head, dout_token,
        dout_head, full_end, end, see_begin, see_end, start, keys, shift, left, right, scale, multiplier,
        cap, cap_scale, True, GROUP, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_M, UNIT, NEAR, HAS_LEFT,
        HAS_RIGHT, HAS_DOCUMENTS, SOFTCAP, SIGN, REDUCE,
    )  # fmt: skip
    dk, dv = _walk_rows(
        dk, dv, k, v, key, q_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, documents_ptr, q_token, q_head, dout_token,
        dout_head, full_begin, full_end, see_begin, see_end, start, keys, shift, left, right, scale,
        multiplier, cap, cap_scale, False, GROUP, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_M, UNIT, NEAR, HAS_LEFT,
        HAS_RIGHT, HAS_DOCUMENTS, SOFTCAP, SIGN, REDUCE,
    )  # fmt: skip
    dk, dv = _walk_rows(
        dk, dv, k, v, key, q_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, documents_ptr, q_token, q_head, dout_token,
        dout_head, begin, full_begin, see_begin, see_end, start, keys, shift, left, right, scale, multiplier,
        cap, cap_scale, True, GROUP, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_M, UNIT, NEAR, HAS_LEFT,
        HAS_RIGHT, HAS_DOCUMENTS, SOFTCAP, SIGN, REDUCE,
    )  # fmt: skip
    dk_rows, dv_rows, exists = _sum_rows(  # `zero`, or the compiler holds these in registers through the loops
        zero, dk_ptr, dv_ptr, cu_k_ptr, dk_batch, dk_token, dk_head, dv_batch, dv_token, dv_head, keys, tiles,
        kv_heads, BLOCK_N, SUM_UNIT, VARLEN,
    )  # fmt: skip
    stored = exists[:, None] & (columns < HEAD_DIM)[None, :] if HEAD_DIM < BLOCK_D else exists[:, None]
    tl.store(dk_rows + columns, dk, mask=stored)
    stored = exists[:, None] & (value_columns < VALUE_DIM)[None, :] if VALUE_DIM < BLOCK_V else exists[:, None]
    tl.store(dv_rows + value_columns, dv, mask=stored)
