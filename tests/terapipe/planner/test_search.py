"""The search against every candidate simulated, and what it finds."""

from __future__ import annotations

import dataclasses
import time
from functools import cache

import pytest
from planner_cases import provider, request

from terapipe.models.presets import PRESETS
from terapipe.planner import search as search_module
from terapipe.planner.analytic import analytic_costs
from terapipe.planner.candidates import candidates_of
from terapipe.planner.hardware import HARDWARE
from terapipe.planner.prediction import predict
from terapipe.planner.request import Request
from terapipe.planner.search import search
from terapipe.schedule import GENERATORS


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
def test_what_bounds_rule_out_is_never_better(ranks, monkeypatch):
    asked, costs_of = request(ranks=ranks, batch=6, tensor=(1, 2)), provider()
    found = search(asked, costs_of)
    every = candidates_of(asked, costs_of)
    simulated = [search_module._simulated(candidate, asked, costs_of) for candidate in every]
    assert len(simulated) == found.candidates and found.left_out == 0
    for one in simulated:
        assert one.candidate.bound_s <= one.prediction.step_s * (1 + 1e-9), one.candidate
        assert one.candidate.least_bytes <= max(one.prediction.memory_bytes) * (1 + 1e-9), one.candidate
    fastest = min(one.prediction.step_s for one in simulated if one.fits)
    assert found.best.prediction.step_s == fastest


@pytest.mark.parametrize("ranks", [2, 5])
def test_no_equal_slices_are_better_than_what_is_found(ranks):
    costs_of = provider(name="cpu-2core", sizes=(1,))
    found = search(request(ranks=ranks, batch=1, unit=8, data=(1,), schedules=("terapipe", "gpipe")), costs_of)
    for count in (1, 2, 4, 8, 16, 32):
        best = found.best.candidate
        plan = dataclasses.replace(best, slices=(512 // count,) * count, schedule="terapipe").plan()
        assert predict(plan, costs_of(1), best.layout).step_s >= found.best.prediction.step_s


def test_one_rank_is_not_sliced_and_many_short_micros_need_not_be():
    found = search(request(ranks=1), provider())
    assert len(found.best.candidate.slices) == 1
    many = search(
        request(ranks=2, batch=64, data=(1,), schedules=("gpipe", "one_f_one_b", "terapipe", "seq_1f1b")), provider()
    )
    assert len(many.best.candidate.slices) == 1  # launches cost more than the bubble of 64 micros
    few = search(request(ranks=2, batch=1, data=(1,), memory_bytes=1e12), provider(name="cpu-2core", sizes=(1,)))
    assert len(few.best.candidate.slices) > 1


def test_a_memory_cap_changes_the_plan_and_says_what_would_fit():
    free = search(request(schedules=("terapipe", "gpipe", "seq_1f1b", "one_f_one_b"), data=(1,)), provider())
    needs = max(free.best.prediction.memory_bytes)
    tight = search(request(memory_bytes=needs * 0.9, data=(1,)), provider())
    assert max(tight.best.prediction.memory_bytes) <= needs * 0.9
    with pytest.raises(
        ValueError, match=r"no plan fits 9.54 MiB per device: the smallest .* more .*Give --memory \d+MB"
    ):
        search(request(memory_bytes=1e7), provider())


def test_175b_on_48_nodes_is_planned_in_seconds():
    model, hardware = PRESETS["gpt3_175b"](), HARDWARE["v100-p3.16xlarge"]

    @cache
    def costs_of(tensor):
        return analytic_costs(model, hardware, max_tokens=2048, micro_sizes=(1, 2), tensor=tensor)

    began = time.process_time()
    asked = Request(ranks=384, tokens=2048, batch=2, memory_bytes=16e9, tensor=(1, 2, 4, 8))
    found = search(asked, costs_of)
    assert time.process_time() - began < 10  # 3 s here
    assert len(found.best.candidate.slices) > 1 and found.left_out == 0
    unsliced = next(one for one in found.ranked if len(one.candidate.slices) == 1)
    assert unsliced.prediction.step_s > 3 * found.best.prediction.step_s


def test_every_schedule_is_a_candidate():
    found = search(request(ranks=2, data=(1,)), provider())
    assert {one.candidate.schedule for one in found.ranked} == set(GENERATORS)
    best = found.best
    again = predict(best.candidate.plan(), provider()(1), best.candidate.layout)
    assert again.step_s == best.prediction.step_s


def test_what_the_budget_leaves_out_is_counted_apart_from_what_bounds_rule_out():
    """No time at all: the last resorts are simulated, and every candidate is counted once."""
    found = search(request(ranks=4, data=(1,), budget_s=0.0), provider())
    assert found.left_out > 0 and found.ruled_out >= 0
    assert len(found.ranked) + found.left_out + found.ruled_out == found.candidates


def test_slow_candidates_leave_simulation_its_time(monkeypatch):
    """What a large search spends before it simulates is no reason to take a plan that was not compared."""

    def slowly(asked, costs_of):
        until = time.process_time() + 0.3
        yield from candidates_of(asked, costs_of)
        while time.process_time() < until:
            pass

    best = search(request(ranks=2, data=(1,)), provider()).best
    monkeypatch.setattr(search_module, "candidates_of", slowly)
    assert search(request(ranks=2, data=(1,), budget_s=0.29), provider()).best.candidate == best.candidate
