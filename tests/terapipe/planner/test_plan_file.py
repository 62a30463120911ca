"""Plan files: what comes back, what is refused, what the engine cannot run."""

from __future__ import annotations

import dataclasses
import json
from typing import get_args, get_type_hints

import pytest
from planner_cases import MODEL, planned, provider, request

from terapipe.planner.plan_file import (
    ENGINE_DTYPES,
    load,
    refuse_other_model,
    refuse_what_the_engine_lacks,
    what_the_engine_lacks,
)
from terapipe.planner.prediction import Layout
from terapipe.planner.search import search
from terapipe.train.config import TrainConfig


@pytest.fixture(scope="module")
def run():
    return planned(search(request(ranks=2, data=(1,)), provider()), provider()(1))


def test_a_plan_file_brings_everything_back(run, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(run.to_json())
    again = load(path)
    assert again == run
    assert again.simulation().makespan == pytest.approx(run.makespan_s)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.update(version=2), "version 2, this program reads version 1; make it again with `terapipe plan`"),
        (lambda f: f.update(format="terapipe-plan"), 'lacks "format": "terapipe-planned-run"'),
        (lambda f: f.pop("times"), "'times' is missing in the plan file"),
        (lambda f: f.update(links=3), "links is 3; it must be a list"),
        (lambda f: f.update(step_s=None), "step_s is None; it must be a number"),
        (lambda f: f.update(makespan_s="3"), "makespan_s is '3'; it must be a number"),
        (lambda f: f.update(bubble_share=float("nan")), "bubble_share is nan; it must be a number"),
        (lambda f: f.update(step_s=-1), "step_s is -1; it must be a finite number from 0 up"),
        (lambda f: f["plan"].update(micros=99), "99 micros"),
        (lambda f: f["plan"]["stages"][0].__setitem__(0, float("inf")), "a field of the plan file has the wrong type"),
        (lambda f: f["memory_bytes"].pop(), "memory_bytes has 1 entries for 2 ranks"),
        (lambda f: f["layout"].update(data=0), "layout: data of a layout is 0; it must be at least 1"),
        (lambda f: f.update(memory_bytes=None), "memory_bytes is None; it must be a list"),
        (lambda f: f["layout"].update(recompute="no"), "layout.recompute is 'no'; it must be true or false"),
        (
            lambda f: f["layout"].update(pipe=2),
            "unknown key 'layout.pipe'; known: layout.data, layout.link, layout.recompute, layout.tensor",
        ),
        (lambda f: f["model"].pop("hidden"), "'hidden' is missing in model; add it"),
        (lambda f: f["times"].pop("B"), r"times.B is of 0 stages with \[\] slices, the plan of 2 with \d+; make"),
        (
            lambda f: f["times"]["F"][1].pop(),
            r"times.F is of 2 stages with \[\d+, \d+\] slices, the plan of 2 with \d+",
        ),
        (lambda f: f["times"]["F"][0].__setitem__(0, -1), "an entry of times.F is -1"),
        (lambda f: f["first"]["B"].pop(), "first.B has 1 entries for 2 stages"),
        (lambda f: f["links"].pop(), "links lacks 1->0B with the bytes of each of"),
        (lambda f: f["links"][0][5].pop(), "links lacks 0->1F with the bytes of each of"),
        (lambda f: f["links"][0].__setitem__(4, 0), "bytes_per_s of a link must be finite and at least 1, got 0"),
    ],
)
def test_plan_files_that_make_no_sense_are_refused(run, tmp_path, change, words):
    fields = json.loads(run.to_json())
    change(fields)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=words) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_another_model_and_what_the_engine_lacks_are_named(run):
    refuse_other_model(run, MODEL)
    with pytest.raises(ValueError, match=r"another model: it has hidden 512 \(here 256\), head_dim 64 \(here 32\)"):
        refuse_other_model(run, dataclasses.replace(MODEL, hidden=256, head_dim=32))
    plain = dataclasses.replace(run, layout=Layout())
    for layout, words in ((Layout(tensor=2), "tensor = 2"), (Layout(data=3), "data = 3")):
        with pytest.raises(ValueError, match=words):
            refuse_what_the_engine_lacks(dataclasses.replace(plain, layout=layout))
    split = search(request(ranks=2, schedules=("seq_zero_bubble",), data=(1,)), provider())
    with pytest.raises(ValueError, match="split backwards"):
        refuse_what_the_engine_lacks(planned(split, provider()(1)))
    whole = search(request(ranks=2, schedules=("seq_1f1b",), data=(1,)), provider())
    fine = planned(whole, provider()(1))
    assert fine.dtype == "bf16" and what_the_engine_lacks(fine) == []
    assert what_the_engine_lacks(dataclasses.replace(fine, dtype="fp16", layout=Layout(tensor=2))) == [
        "training in fp16 (plan with --dtype fp32 or bf16)",
        "tensor-parallel stages (tensor = 2)",
    ]


def test_the_dtypes_of_the_engine_are_those_of_train():
    assert get_args(get_type_hints(TrainConfig)["dtype"]) == ENGINE_DTYPES
