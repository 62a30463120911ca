"""From a slot of a link and a call's tensors to launches of the hand-off kernels (hand_off.py, hand_off_matmul.py).

Rows in, rows out: x [rows, columns], contiguous. With `slot=None` and `out=` a plan is the plain op, the same kernel
without flags, waits and slot: what the fused one must equal bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from tpkernels.hand_off import Slot, target
from tpkernels.triton import hand_off, hand_off_matmul
from tpkernels.triton.launch import INTERPRETED, Launch
from tpkernels.triton.launch import run as run  # a Language (tpkernels/hand_off.py) is this module

# Rows of a tile: one warp group's product on sm_90; fewer delay the first tile less but cost a flag each.
TILE_ROWS = 16 if INTERPRETED else 64
BLOCK_N = 16 if INTERPRETED else 128  # so that the interpreter's small cases have several tiles, too
TICKS_PER_S = 1000 if INTERPRETED else 10**9  # of a wait; the interpreter counts turns
WIDEST_NORM = 32768  # columns; a program holds whole rows in registers


def take_credit(slot: Slot, *, counting: bool = INTERPRETED) -> Launch:
    names = ("credit", "claim", "uses", "control", "words", "budget")
    arguments = _of(slot, *names) | {"slot": slot.index}
    return Launch(hand_off.take_credit, 1, arguments, {"COUNTING": counting}, warps=1)


def begin_use(slot: Slot, tiles: int, *, counting: bool = INTERPRETED) -> Launch:
    arguments = _of(slot, "flags", "uses", "control", "words", "budget") | {"slot": slot.index, "tiles": tiles}
    return Launch(hand_off.begin_use, 1, arguments, {"COUNTING": counting}, warps=1)


def end_use(slot: Slot, *, release: bool, counting: bool = INTERPRETED) -> Launch:
    arguments = _of(slot, "claim", "credit", "uses", "control", "words") | {"slot": slot.index}
    return Launch(hand_off.end_use, 1, arguments, {"RELEASE": release, "COUNTING": counting}, warps=1)


def add_put(
    slot: Slot | None, x: Tensor, residual: Tensor | None, *, out: Tensor | None = None, counting: bool = INTERPRETED
) -> Launch:
    """The slot, or out, becomes x + residual."""
    tile_rows = TILE_ROWS if slot is None else slot.tile_rows
    rows, columns = x.shape
    constants = {
        "COLUMNS": columns,
        "TILE_ROWS": tile_rows,
        "BLOCK": min(4096, triton.next_power_of_2(tile_rows * columns)),
        "COUNTING": counting,
    }
    arguments = {"x": x, "residual": residual, "out": target(slot, out), "rows": rows}
    arguments |= _of(slot, "flags", "uses", "control")
    return Launch(hand_off.add_put, triton.cdiv(rows, tile_rows), arguments, constants, warps=8)


def matmul_add_put(
    slot: Slot | None,
    a: Tensor,
    b: Tensor,
    residual: Tensor | None,
    *,
    transposed: bool,
    out: Tensor | None = None,
    counting: bool = INTERPRETED,
) -> Launch:
    """The slot, or out, becomes a @ b + residual; b [K, N], or with `transposed` a weight [N, K]."""
    arguments = {"a": a, "b": b, "residual": residual, "out": target(slot, out), "rows": a.shape[0]}
    arguments |= _of(slot, "flags", "arrived", "uses", "control")
    return _matmul(hand_off_matmul.matmul_add_put, slot, arguments, transposed, counting)


def wait_matmul(
    slot: Slot | None,
    b: Tensor,
    *,
    rows: int,
    transposed: bool,
    out: Tensor,
    a: Tensor | None = None,
    counting: bool = INTERPRETED,
) -> Launch:
    """out = rows of the slot (or a) @ b, each row tile as soon as it is there."""
    arguments = {"a": target(slot, a), "b": b, "out": out, "rows": rows}
    arguments |= _of(slot, "flags", "uses", "control", "words", "budget") | {"slot": 0 if slot is None else slot.index}
    return _matmul(hand_off_matmul.wait_matmul, slot, arguments, transposed, counting)


def wait_norm(
    slot: Slot | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    rows: int,
    eps: float,
    out: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    x: Tensor | None = None,
    counting: bool = INTERPRETED,
) -> Launch:
    """out = the norm of the slot's rows (or of x); mean: None for RMSNorm. ValueError for too many columns."""
    tile_rows = TILE_ROWS if slot is None else slot.tile_rows
    columns = weight.shape[0]
    if columns > WIDEST_NORM:
        raise ValueError(f"a fused norm holds whole rows in registers, at most {WIDEST_NORM} columns, not {columns}.")
    block = triton.next_power_of_2(columns)
    rows_each = max(1, min(tile_rows, 4096 // block))
    constants = {"COLUMNS": columns, "TILE_ROWS": tile_rows, "ROWS": rows_each, "BLOCK": block, "COUNTING": counting}
    arguments = {
        "x": target(slot, x),
        "weight": weight,
        "bias": bias,
        "out": out,
        "mean_out": mean,
        "rstd_out": rstd,
        "rows": rows,
        "eps": eps,
        "slot": 0 if slot is None else slot.index,
    }
    arguments |= _of(slot, "flags", "uses", "control", "words", "budget")
    warps = 4 if block <= 4096 else 16
    return Launch(hand_off.wait_norm, triton.cdiv(rows, rows_each), arguments, constants, warps=warps)


def _matmul(kernel: Any, slot: Slot | None, arguments: dict[str, Any], transposed: bool, counting: bool) -> Launch:
    a, b = arguments["a"], arguments["b"]
    n, k = b.shape if transposed else b.T.shape
    tile_rows = TILE_ROWS if slot is None else slot.tile_rows
    block_n = BLOCK_N if INTERPRETED or a.dtype.itemsize == 2 else BLOCK_N // 2  # fp32 sums stay within the registers
    constants = {
        "N": n,
        "K": k,
        "TRANSPOSED": transposed,
        "TILE_ROWS": tile_rows,
        "BLOCK_N": block_n,
        "BLOCK_K": 16 if INTERPRETED else 128 // a.dtype.itemsize,  # 128 bytes of a row: one line
        "COUNTING": counting,
    }
    grid = triton.cdiv(arguments["rows"], tile_rows) * triton.cdiv(n, block_n)
    return Launch(kernel, grid, arguments, constants, warps=4, stages=3)


def _of(slot: Slot | None, *names: str) -> dict[str, Any]:
    return {name: 0 if slot is None and name == "budget" else getattr(slot, name, None) for name in names}


def meta_slot(columns: int, dtype: torch.dtype) -> Slot:
    """A slot without memory, to compile kernels for."""
    data = torch.empty(TILE_ROWS, columns, dtype=dtype, device="meta")
    word = torch.empty(32, dtype=torch.int32, device="meta")
    return Slot(0, data, word, word, word, word, word, word, word, 2**33, TILE_ROWS)
