# mypy: allow-incomplete-defs, allow-untyped-calls
"""Device functions that all attention kernels share: rows, key intervals, scores, tile loads.

Query rows of one KV head are packed: row r is head r % GROUP of the group, at token r // GROUP, so a short slice still
fills a tile and positions never decrease with r. A row at position p sees keys [lo(p), hi(p)) (csrc/include/tpk/
mask_intervals.h): a tile is skipped, full or partial by the rows at its ends.

The one trap: no `from __future__ import annotations` here or in any file with kernels; the interpreter would take the
text "tl.constexpr" for a run-time argument.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
ANYWHERE = ["documents_ptr"]  # a slice's begin at any token: on 16 bytes or not, the same kernel


@triton.jit
def first_key(position, documents_ptr, token, valid, left, HAS_LEFT: tl.constexpr, HAS_DOCUMENTS: tl.constexpr):
    """lo(p). documents_ptr: document starts of this batch row's query tokens. Works on a row or a vector of rows."""
    lo = position * 0
    if HAS_LEFT:
        lo = tl.maximum(lo, position - left)
    if HAS_DOCUMENTS:
        lo = tl.maximum(lo, tl.load(documents_ptr + token, mask=valid, other=0))
    return lo


@triton.jit
def end_key(position, keys, right, HAS_RIGHT: tl.constexpr):
    """hi(p); negative for a row before the first key."""
    hi = position * 0 + keys
    if HAS_RIGHT:
        hi = tl.minimum(hi, position + right + 1)
    return hi


@triton.jit
def first_token_at(documents_ptr, tokens, key):
    """The first query token whose document starts at `key` or later; `tokens` if there is none."""
    low = tokens * 0
    high = tokens
    while low < high:
        middle = low + (high - low) // 2
        at = tl.load(documents_ptr + middle) >= key
        low = tl.where(at, low, middle + 1)
        high = tl.where(at, middle, high)
    return low


@triton.jit
def row_offsets(rows, stride, UNIT: tl.constexpr):
    """rows * stride in elements, in 64 bits. Strides come in units of 16 bytes where all allow it, so that the compiler
    sees that a row starts on 16 bytes and moves 16 bytes at a time."""
    return tl.cast(rows, tl.int64) * (tl.cast(stride, tl.int64) * UNIT)


