"""Times the steps of several variants in one run: in turns, so that a slow moment of the machine hits all of them
alike.

A turn is a few steps of one variant back to back, of which the first does not count: it finds the caches full of the
variant before, while a training run takes step after step of one kind.

Every rank of the launch calls `measure` with the same names in the same order; a rank that has no part in a variant
gives None and waits at the barrier, asleep. Times are those of rank 0; a pipeline step ends on all ranks together.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

LEAST_ROUNDS = 3
STEPS_A_TURN = 3  # the first does not count


@dataclass(frozen=True)
class StepTime:
    """Seconds of one variant's step: the median, and between which times half of all steps lay."""

    median_s: float
    quarter_s: float
    three_quarters_s: float
    steps: int

    @classmethod
    def of(cls, seconds: list[float]) -> StepTime:
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(middle, low, high, len(seconds))


def measure(
    variants: Mapping[str, Callable[[], object] | None], *, rounds: int, warm_up: int = 1, budget_s: float = math.inf
) -> dict[str, StepTime]:
    """Every variant has one turn a round, in an order that rotates from round to round; the first `warm_up` rounds do
    not count. Rounds are fewer (at least `LEAST_ROUNDS`) where the machine would need more than `budget_s` for them."""
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    began = time.perf_counter()
    number = 0
    while number < warm_up + rounds:
        for name in names[number % len(names) :] + names[: number % len(names)]:
            step = variants[name]
            for place in range(STEPS_A_TURN):
                barrier()
                started = time.perf_counter()
                if step is not None:
                    step()
                if number >= warm_up and place > 0:
                    seconds[name].append(time.perf_counter() - started)
        number += 1
        if number == warm_up:
            round_s = (time.perf_counter() - began) / warm_up
            rounds = min(rounds, max(LEAST_ROUNDS, _agreed(int(budget_s / round_s) if budget_s < math.inf else rounds)))
    barrier()
    return {name: StepTime.of(times) for name, times in seconds.items()}


def _agreed(value: int) -> int:
    """Rank 0's value, on every rank."""
    if not dist.is_available() or not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def barrier() -> None:
    """Wait for all processes of the launch, if there are several."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
