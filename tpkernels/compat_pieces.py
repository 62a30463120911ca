"""Intervals of keys, one for each query, and the pieces of a batch that a backend can take as they are.

intervals: int32 [batch or 1, tokens, 2], query i of row b sees keys [lo, hi) = intervals[b, i]; lo = NOT_AN_INTERVAL
marks a query whose keys are no interval. A piece is a run of queries whose `hi` grows by one a query (causal) or stands
still (all alike), while `lo` never falls: what kernels know as document starts. A left-padded batch is one piece, so
are packed documents; a right-padded row is two. compat_intervals.py runs them.

The one trap: pieces are cut on the host, from CPU tensors; making intervals reads no value, so it can be compiled.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.mask import RawMask

NOT_AN_INTERVAL = -1  # as lo: this query's keys are not one interval; pieces_of refuses it


class Sequences(NamedTuple):
    """Packed sequences: int32 [sequences + 1] running totals of queries and keys, and bounds of the lengths."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


class Window(NamedTuple):
    """What narrows a query's keys below its whole sequence; -1 is no bound."""

    causal: bool = False
    left: int = -1
    right: int = -1


# ---- intervals -------------------------------------------------------------------------------------------------------


def aligned_intervals(queries: Tensor, tokens: Any, begin: Any, end: Any, window: Window) -> Tensor:
    """int32 [..., 2] for query numbers 0 .. tokens - 1 whose last one sees the last of keys [begin, end)."""
    position = end - tokens + queries
    lo, hi = begin + 0 * position, end + 0 * position
    if window.left >= 0:
        lo = torch.maximum(lo, position - window.left)
    if window.causal:
        hi = torch.minimum(hi, position + 1)
    if window.right >= 0:
        hi = torch.minimum(hi, position + window.right + 1)
    return torch.stack([lo, hi], -1).to(torch.int32)


def mask_intervals(mask: Tensor) -> Tensor:
    """int32 [..., T, 2] of a boolean mask [..., T, S], True where a query sees a key.

    A row without keys is [0, 0); one whose keys are not an interval has lo = NOT_AN_INTERVAL. No value is read here.
    """
    if not mask.shape[-1]:
        return torch.zeros(*mask.shape[:-1], 2, dtype=torch.int32, device=mask.device)
    count = mask.sum(-1, dtype=torch.int32)
    first = mask.to(torch.uint8).argmax(-1).to(torch.int32)
    borders = (mask[..., 1:] != mask[..., :-1]).sum(-1, dtype=torch.int32)
    borders = borders + mask[..., 0].to(torch.int32) + mask[..., -1].to(torch.int32)
    lo = torch.where(borders <= 2, first, NOT_AN_INTERVAL)
    return torch.stack([lo, first + count], -1)


def sequence_intervals(sequences: Sequences, tokens: int, window: Window) -> Tensor:
    """int32 [1, tokens, 2] of packed sequences; [0, 0) for queries behind the last one."""
    intervals = torch.zeros(1, tokens, 2, dtype=torch.int32, device="cpu")
    queries = itertools.pairwise(sequences.cu_q.tolist())
    keys = itertools.pairwise(sequences.cu_k.tolist())
    for (q_begin, q_end), (k_begin, k_end) in zip(queries, keys, strict=True):
        numbers = torch.arange(q_end - q_begin, device="cpu")
        intervals[0, q_begin:q_end] = aligned_intervals(numbers, q_end - q_begin, k_begin, k_end, window)
    return intervals


def check_sequences(sequences: Sequences, *, tokens: int, keys: int) -> None:
    """ValueError for running totals that do not fit; values on a GPU stay unread."""
    name = "flash_attn_varlen_func"
    parts = (("q", sequences.cu_q, tokens, sequences.max_q), ("k", sequences.cu_k, keys, sequences.max_k))
    for which, totals, limit, bound in parts:
        if totals.dtype != torch.int32 or totals.dim() != 1 or totals.shape != sequences.cu_q.shape or not len(totals):
            raise ValueError(
                f"{name}: cu_seqlens_{which} is {totals.dtype} {list(totals.shape)}; it must be int32 [sequences + 1], "
                "as long for q as for k; use .to(torch.int32)"
            )
        if totals.device.type != "cpu":
            continue
        values = totals.tolist()
        lengths = [after - before for before, after in itertools.pairwise(values)]
        if values[0] != 0 or min(lengths, default=0) < 0 or values[-1] > limit:
            raise ValueError(
                f"{name}: cu_seqlens_{which} is {_shortened(values)}; it starts with 0, never falls and ends at the "
                f"{limit} tokens of {which} or before"
            )
        if max(lengths, default=0) > bound:
            raise ValueError(
                f"{name}: max_seqlen_{which} is {bound} but a sequence has {max(lengths)} tokens; pass "
                f"max_seqlen_{which}={max(lengths)}"
            )


