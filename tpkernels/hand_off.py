"""What kernels of a hand-off between two GPUs share, in Triton (triton/hand_off.py, which tells the protocol) and CUDA
C++ (csrc/cuda/peer_protocol.cuh): the words, a slot, and what a language offers. The two ends of a link may use
different ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# Words of `control`, in an end's device memory.
STOPPED, REPORTER, DIRECTION, GENERATION = range(4)

# Words of `words`, which the host sees: it sets ABORT, and reads the report that follows.
ABORT = 0
REPORT = 1  # who, direction, slot, tile, want, got, generation
HOST_WORDS = 8

# who
SENDER = 1  # waited for a credit
RECEIVER = 2  # waited for a tile
HOLDER = 3  # found a slot written over


@dataclass(frozen=True)
class Slot:
    """One slot as the kernels of one end see it; int32 words, addressed from their first.

    data, claim, flags [tiles] lie in the receiver's memory, credit in the sender's, the rest in this end's; words where
    the host reads them. budget: how long a wait may last, in ticks of the language."""

    index: int
    data: Tensor
    claim: Tensor
    flags: Tensor
    credit: Tensor
    uses: Tensor
    arrived: Tensor
    control: Tensor
    words: Tensor
    budget: int
    tile_rows: int


class Language(Protocol):
    """Kernels of a hand-off. Each call but `run` gives a launch; x is [rows, columns], contiguous. With `slot=None` and
    `out=` a launch is the plain op, the same kernel without flags, waits and slot."""

    TILE_ROWS: int
    TICKS_PER_S: int

    def run(self, launches: Sequence[Any], device: torch.device, /) -> None: ...
    def take_credit(self, slot: Slot) -> Any: ...
    def begin_use(self, slot: Slot, tiles: int) -> Any: ...
    def end_use(self, slot: Slot, *, release: bool) -> Any: ...
    def add_put(self, slot: Slot | None, x: Tensor, residual: Tensor | None, *, out: Tensor | None = None) -> Any: ...
    def matmul_add_put(
        self,
        slot: Slot | None,
        a: Tensor,
        b: Tensor,
        residual: Tensor | None,
        *,
        transposed: bool,
        out: Tensor | None = None,
    ) -> Any: ...
    def wait_matmul(
        self, slot: Slot | None, b: Tensor, *, rows: int, transposed: bool, out: Tensor, a: Tensor | None = None
    ) -> Any: ...
    def wait_norm(
        self,
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
    ) -> Any: ...


def target(slot: Slot | None, plain: Tensor | None) -> Tensor:
    """The slot's rows, or the tensor of a plain op."""
    chosen = plain if slot is None else slot.data
    assert chosen is not None and (slot is None or plain is None)
    return chosen
