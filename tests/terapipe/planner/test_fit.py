"""Non-negative least squares against brute force over active sets; the context term against what made the points."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe.planner.fit import Context, FitError, Point, fit_context, non_negative_least_squares


def brute(matrix: np.ndarray, values: np.ndarray) -> float:
    """The smallest residual over every set of free coefficients whose solution is not negative."""
    best, count = float(np.sum(values**2)), matrix.shape[1]
    for size in range(1, count + 1):
        for free in itertools.combinations(range(count), size):
            x = np.linalg.lstsq(matrix[:, free], values, rcond=None)[0]
            if (x >= -1e-12).all():
                best = min(best, float(np.sum((matrix[:, free] @ x - values) ** 2)))
    return best


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 9))
def test_no_other_active_set_is_better(seed: int, count: int, rows: int) -> None:
    """Columns much alike and values of both signs in them, so that coefficients that were free fall to zero again."""
    random = np.random.default_rng(seed)
    matrix = random.normal(size=(rows, 1)) + 0.3 * random.normal(size=(rows, count))
    values = matrix @ random.normal(size=count) + random.integers(2) * random.normal(size=rows)
    matrix *= 10.0 ** random.integers(-4, 5, size=count)
    x = np.array(non_negative_least_squares(matrix.tolist(), values.tolist()))
    assert (x >= 0).all()
    assert float(np.sum((matrix @ x - values) ** 2)) <= brute(matrix, values) * (1 + 1e-9) + 1e-12


def test_columns_of_zeros_get_nothing() -> None:
    assert non_negative_least_squares([[0.0, 2.0], [0.0, 4.0]], [1.0, 2.0]) == pytest.approx([0.0, 0.5])


def test_the_context_term_is_found_again() -> None:
    context = Context(3e-4, 2e-7, 5e-10)
    base = {length: 1e-3 + 1e-5 * length for length in (7, 64, 300)}
    points = [
        Point(length, start, base[length] + context(length, start)) for length in base for start in (0, 5, 100, 999)
    ]
    assert fit_context(points, base) == pytest.approx(context, rel=1e-6)
    assert context(64, 0) == 0.0


def test_times_that_fall_with_the_prefix_do_not_make_it_pay() -> None:
    base = {10: 1.0}
    context = fit_context([Point(10, start, 1.0 - start * 1e-3) for start in (10, 100, 500)], base)
    assert context == Context(0.0, 0.0, 0.0)
    assert fit_context([Point(10, 5, 0.0), Point(9, 5, 1.0)], base) == fit_context([], base) == Context()


def test_fit_error() -> None:
    assert FitError.of([0.1, -0.3, 0.2]) == FitError(3, 0.2, 0.3)
    assert FitError.of([]) == FitError(0, 0.0, 0.0)