def _shortened(values: list[int]) -> str:
    return str(values) if len(values) <= 12 else f"[{', '.join(map(str, values[:8]))}, ..., {values[-1]}]"


# ---- pieces ----------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Queries [q_begin, q_end) of batch rows [row_begin, row_end), which see a part of keys [k_begin, k_end).

    causal: the last query sees the last key, each one before it one less; else all see up to the last.
    starts: int32 [rows or 1, queries], the first key of each query, counted from k_begin; None: all 0.
    """

    row_begin: int
    row_end: int
    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    causal: bool
    starts: Tensor | None

    def queries(self, x: Tensor) -> Tensor:
        """Its part of a tensor [B, T, ...]."""
        return x[self.row_begin : self.row_end, self.q_begin : self.q_end]

    def keys(self, x: Tensor) -> Tensor:
        """Its part of a tensor [B, S, ...]."""
        return x[self.row_begin : self.row_end, self.k_begin : self.k_end]

    def mask(self, device: torch.device) -> RawMask:
        """For the backend, with positions counted from k_begin."""
        starts = self.starts
        if starts is not None:
            starts = starts.expand(self.row_end - self.row_begin, -1).contiguous().to(device)
        return RawMask(self.causal, -1, -1, starts)

    @property
    def start(self) -> int:
        """Position of the first query."""
        return (self.k_end - self.k_begin) - (self.q_end - self.q_begin)


def pieces_of(intervals: Tensor, *, batch: int, keys: int) -> list[Piece]:
    """The pieces of CPU intervals int32 [batch or 1, T, 2]; queries that see nothing may be in none."""
    lo, hi = intervals[..., 0], intervals[..., 1]
    bad = ((lo == NOT_AN_INTERVAL) | (lo < 0) | (hi > keys)) & ((hi > lo) | (lo == NOT_AN_INTERVAL))
    if bad.any():
        row, query = (int(i) for i in bad.nonzero()[0])
        if int(lo[row, query]) == NOT_AN_INTERVAL:
            raise ValueError(
                f"attention mask: the keys that query {query} of batch row {row} sees are not one interval; only "
                "masks whose rows are one run of True are served. Use another attention implementation for this mask"
            )
        raise ValueError(
            f"attention: query {query} of batch row {row} sees keys [{int(lo[row, query])}, {int(hi[row, query])}), "
            f"but there are {keys} keys"
        )
    lo, hi = _joined_to_the_next(lo, hi)
    if not intervals.numel():
        return []
    if bool((hi == hi[:1]).all()):
        return _runs(lo, hi[0], 0, batch)
    return [piece for row in range(batch) for piece in _runs(lo[row : row + 1], hi[row], row, row + 1)]


def _joined_to_the_next(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """Queries before the first that sees a key continue its run backwards, still empty: left padding is no piece."""
    sees = hi > lo
    first = sees.to(torch.uint8).argmax(1, keepdim=True) if hi.shape[1] else hi
    number = torch.arange(hi.shape[1], device="cpu")
    before = (number < first) & sees.any(1, keepdim=True)
    if not before.any():
        return lo, hi
    first_lo, first_hi = lo.gather(1, first), hi.gather(1, first)
    earlier = torch.minimum(first_hi - (first - number).to(hi.dtype), first_lo)
    return torch.where(before, first_lo, lo), torch.where(before, earlier, hi)


def _runs(lo: Tensor, hi: Tensor, row_begin: int, row_end: int) -> list[Piece]:
    """Pieces of rows that share hi [T] and have lo [rows or 1, T] of their own."""
    step = hi[1:] - hi[:-1]
    falls = (lo[:, 1:] < lo[:, :-1]).any(0)
    codes = torch.where(falls | (step < 0) | (step > 1), -1, step)
    values, counts = torch.unique_consecutive(codes, return_counts=True)
    cuts, kinds, begin, kind = [0], [], 0, -1  # kind -1: a run of one query so far
    query = 0
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        if value == -1:
            for cut in range(query + 1, query + count + 1):
                kinds.append(kind)
                cuts.append(cut)
                kind = -1
        elif kind in (-1, value):
            kind = value
        else:
            kinds.append(kind)
            cuts.append(query + 1)
            kind = value if count > 1 else -1
        query += count
    kinds.append(kind)
    cuts.append(hi.shape[0])
    pieces = []
    for (begin, end), kind in zip(itertools.pairwise(cuts), kinds, strict=True):
        lows, k_end = lo[:, begin:end], int(hi[end - 1])
        if not (hi[begin:end] > lows).any():
            continue
        k_begin = int(lows.min())
        starts = None if int(lows.max()) == k_begin else (lows - k_begin).to(torch.int32)
        pieces.append(Piece(row_begin, row_end, begin, end, k_begin, k_end, kind == 1, starts))
    return pieces
