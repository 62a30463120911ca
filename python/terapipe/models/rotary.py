"""Rotary positions (Su et al. 2021): channel pair (2i, 2i+1) of q and k turns by position * theta ** (-2i / head_dim).

Pairs are neighbours, as in Meta's Llama weights; Hugging Face stores the same weights with the pairs half a head
apart, so a converter permutes the rows of the query and key matrices. The turns are unit complex numbers, which
tpkernels.fused.rotary multiplies in. Angles are made in fp64 and rounded once: positions in the millions stay exact,
and a slice sees the angles that the whole sequence would.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryAngles:
    """Unit complex numbers [batch, tokens, 1, head_dim / 2] of document-relative positions; one object for all blocks.

    The last answer is kept, because the blocks of a stage ask for the same slice one after another. Positions are
    compared by identity and version, so a tensor overwritten in place is noticed.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        self.frequencies = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / -head_dim)
        self._positions: Tensor | None = None
        self._version = -1
        self._turns: Tensor | None = None

    def __call__(self, positions: Tensor, *, dtype: torch.dtype) -> Tensor:
        turn_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
        if torch.compiler.is_compiling() or positions.is_inference():
            return self.turns(positions, turn_dtype)
        known = self._turns
        if (
            known is None
            or self._positions is not positions
            or self._version != positions._version
            or known.dtype != turn_dtype
        ):
            known = self.turns(positions, turn_dtype)
            self._positions, self._version, self._turns = positions, positions._version, known
        return known

    def turns(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        angles = positions[..., None, None] * self.frequencies.to(positions.device)
        return torch.complex(angles.cos(), angles.sin()).to(dtype)
