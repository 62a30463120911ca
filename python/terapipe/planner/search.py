"""Finds the plan of a step: simulates the candidates that bounds do not rule out, and says why the others lose.

Candidates are simulated in the order of a closed form's estimate; those whose lower bound is not below the best found
are left out.

The trap: a time budget ends the simulations, so on a very large space the answer is the best of those simulated;
`Found.left_out` says how many were not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from terapipe.planner.candidates import Candidate, candidates_of
from terapipe.planner.prediction import Prediction, predict
from terapipe.planner.request import CostsOf, Request
from terapipe.schedule.plan import unchecked_plan

MOST_TENSOR = 4  # powers of two, from 1
LAST_RESORTS = 12


@dataclass(frozen=True)
class Ranked:
    """A candidate that was simulated."""

    candidate: Candidate
    prediction: Prediction
    fits: bool


@dataclass(frozen=True)
class Found:
    """`best`; all that were simulated, fastest first (those that do not fit too); how many candidates there were, how
    many a bound ruled out, how many the time budget left out."""

    best: Ranked
    ranked: tuple[Ranked, ...]
    candidates: int
    ruled_out: int
    left_out: int
    seconds: float


def search(request: Request, costs_of: CostsOf) -> Found:
    """The fastest candidate that fits. ValueError, with values and remedy, when sizes do not divide or nothing fits."""
    began = time.process_time()
    candidates = sorted(candidates_of(request, costs_of), key=lambda c: c.estimate_s)
    ranked: list[Ranked] = []
    best: Ranked | None = None
    skipped: list[Candidate] = []
    late: list[Candidate] = []  # of the skipped: those that no bound rules out
    simulating = time.process_time()
    fitting = [candidate for candidate in candidates if candidate.least_bytes <= request.memory_bytes]
    for candidate in fitting:
        if best is not None and candidate.bound_s >= best.prediction.step_s:
            skipped.append(candidate)
        elif time.process_time() - simulating > request.budget_s:
            skipped.append(candidate)
            late.append(candidate)
        else:
            ranked.append(_simulated(candidate, request, costs_of))
            if ranked[-1].fits and (best is None or ranked[-1].prediction.step_s < best.prediction.step_s):
                best = ranked[-1]
    if best is None:  # all that were fast to look at are too large: the smallest have the last word
        for candidate in sorted(skipped, key=lambda one: one.least_bytes)[:LAST_RESORTS]:
            ranked.append(_simulated(candidate, request, costs_of))
        best = min((one for one in ranked if one.fits), key=lambda one: one.prediction.step_s, default=None)
    if best is None:
        raise ValueError(_nothing_fits(request, candidates, ranked))
    known = {kind for one in ranked if one.fits for kind in _kinds(one.candidate)}
    for candidate in skipped:  # so that every kind of plan that lost can be shown with why
        if not _kinds(candidate) <= known:
            ranked.append(_simulated(candidate, request, costs_of))
            if ranked[-1].fits:
                known |= _kinds(candidate)
    seen = {id(one.candidate) for one in ranked}
    left_out = sum(id(candidate) not in seen for candidate in late)
    ranked.sort(key=lambda one: one.prediction.step_s)
    ruled_out = len(candidates) - len(ranked) - left_out
    return Found(best, tuple(ranked), len(candidates), ruled_out, left_out, time.process_time() - began)


def _kinds(candidate: Candidate) -> set[str]:
    return {candidate.schedule, "slices" if len(candidate.slices) > 1 else "no slices"}


def _simulated(candidate: Candidate, request: Request, costs_of: CostsOf) -> Ranked:
    plan = unchecked_plan(
        candidate.slices, candidate.micros, candidate.micro_size, candidate.stages, candidate.make_schedule()
    )
    prediction = predict(plan, costs_of(candidate.layout.tensor), candidate.layout)
    return Ranked(candidate, prediction, max(prediction.memory_bytes) <= request.memory_bytes)


def _nothing_fits(request: Request, candidates: Sequence[Candidate], ranked: Sequence[Ranked]) -> str:
    from terapipe.planner.report import size

    if ranked:
        least = min(ranked, key=lambda one: max(one.prediction.memory_bytes))
        needs, which = max(least.prediction.memory_bytes), least.candidate
    else:
        which = min(candidates, key=lambda one: one.least_bytes)
        needs = which.least_bytes
    at_least = "" if ranked else "at least "
    return (
        f"no plan fits {size(request.memory_bytes)} per device: the smallest of {len(candidates)} needs {at_least}"
        f"{size(needs)}, {size(needs - request.memory_bytes)} more ({which}). Give --memory {_up(needs)} or more, more "
        f"ranks, a smaller micro size, or shorter sequences."
    )


def _up(value: float) -> str:
    """Megabytes, rounded up, so that giving them suffices."""
    return f"{math.ceil(value / 1e6)}MB"
