"""Curves, tables, stages as sums of layers, and what is refused. The file form too."""

from __future__ import annotations

import dataclasses
import json
import math
import time

import numpy as np
import pytest

from terapipe.models.presets import PRESETS
from terapipe.planner import cost_file
from terapipe.planner.analytic import analytic_costs, matmul_weights, model_flops
from terapipe.planner.costs import Overheads, parameter_bytes
from terapipe.planner.fit import Context, Point
from terapipe.planner.hardware import HARDWARE, Value, hardware
from terapipe.planner.pass_costs import CurveCost, GridCost
from terapipe.planner.slicing import SliceCosts, cost_table


def costs(tensor: int = 1, sizes=(1, 3)):
    return analytic_costs(
        PRESETS["llama3_8b"](), HARDWARE["a100-80gb"], max_tokens=8192, micro_sizes=sizes, tensor=tensor
    )


def test_a_curve_is_exact_for_causal_attention_between_its_points():
    def true(length, start):
        return 2e-3 + 3e-6 * length + 4e-9 * length * (start + length / 2) + (1e-4 + 2e-8 * start if start else 0)

    points = [Point(n, s, true(n, s)) for n in (16, 100, 700, 2048) for s in (0, 37, 5000)]
    curve = CurveCost.fit(points)
    for length in (16, 17, 99, 555, 1999, 3000):
        for start in (0, 1, 4321):
            assert curve(length, start) == pytest.approx(true(length, start), rel=1e-6)
    assert curve(3, 0) == curve(16, 0)  # below the first length nothing is cheaper
    assert curve.error(points).largest < 1e-9


def test_a_table_is_bilinear():
    table = GridCost((10, 20, 40), (0, 100), ((1.0, 2.0, 4.0), (2.0, 3.0, 6.0)))
    assert table(10, 0) == 1.0 and table(40, 100) == 6.0
    assert table(30, 50) == pytest.approx((3.0 + 4.5) / 2)
    assert table(80, 200) == pytest.approx(16.0)  # linear beyond both ends
    assert GridCost((10,), (0,), ((1.5,),))(99, 99) == 1.5


@pytest.mark.parametrize(
    "cost",
    [
        GridCost((10, 20, 47), (0, 100), ((1.1, 2.3, 4.7), (2.9, 3.1, 6.3))),
        GridCost((10, 20), (7,), ((1.1, 0.3),)),
        GridCost((10,), (0, 3, 9), ((1.1,), (0.7,), (0.1,))),
        CurveCost((8, 100, 333), (1.1, 2.3, 9.7), Context(0.3, 1e-3, 1e-5)),
    ],
)
def test_many_at_once_are_the_same_to_the_bit(cost):
    lengths, starts = np.array([1, 9, 10, 11, 47, 333, 999]), np.array([0, 1, 7, 55, 100, 1234])
    assert cost.many(lengths, starts).tolist() == [[cost(int(n), int(s)) for n in lengths] for s in starts]


def test_a_table_of_many_units_is_laid_out_in_a_moment():
    model, grid = costs(sizes=(1,)), GridCost((8, 4096), (0, 4096), ((1e-3, 2e-2), (2e-3, 3e-2)))
    block = dataclasses.replace(model.layers["block"], forward={1: grid}, weight_grad={1: grid})
    stage = dataclasses.replace(model, layers={**model.layers, "block": block}).stage(1, 9)
    began = time.process_time()
    table = cost_table(stage.slice_costs(1, unit=8, units=512))
    assert time.process_time() - began < 0.5  # 0.03 s; a pair at a time took 1.5 s
    tokens = (1, 8 * 77, 8 * 123)
    assert table.cost(77, 123) == pytest.approx(stage.forward(*tokens) + stage.backward(*tokens))


@pytest.mark.parametrize("bad", [math.nan, -1e-9, math.inf, None, True])
def test_what_is_no_time_is_refused(bad):
    for make in (
        lambda: CurveCost((8, 16), (1.0, bad)),
        lambda: GridCost((8,), (0, 8), ((1.0,), (bad,))),
        lambda: CurveCost((8,), (1.0,), Context(0.0, bad, 0.0)),
    ):
        with pytest.raises(ValueError, match=rf"is {bad}; it must be a finite number"):
            make()


def test_missing_entries_are_refused():
    with pytest.raises(ValueError, match="2 lengths and 1 seconds"):
        CurveCost((8, 16), (1.0,))
    with pytest.raises(ValueError, match="row of start 8 in a cost table has 0 times for 1 lengths"):
        GridCost((8,), (0, 8), ((1.0,), ()))
    with pytest.raises(ValueError, match="row for each of 2 starts, got 1"):
        GridCost((8,), (0, 8), ((1.0,),))
    with pytest.raises(ValueError, match="must ascend"):
        CurveCost((8, 8), (1.0, 1.0))
    with pytest.raises(ValueError, match="points at start 0"):
        CurveCost.fit([Point(8, 8, 1.0)])
    with pytest.raises(ValueError, match="no micro size 2, only"):
        costs().stage(0, 3).forward(2, 64, 0)


