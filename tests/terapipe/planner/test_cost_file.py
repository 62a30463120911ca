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


def _table(**changes):
    return {"lengths": [1, 8], "starts": [0], "seconds": [[1e-3, 8e-3]], **changes}


def _only(fields, kind, size):
    layer = fields["layers"][kind]
    return layer | {name: {size: layer[name][size]} for name in ("forward", "input_grad", "weight_grad")}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.update(version=7), "version 7, this program reads version 1"),
        (lambda f: f.update(format="x"), 'lacks "format": "terapipe-costs"; make it with `terapipe profile`'),
        (lambda f: f.pop("links"), "'links' is missing in the cost file"),
        (lambda f: f.update(colour=1), "unknown key 'colour'; known: "),
        (lambda f: f["layers"].pop("head"), "lack the layer 'head'"),
        (lambda f: f["layers"]["block"].pop("forward"), "'forward' is missing in layers.block"),
        (lambda f: f["layers"]["block"]["forward"].pop("3"), "same micro sizes"),
        (lambda f: f["layers"]["block"]["forward"]["1"]["seconds"].__setitem__(2, None), "is None"),
        (lambda f: f["layers"]["block"]["forward"]["1"]["seconds"].__setitem__(2, -1.0), "is -1.0"),
        (lambda f: f["layers"]["block"]["forward"]["1"]["seconds"].pop(), "give the missing ones"),
        (lambda f: f["layers"]["block"]["forward"].__setitem__("none", {}), "a key of layers.block.forward is 'none'"),
        (lambda f: f["links"]["intra"].update(bytes_per_s=0), "bytes_per_s of a link"),
        (lambda f: f["overheads"].update(asleep=[[0.1]]), r"overheads.asleep\[0\] is \[0.1\]; it must be 2 values"),
        (lambda f: f["overheads"].update(asleep=[[0.1, 1e-3], [0.1, 2e-3]]), "must ascend"),
        (lambda f: f["overheads"].update(asleep=[[-0.1, 1e-3]]), "the sleep of overhead asleep is -0.1"),
        (lambda f: f["overheads"].update(asleep=[[0.1, -1e-3]]), "overhead asleep behind 0.1 s is -0.001"),
        (lambda f: f["overheads"].update(asleep=3), "overheads.asleep is 3; it must be a list"),
        (lambda f: f["model"].update(hidden=-1), "model: model config: hidden is -1"),
        (lambda f: f["model"].update(hidden="256"), "model.hidden is '256'; it must be a whole number"),
        (lambda f: f["model"].update(norm="none"), "model.norm is 'none'; it must be one of layernorm, rmsnorm"),
        (lambda f: f.update(model=[]), r"model is \[\]; it must be an object of JSON"),
        (lambda f: f.update(max_tokens=0), "max_tokens of the costs is 0; it must be at least 1"),
        (lambda f: f.update(max_tokens=2048.5), "max_tokens is 2048.5; it must be a whole number"),
        (lambda f: f.update(tensor=None), "tensor is None; it must be a whole number"),
        (
            lambda f: f.update(devices_per_node="8"),
            "devices_per_node is '8'; it must be a whole number below 1e18 or null",
        ),
        (lambda f: f.update(hardware={}), "hardware is {}; it must be a text"),
        (lambda f: f["links"].update(inter=None), "links.inter is None; it must be an object of JSON"),
        (lambda f: f["links"]["intra"].update(latency_s=True), "links.intra.latency_s is True; it must be a number"),
        (lambda f: f["layers"]["head"].update(parameters=10**400), "layers.head.parameters is 10"),
        (lambda f: f["layers"]["block"]["forward"]["1"]["seconds"].__setitem__(1, 1e300), r"seconds\[1\] is 1e\+300"),
        (
            lambda f: f["layers"]["block"]["forward"]["1"]["lengths"].__setitem__(0, "1"),
            r"1.lengths\[0\] is '1'; it must",
        ),
        (
            lambda f: f["layers"]["block"]["forward"]["1"].update(context=[0, 0]),
            r"context is \[0, 0\]; it must be 3 values",
        ),
        (lambda f: f["layers"]["block"]["forward"].update({"01": {}}), "a key of layers.block.forward is '01'"),
        (
            lambda f: f["layers"]["block"]["forward"].update({"1": {"starts": [0.5]}}),
            "'lengths' is missing in layers.bl",
        ),
        (lambda f: f["layers"]["block"]["forward"].update({"1": _table(starts=["0"])}), r"starts\[0\] is '0'; it must"),
        (lambda f: f["layers"]["block"]["forward"].update({"1": _table(starts=[-1])}), "must ascend from at least 0"),
        (
            lambda f: f["layers"].update(head=_only(f, "head", "1"), block=_only(f, "block", "3")),
            "no micro size in common",
        ),
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
    with pytest.raises(ValueError, match=r"links\.intra\.latency_s is nan; it must be a number below"):
        cost_file.load(path)
    with pytest.raises(ValueError, match="terapipe profile"):
        cost_file.load(tmp_path / "none.json")
