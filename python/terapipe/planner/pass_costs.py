"""Seconds of one pass over one layer as a function of slice length and prefix length: a curve with a context term, or a
table.

The trap: nothing that cannot be a time may come in, so NaN, negative, infinite and missing entries are refused here.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from terapipe.planner.fit import Context, FitError, Point, fit_context

if TYPE_CHECKING:
    import numpy as np

FIT_ROUNDS = 5
NO_CONTEXT = Context()


def require_time(what: str, value: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"{what} is {value!r}; it must be a finite number from 0 up: measure it again, or correct it.")


class PassCost(Protocol):
    """Seconds of one pass over one layer: of a slice of `length` tokens behind a prefix of `start` tokens."""

    def __call__(self, length: int, start: int) -> float: ...

    def many(self, lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """[starts, lengths]: of every pair, to the same bits."""


@dataclass(frozen=True)
class CurveCost:
    """A curve at start 0 (`lengths` ascending, `seconds`) and a context term.

    Between two lengths the curve is a straight line plus the causal attention's `per_start_length * length^2 / 2`,
    which is not straight; beyond the last length it goes on as the last two say; below the first it is constant.
    """

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    context: Context = NO_CONTEXT

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.seconds) or not self.lengths:
            raise ValueError(
                f"a cost curve needs one time for each length, got {len(self.lengths)} lengths and "
                f"{len(self.seconds)} seconds; give the missing ones."
            )
        if any(a >= b for a, b in itertools.pairwise(self.lengths)) or self.lengths[0] < 1:
            raise ValueError(f"the lengths of a cost curve must ascend from at least 1, got {list(self.lengths)}.")
        for length, value in zip(self.lengths, self.seconds, strict=True):
            require_time(f"the cost of {length} tokens", value)
        for name, value in self.context._asdict().items():
            require_time(f"the context coefficient {name}", value)

    @cached_property
    def _known(self) -> dict[int, float]:
        return {}

    def base(self, length: int) -> float:
        """Seconds of a slice without a prefix."""
        value = self._known.get(length)
        if value is None:
            value = self._known[length] = self._interpolate(length)
        return value

    def _interpolate(self, length: int) -> float:
        lengths, seconds = self.lengths, self.seconds
        if len(lengths) == 1 or length <= lengths[0]:
            return seconds[0]
        high = min(max(1, bisect.bisect_left(lengths, length)), len(lengths) - 1)
        low = high - 1
        attention = self.context.per_start_length / 2
        first, last = (seconds[i] - attention * lengths[i] ** 2 for i in (low, high))
        straight = first + (last - first) * (length - lengths[low]) / (lengths[high] - lengths[low])
        return max(0.0, straight + attention * length**2)

    def __call__(self, length: int, start: int) -> float:
        return self.base(length) + self.context(length, start)

    def many(self, lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
        import numpy as np

        base, behind = np.array([self.base(int(length)) for length in lengths]), starts[:, None]
        context = self.context.constant + behind * (self.context.per_start + self.context.per_start_length * lengths)
        return base + np.where(behind > 0, context, 0.0)

    @classmethod
    def fit(cls, points: Iterable[Point]) -> CurveCost:
        """From measured points; where a (length, start) was measured several times, give the median.

        Every length needs a point at start 0. What a length costs there is then told by all its points, less the
        context term, which in turn is fitted to what is left of them: a few rounds of both.
        """
        found = sorted(points)
        for point in found:
            require_time(f"the measured cost of {point.length} tokens behind {point.start}", point.seconds)
        base = {point.length: point.seconds for point in found if point.start == 0}
        if not base:
            raise ValueError("a cost curve needs points at start 0, got none; measure slices without a prefix too.")
        context = fit_context(found, base)
        for _ in range(FIT_ROUNDS):
            left: dict[int, list[float]] = {length: [] for length in base}
            for point in found:
                if point.length in base:
                    left[point.length].append(point.seconds - context(point.length, point.start))
            base = {length: max(0.0, sum(values) / len(values)) for length, values in left.items()}
            context = fit_context(found, base)
        return cls(tuple(base), tuple(base.values()), context)

    def error(self, points: Iterable[Point]) -> FitError:
        """Relative errors of this curve on `points`."""
        return FitError.of(self(p.length, p.start) / p.seconds - 1 for p in points if p.seconds > 0)


@dataclass(frozen=True)
class GridCost:
    """A table: `seconds[i][j]` of `lengths[j]` tokens behind `starts[i]`; bilinear between, linear beyond its ends."""

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.lengths or not self.starts:
            raise ValueError("a cost table needs at least one length and one start.")
        for name, axis, least in (("lengths", self.lengths, 1), ("starts", self.starts, 0)):
            if any(a >= b for a, b in itertools.pairwise(axis)) or axis[0] < least:
                raise ValueError(f"the {name} of a cost table must ascend from at least {least}, got {list(axis)}.")
        if len(self.seconds) != len(self.starts):
            raise ValueError(
                f"a cost table needs a row for each of {len(self.starts)} starts, got {len(self.seconds)}."
            )
        for start, row in zip(self.starts, self.seconds, strict=True):
            if len(row) != len(self.lengths):
                raise ValueError(
                    f"the row of start {start} in a cost table has {len(row)} times for {len(self.lengths)} lengths; "
                    f"give the missing ones."
                )
            for length, value in zip(self.lengths, row, strict=True):
                require_time(f"the cost of {length} tokens behind {start}", value)

    def __call__(self, length: int, start: int) -> float:
        row, beside = bracket(self.starts, start)
        column, next_column = bracket(self.lengths, length)
        values = [
            between(self.lengths, self.seconds[i], column, next_column, length) for i in dict.fromkeys((row, beside))
        ]
        if len(values) == 1:
            return max(0.0, values[0])
        share = (start - self.starts[row]) / (self.starts[beside] - self.starts[row])
        return max(0.0, values[0] + (values[1] - values[0]) * share)

    def many(self, lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
        import numpy as np

        known, (low, high) = np.array(self.seconds), _brackets(self.lengths, lengths)
        rows = known[:, low]
        if len(self.lengths) > 1:
            axis = np.array(self.lengths)
            rows = rows + (known[:, high] - rows) * (lengths - axis[low]) / (axis[high] - axis[low])
        row, beside = _brackets(self.starts, starts)
        found = rows[row]
        if len(self.starts) > 1:
            axis = np.array(self.starts)
            found = found + (rows[beside] - found) * ((starts - axis[row]) / (axis[beside] - axis[row]))[:, None]
        return np.maximum(0.0, found)


def bracket(axis: Sequence[float], at: float) -> tuple[int, int]:
    """The two indices between which `at` lies (the outermost two beyond the ends; one twice if there is only one)."""
    high = min(max(1, bisect.bisect_left(axis, at)), len(axis) - 1)
    return max(0, high - 1), high


def _brackets(axis: Sequence[int], at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`bracket` for many."""
    import numpy as np

    high = np.minimum(np.maximum(1, np.searchsorted(np.array(axis), at)), len(axis) - 1)
    return np.maximum(0, high - 1), high


def between(axis: Sequence[float], values: Sequence[float], low: int, high: int, at: float) -> float:
    if low == high:
        return values[low]
    return values[low] + (values[high] - values[low]) * (at - axis[low]) / (axis[high] - axis[low])