def test_a_stage_is_the_sum_of_its_layers():
    model = costs()
    stage = model.stage(0, 5)
    layers = [model.layer(index) for index in range(5)]
    for micro, length, start in ((1, 77, 0), (3, 512, 1000)):
        expected = sum(layer.forward[micro](length, start) for layer in layers)
        assert stage.forward(micro, length, start) == pytest.approx(expected)
    assert stage.parameters == sum(layer.parameters for layer in layers)
    whole = model.stage(0, model.num_layers)
    assert whole.parameters == model.model.parameters()  # untied
    assert whole.backward(1, 64, 9) == pytest.approx(whole.input_grad(1, 64, 9) + whole.weight_grad(1, 64, 9))
    with pytest.raises(ValueError, match=r"no stage \[3, 99\)"):
        model.stage(3, 99)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_search_gets_what_the_stage_costs(recompute):
    stage, unit, units = costs().stage(30, 34), 64, 16
    found = stage.slice_costs(
        3, unit=unit, units=units, added=[0.5 * n for n in range(1, units + 1)], recompute=recompute
    )
    assert isinstance(found, SliceCosts)
    table = cost_table(found)
    for length, start in ((1, 0), (3, 5), (16, 0)):
        tokens, before = length * unit, start * unit
        expected = stage.forward(3, tokens, before) * (1 + recompute) + stage.backward(3, tokens, before)
        assert table.cost(length, start) == pytest.approx(expected + 0.5 * length)


def test_tables_reach_the_search_too():
    model = costs(sizes=(1,))
    grid = GridCost((64, 128), (0, 64), ((1.0, 2.0), (3.0, 5.0)))
    head = dataclasses.replace(model.layers["head"], weight_grad={1: grid})
    model = dataclasses.replace(model, source="table", layers={**model.layers, "head": head})
    stage = model.stage(33, 34)
    table = cost_table(stage.slice_costs(1, unit=64, units=2))
    for length, start in ((1, 0), (2, 0), (1, 1)):
        tokens = (1, length * 64, start * 64)
        assert table.cost(length, start) == pytest.approx(stage.forward(*tokens) + stage.backward(*tokens))
    assert cost_file.from_json(cost_file.to_json(model)) == model


def test_memory():
    stage = costs().stage(1, 3)
    assert stage.cache_bytes(2, 100) == 2 * 2 * 100 * 2 * 8 * 128 * 2
    assert stage.saved_bytes(2, 100, recompute=True) == 2 * 100 * 4096 * 2
    assert parameter_bytes("fp32") == 16 and parameter_bytes("bf16") == 18 and parameter_bytes("bf16", 4) == 9
    assert stage.fixed_bytes(2, 100) == stage.parameters * 18 + 2 * 100 * 2 * 2 * 8 * 128 * 4


def test_tensor_degrees_cut_weights_and_add_reductions():
    one, two = costs(), costs(tensor=2)
    assert two.layers["block"].parameters == math.ceil(one.layers["block"].parameters / 2)
    assert one.stage(1, 2).forward(1, 4096, 0) / 2 < two.stage(1, 2).forward(1, 4096, 0)
    assert two.stage(1, 2).forward(1, 4096, 0) < one.stage(1, 2).forward(1, 4096, 0)
    with pytest.raises(ValueError, match="tensor degree 3 does not divide the model's heads 32"):
        costs(tensor=3)


def test_flops_of_a_model():
    model = PRESETS["gpt3_175b"]()
    assert matmul_weights(model, "block") == 12 * model.hidden**2
    flops = model_flops(model, tokens=2048, sequences=2)
    assert flops == pytest.approx(6 * 175e9 * 4096, rel=0.03)


def test_a_file_gives_the_same_costs_and_text(tmp_path):
    model = dataclasses.replace(costs(), overheads=Overheads(action_s=1e-4, asleep=((1e-3, 2e-4), (1e-2, 1e-3))))
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
    fields = json.loads(cost_file.to_json(costs()))
    change(fields)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=words) as caught:
        cost_file.load(path)
    assert str(path) in str(caught.value)


def test_nan_in_a_file_is_refused(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(cost_file.to_json(costs()).replace('"latency_s": 1e-05', '"latency_s": NaN'))
    with pytest.raises(ValueError, match="latency_s of a link is nan"):
        cost_file.load(path)
    with pytest.raises(ValueError, match="terapipe profile"):
        cost_file.load(tmp_path / "none.json")


def test_every_value_of_every_hardware_has_a_source():
    for item in HARDWARE.values():
        values = [value for value in vars(item).values() if isinstance(value, Value)]
        assert len(values) == 14 and all(len(value.source) > 5 and float(value) > 0 for value in values)
        assert item.name in str(item)
    with pytest.raises(ValueError, match="did you mean 'h100-sxm'"):
        hardware("h100")
