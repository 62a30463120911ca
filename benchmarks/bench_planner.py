"""Exact slicing: seconds and evaluations by number of units, on costs that are easy and on tables made to be hard.

`seconds` is the median of the rounds for one answer from the costs as a user has them, laying out the table included: a
curve (`SliceCosts`), an array, or a `CostModel` of 175B (analytic or a table) that is made anew each time. `best_s` is
the best round, which matters on a shared machine. Each answer is checked before it is timed: its slices cost what it
says, and no uniform slicing costs less. One thread; nothing is random from run to run.

In the hard families every number of equal slices costs a step the same (t = c * l / (units + (stages - 1) * l)), so
that only noise tells one t_max from another and no bound cuts anything off.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from terapipe.models.presets import PRESETS
from terapipe.planner import SliceCosts, Slicing, cost_table, slice_batch
from terapipe.planner.analytic import analytic_costs
from terapipe.planner.costs import BLOCK
from terapipe.planner.hardware import HARDWARE
from terapipe.planner.pass_costs import GridCost
from terapipe.planner.slicing import CostTable

SIZES = ((256, 96), (512, 64), (1024, 64), (2048, 64), (4096, 64))
ROUNDS = 5
MODEL = PRESETS["gpt3_175b"]()
LONGEST_BATCH = 8  # sequences, in the family that chooses micro sizes too

Costs = Mapping[int, Any]  # by micro size


@dataclass(frozen=True)
class MadeAnew:
    """Costs that are made within the time."""

    make: Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """`exact`: what the search claims, and what the check before the timing did not refute."""

    units: int
    stages: int
    family: str
    seconds: float
    best_s: float
    evaluations: int
    slices: int
    exact: bool


def run() -> list[Row]:
    return [
        _measure(family, make, units, stages)
        for units, stages in SIZES
        for family, make in FAMILIES.items()
        if family != "micro sizes" or units <= 1024
    ]


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds by units, one line a family, and the line of n^2 that they follow."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for family in dict.fromkeys(row["family"] for row in rows):
        chosen = [row for row in rows if row["family"] == family]
        axes.loglog([row["units"] for row in chosen], [row["seconds"] for row in chosen], marker="o", label=family)
    ends = [SIZES[0][0], SIZES[-1][0]]
    axes.loglog(ends, [1e-3 * (units / ends[0]) ** 2 for units in ends], "k:", label="$n^2$")
    axes.set_xlabel("units of a sequence")
    axes.set_ylabel("seconds to the exact answer, one core")
    axes.set_xticks([units for units, _ in SIZES], [str(units) for units, _ in SIZES])
    axes.minorticks_off()
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _attention(units: int, stages: int) -> Costs:
    length = np.arange(1, units + 1)
    base = 60e-6 + 9e-6 * length + 2e-8 * length**2
    return {1: SliceCosts(tuple(base), constant=5e-6, per_start_length=4e-8)}


def _saturating(units: int, stages: int) -> Costs:
    """A GEMM that is bound by its weights up to 32 units."""
    length = np.arange(1, units + 1)
    return {1: SliceCosts(tuple(1e-4 + 1e-5 * np.maximum(32, length)), per_start_length=3e-8)}


def _concave(units: int, stages: int) -> Costs:
    return {1: SliceCosts(tuple(5e-5 + 9e-5 * np.arange(1, units + 1) ** 0.8), per_start_length=1e-8)}


def _convex(units: int, stages: int) -> Costs:
    length = np.arange(1, units + 1)
    return {1: SliceCosts(tuple(3e-5 + 4e-6 * length + 2e-8 * length**2), per_start_length=1e-8)}


def _noisy(units: int, stages: int) -> Costs:
    """Measured one by one: 5 % of noise, rows not monotone."""
    length, start = np.arange(1, units + 1), np.arange(units)[:, None]
    costs = 1.5e-4 + 5e-6 * length + 5e-9 * length * start
    return {1: costs * (1 + 0.05 * np.random.default_rng(units).random((units, units)))}


def _hard(noise: float) -> Callable[[int, int], Costs]:
    def make(units: int, stages: int) -> Costs:
        length = np.arange(1, units + 1)
        costs = np.tile(length / (units + (stages - 1) * length), (units, 1))
        return {1: costs * (1 + noise * np.random.default_rng(units).random((units, units)))}

    return make


def _micro_sizes(units: int, stages: int) -> Costs:
    length = np.arange(1, units + 1)
    return {
        size: SliceCosts(tuple(6e-5 + 9e-6 * size * length), per_start_length=4e-8 * size)
        for size in range(1, LONGEST_BATCH + 1)
    }


def _model(*, table: bool) -> Callable[[int, int], Costs]:
    def make(units: int, stages: int) -> Costs:
        unit = 512
        grid = GridCost((unit, units * unit), (0, units * unit), ((1e-3, 1e-3 * units), (3e-3, 3e-3 * units)))

        def stage_costs() -> Any:
            costs = analytic_costs(MODEL, HARDWARE["v100-p3.16xlarge"], max_tokens=units * unit, tensor=8)
            if table:
                block = replace(costs.layers[BLOCK], forward={1: grid}, input_grad={1: grid}, weight_grad={1: grid})
                costs = replace(costs, layers={**costs.layers, BLOCK: block})
            return costs.stage(1, 3).slice_costs(1, unit=unit, units=units)

        return {1: MadeAnew(stage_costs)}

    return make


FAMILIES: dict[str, Callable[[int, int], Costs]] = {
    "attention": _attention,
    "saturating GEMM": _saturating,
    "concave": _concave,
    "convex": _convex,
    "noisy": _noisy,
    "hard, flat": _hard(0.0),
    "hard, noise 1e-6": _hard(1e-6),
    "hard, noise 1e-3": _hard(1e-3),
    "hard, noise 1e-1": _hard(1e-1),
    "micro sizes": _micro_sizes,
    "cost model, analytic": _model(table=False),
    "cost model, table": _model(table=True),
}


def _measure(family: str, make: Callable[[int, int], Costs], units: int, stages: int) -> Row:
    costs = make(units, stages)
    batch = max(costs)
    tables = {size: cost_table(cost) for size, cost in _made(costs).items()}
    found = slice_batch(tables, stages=stages, batch=batch)
    _check(found, tables, stages, batch)
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        again = slice_batch(_made(costs), stages=stages, batch=batch)
        seconds.append(time.perf_counter() - begun)
        if again != found:
            raise RuntimeError(f"two searches of the same costs disagree: {found} and {again}")
    return Row(
        units=units,
        stages=stages,
        family=family,
        seconds=statistics.median(seconds),
        best_s=min(seconds),
        evaluations=found.evaluations,
        slices=sum(micro.count * len(micro.slices) for micro in found.micros),
        exact=found.exact,
    )


def _made(costs: Costs) -> Costs:
    return {size: cost.make() if isinstance(cost, MadeAnew) else cost for size, cost in costs.items()}


def _check(found: Slicing, tables: Mapping[int, CostTable], stages: int, batch: int) -> None:
    times = [t for micro in found.micros for t in _times(tables[micro.size], micro.slices) * micro.count]
    step = sum(times) + (stages - 1) * max(times)
    if abs(step - found.step_s) > 1e-12 * step:
        raise RuntimeError(f"the slices cost {step}, not what the answer says: {found}")
    for size, table in tables.items():
        if batch % size:
            continue
        for count in {int(table.units ** (step / 40)) for step in range(41)}:
            lengths = [table.units // count + (index < table.units % count) for index in range(count)]
            uniform = _times(table, lengths)
            step = batch // size * sum(uniform) + (stages - 1) * max(uniform)
            if step < found.step_s * (1 - 1e-12):
                raise RuntimeError(f"{count} uniform slices cost {step}, less than the answer {found}")


def _times(table: CostTable, lengths: list[int] | tuple[int, ...]) -> list[float]:
    starts = np.cumsum([0, *lengths]).tolist()
    return [table.cost(length, start) for length, start in zip(lengths, starts, strict=False)]


if __name__ == "__main__":
    for row in run():
        print(asdict(row))
