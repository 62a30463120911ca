"""A call as the kernels see it: sizes, scoring, mask, strides in units, and whether all of it fits 32 bits.

Everything here is host arithmetic on shapes and strides; tensors may be on any device, also "meta". Packed sequences
(`lengths`) are one batch row of all tokens, [1, total, heads, dim].

The one trap: a stride of a dimension of one is arbitrary (torch leaves anything there), so it never counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.mask import RawMask

MAX_GRID = 2**31 - 1  # of a grid's x dimension; y and z hold 65535 only and are not used
MAX_POSITION = 2**30  # positions and packed rows are 32-bit, with room for sums of two
LOG2E = 1.4426950408889634


class Lengths(NamedTuple):
    """Packed sequences: cu_q, cu_k int32 [batch + 1] on the device; max_q, max_k bound the lengths on the host."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


class Scoring(NamedTuple):
    """How products q.k become scores. multiplier: of the score in exp2."""

    scale: float
    multiplier: float
    cap: float
    cap_scale: float
    sign: int

    @classmethod
    def of(cls, scale: float, softcap: float) -> Scoring:
        """With a softcap scores are natural; else in units of |scale|: the scale rides in the exponent's fma."""
        if softcap:
            return cls(scale, LOG2E, softcap, scale / softcap, 1)
        if scale == 0:
            return cls(scale, LOG2E, 0.0, 0.0, 0)
        return cls(scale, abs(scale) * LOG2E, 0.0, 0.0, 1 if scale > 0 else -1)


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

    @property
    def arguments(self) -> dict[str, Any]:
        """Of every kernel that looks at the mask."""
        batch = 0 if self.documents is None else self.documents.stride(0)
        return {"documents_ptr": self.documents, "documents_batch": batch, "left": self.left, "right": self.right}

    @property
    def constants(self) -> dict[str, Any]:
        """Which parts of the mask there are, at compile time."""
        has_documents = self.documents is not None
        return {"HAS_LEFT": self.has_left, "HAS_RIGHT": self.has_right, "HAS_DOCUMENTS": has_documents}


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


def near(tensors: Sequence[Tensor], unit: int) -> bool:
    """Whether every row's offset, in units, fits 32 bits with room to spare: also that of a tile past the last row."""
    return all(sum(abs(s) // unit * n for s, n in zip(x.stride()[:3], x.shape, strict=False)) < 2**30 for x in tensors)


def strides(name: str, x: Tensor, unit: int) -> dict[str, int]:
    """Strides in units; that of a dimension of one is arbitrary, and 0 here."""
    batch, token, head = (s // unit if n > 1 else 0 for s, n in zip(x.stride()[:3], x.shape, strict=False))
    return {f"{name}_batch": batch, f"{name}_token": token, f"{name}_head": head}


def fp32(sinks: Tensor | None) -> Tensor | None:
    """One fp32 number behind the other, as the kernels read them."""
    return None if sinks is None else sinks.detach().to(torch.float32).contiguous()


def tiles_of(rows: int, tile: int) -> int:
    """Tiles that cover the rows."""
    return -(-rows // tile)


def grid_of(*sizes: int) -> int:
    """Programs of a launch; ValueError for more than a grid holds."""
    grid = 1
    for size in sizes:
        grid *= size
    if grid > MAX_GRID:
        raise ValueError(
            f"attention backend triton: the call needs {grid} programs, more than a grid's {MAX_GRID}; split the batch"
        )
    return grid