@triton.jit
def quotient(number, divisor):
    """number // divisor in 32 bits, of numbers that are not negative.

    Unsigned: a signed division leaves signs and absolute values in registers through the loops; kernels spill by it.
    """
    return (tl.cast(number, tl.uint32) // tl.cast(divisor, tl.uint32)).to(tl.int32)


@triton.jit
def token_and_member(row, GROUP: tl.constexpr):
    """Of a packed row that is not negative: its token, and which query head of its group it is."""
    token = quotient(row, GROUP)
    return token, row - token * GROUP


@triton.jit
def program(zero, tiles, kv_heads):
    """(tile, KV head, batch row) of a program; the tiles of one KV head follow each other. zero: as locate's."""
    pid = tl.program_id(0) + zero
    heads_before = quotient(pid, tiles)
    batch = quotient(heads_before, kv_heads)
    kv_head = heads_before - batch * kv_heads
    return pid - heads_before * tiles, kv_head.to(tl.int64), batch.to(tl.int64)


@triton.jit
def locate(zero, cu_q_ptr, tokens, kv_heads, row_tiles, splits, VARLEN: tl.constexpr):
    """What the program works on: (query tile, split, KV head, sequence, its first token, its tokens).

    Tiles of one KV head follow each other, so that its keys stay in L2; those with most keys come first. `zero` is 0: a
    kernel that locates itself again for its epilogue, with that argument, does not hold addresses in registers through
    its loops (the compiler cannot see that they are the same), which is what keeps it from spilling.
    """
    place, kv_head, batch = program(zero, row_tiles * splits, kv_heads)
    split = quotient(place, row_tiles)
    row_tile = row_tiles - 1 - (place - split * row_tiles)
    q_begin = tokens * 0
    if VARLEN:
        q_begin = tl.load(cu_q_ptr + batch)
        tokens = tl.load(cu_q_ptr + batch + 1) - q_begin
    return row_tile, split, kv_head, batch, q_begin, tokens


@triton.jit
def query_rows(
    row_tile,
    kv_head,
    start,
    tokens,
    keys,
    documents_ptr,
    left,
    right,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):
    """Of a tile's packed rows: valid, token, query head, and the keys [lo, hi) each sees."""
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < tokens * GROUP
    token, member = token_and_member(row, GROUP)
    head = kv_head * GROUP + member
    lo = first_key(start + token, documents_ptr, token, valid, left, HAS_LEFT, HAS_DOCUMENTS)
    hi = end_key(start + token, keys, right, HAS_RIGHT)
    return valid, token, head, lo, hi


@triton.jit
def sees(key, lo, hi, HAS_LEFT: tl.constexpr, HAS_DOCUMENTS: tl.constexpr):
    """Which keys lie in [lo, hi), of shapes that broadcast; without a lower bound lo is 0 and costs nothing."""
    visible = key < hi
    if HAS_LEFT or HAS_DOCUMENTS:
        visible = visible & (key >= lo)
    return visible


@triton.jit
def key_tiles(
    row_tile,
    split,
    splits,
    start,
    tokens,
    keys,
    documents_ptr,
    left,
    right,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """(begin, full_begin, full_end, end, see_begin, see_end): key tiles [begin, end) are this program's share, those in
    [full_begin, full_end) are seen whole by every row; keys [see_begin, see_end) are seen by any row of the tile.

    The tile's first and last row bound what any of it sees, and what all of it sees.
    """
    first = quotient(row_tile * BLOCK_M, GROUP)
    last = quotient(tl.minimum((row_tile + 1) * BLOCK_M, tokens * GROUP) - 1, GROUP)
    see_begin = tl.maximum(first_key(start + first, documents_ptr, first, True, left, HAS_LEFT, HAS_DOCUMENTS), 0)
    all_begin = tl.maximum(first_key(start + last, documents_ptr, last, True, left, HAS_LEFT, HAS_DOCUMENTS), 0)
    all_end = tl.maximum(end_key(start + first, keys, right, HAS_RIGHT), 0)
    see_end = tl.maximum(end_key(start + last, keys, right, HAS_RIGHT), 0)
    begin = quotient(see_begin, BLOCK_N)
    end = tl.maximum(quotient(see_end + BLOCK_N - 1, BLOCK_N), begin)
    if SPLIT:
        share = quotient(end - begin + splits - 1, splits)
        begin = tl.minimum(begin + split * share, end)
        end = tl.minimum(begin + share, end)
    full_begin = begin
    if HAS_LEFT or HAS_DOCUMENTS:
        full_begin = tl.minimum(tl.maximum(quotient(all_begin + BLOCK_N - 1, BLOCK_N), begin), end)
    full_end = tl.maximum(tl.minimum(quotient(all_end, BLOCK_N), end), full_begin)
    return begin, full_begin, full_end, end, see_begin, see_end


@triton.jit
def load_tile(pointers, rows_valid, columns, MASK_ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """A [rows, BLOCK] tile, zero in columns past DIM and, with MASK_ROWS, in rows that are not valid."""
    if MASK_ROWS and DIM < BLOCK:
        tile = tl.load(pointers, mask=rows_valid[:, None] & (columns[None, :] < DIM), other=0.0)
    elif MASK_ROWS:
        tile = tl.load(pointers, mask=rows_valid[:, None], other=0.0)
    elif DIM < BLOCK:
        tile = tl.load(pointers, mask=columns[None, :] < DIM, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def tanh(x):
    """tanh in fp32 to about two ulp (Cephes tanhf): a polynomial near zero, where 1 - 2 / (e^2x + 1) cancels."""
    magnitude = tl.abs(x)
    z = x * x
    p = tl.fma(z, -5.70498872745e-3, 2.06390887954e-2)
    p = tl.fma(p, z, -5.37397155531e-2)
    p = tl.fma(p, z, 1.33314422036e-1)
    p = tl.fma(p, z, -3.33332819422e-1)
    small = tl.fma(p * z, x, x)
    large = 1.0 - 2.0 / (tl.exp2(magnitude * (2.0 * LOG2E)) + 1.0)
    return tl.where(magnitude < 0.625, small, tl.where(x < 0, -large, large))
