"""Cost files: the same costs come back, and what makes no sense is refused by place and value."""

from __future__ import annotations

import dataclasses
import json

import pytest
from planner_cases import costs_8b

from terapipe.planner import cost_file
from terapipe.planner.costs import Overheads


def test_a_file_gives_the_same_costs_and_text(tmp_path):
    model = dataclasses.replace(costs_8b(), overheads=Overheads(action_s=1e-4, asleep=((1e-3, 2e-4), (1e-2, 1e-3))))
    path = tmp_path / "costs.json"
    path.write_text(cost_file.to_json(model))
    again = cost_file.load(path)
    assert again == model and str(again) == str(model)
    assert "block forward" in str(model) and "link inter" in str(model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.update(version=7), "version 7, this program reads version 1"),
        (lambda f: f.update(format="x"), "holds no costs"),
        (lambda f: f.pop("links"), "lack 'links'"),
        (lambda f: f.update(colour=1), "unknown key 'colour'"),
        (lambda f: f["layers"].pop("head"), "lack the layer 'head'"),
        (lambda f: f["layers"]["block"].pop("forward"), "lack 'forward'"),
        (lambda f: f["layers"]["block"]["forward"].pop("3"), "same micro sizes"),
        (lambda f: f["layers"]["block"]["forward"]["1"]["seconds"].__setitem__(2, None), "is None"),
        (lambda f: f["layers"]["block"]["forward"]["1"]["seconds"].__setitem__(2, -1.0), "is -1.0"),
        (lambda f: f["layers"]["block"]["forward"]["1"]["seconds"].pop(), "give the missing ones"),
        (lambda f: f["layers"]["block"]["forward"].__setitem__("none", {}), "micro size"),
        (lambda f: f["links"]["intra"].update(bytes_per_s=0), "bytes_per_s of a link"),
        (lambda f: f["overheads"].update(asleep=[[0.1]]), "pairs of seconds slept"),
        (lambda f: f["overheads"].update(asleep=[[0.1, 1e-3], [0.1, 2e-3]]), "must ascend"),
        (lambda f: f["model"].update(hidden=-1), "hidden"),
        (lambda f: f.update(source="guess"), "measured, analytic, table"),
    ],
)
def test_files_that_make_no_sense_are_refused(tmp_path, change, words):
    fields = json.loads(cost_file.to_json(costs_8b()))
    change(fields)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=words) as caught:
        cost_file.load(path)
    assert str(path) in str(caught.value)


def test_nan_in_a_file_is_refused(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(cost_file.to_json(costs_8b()).replace('"latency_s": 1e-05', '"latency_s": NaN'))
    with pytest.raises(ValueError, match="latency_s of a link is nan"):
        cost_file.load(path)
    with pytest.raises(ValueError, match="terapipe profile"):
        cost_file.load(tmp_path / "none.json")
