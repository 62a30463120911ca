"""The backward's launches: prepare, sink_gradient if wanted, attention_backward_keys, and what makes dq.

The one trap: packed rows (backward.py) begin at start * GROUP mod ALIGN, so that a row tile is an absolute one; with
another ALIGN the bits of dk and dv change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.backends import RawSettings
from tpkernels.triton import backward, backward_queries, tiles
from tpkernels.triton.launch import Launch
from tpkernels.triton.problem import Bounds, Lengths, Problem, Scoring, grid_of, near, strides, strides_unit, tiles_of
from tpkernels.triton.tiles import Tile


def plan_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dsinks: Tensor | None,
    settings: RawSettings,
    architecture: str,
    processors: int,
    lengths: Lengths | None = None,
    keys_tile: Tile | None = None,
    queries_tile: Tile | None = None,
) -> list[Launch]:
    """prepare; sink_gradient if wanted; attention_backward_keys; then dq: attention_backward_queries or round_rows."""
    mask, sinks, deterministic = settings.mask, settings.sinks, settings.deterministic
    problem = Problem.of(q, k, v, settings.start, lengths)
    scoring = Scoring.of(settings.scale, settings.softcap)
    bounds = Bounds.of(mask, start=problem.start, tokens=problem.tokens, keys=problem.keys, packed=lengths is not None)
    dim = max(problem.head_dim, problem.value_head_dim)
    costly = settings.softcap or mask.document_starts is not None
    kind: tiles.Kind = "costly keys" if costly else "keys"
    tile = keys_tile or tiles.find(architecture, dim, q.element_size(), kind)
    unit = strides_unit([q, k, v, out, dout, dq])
    sum_unit = strides_unit([dk, dv])
    rows = problem.tokens * problem.group
    shift = 0 if lengths is not None else problem.start * problem.group % tile.rows
    batch_tiles = tiles_of(rows + tile.rows - 1, tile.rows)
    total_tiles = problem.batch * batch_tiles
    if lengths is not None:
        total_tiles = problem.packed_tokens * problem.group // tile.rows + problem.batch + 1
    block_d, block_v = tiles.padded(problem.head_dim), tiles.padded(problem.value_head_dim)
    packed_rows = problem.kv_heads * total_tiles * tile.rows
    packed_lse = torch.empty(packed_rows, dtype=torch.float32, device=q.device)
    packed_delta = torch.empty_like(packed_lse)
    packed_dq = None
    if not deterministic:
        packed_dq = torch.zeros(packed_rows, block_d, dtype=torch.float32, device=q.device)

    places: dict[str, Any] = {
        "shift": shift,
        "total_tiles": total_tiles,
        "batch_tiles": batch_tiles,
        "tokens": problem.tokens,
        "cu_q_ptr": None if lengths is None else lengths.cu_q,
    }
    packed = {"packed_lse_ptr": packed_lse, "packed_delta_ptr": packed_delta}
    place_constants = {"GROUP": problem.group, "ALIGN": tile.rows, "VARLEN": lengths is not None}
    launches = [
        Launch(
            backward.prepare,
            grid_of(problem.batch, problem.kv_heads, batch_tiles),
            {
                "out_ptr": out,
                "dout_ptr": dout,
                "lse_ptr": lse,
                **packed,
                **strides("out", out, unit),
                **strides("dout", dout, unit),
                "lse_batch": lse.stride(0),
                "lse_head": lse.stride(1),
                "kv_heads": problem.kv_heads,
                "tiles": batch_tiles,
                **places,
            },
            {
                **place_constants,
                "VALUE_DIM": problem.value_head_dim,
                "BLOCK_V": block_v,
                "BLOCK_M": tile.rows,
                "UNIT": unit,
            },
        )
    ]
    if dsinks is not None:
        launches.append(
            Launch(
                backward_queries.sink_gradient,
                problem.kv_heads * problem.group,
                {**packed, "sinks_ptr": sinks, "dsinks_ptr": dsinks, "batch": problem.batch, **places},
                {**place_constants, "BLOCK_M": tiles.SINK_TOKENS},
            )
        )
    inputs = {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "dout_ptr": dout,
        **packed,
        "cu_k_ptr": None if lengths is None else lengths.cu_k,
        **strides("q", q, unit),
        **strides("k", k, unit),
        **strides("v", v, unit),
        **strides("dout", dout, unit),
        **bounds.arguments,
        **places,
        "keys": problem.keys,
        "start": problem.start,
        "kv_heads": problem.kv_heads,
        "zero": 0,
        "scale": scoring.scale,
        "multiplier": scoring.multiplier,
        "cap": scoring.cap,
        "cap_scale": scoring.cap_scale,
    }
    constants = {
        **place_constants,
        "HEAD_DIM": problem.head_dim,
        "VALUE_DIM": problem.value_head_dim,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "UNIT": unit,
        **bounds.constants,
        "SOFTCAP": settings.softcap != 0,
        "SIGN": scoring.sign,
    }
    key_tiles = tiles_of(problem.keys, tile.keys)
    launches.append(
        Launch(
            backward.attention_backward_keys,
            grid_of(problem.batch, problem.kv_heads, key_tiles),
            {
                **inputs,
                "packed_dq_ptr": packed_dq,
                "dk_ptr": dk,
                "dv_ptr": dv,
                **strides("dk", dk, sum_unit),
                **strides("dv", dv, sum_unit),
                "tiles": key_tiles,
            },
            {
                **constants,
                "BLOCK_M": tile.rows,
                "BLOCK_N": tile.keys,
                "SUM_UNIT": sum_unit,
                "NEAR": near([q, dout], unit),
                "REDUCE": packed_dq is not None,
            },
            tile.warps,
            tile.stages,
            tile.registers,
        )
    )
    if packed_dq is None:
        tile = queries_tile or tiles.find(architecture, dim, q.element_size(), "queries")
        row_tiles = tiles_of(rows, tile.rows)
        if problem.batch * problem.kv_heads * row_tiles < processors * tile.residents and queries_tile is None:
            tile = tiles.find(architecture, dim, q.element_size(), "few queries")
            row_tiles = tiles_of(rows, tile.rows)
        launches.append(
            Launch(
                backward_queries.attention_backward_queries,
                grid_of(problem.batch, problem.kv_heads, row_tiles),
                {**inputs, "dq_ptr": dq, **strides("dq", dq, unit), "tiles": row_tiles},
                {**constants, "BLOCK_M": tile.rows, "BLOCK_N": tile.keys},
                tile.warps,
                tile.stages,
                tile.registers,
            )
        )
        return launches
    row_tiles = tiles_of(rows, tiles.SMALL_ROWS)
    launches.append(
        Launch(
            backward_queries.round_rows,
            grid_of(problem.batch, problem.kv_heads, row_tiles),
            {
                "packed_dq_ptr": packed_dq,
                "dq_ptr": dq,
                **strides("dq", dq, unit),
                "kv_heads": problem.kv_heads,
                "tiles": row_tiles,
                **places,
            },
            {
                **place_constants,
                "HEAD_DIM": problem.head_dim,
                "BLOCK_D": block_d,
                "BLOCK_M": tiles.SMALL_ROWS,
                "UNIT": unit,
            },
        )
    )
    return launches
