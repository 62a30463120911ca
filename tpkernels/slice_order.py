"""The order of a cache's slices: where a forward's slice goes, and which slice's backward may run.

State is in the int64 CPU tensors of PrefixCache (`position`, `progress`) and GradientAccumulator (`state`). `place` and
`starts_backward` only look, and refuse with ValueError what is out of order; `appended`, `claim` and `gone_back` write.
So that an error leaves everything as it was, callers write after their last check.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.prefix_cache import (
    BACKWARD_END,
    BACKWARD_GENERATION,
    GENERATION,
    IDENTITY,
    LENGTH,
    OWNER,
    PRELOADED,
    SLICE_STARTS,
    backward_end,
)


class Slice(NamedTuple):
    """Tokens [start, end) of a sequence."""

    start: int
    end: int

    def __str__(self) -> str:
        return f"[{self.start}, {self.end})"


class Placed(NamedTuple):
    """Where a slice goes, whether it is written there (`append`) or is there already, and the cache's generation."""

    piece: Slice
    append: bool
    generation: int


def place(position: Tensor, progress: Tensor, start: int | None, tokens: int, *, capacity: int) -> Placed:
    """Where the slice goes, by default behind the cache's tokens; ValueError where it cannot. Moves nothing."""
    piece = _placed(position, start, tokens)
    append = _is_append(piece, position, progress, capacity=capacity)
    return Placed(piece, append, int(position[GENERATION]))


def appended(position: Tensor, piece: Slice) -> None:
    """The slice is in the cache now."""
    if piece.start < piece.end:
        position[LENGTH] = piece.end
        position[SLICE_STARTS + piece.end] = piece.start


def _placed(position: Tensor, start: int | None, tokens: int) -> Slice:
    """The slice's range; by default it is appended."""
    if start is not None:
        return Slice(start, start + tokens)
    if torch._C._current_graph_task_id() != -1:  # as torch.utils.checkpoint tells that a backward is running
        raise ValueError(
            "prefix_attention: a slice is recomputed inside a backward (activation checkpointing), where its place is "
            "not the cache's length any more; pass start= to prefix_attention"
        )
    length = int(position[LENGTH])
    return Slice(length, length + tokens)


def _is_append(piece: Slice, position: Tensor, progress: Tensor, *, capacity: int) -> bool:
    """True: the slice is written behind the cache's tokens. False: they hold it already (a recomputation)."""
    length = int(position[LENGTH])
    if piece.start < 0:
        raise ValueError(f"prefix_attention: slice starts at {piece.start}; with a cache, positions start at 0")
    if piece.start > length:
        raise ValueError(
            f"prefix_attention: slice starts at {piece.start} but the cache holds {length} tokens; run the slices of "
            "a sequence in order"
        )
    if piece.start < length:
        if piece.end <= length:
            return False
        raise ValueError(
            f"prefix_attention: slice {piece} is only partly in the cache, which holds {length} tokens; start at "
            f"{length} to append, or recompute a range inside [0, {length})"
        )
    if piece.end > capacity:
        raise ValueError(
            f"prefix_attention: slice {piece} needs {piece.end} tokens but the cache's capacity is {capacity}; make "
            "PrefixCache with a larger capacity, or reset() it for the next sequence"
        )
    next_end = backward_end(position, progress)
    if next_end < length:
        raise ValueError(
            f"prefix_attention: slice {piece} would be appended to a cache whose backward has reached {next_end} of "
            f"{length} tokens; finish the backward, then reset() the cache before the next forward"
        )
    return True


def starts_backward(piece: Slice, generation: int, position: Tensor, progress: Tensor, state: Tensor) -> bool:
    """Whether a sweep of backwards starts here, at the last slice; else it goes on. ValueError out of order."""
    length, current, identity = (int(position[slot]) for slot in (LENGTH, GENERATION, IDENTITY))
    owner, preloaded = state.tolist()
    if generation != current:
        raise ValueError(
            f"prefix_attention: backward of slice {piece}, whose cache was reset() after its forward; run the backward "
            "of every slice before reset()"
        )
    next_end = backward_end(position, progress)
    # After a complete sweep another may start: the same graph run backward twice (retain_graph=True).
    first = piece.end == length and next_end in (length, 0)
    if not first and piece.end != next_end:
        expected_end = next_end or length
        expected = Slice(int(position[SLICE_STARTS + expected_end]), expected_end)
        raise ValueError(
            f"prefix_attention: backward of slice {piece} out of order: the next is that of slice {expected}; run the "
            "backward of the slices last to first, each once"
        )
    if first and owner not in (0, identity):
        raise ValueError(
            f"prefix_attention: backward of slice {piece} of cache {identity} would start while the backward of cache "
            f"{owner} is unfinished in the same GradientAccumulator; finish that one first, or give it up with reset() "
            "of that cache or of the accumulator"
        )
    if not first and owner != identity:
        raise ValueError(
            f"prefix_attention: backward of slice {piece} of cache {identity}: its GradientAccumulator was reset, or "
            "used by another cache, since the backward of the slice after it; reset() the cache and run the forward "
            "again"
        )
    if preloaded > piece.end:  # none once a sweep has started
        raise ValueError(
            f"prefix_attention: {preloaded} rows were preloaded into the GradientAccumulator but the cache holds "
            f"{piece.end} tokens; preload at most as many rows"
        )
    return first


def claim(state: Tensor, position: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Start the sums [batch, keys of the cache, kv_heads, dim]: zero, but for preloaded rows; the accumulator is this
    cache's until its first slice is done."""
    preloaded = int(state[PRELOADED])
    dk[:, preloaded:].zero_()
    dv[:, preloaded:].zero_()
    state[OWNER] = position[IDENTITY]
    state[PRELOADED] = 0


def gone_back(piece: Slice, generation: int, progress: Tensor, state: Tensor) -> None:
    """The slice's backward has run."""
    progress[BACKWARD_END] = piece.start
    progress[BACKWARD_GENERATION] = generation
    if piece.start == 0:
        state[OWNER] = 0
