"""Mask: which keys a query sees, always one interval of absolute positions [lo(p), hi(p)).

Query p (its absolute position) sees key j when lo(p) <= j < hi(p):
    lo(p) = max(0, p - left, document_start(p))        hi(p) = min(keys, p + 1 if causal, p + right + 1)
Both ends never decrease with p, so a kernel decides from a tile's corners whether it is skipped, full or partial.
No dense mask is built anywhere but in the oracle (reference.py).

The one trap: document_starts holds ABSOLUTE starts, one per position of the whole sequence, not one per document.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Window = tuple[int | None, int | None]


def window_bound(size: int | None) -> int:
    """One side of a window as kernels take it: -1 for no bound, which one beyond every int32 position is too."""
    return size if size is not None and 0 <= size < 2**31 else -1


@dataclass(frozen=True, eq=False)
class RawMask:
    """What a kernel gets: -1 is "no bound"; document_starts int32 [batch, tokens] of the query rows, contiguous."""

    causal: bool
    window_left: int
    window_right: int
    document_starts: Tensor | None


@dataclass(frozen=True, eq=False)
class Mask:
    """Mask of one micro, the same object for each of its slices.

    causal: a query sees no key after itself.
    window: (left, right) keeps keys p - left <= j <= p + right; None is unbounded.
    document_starts: int32 [batch or 1, positions]: absolute start of the document that each position belongs to.

    Raises TypeError for a window that is no int, ValueError for a negative one, and for document starts that decrease,
    lie after their own position, or come with causal=False (the interval bounds a document's first key only, so a later
    document would be seen).
    The values are read once, here (a host sync when they live on a GPU).
    """

    causal: bool = True
    window: Window = (None, None)
    document_starts: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.window, Sequence) or len(self.window) != 2:
            raise ValueError(f"Mask: window is (left, right), got {self.window!r}")
        for side, size in zip(("left", "right"), self.window, strict=True):
            if size is not None and not hasattr(type(size), "__index__"):
                raise TypeError(f"Mask: window {side} is {size!r}; it must be a number of tokens, an int, or None")
            if size is not None and size < 0:
                raise ValueError(f"Mask: window {side} is {size}; use None for no bound, or a size of 0 or more tokens")
        if self.document_starts is not None:
            self._check_documents(self.document_starts)

    def _check_documents(self, starts: Tensor) -> None:
        if not self.causal:
            raise ValueError("Mask: document_starts need causal=True; without it a query would see later documents")
        if starts.dim() != 2 or starts.dtype != torch.int32:
            raise ValueError(
                f"Mask: document_starts must be int32 [batch, positions], got {starts.dtype} {list(starts.shape)}"
            )
        if torch.compiler.is_compiling() or not starts.numel():
            return
        host = starts.detach().cpu()
        positions = torch.arange(host.shape[1], dtype=torch.int32, device="cpu")
        late = (host > positions) | (host < 0)
        if late.any():
            row, position = (int(index) for index in late.nonzero()[0])
            raise ValueError(
                f"Mask: document_starts[{row}, {position}] is {int(host[row, position])}; a document starts between 0 "
                f"and its own position {position}"
            )
        falling = host[:, 1:] < host[:, :-1]
        if falling.any():
            row, position = (int(index) for index in falling.nonzero()[0])
            raise ValueError(
                f"Mask: document_starts[{row}] falls from {int(host[row, position])} to {int(host[row, position + 1])} "
                f"at position {position + 1}; starts never decrease"
            )

    @classmethod
    def from_documents(
        cls,
        lengths: Sequence[Sequence[int]] | Sequence[int] | None = None,
        *,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        window: Window = (None, None),
        device: torch.device | str | None = None,
    ) -> Mask:
        """Causal mask of packed documents.

        lengths: tokens of each document, one list per batch row (one flat list is one row); rows have equal sums.
        cu_seqlens: instead, running totals [0, n0, n0 + n1, ...] of one row, as flash-attn's varlen functions take.
        Empty documents are allowed and change nothing.
        """
        if (lengths is None) == (cu_seqlens is None):
            raise ValueError("Mask.from_documents: give either lengths or cu_seqlens")
        if cu_seqlens is not None:
            totals = [int(total) for total in cu_seqlens]
            if not totals or totals[0] != 0:
                raise ValueError(f"Mask.from_documents: cu_seqlens starts with 0, got {totals[:1]}")
            rows = [[after - before for before, after in itertools.pairwise(totals)]]
        else:
            assert lengths is not None
            rows = [list(row) if isinstance(row, Sequence) else [int(row)] for row in lengths]
            if all(not isinstance(row, Sequence) for row in lengths):
                rows = [[length for row in rows for length in row]]
        if any(length < 0 for row in rows for length in row):
            raise ValueError(f"Mask.from_documents: a document has a negative length in {rows}")
        sums = [sum(row) for row in rows]
        if len(set(sums)) > 1:
            raise ValueError(f"Mask.from_documents: batch rows hold {sums} tokens; every row needs the same number")
        starts = [[start for i, length in enumerate(row) for start in [sum(row[:i])] * length] for row in rows]
        return cls(window=window, document_starts=torch.tensor(starts, dtype=torch.int32, device=device))

    def positions(self, start: int, length: int, device: torch.device | str | None = None) -> Tensor:
        """Document-relative positions of tokens [start, start + length): int64 [rows of document_starts or 1, length].

        Learned and rotary positions use these, so that packed documents equal separate ones.
        """
        starts = self.document_starts
        if starts is None:
            return torch.arange(start, start + length, device=device)[None]
        if start < 0 or start + length > starts.shape[1]:
            raise ValueError(
                f"Mask.positions: tokens [{start}, {start + length}) but document_starts covers {starts.shape[1]} "
                "positions"
            )
        absolute = torch.arange(start, start + length, device=starts.device)
        return (absolute - starts[:, start : start + length]).to(device)

    @property
    def window_left(self) -> int:
        """Left window as kernels take it (-1: none)."""
        return window_bound(self.window[0])

    @property
    def window_right(self) -> int:
        """Right window as kernels take it (-1: none)."""
        return window_bound(self.window[1])


CAUSAL = Mask()
