"""Start: what is refused before any step.  In whole pipelines: test_pipeline.py; among processes: test_failure.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from terapipe.engine.failure import Failure, PipelineError
from terapipe.engine.opening import Process
from terapipe.engine.start import Start, check_layers, check_links, check_starts, runs_every_rank
from terapipe.schedule import make_plan

PLAN = make_plan(layers=3, ranks=2, slices=2, tokens=8)
ALIKE = Start([], {"plan": "one plan", "dtype": "torch.float32"}, None, Process("one", 1))


@pytest.mark.parametrize(
    ("links", "processes", "local"), [("auto", 1, True), ("auto", 2, False), ("local", 2, True), ("dist", 2, False)]
)
def test_links_follow_the_number_of_processes(links: str, processes: int, local: bool) -> None:
    assert runs_every_rank(links, processes) is local
    check_links(links, PLAN, processes)


@pytest.mark.parametrize(("links", "processes"), [("auto", 3), ("dist", 1), ("dist", 4)])
def test_another_number_of_processes_than_ranks_is_refused_with_both_remedies(links: str, processes: int) -> None:
    with pytest.raises(ValueError, match=rf"plan has 2 ranks but .*; start 2 .* or make a plan for {processes}\."):
        check_links(links, PLAN, processes)


def test_a_launched_process_that_joined_no_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"process 1 of a launch of 2.*call terapipe\.engine\.launch\.initialize\(\)"):
        check_links("auto", PLAN, 1)
    check_links("local", PLAN, 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_links("auto", PLAN, 1)


def test_layers_must_be_as_many_as_planned_callable_and_apart() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    check_layers({"a": a, "b": b, "c": lambda: a}, PLAN)  # a factory's parameters are known once it was called
    with pytest.raises(ValueError, match=r"2 layers were given but the plan's stages cover 3: \[\(0, 2\), \(2, 3\)\]"):
        check_layers({"a": a, "b": b}, PLAN)
    with pytest.raises(ValueError, match="layer 'b' is a str"):
        check_layers({"a": a, "b": "b", "c": b}, PLAN)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"a\.weight and c\.weight are one tensor"):
        check_layers({"a": a, "b": b, "c": a}, PLAN)


def test_ranks_that_started_alike_pass_and_the_first_trouble_is_everybodys() -> None:
    check_starts([ALIKE, ALIKE], here=1)
    match = r"rank 1 was given another dtype than rank 0; .*\nrank 0: torch\.float32\nrank 1: bf16"
    with pytest.raises(ValueError, match=match):
        check_starts([ALIKE, replace(ALIKE, given={**ALIKE.given, "dtype": "bf16"})], here=0)
    failed = replace(ALIKE, failure=Failure(1, "building its layers", "OSError: no file"))
    with pytest.raises(PipelineError, match="rank 0 stopped because rank 1 failed in building its layers: OSError: no"):
        check_starts([ALIKE, failed], here=0)
