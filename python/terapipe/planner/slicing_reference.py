"""The slow twin of `slicing`: what the definitions say, in plain Python. The oracle of its tests.

Costs are a callable `t(length, start)` and the number of units. `brute_*` try every slicing (2^(units - 1) of them: up
to 13 units or so); `every_t_max` runs the paper's Algorithm 1 for every value that a slice can cost (up to 80 units).
Sums run from the last slice to the first, as in the C++ code; with whole numbers below 2^53 all results are exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

Cost = Callable[[int, int], float]
INFINITY = float("inf")


class Found(NamedTuple):
    """The best value of the objective, and the micros that reach it: (size, lengths) of each."""

    step_s: float
    micros: tuple[tuple[int, tuple[int, ...]], ...]


def compositions(units: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut `units` units into slices."""
    for first in range(units, 0, -1):
        if first == units:
            yield (units,)
        else:
            yield from ((first, *rest) for rest in compositions(units - first))


def slice_costs(cost: Cost, lengths: Sequence[int]) -> list[float]:
    starts = itertools.accumulate(lengths, initial=0)
    return [cost(length, start) for length, start in zip(lengths, starts, strict=False)]


def brute_sequence(cost: Cost, units: int, *, stages: int, micros: int = 1) -> Found:
    """Every slicing of equal micros."""

    def step(lengths: tuple[int, ...]) -> float:
        times = slice_costs(cost, lengths)
        return micros * sum(times) + (stages - 1) * max(times) if max(times) < INFINITY else INFINITY

    best = min(compositions(units), key=step)
    return Found(step(best), ((1, best),) * micros)


def brute_batch(costs: Mapping[int, Cost], units: int, *, stages: int, batch: int) -> Found:
    """Every multiset of micro sizes with every slicing of every micro, each micro on its own."""
    options = [
        (size, lengths, sum(times), max(times))
        for size, cost in costs.items()
        for lengths in compositions(units)
        if max(times := slice_costs(cost, lengths)) < INFINITY
    ]
    best = Found(INFINITY, ())

    def extend(first: int, left: int, total: float, largest: float, chosen: tuple) -> None:
        nonlocal best
        if left == 0 and (value := total + (stages - 1) * largest) < best.step_s:
            best = Found(value, tuple((size, lengths) for size, lengths, _, _ in chosen))
        for index in range(first, len(options)):
            size, _, added, largest_here = options[index]
            if size <= left:
                extend(index, left - size, total + added, max(largest, largest_here), (*chosen, options[index]))

    extend(0, batch, 0, 0, ())
    return best


def best_sum(cost: Cost, units: int, t_max: float) -> Found:
    """S*(units; t_max) of the paper's equation 8 and a slicing that reaches it, by the DP from the end."""
    after: list[tuple[float, tuple[int, ...]]] = [(0, ())]  # for each number of units left
    for left in range(1, units + 1):
        start = units - left
        options = [
            (t + after[left - length][0], (length, *after[left - length][1]))
            for length in range(left, 0, -1)
            if (t := cost(length, start)) <= t_max
        ]
        after.append(min(options, key=lambda option: option[0], default=(INFINITY, ())))
    return Found(after[units][0], ((1, after[units][1]),))


def every_t_max(costs: Mapping[int, Cost], units: int, *, stages: int, batch: int) -> Found:
    """Algorithm 1 without any shortcut, with the batch dimension: for each t_max a DP a size and a knapsack."""
    values = {
        cost(length, start)
        for cost in costs.values()
        for start in range(units)
        for length in range(1, units - start + 1)
    }
    best = Found(INFINITY, ())
    for t_max in sorted(values):
        sums = {size: best_sum(cost, units, t_max) for size, cost in costs.items()}
        filled: list[tuple[float, tuple]] = [(0, ())]
        for b in range(1, batch + 1):
            options = [
                (filled[b - size][0] + found.step_s, (*filled[b - size][1], (size, found.micros[0][1])))
                for size, found in sums.items()
                if size <= b
            ]
            filled.append(min(options, key=lambda option: option[0], default=(INFINITY, ())))
        total, micros = filled[batch]
        if total == INFINITY or t_max == INFINITY:
            continue
        largest = max(max(slice_costs(costs[size], lengths)) for size, lengths in micros)
        if total + (stages - 1) * largest < best.step_s:
            best = Found(total + (stages - 1) * largest, micros)
    return best


class EqualCost(NamedTuple):
    largest_s: float
    sum_s: float


def brute_equal_cost(cost: Cost, units: int, *, slices: int | None = None) -> EqualCost:
    """The smallest (largest slice, sum) over every slicing into `slices` slices, or into any number."""
    return min(
        EqualCost(max(times), sum(times))
        for lengths in compositions(units)
        if slices in (None, len(lengths))
        for times in [slice_costs(cost, lengths)]
    )
