"""Text for people: units, tables, what is said of costs, of a search and of a plan file."""

from __future__ import annotations

import dataclasses

import pytest
from planner_cases import costs_8b, planned, provider, request

from terapipe.planner.costs import FREE_LINK, LinkModel, Overheads
from terapipe.planner.report import columns, describe_costs, describe_found, describe_run, found_rows, seconds, size
from terapipe.planner.search import search


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 us"), (2.5e-8, "0.025 us"), (288e-6, "288 us"), (1e-3, "1 ms"), (0.0641, "64.1 ms"), (90.0, "90 s")],
)
def test_times_have_the_unit_that_reads_best(value, text):
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1e7, "9.54 MiB"), (2**40, "1.02e+03 GiB")]
)
def test_bytes_too(value, text):
    assert size(value) == text


def test_columns_are_aligned():
    assert columns([["a", "bb", ""], ["ccc", "d", "e"]]) == "a    bb\nccc   d  e"


def test_costs_are_told_with_links_and_overheads():
    overheads = Overheads(action_s=288e-6, step_s=1e-3, norm_s=1e-9, update_s=2e-9, asleep=((1e-3, 5.0), (1e-2, 9.0)))
    costs = dataclasses.replace(
        costs_8b(), overheads=overheads, links={"shm": LinkModel(2e-6, 2e10), "local": FREE_LINK}, notes={"rounds": 3}
    )
    lines = describe_costs(costs).splitlines()
    assert "overheads: 288 us per action, 1 ms per step, 3 ms per million parameters" in lines
    assert "link shm: latency 2 us, 20 GB/s" in lines and "link local: free" in lines
    assert lines[-1] == "rounds: 3" and any(line.startswith("block forward ") for line in lines)


def test_a_search_is_told_with_what_was_not_chosen_and_why():
    asked = request(ranks=4)
    found = search(asked, provider())
    text = describe_found(found, asked, planned(found, provider()(1)))
    assert text.startswith(f"plan: {found.best.candidate}\n")
    head = next(line for line in text.splitlines() if line.startswith("other plans "))
    assert head.split() == ["other", "plans", "step", "ratio", "why"]
    for words in ("\nwith slices: ", "\nanother schedule: ", " per rank, cap 22.4 GiB; MFU "):
        assert words in text
    second = found.ranked[1]
    line = next(line for line in text.splitlines() if line.startswith("runner-up: "))
    assert f"{second.candidate} " in line and f" {second.prediction.step_s / found.best.prediction.step_s:.3f} " in line
    assert " more for " in line or line.endswith("equally fast")
    rows = found_rows(found)
    assert len(rows) == len(found.ranked) and rows[0]["plan"] == str(found.ranked[0].candidate)


def test_a_plan_file_is_told_rank_by_rank():
    found = search(request(ranks=2, data=(1,)), provider())
    run = planned(found, provider()(1))
    lines = describe_run(run, run.simulation()).splitlines()
    assert lines[0] == run.label and lines[-3].split()[:2] == ["rank", "layers"]
    assert [line.split()[0] for line in lines[-2:]] == ["0", "1"]
