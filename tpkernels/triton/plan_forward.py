"""The forward's launches: attention_forward, and combine_splits where the keys of a tile are shared out.

The one trap: how many shares there are follows from sizes alone, and is 1 with deterministic=True: shares are cut where
a tile's visible keys say, so their sums differ in the last bits from one program's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.backends import RawSettings
from tpkernels.triton import forward, tiles
from tpkernels.triton.launch import Launch
from tpkernels.triton.problem import Bounds, Lengths, Problem, Scoring, grid_of, strides, strides_unit, tiles_of
from tpkernels.triton.tiles import Tile

# Of a program that shares a tile's keys, in units of the time that one key tile takes: starting, and writing partial
# results that are read again. Arithmetic from bytes and operations on an H200 (128 x 128 tiles, head_dim 128, half of
# the peak rate), not measured; between half and twice of each the choice hardly changes.
START, PARTIAL, COMBINE = 1, 2, 4
MIN_TILES_PER_SPLIT = 4
MAX_SPLITS = 32
MANY_ROUNDS = 4  # of programs: with more the last round's idle multiprocessors hardly count, and partial results would


def choose_splits(programs: int, key_tiles: int, slots: int) -> int:
    """Shares of each query tile's keys that take the least time on a GPU that runs `slots` programs at once."""
    if programs > MANY_ROUNDS * slots:
        return 1

    def time(splits: int) -> int:
        rounds = tiles_of(programs * splits, slots)
        extra = 0 if splits == 1 else PARTIAL
        return rounds * (tiles_of(key_tiles, splits) + START + extra) + (COMBINE if splits > 1 else 0)

    return min(range(1, max(1, min(key_tiles // MIN_TILES_PER_SPLIT, MAX_SPLITS)) + 1), key=time)


def plan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    out: Tensor,
    lse: Tensor,
    settings: RawSettings,
    architecture: str,
    processors: int,
    lengths: Lengths | None = None,
    tile: Tile | None = None,
) -> list[Launch]:
    """attention_forward, and combine_splits when the keys are split (never with deterministic or packed sequences)."""
    mask, sinks, deterministic = settings.mask, settings.sinks, settings.deterministic
    problem = Problem.of(q, k, v, settings.start, lengths)
    scoring = Scoring.of(settings.scale, settings.softcap)
    bounds = Bounds.of(mask, start=problem.start, tokens=problem.tokens, keys=problem.keys, packed=lengths is not None)
    kind: tiles.Kind = "softcap forward" if settings.softcap else "forward"
    tile = tile or tiles.find(architecture, max(problem.head_dim, problem.value_head_dim), q.element_size(), kind)
    row_tiles = tiles_of(problem.tokens * problem.group, tile.rows)
    programs = grid_of(problem.batch, problem.kv_heads, row_tiles)
    splits = 1
    if not deterministic and lengths is None:
        seen = problem.keys
        if bounds.has_left and bounds.has_right:  # what one tile of rows can see
            seen = min(seen, bounds.left + bounds.right + 1 + tiles_of(tile.rows, problem.group))
        splits = choose_splits(programs, seen // tile.keys, processors * tile.residents)
    unit = strides_unit([q, k, v, out])
    if out.numel() % unit:  # partial results lie behind each other
        unit = 1
    sizes = {
        "tokens": problem.tokens,
        "keys": problem.keys,
        "start": problem.start,
        "kv_heads": problem.kv_heads,
        "row_tiles": row_tiles,
        "splits": splits,
    }
    part, part_lse = out, lse
    if splits > 1:
        part = torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)
        part_lse = torch.empty(splits, *lse.shape, dtype=torch.float32, device=lse.device)
    result_strides = {
        **strides("out", out, unit),
        "out_split": out.numel() // unit,
        "lse_split": lse.numel(),
        "lse_batch": lse.stride(0),
        "lse_head": lse.stride(1),
    }
    constants = {
        "GROUP": problem.group,
        "VALUE_DIM": problem.value_head_dim,
        "BLOCK_V": tiles.padded(problem.value_head_dim),
        "BLOCK_M": tile.rows,
        "UNIT": unit,
        **bounds.constants,
        "SINKS": sinks is not None,
    }
    launches = [
        Launch(
            forward.attention_forward,
            grid_of(programs, splits),
            {
                "q_ptr": q,
                "k_ptr": k,
                "v_ptr": v,
                "out_ptr": part,
                "lse_ptr": part_lse,
                "sinks_ptr": sinks,
                "cu_q_ptr": None if lengths is None else lengths.cu_q,
                "cu_k_ptr": None if lengths is None else lengths.cu_k,
                **strides("q", q, unit),
                **strides("k", k, unit),
                **strides("v", v, unit),
                **result_strides,
                **bounds.arguments,
                **sizes,
                "zero": 0,
                "multiplier": scoring.multiplier,
                "cap": scoring.cap,
                "cap_scale": scoring.cap_scale,
            },
            {
                **constants,
                "HEAD_DIM": problem.head_dim,
                "BLOCK_D": tiles.padded(problem.head_dim),
                "BLOCK_N": tile.keys,
                "SOFTCAP": settings.softcap != 0,
                "SIGN": scoring.sign,
                "VARLEN": lengths is not None,
                "SPLIT": splits > 1,
            },
            tile.warps,
            tile.stages,
            tile.registers,
        )
    ]
    if splits > 1:
        rows = tiles.SMALL_ROWS
        sizes["row_tiles"] = tiles_of(problem.tokens * problem.group, rows)
        launches.append(
            Launch(
                forward.combine_splits,
                grid_of(problem.batch, problem.kv_heads, sizes["row_tiles"]),
                {
                    "part_ptr": part,
                    "part_lse_ptr": part_lse,
                    "out_ptr": out,
                    "lse_ptr": lse,
                    "sinks_ptr": sinks,
                    **result_strides,
                    **bounds.arguments,
                    **sizes,
                },
                {**constants, "BLOCK_M": rows},
            )
        )
    return launches
