"""A kernel launch as plain data, and running it on the current stream.

plan_forward.py and plan_backward.py make lists of Launch from a call; the backend runs them, ahead_of_time.py compiles
exactly the same ones for any GPU.

The one trap: nothing here may look at a value on the device; that would synchronise and break graph capture.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from tpkernels.triton.problem import Lengths

INTERPRETED = bool(triton.knobs.runtime.interpret)
INTERPRETED_PROCESSORS = 8  # stands for a GPU's number of multiprocessors, so that small cases split too

__all__ = ["INTERPRETED", "Launch", "Lengths", "processors_of", "run"]


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `constants` are compile-time; a None among `arguments` is an absent pointer."""

    kernel: Any
    grid: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3
    registers: int = 0

    @property
    def limits(self) -> dict[str, int]:
        """The compiler's option that keeps a thread to `registers`, so that more programs fit a multiprocessor."""
        return {"maxnreg": self.registers} if self.registers else {}


@functools.cache
def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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
                **launch.limits,
            )
