"""Exact slicing: the slices that minimise a step's time in the paper's model (Li et al. 2021, section 3.3).

A sequence of `units` units is cut into slices of whole units. `t(length, start)` is what a slice of `length` units
costs a stage behind a prefix of `start`: forward and backward, in seconds or any unit of time. The search is in C++
(csrc/planner/) and exact, epsilon = 0: no slicing of these units costs less in this model, whatever the shape of the
costs. `slicing_reference` is its slow twin. The GIL is released, so several searches may run in threads.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from terapipe._core import CostTable
from terapipe._core import Slicing as _Found
from terapipe._core import equal_cost_slices as _equal_cost_slices
from terapipe._core import slice_batch as _slice_batch

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True)
class SliceCosts:
    """A measured curve and a fitted context term:

        t(l, s) = base[l - 1] + (0 if s == 0 else constant + s * (per_start + per_start_length * l))

    `base` holds lengths 1, 2, ..., units; lengths and starts count in units. The sum of two of them (forward and
    backward) is the sum of their fields.
    """

    base: tuple[float, ...]
    constant: float = 0.0
    per_start: float = 0.0
    per_start_length: float = 0.0

    @property
    def units(self) -> int:
        return len(self.base)

    def __call__(self, length: int, start: int) -> float:
        if start == 0:
            return self.base[length - 1]
        return self.base[length - 1] + (self.constant + start * (self.per_start + self.per_start_length * length))


# SliceCosts; an array [units, units] with the cost of `length` units behind `start` at [start, length - 1], where
# entries past the end of the sequence are not read and infinity is a slice that is not allowed; or a `cost_table`.
if TYPE_CHECKING:
    Costs = SliceCosts | CostTable | npt.ArrayLike


@dataclass(frozen=True)
class MicroSlices:
    """`count` micros of `size` sequences each, all cut into `slices` (lengths in units)."""

    size: int
    count: int
    slices: tuple[int, ...]


@dataclass(frozen=True)
class Slicing:
    """The best slicing of a step and its time, `step_s = sum_s + (stages - 1) * largest_s`.

    sum_s: of all slices of all micros. evaluations: how many dynamic programs over all positions it took. exact: that
    nothing was skipped which could have been better.
    """

    micros: tuple[MicroSlices, ...]
    sum_s: float
    largest_s: float
    step_s: float
    evaluations: int
    exact: bool = True

    @property
    def slices(self) -> tuple[int, ...]:
        """The lengths, in units, where all micros are cut the same way."""
        if len(self.micros) != 1:
            sizes = ", ".join(f"{m.count} x {m.size}" for m in self.micros)
            raise ValueError(f"micros of different sizes ({sizes}) have different slices; read them from `micros`")
        return self.micros[0].slices

    @property
    def num_micros(self) -> int:
        return sum(micro.count for micro in self.micros)


def cost_table(costs: Costs) -> CostTable:
    """The costs of every slice, checked and laid out for the search: worth keeping when one table serves many searches.

    ValueError for an empty table and for a cost that is negative or NaN.
    """
    if isinstance(costs, CostTable):
        return costs
    if isinstance(costs, SliceCosts):
        context = {name: getattr(costs, name) for name in ("constant", "per_start", "per_start_length")}
        if not all(math.isfinite(value) for value in context.values()):
            raise ValueError(f"the context term of the costs must be finite numbers, got {context}")
        return CostTable.from_curve(array("d", costs.base), **context)
    import numpy as np

    values = np.ascontiguousarray(costs, dtype=np.float64)
    if values.size == 0:
        raise ValueError("the cost table is empty; it needs the cost of at least one unit")
    if values.ndim != 2 or values.shape[0] != values.shape[1]:
        raise ValueError(
            f"a table of costs has one row for each start and one column for each length, [units, units]; got shape "
            f"{values.shape}"
        )
    return CostTable(values)


def slice_sequence(costs: Costs, *, stages: int, micros: int = 1) -> Slicing:
    """The slices of `micros` equal micros: minimises `micros * sum t_i + (stages - 1) * max t_i`."""
    _require_positive(stages=stages, micros=micros)
    # Equal micros are a batch of `micros` made of micros of one size; the bubble term counts once a step.
    return _slicing(_slice_batch([(cost_table(costs), 1)], batch=micros, fill=float(stages - 1)))


def slice_batch(costs: Mapping[int, Costs], *, stages: int, batch: int) -> Slicing:
    """Micro sizes and the slices of each: minimises the sum of all slices plus `(stages - 1)` times the largest.

    costs: what slices cost by the number of sequences in the micro; sizes that are not listed are not used. Every
    micro of one size is sliced the same way (nothing is gained otherwise).
    """
    _require_positive(stages=stages, batch=batch)
    sizes = sorted(size for size in costs if size <= batch)
    if any(size < 1 for size in costs):
        raise ValueError(f"micro sizes must be at least 1, got {sorted(costs)}")
    if not sizes:
        raise ValueError(f"no micro size fits a batch of {batch}: the costs have sizes {sorted(costs)}; add size 1")
    return _slicing(_slice_batch([(cost_table(costs[size]), size) for size in sizes], batch=batch, fill=stages - 1.0))


def equal_cost_slices(costs: Costs, *, slices: int | None = None, stages: int = 1) -> Slicing:
    """Minimises the largest slice and, among such slicings, the sum: what 1F1B-type schedules want, where a slice of
    one micro runs beside a slice of another and the slower one is waited for.

    slices: exactly so many; None: any number, which mostly means the smallest slices there are. stages: for `step_s`.
    """
    _require_positive(stages=stages, **({} if slices is None else {"slices": slices}))
    found = _slicing(_equal_cost_slices(cost_table(costs), count=slices or 0))
    return Slicing(
        found.micros, found.sum_s, found.largest_s, found.sum_s + (stages - 1) * found.largest_s, found.evaluations
    )


def _slicing(found: _Found) -> Slicing:
    micros = tuple(MicroSlices(micro.size, micro.count, tuple(micro.lengths)) for micro in found.micros)
    return Slicing(micros, found.sum, found.largest, found.cost, found.evaluations)


def _require_positive(**sizes: Any) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
