"""Fits the four rates of `paper_cluster` to settings 5, 8 and 9 (with their uniform slicings) and to one layer's curve.

Minimises the squared logarithms of predicted over published times, by Levenberg and Marquardt's method. The result is
frozen in `paper_cluster.FITTED`; a test fits again and compares. No other setting is looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from terapipe.planner.paper_cluster import ClusterRates, Times, layer_times, step_s
from terapipe.planner.paper_settings import PUBLISHED, SETTINGS, SINGLE_LAYER, TOKENS, UNIFORM

FITTED_SETTINGS = (5, 8, 9)

START = ClusterRates(60e12, 600e9, 1e-3, 20.0)
CURVE_WEIGHT = 0.5  # of a point of figure 3, which was read off a small plot


def fit() -> ClusterRates:
    """The rates of the cluster that explain the published times best, searched from `START`."""
    steps: list[tuple[int, tuple[int, ...], float]]
    steps = [(number, (TOKENS,), PUBLISHED[number].without_s) for number in FITTED_SETTINGS]
    steps += [(number, PUBLISHED[number].slices, PUBLISHED[number].with_s) for number in FITTED_SETTINGS]
    steps += [
        (number, (TOKENS // count,) * count, seconds)
        for number, curve in UNIFORM.items()
        for count, seconds in curve.items()
        if count > 1
    ]
    lengths, layer_s = np.array(list(SINGLE_LAYER), dtype=np.float64), np.array(list(SINGLE_LAYER.values()))

    def residuals(logarithms: Times) -> Times:
        rates = ClusterRates(*np.exp(logarithms))
        of_steps = [np.log(step_s(SETTINGS[number], slices, rates) / seconds) for number, slices, seconds in steps]
        of_curve = CURVE_WEIGHT * np.log(layer_times(SETTINGS[1], lengths, 0.0, rates).forward / layer_s)
        return np.array([*of_steps, *of_curve])

    return ClusterRates(*np.exp(_least_squares(residuals, np.log(dataclasses.astuple(START)))).tolist())


def _least_squares(residuals: Callable[[Times], Times], point: Times) -> Times:
    """The nearest local minimum of the sum of squares, derivatives by differences."""
    step, damping, current = 1e-5, 1e-2, residuals(point)
    while damping < 1e12:
        jacobian = np.stack([(residuals(point + step * unit) - current) / step for unit in np.eye(len(point))], axis=1)
        normal = jacobian.T @ jacobian
        move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -jacobian.T @ current)
        tried = residuals(point + move)
        if tried @ tried < current @ current:
            point, current, damping = point + move, tried, damping / 3
        else:
            damping *= 4
    return point
