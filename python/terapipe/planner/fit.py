"""Least squares with coefficients that are not negative, and the context term fitted with it.

    t(length, start) = base(length) + (0 if start == 0 else constant + start * (per_start + per_start_length * length))

`base` is measured where start is 0, so only the three coefficients are fitted. Each equation is divided by its time:
what is minimised is the sum of squared relative errors. The trap: a time that falls with the prefix (noise) gets
coefficients of zero, not negative ones, which would make long prefixes free.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

TOLERANCE = 1e-12  # of a gradient, relative to the largest, that counts as zero


class Point(NamedTuple):
    """One measured slice."""

    length: int
    start: int
    seconds: float


@dataclass(frozen=True)
class FitError:
    """Relative errors of a prediction, over `points` points that it was not fitted to."""

    points: int
    median: float
    largest: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> FitError:
        found = [abs(error) for error in errors]
        return cls(len(found), statistics.median(found), max(found)) if found else cls(0, 0.0, 0.0)


def non_negative_least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """x >= 0 that minimises |rows x - values|^2, by active sets (Lawson and Hanson 1974, chapter 23)."""
    import numpy as np

    matrix, wanted = np.asarray(rows, dtype=np.float64), np.asarray(values, dtype=np.float64)
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    matrix = matrix / scale  # columns of one length, so that one tolerance fits all
    count = matrix.shape[1]
    x, free = np.zeros(count), np.zeros(count, dtype=bool)

    def solve() -> np.ndarray:
        found = np.zeros(count)
        found[free] = np.linalg.lstsq(matrix[:, free], wanted, rcond=None)[0]
        return found

    limit = TOLERANCE * max(1.0, float(np.abs(matrix.T @ wanted).max(initial=0.0)))
    for _ in range(10 * count):
        gradient = matrix.T @ (wanted - matrix @ x)
        gradient[free] = -np.inf
        if not (~free).any() or gradient.max() <= limit:
            break
        free[int(gradient.argmax())] = True
        trial = solve()
        while (trial[free] <= 0).any():  # step towards the trial until the first coefficient reaches zero
            falling = free & (trial <= 0)
            step = float((x[falling] / (x[falling] - trial[falling])).min())
            x = x + step * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
            trial = solve()
        x = trial
    return [float(value) for value in x / scale]


class Context(NamedTuple):
    """What a prefix adds: `constant + start * (per_start + per_start_length * length)` for start > 0."""

    constant: float = 0.0
    per_start: float = 0.0
    per_start_length: float = 0.0

    def __call__(self, length: int, start: int) -> float:
        return 0.0 if start == 0 else self.constant + start * (self.per_start + self.per_start_length * length)


def fit_context(points: Sequence[Point], base: dict[int, float]) -> Context:
    """The context term of points with start > 0, given the time of each length at start 0."""
    used = [point for point in points if point.start > 0 and point.length in base and point.seconds > 0]
    if not used:
        return Context()
    rows = [[1.0 / p.seconds, p.start / p.seconds, p.start * p.length / p.seconds] for p in used]
    return Context(*non_negative_least_squares(rows, [(p.seconds - base[p.length]) / p.seconds for p in used]))
