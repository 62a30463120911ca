"""Steps of several variants in turns, so that a machine whose speed drifts is the same for all of them.

Every rank makes the same calls. A turn that other processes disturbed is repeated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from terapipe.timing.foreign_load import LIMIT, foreign_cores, sample
from terapipe.timing.step_times import barrier

REPEATS = 4  # of a turn that others disturbed

Step = Callable[[], Any]


class Turns:
    """`seconds` of every step that counts and the foreign `loads` of every turn, by variant."""

    def __init__(self, steps: Mapping[str, Step]) -> None:
        self.steps = steps
        self.seconds: dict[str, list[float]] = {name: [] for name in steps}
        self.loads: dict[str, list[float]] = {name: [] for name in steps}

    def take(self, steps: int) -> None:
        """A turn of every variant: so many steps, of which the first does not count."""
        for name, step in self.steps.items():
            for _ in range(REPEATS):
                taken = []
                step()
                before = sample()
                for _ in range(steps - 1):
                    barrier()
                    began = time.perf_counter()
                    step()
                    taken.append(time.perf_counter() - began)
                load = foreign_cores(before, sample())
                if load <= LIMIT:
                    break
            self.seconds[name] += taken
            self.loads[name].append(load)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.seconds.items()}
