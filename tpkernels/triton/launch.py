"""From a call to kernel launches: tile sizes, grids, strides, constants; then running them on the current stream.

plan_forward and plan_backward return a list of Launch, plain data, from tensors on any device (also "meta"): the
backend runs them, ahead_of_time.py compiles exactly the same ones for any GPU. Packed sequences (`lengths`) are one
batch row of all tokens, [1, total, heads, dim].

The one trap: nothing here may look at a value on the device; that would synchronise and break graph capture.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tpkernels.mask import RawMask
from tpkernels.triton import backward, backward_queries, forward, tiles
from tpkernels.triton.tiles import Tile

MAX_GRID = 2**31 - 1  # of a grid's x dimension; y and z hold 65535 only and are not used
MAX_POSITION = 2**30  # positions and packed rows are 32-bit, with room for sums of two
LOG2E = 1.4426950408889634
# Below this many key tiles a split costs more than it gains: its partial results are written and read again.
MIN_TILES_PER_SPLIT = 4
MAX_SPLITS = 32
INTERPRETED_PROCESSORS = 8  # stands for a GPU's number of multiprocessors, so that small cases split too


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `constants` are compile-time; a None among `arguments` is an absent pointer."""

    kernel: Any
    grid: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3


class Lengths(NamedTuple):
    """Packed sequences: cu_q, cu_k int32 [batch + 1] on the device; max_q, max_k bound the lengths on the host."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


class Scoring(NamedTuple):
    """How products q.k become scores. multiplier: of the score in exp2; natural: of the score in exp (forward.py)."""

    scale: float
    multiplier: float
    natural: float
    cap: float
    cap_scale: float
    sign: int

    @classmethod
    def of(cls, scale: float, softcap: float) -> Scoring:
        """With a softcap scores are natural; else in units of |scale|: the scale rides in the exponent's fma."""
        if softcap:
            return cls(scale, LOG2E, 1.0, softcap, scale / softcap, 1)
        if scale == 0:
            return cls(scale, LOG2E, 1.0, 0.0, 0.0, 0)
        return cls(scale, abs(scale) * LOG2E, abs(scale), 0.0, 0.0, 1 if scale > 0 else -1)


class Bounds(NamedTuple):
    """The mask as the kernels take it: runtime values and which of them exist."""

    left: int
    right: int
    has_left: bool
    has_right: bool
    documents: Tensor | None

    @classmethod
    def of(cls, mask: RawMask, *, start: int, tokens: int, keys: int, packed: bool) -> Bounds:
        """A window that cannot bind here is dropped: it would cost a loop with mask arithmetic."""
        left, right = min(mask.window_left, MAX_POSITION), min(mask.window_right, MAX_POSITION)
        if mask.causal:
            right = 0
        binds_left = left >= 0 and (packed or left < start + tokens - 1)
        binds_right = right >= 0 and (packed or start + right + 1 < keys)
        return cls(max(left, 0), max(right, 0), binds_left, binds_right, mask.document_starts)


class Problem(NamedTuple):
    """Sizes of a call. batch: sequences (packed ones too); tokens, keys: of one, the most for packed ones."""

    batch: int
    tokens: int
    keys: int
    kv_heads: int
    group: int
    head_dim: int
    value_head_dim: int
    start: int
    packed_tokens: int  # all query tokens of packed sequences, else 0

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, start: int, lengths: Lengths | None) -> Problem:
        """Raises ValueError when rows or positions do not fit 32 bits."""
        batch, tokens, heads, head_dim = q.shape
        keys, kv_heads = k.shape[1:3]
        packed = 0
        if lengths is not None:
            packed, batch = tokens, lengths.cu_q.shape[0] - 1
            tokens, keys, start = lengths.max_q, lengths.max_k, 0
        group = heads // kv_heads
        rows = max(tokens, packed) * group
        if max(rows, keys) > MAX_POSITION:
            raise ValueError(
                f"attention backend triton: {keys} keys and {rows} query rows (tokens x heads of a group) exceed "
                f"{MAX_POSITION}; use fewer tokens a call"
            )
        return cls(batch, tokens, keys, kv_heads, group, head_dim, v.shape[3], start, packed)


def strides_unit(tensors: Sequence[Tensor]) -> int:
    """Elements in 16 bytes if every row of every tensor starts on 16 bytes, so that loads move 16 bytes; else 1."""
    unit = 16 // tensors[0].element_size()
    for x in tensors:
        if x.data_ptr() % 16 or any(s % unit for s, n in zip(x.stride()[:3], x.shape, strict=False) if n > 1):
            return 1
    return unit


