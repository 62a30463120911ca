# mypy: allow-incomplete-defs, allow-untyped-calls
"""Matrix products at the two ends of a hand-off: one that puts its result tile by tile, one that starts on tiles that
came (protocol and traps: hand_off.py).

out [rows, N] = a [rows, K] @ b, where b is [K, N], or with TRANSPOSED a weight [N, K]; a program makes TILE_ROWS rows
and BLOCK_N columns. Programs go through the columns of one row tile first: otherwise all row tiles end at the end, and
nothing overlaps. fp32 sums, never tf32.
"""

import triton
import triton.language as tl

from tpkernels.triton.hand_off import RECEIVER, narrow, post, stopped, wait


@triton.jit
def product(
    a,
    b,
    row,
    column,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COUNTING: tl.constexpr,
):
    """Rows `row`, columns `column` of a @ b, in fp32."""
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    row_at = tl.cast(row, tl.int64)[:, None] * K
    for first in range(0, K, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        left = tl.load(a + row_at + inner[None, :], mask=(row < rows)[:, None] & (inner < K)[None, :], other=0.0)
        inside = (inner < K)[:, None] & (column < N)[None, :]
        if TRANSPOSED:
            right = tl.load(b + tl.cast(column, tl.int64)[None, :] * K + inner[:, None], mask=inside, other=0.0)
        else:
            right = tl.load(b + tl.cast(inner, tl.int64)[:, None] * N + column[None, :], mask=inside, other=0.0)
        if COUNTING:  # the interpreter multiplies the raw bits of bf16
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=("rows",))
def matmul_add_put(
    a,
    b,
    residual,
    out,
    flags,
    arrived,
    uses,
    control,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COUNTING: tl.constexpr,
):
    """out = a @ b (+ residual), rounded before the addition as two kernels would. The last program of a row tile posts
    its flag: its release covers the others' stores, which it acquired through `arrived` [tiles]. That counter is this
    GPU's own, so its last user may set it back: the next use is a later kernel of the same stream. Without flags a
    plain product."""
    if flags is None or not stopped(control):
        TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
        tile = tl.program_id(0) // TILES_N
        row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        column = (tl.program_id(0) % TILES_N) * BLOCK_N + tl.arange(0, BLOCK_N)
        total = product(a, b, row, column, rows, N, K, TRANSPOSED, TILE_ROWS, BLOCK_N, BLOCK_K, COUNTING)
        value = narrow(total, a.dtype.element_ty, COUNTING)
        inside = (row < rows)[:, None] & (column < N)[None, :]
        at = tl.cast(row, tl.int64)[:, None] * N + column[None, :]
        if residual is not None:
            total = value.to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
            value = narrow(total, a.dtype.element_ty, COUNTING)
        tl.store(out + at, value, mask=inside)
        if flags is not None:
            tl.debug_barrier()
            if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == TILES_N - 1:
                tl.atomic_xchg(arrived + tile, 0, sem="relaxed", scope="gpu")
                post(flags + tile, tl.load(uses), COUNTING)


@triton.jit(do_not_specialize=("rows", "slot", "budget"))
def wait_matmul(
    a,
    b,
    out,
    flags,
    uses,
    control,
    words,
    rows,
    slot,
    budget,
    N: tl.constexpr,
    K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COUNTING: tl.constexpr,
):
    """out = a @ b, where a is the slot: each program waits for its row tile, then multiplies. Without flags a plain
    product."""
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // TILES_N
    ready = True
    if flags is not None:
        ready = not stopped(control)
        if ready:
            ready = wait(flags + tile, tl.load(uses), RECEIVER, slot, tile, control, words, budget, COUNTING)
    if ready:
        row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        column = (tl.program_id(0) % TILES_N) * BLOCK_N + tl.arange(0, BLOCK_N)
        total = product(a, b, row, column, rows, N, K, TRANSPOSED, TILE_ROWS, BLOCK_N, BLOCK_K, COUNTING)
        inside = (row < rows)[:, None] & (column < N)[None, :]
        at = tl.cast(row, tl.int64)[:, None] * N + column[None, :]
        tl.store(out + at, narrow(total, a.dtype.element_ty, COUNTING), mask=inside)
