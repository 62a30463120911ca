"""Times without a GPU: a clock that is made up."""

from __future__ import annotations

from benchmarks.gpu_report import timing


def test_times_are_the_median_and_the_spread_of_the_samples():
    calls: list[str] = []
    clock = iter([100.0, 3.0, 1.0, 2.0, 5.0, 4.0])  # the guess, then as few repeats as there may be
    times = timing.measure(lambda: calls.append("job"), "cpu", sample=lambda job: (next(clock), 0.5))
    assert times == (3.0, 2.0, 4.0, 0.5, 5) and calls == ["job", "job"]
