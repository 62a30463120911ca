"""Timing in turns: who runs when, what counts, and that a slow machine measures fewer rounds."""

from __future__ import annotations

import time
from collections import Counter

from terapipe.timing.step_times import LEAST_ROUNDS, STEPS_A_TURN, measure

COUNTED = STEPS_A_TURN - 1


def test_variants_take_turns_and_the_first_rounds_do_not_count() -> None:
    order: list[str] = []
    times = measure({name: lambda name=name: order.append(name) for name in "abc"}, rounds=4, warm_up=2)
    turns = [order[at : at + STEPS_A_TURN] for at in range(0, len(order), STEPS_A_TURN)]
    assert all(len(set(turn)) == 1 for turn in turns)
    firsts = "".join(turn[0] for turn in turns)
    assert [firsts[at : at + 3] for at in range(0, 18, 3)] == ["abc", "bca", "cab", "abc", "bca", "cab"]
    assert {name: time.steps for name, time in times.items()} == dict.fromkeys("abc", 4 * COUNTED)


def test_the_first_step_of_a_turn_does_not_count() -> None:
    steps: Counter[str] = Counter()

    def slow_at_first() -> None:
        steps["slow"] += 1
        time.sleep(0.02 if steps["slow"] % STEPS_A_TURN == 1 else 0.0)

    assert measure({"slow": slow_at_first, "other": lambda: None}, rounds=3)["slow"].three_quarters_s < 0.02


def test_the_median_is_that_of_the_variant_and_quartiles_enclose_it() -> None:
    times = measure({"fast": lambda: None, "slow": lambda: time.sleep(0.005)}, rounds=5)
    for measured in times.values():
        assert measured.quarter_s <= measured.median_s <= measured.three_quarters_s
    assert times["slow"].median_s >= 0.005 > times["fast"].median_s


def test_a_variant_that_runs_elsewhere_is_waited_for_without_work() -> None:
    assert measure({"elsewhere": None, "here": lambda: None}, rounds=3)["elsewhere"].steps == 3 * COUNTED


def test_a_budget_limits_the_rounds_but_not_below_the_least() -> None:
    counts: Counter[str] = Counter()

    def step() -> None:
        counts["step"] += 1
        time.sleep(0.01)

    assert measure({"step": step}, rounds=1000, budget_s=0.1).popitem()[1].steps <= 12 * COUNTED
    assert measure({"step": step}, rounds=1000, budget_s=0.0).popitem()[1].steps == LEAST_ROUNDS * COUNTED
    assert measure({"step": step}, rounds=2, budget_s=0.0).popitem()[1].steps == 2 * COUNTED
