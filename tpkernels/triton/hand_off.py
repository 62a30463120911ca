# mypy: allow-incomplete-defs, allow-untyped-calls
"""Kernels that hand a slice's rows to the next GPU tile by tile, and start on those that came (links/peer.py).

A slot is [rows, COLUMNS] in the receiver's memory; a tile is TILE_ROWS of its rows. An epoch counts the uses of a slot
and wraps: it is compared by difference, never set back. Use n of a slot:
  sender    take_credit: wait for credit == n - 1, claim = n;  add_put or matmul_add_put: each tile, then its flag = n
  receiver  begin_use: wait for the first tiles;  wait_norm or wait_matmul: tile by tile;  end_use: credit = n
n itself lives in device memory (`uses`) and is counted up by take_credit and begin_use, so that a CUDA graph replays.

Ordering: all threads store, barrier, one thread posts with release at .sys; a waiter spins with acquire at .sys and
every load of a slot follows it, through pointers (a TMA load would need a proxy fence) and never through .nc.
A wait that fails reports once, into words that the host sees, and stops this end: every later kernel leaves without a
store, a flag or a credit. Nothing traps, so the context stays alive.

The traps: what ends a wait must be the same for all threads, as barriers stand in the loop; hence each such value goes
through a scalar atomic, which one thread runs and all receive. And no `from __future__ import annotations`, see
pieces.py. COUNTING is the interpreter's: no inline PTX, a turn of the loop for a nanosecond, and bf16 rounded by hand.
"""

import triton
import triton.language as tl

from tpkernels import hand_off as words_of

STOPPED = tl.constexpr(words_of.STOPPED)
REPORTER = tl.constexpr(words_of.REPORTER)
DIRECTION = tl.constexpr(words_of.DIRECTION)
GENERATION = tl.constexpr(words_of.GENERATION)
ABORT = tl.constexpr(words_of.ABORT)
REPORT = tl.constexpr(words_of.REPORT)
SENDER = tl.constexpr(words_of.SENDER)
RECEIVER = tl.constexpr(words_of.RECEIVER)
HOLDER = tl.constexpr(words_of.HOLDER)


@triton.jit
def stopped(control):
    """Whether an earlier wait of this end has failed."""
    return tl.atomic_add(control + STOPPED, 0, sem="relaxed", scope="gpu") != 0


@triton.jit
def clock(turns, COUNTING: tl.constexpr):
    """Nanoseconds; the interpreter's twin counts turns."""
    if COUNTING:
        now = tl.cast(turns, tl.int64)
    else:
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    return now


