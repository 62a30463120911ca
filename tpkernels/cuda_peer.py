"""The kernels of a hand-off between two GPUs by tpkernels._cuda (csrc/cuda/peer_*.cuh): fp32, fp16 and bf16, rows of
whole 16-byte units. The same protocol as the Triton kernels, so one link may have both, one at each end.

By request only (`open_link("peer", ..., language="cuda")`) until their tests have passed on hardware (PROVEN).

The one trap: as in cuda.py, the extension sees raw addresses, so a launch holds the tensors of its call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpkernels.cuda import Extension
from tpkernels.dtypes import DTYPE_CODES
from tpkernels.hand_off import Slot, target

PROVEN: frozenset[int] = frozenset()  # compute capabilities; none yet
Launch = Callable[[], None]


class CudaPeer(Extension):
    """tpkernels.hand_off.Language; tests pass the emulator's module and "cpu"."""

    TILE_ROWS = 64
    TICKS_PER_S = 10**9

    def run(self, launches: Sequence[Launch], device: torch.device, /) -> None:
        """On the device's current stream."""
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            for launch in launches:
                launch()

    def take_credit(self, slot: Slot) -> Launch:
        return partial(self._call, "peer_take_credit", slot, slot.uses)

    def begin_use(self, slot: Slot, tiles: int) -> Launch:
        return partial(self._call, "peer_begin_use", slot, slot.uses, tiles=tiles)

    def end_use(self, slot: Slot, *, release: bool) -> Launch:
        return partial(self._call, "peer_end_use", slot, slot.uses, release=release)

    def add_put(self, slot: Slot | None, x: Tensor, residual: Tensor | None, *, out: Tensor | None = None) -> Launch:
        """The slot, or out, becomes x + residual."""
        rows, columns = x.shape
        tensors = {"x": x, "residual": residual, "out": target(slot, out)}
        return partial(self._call, "peer_add_put", slot, x, **_checked(tensors), rows=rows, columns=columns)

    def matmul_add_put(
        self,
        slot: Slot | None,
        a: Tensor,
        b: Tensor,
        residual: Tensor | None,
        *,
        transposed: bool,
        out: Tensor | None = None,
    ) -> Launch:
        """The slot, or out, becomes a @ b + residual; b [K, N], or with `transposed` a weight [N, K]."""
        tensors = {"a": a, "b": b, "residual": residual, "out": target(slot, out)}
        sizes = _sizes(a.shape[0], b, transposed)
        return partial(self._call, "peer_matmul_add_put", slot, a, **_checked(tensors), **sizes)

    def wait_matmul(
        self, slot: Slot | None, b: Tensor, *, rows: int, transposed: bool, out: Tensor, a: Tensor | None = None
    ) -> Launch:
        """out = rows of the slot (or a) @ b, each row tile as soon as it is there."""
        tensors = {"a": target(slot, a), "b": b, "residual": None, "out": out}
        return partial(self._call, "peer_wait_matmul", slot, out, **_checked(tensors), **_sizes(rows, b, transposed))

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
    ) -> Launch:
        """out = the norm of the slot's rows (or of x); mean: None for RMSNorm."""
        tensors = _checked({"x": target(slot, x), "weight": weight, "bias": bias, "out": out})
        settings = {"rms": mean is None, "rows": rows, "columns": weight.shape[0], "eps": eps}
        return partial(self._call, "peer_wait_norm", slot, out, **tensors, mean=mean, rstd=rstd, **settings)

    def _call(self, name: str, slot: Slot | None, own: Tensor, **arguments: Any) -> None:
        """own: a tensor on this end's device, whose dtype is the kernel's."""
        if own.dtype in DTYPE_CODES:
            arguments["dtype"] = DTYPE_CODES[own.dtype]
        tensors = {key: value for key, value in arguments.items() if value is None or isinstance(value, Tensor)}
        arguments |= {key: 0 if value is None else value.data_ptr() for key, value in tensors.items()}
        getattr(self.module, name)(slot=self._slot(slot), **arguments, **self.place(own))

    def _slot(self, slot: Slot | None) -> tuple[int, ...]:
        if slot is None:
            return (0,) * 10
        if slot.tile_rows != self.TILE_ROWS:
            raise ValueError(
                f"cuda kernels of a peer link: tiles of {slot.tile_rows} rows; they make {self.TILE_ROWS}, and both "
                "ends of a link need the same."
            )
        words = (slot.claim, slot.flags, slot.credit, slot.uses, slot.arrived, slot.control, slot.words)
        return (slot.data.data_ptr(), *(word.data_ptr() for word in words), slot.budget, slot.index)


def _sizes(rows: int, b: Tensor, transposed: bool) -> dict[str, Any]:
    n, k = b.shape if transposed else b.T.shape
    return {"rows": rows, "n": n, "k": k, "transposed": transposed}


def _checked(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    given = {key: value for key, value in tensors.items() if value is not None}
    dtypes = {value.dtype for value in given.values()}
    if len(dtypes) > 1 or not dtypes <= DTYPE_CODES.keys():
        found = ", ".join(f"{key} {value.dtype}" for key, value in given.items())
        raise ValueError(f"cuda kernels of a peer link: tensors must be of one dtype, fp32, fp16 or bf16, not {found}")
    for key, value in given.items():
        if not value.is_contiguous():
            raise ValueError(f"cuda kernels of a peer link: {key} must be contiguous, not of strides {value.stride()}")
    return tensors