def _strides(name: str, x: Tensor, unit: int) -> dict[str, int]:
    """Strides in units; that of a dimension of one is arbitrary, and 0 here."""
    batch, token, head = (s // unit if n > 1 else 0 for s, n in zip(x.stride()[:3], x.shape, strict=False))
    return {f"{name}_batch": batch, f"{name}_token": token, f"{name}_head": head}


def _tiles(rows: int, tile: int) -> int:
    return -(-rows // tile)


def _grid(*sizes: int) -> int:
    grid = 1
    for size in sizes:
        grid *= size
    if grid > MAX_GRID:
        raise ValueError(
            f"attention backend triton: the call needs {grid} programs, more than a grid's {MAX_GRID}; split the batch"
        )
    return grid


def choose_splits(programs: int, key_tiles: int, processors: int) -> int:
    """Shares of each query tile's keys: enough to give every multiprocessor one, none too small to be worth it."""
    return max(1, min(processors // max(programs, 1), key_tiles // MIN_TILES_PER_SPLIT, MAX_SPLITS))


@functools.cache
def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _mask_arguments(bounds: Bounds) -> dict[str, Any]:
    documents = bounds.documents
    batch = 0 if documents is None else documents.stride(0)
    return {"documents_ptr": documents, "documents_batch": batch, "left": bounds.left, "right": bounds.right}


def _mask_constants(bounds: Bounds) -> dict[str, Any]:
    return {
        "HAS_LEFT": bounds.has_left,
        "HAS_RIGHT": bounds.has_right,
        "HAS_DOCUMENTS": bounds.documents is not None,
    }


def plan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    out: Tensor,
    lse: Tensor,
    start: int,
    mask: RawMask,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    deterministic: bool,
    architecture: str,
    processors: int,
    lengths: Lengths | None = None,
    tile: Tile | None = None,
) -> list[Launch]:
    """attention_forward, and combine_splits when the keys are split (never with deterministic or packed sequences)."""
    problem = Problem.of(q, k, v, start, lengths)
    scoring = Scoring.of(scale, softcap)
    bounds = Bounds.of(mask, start=problem.start, tokens=problem.tokens, keys=problem.keys, packed=lengths is not None)
    tile = tile or tiles.find(architecture, max(problem.head_dim, problem.value_head_dim), q.element_size(), "forward")
    row_tiles = _tiles(problem.tokens * problem.group, tile.rows)
    programs = _grid(problem.batch, problem.kv_heads, row_tiles)
    splits = 1
    if not deterministic and lengths is None:
        seen = problem.keys
        if bounds.has_left and bounds.has_right:  # what one tile of rows can see
            seen = min(seen, bounds.left + bounds.right + 1 + _tiles(tile.rows, problem.group))
        splits = choose_splits(programs, seen // tile.keys, processors)
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
        **_strides("out", out, unit),
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
        **_mask_constants(bounds),
        "SINKS": sinks is not None,
    }
    launches = [
        Launch(
            forward.attention_forward,
            _grid(programs, splits),
            {
                "q_ptr": q,
                "k_ptr": k,
                "v_ptr": v,
                "out_ptr": part,
                "lse_ptr": part_lse,
                "sinks_ptr": sinks,
                "cu_q_ptr": None if lengths is None else lengths.cu_q,
                "cu_k_ptr": None if lengths is None else lengths.cu_k,
                **_strides("q", q, unit),
                **_strides("k", k, unit),
                **_strides("v", v, unit),
                **result_strides,
                **_mask_arguments(bounds),
                **sizes,
                "zero": 0,
                "multiplier": scoring.multiplier,
                "natural": scoring.natural,
                "cap": scoring.cap,
                "cap_scale": scoring.cap_scale,
            },
            {
                **constants,
                "HEAD_DIM": problem.head_dim,
                "BLOCK_D": tiles.padded(problem.head_dim),
                "BLOCK_N": tile.keys,
                "SOFTCAP": softcap != 0,
                "SIGN": scoring.sign,
                "VARLEN": lengths is not None,
                "SPLIT": splits > 1,
            },
            tile.warps,
            tile.stages,
        )
    ]
    if splits > 1:
        rows = tiles.SMALL_ROWS
        sizes["row_tiles"] = _tiles(problem.tokens * problem.group, rows)
        launches.append(
            Launch(
                forward.combine_splits,
                _grid(problem.batch, problem.kv_heads, sizes["row_tiles"]),
                {
                    "part_ptr": part,
                    "part_lse_ptr": part_lse,
                    "out_ptr": out,
                    "lse_ptr": lse,
                    "sinks_ptr": sinks,
                    **result_strides,
                    **_mask_arguments(bounds),
                    **sizes,
                },
                {**constants, "BLOCK_M": rows},
            )
        )
    return launches


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
    start: int,
    mask: RawMask,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    deterministic: bool,
    architecture: str,
    lengths: Lengths | None = None,
    keys_tile: Tile | None = None,
    queries_tile: Tile | None = None,
) -> list[Launch]:
    """prepare; sink_gradient if wanted; attention_backward_keys; then dq: attention_backward_queries or round_rows."""
    problem = Problem.of(q, k, v, start, lengths)
    scoring = Scoring.of(scale, softcap)
    bounds = Bounds.of(mask, start=problem.start, tokens=problem.tokens, keys=problem.keys, packed=lengths is not None)
    dim = max(problem.head_dim, problem.value_head_dim)
    tile = keys_tile or tiles.find(architecture, dim, q.element_size(), "keys")
    unit = strides_unit([q, k, v, out, dout, dq])
    sum_unit = strides_unit([dk, dv])
    rows = problem.tokens * problem.group
    shift = 0 if lengths is not None else problem.start * problem.group % tile.rows
    batch_tiles = _tiles(rows + tile.rows - 1, tile.rows)
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
            _grid(problem.batch, problem.kv_heads, batch_tiles),
            {
                "out_ptr": out,
                "dout_ptr": dout,
                "lse_ptr": lse,
                **packed,
                **_strides("out", out, unit),
                **_strides("dout", dout, unit),
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
        **_strides("q", q, unit),
        **_strides("k", k, unit),
        **_strides("v", v, unit),
        **_strides("dout", dout, unit),
        **_mask_arguments(bounds),
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
        **_mask_constants(bounds),
        "SOFTCAP": softcap != 0,
        "SIGN": scoring.sign,
    }
    key_tiles = _tiles(problem.keys, tile.keys)
    launches.append(
        Launch(
            backward.attention_backward_keys,
            _grid(problem.batch, problem.kv_heads, key_tiles),
            {
                **inputs,
                "packed_dq_ptr": packed_dq,
                "dk_ptr": dk,
                "dv_ptr": dv,
                **_strides("dk", dk, sum_unit),
                **_strides("dv", dv, sum_unit),
                "tiles": key_tiles,
            },
            {
                **constants,
                "BLOCK_M": tile.rows,
                "BLOCK_N": tile.keys,
                "SUM_UNIT": sum_unit,
                "REDUCE": packed_dq is not None,
            },
            tile.warps,
            tile.stages,
        )
    )
    if packed_dq is None:
        tile = queries_tile or tiles.find(architecture, dim, q.element_size(), "queries")
        row_tiles = _tiles(rows, tile.rows)
        launches.append(
            Launch(
                backward_queries.attention_backward_queries,
                _grid(problem.batch, problem.kv_heads, row_tiles),
                {**inputs, "dq_ptr": dq, **_strides("dq", dq, unit), "tiles": row_tiles},
                {**constants, "BLOCK_M": tile.rows, "BLOCK_N": tile.keys},
                tile.warps,
                tile.stages,
            )
        )
        return launches
    row_tiles = _tiles(rows, tiles.SMALL_ROWS)
    launches.append(
        Launch(
            backward_queries.round_rows,
            _grid(problem.batch, problem.kv_heads, row_tiles),
            {
                "packed_dq_ptr": packed_dq,
                "dq_ptr": dq,
                **_strides("dq", dq, unit),
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


def run(launches: Sequence[Launch], device: torch.device) -> None:
    """Launch on the device's current stream."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for launch in launches:
            # Every multiply-add that decides a bit is an explicit fma, so results do not hang on this option; Triton
            # 3.10 changes its default, and the fp32 products want it on.
            launch.kernel[(launch.grid,)](
                **launch.arguments,
                **launch.constants,
                num_warps=launch.warps,
                num_stages=launch.stages,
                enable_fp_fusion=True,
            )


INTERPRETED = bool(triton.knobs.runtime.interpret)