@triton.jit
def post(word, value, COUNTING: tl.constexpr):
    """*word = value, after all stores of this program. A plain store crosses PCIe too, where atomics do not."""
    tl.debug_barrier()  # Triton 3.8 puts none before a release, and one thread's release covers only its own stores
    if COUNTING:
        tl.atomic_xchg(word, value, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .u32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;"
            " @first st.release.sys.global.u32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r",
            [word, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def report(who, slot, tile, want, got, control, words, COUNTING: tl.constexpr):
    """Stop this end; the first to fail says why."""
    tl.atomic_xchg(control + STOPPED, 1, sem="relaxed", scope="gpu")
    if tl.atomic_cas(control + REPORTER, 0, 1, sem="relaxed", scope="gpu") == 0:
        text = words + REPORT
        tl.store(text + 1, tl.load(control + DIRECTION))
        tl.store(text + 2, slot)
        tl.store(text + 3, tile)
        tl.store(text + 4, want)
        tl.store(text + 5, got)
        tl.store(text + 6, tl.load(control + GENERATION))
        post(text, who, COUNTING)


@triton.jit
def wait(word, want, who, slot, tile, control, words, budget, COUNTING: tl.constexpr):
    """Whether *word reached `want`. It ends as well when `budget` is used up, another wait failed, or the host says."""
    turns = 0
    live = 1
    began = clock(turns, COUNTING)
    LOOK: tl.constexpr = 8 if COUNTING else 256  # turns between two looks at why not to wait any longer
    got = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    while ((got - want) < 0) & (live == 1):
        turns += 1
        if turns % LOOK == 0:
            late = tl.cast(clock(turns, COUNTING) - began > tl.cast(budget, tl.int64), tl.int32)
            asked = tl.atomic_add(words + ABORT, 0, sem="relaxed", scope="sys")
            tl.atomic_max(control + STOPPED, tl.maximum(late, asked), sem="relaxed", scope="gpu")
            if tl.atomic_add(control + STOPPED, 0, sem="relaxed", scope="gpu") != 0:
                live = 0
        got = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    if (got - want) < 0:
        report(who, slot, tile, want, got, control, words, COUNTING)
    return (got - want) >= 0


@triton.jit
def narrow(x, TYPE: tl.constexpr, COUNTING: tl.constexpr):
    """fp32 rounded to the nearest of TYPE, ties to even. The interpreter's cast to bf16 cuts off instead."""
    if COUNTING and tl.bfloat16 == TYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(TYPE)


# ---- of one program: credits and uses --------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("slot", "budget"))
def take_credit(credit, claim, uses, control, words, slot, budget, COUNTING: tl.constexpr):
    """Sender, before the work whose result goes into the slot, so that no multiprocessor is held while it waits."""
    if not stopped(control):
        used = tl.load(uses)
        if wait(credit, used, SENDER, slot, 0, control, words, budget, COUNTING):
            tl.store(uses, used + 1)
            post(claim, used + 1, COUNTING)


@triton.jit(do_not_specialize=("slot", "tiles", "budget"))
def begin_use(flags, uses, control, words, slot, tiles, budget, COUNTING: tl.constexpr):
    """Receiver: a new use begins, and its first `tiles` tiles are there. With one tile it is the gate before a kernel
    that waits for the others itself; with all of them any kernel may follow."""
    if not stopped(control):
        want = tl.load(uses) + 1
        tile = 0
        live = 1
        while (tile < tiles) & (live == 1):
            if wait(flags + tile, want, RECEIVER, slot, tile, control, words, budget, COUNTING):
                tile += 1
            else:
                live = 0
        if live == 1:
            tl.store(uses, want)  # after the barriers of the waits, so that no thread loads it anew


@triton.jit(do_not_specialize=("slot",))
def end_use(claim, credit, uses, control, words, slot, RELEASE: tl.constexpr, COUNTING: tl.constexpr):
    """Receiver: report unless the slot still holds this use; with RELEASE it may then be written again."""
    if not stopped(control):
        want = tl.load(uses)
        got = tl.atomic_add(claim, 0, sem="acquire", scope="sys")
        if got != want:
            report(HOLDER, slot, 0, want, got, control, words, COUNTING)
        elif RELEASE:
            post(credit, want, COUNTING)


# ---- rows ------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("rows",))
def add_put(
    x,
    residual,
    out,
    flags,
    uses,
    control,
    rows,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTING: tl.constexpr,
):
    """out = x (+ residual), one program a tile; the flag follows. x, residual, out: [rows, COLUMNS], contiguous, so a
    tile is one range of elements. Without flags a plain sum."""
    if flags is None or not stopped(control):
        tile = tl.program_id(0)
        begin = tl.cast(tile, tl.int64) * (TILE_ROWS * COLUMNS)
        for first in range(0, TILE_ROWS * COLUMNS, BLOCK):
            in_tile = first + tl.arange(0, BLOCK)
            at = begin + in_tile
            inside = (in_tile < TILE_ROWS * COLUMNS) & (at < tl.cast(rows, tl.int64) * COLUMNS)
            value = tl.load(x + at, mask=inside)
            if residual is not None:
                total = value.to(tl.float32) + tl.load(residual + at, mask=inside).to(tl.float32)
                value = narrow(total, x.dtype.element_ty, COUNTING)
            tl.store(out + at, value, mask=inside)
        if flags is not None:
            post(flags + tile, tl.load(uses), COUNTING)


@triton.jit(do_not_specialize=("rows", "slot", "budget"))
def wait_norm(
    x,
    weight,
    bias,
    out,
    mean_out,
    rstd_out,
    flags,
    uses,
    control,
    words,
    rows,
    eps,
    slot,
    budget,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTING: tl.constexpr,
):
    """out = norm(x) * weight + bias: LayerNorm, or RMSNorm where mean_out is absent. ROWS rows a program, which waits
    for their tile. x is the slot, [rows, COLUMNS]; mean_out, rstd_out [rows] in fp32. Without flags a plain norm."""
    first = tl.program_id(0) * ROWS
    ready = True
    if flags is not None:
        tile = first // TILE_ROWS
        ready = not stopped(control)
        if ready:
            ready = wait(flags + tile, tl.load(uses), RECEIVER, slot, tile, control, words, budget, COUNTING)
    if ready:
        row = first + tl.arange(0, ROWS)
        column = tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
        at = tl.cast(row, tl.int64)[:, None] * COLUMNS + column[None, :]
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if mean_out is not None:
            mean = tl.sum(values, 1) / COLUMNS
            tl.store(mean_out + row, mean, mask=row < rows)
            values = tl.where(inside, values - mean[:, None], 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(values * values, 1) / COLUMNS + eps)
        tl.store(rstd_out + row, rstd, mask=row < rows)
        normed = values * rstd[:, None]
        normed = normed * tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
        if bias is not None:
            normed = normed + tl.load(bias + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
        tl.store(out + at, narrow(normed, x.dtype.element_ty, COUNTING), mask=inside)
