"""Stages as sums of layers, their tables for the search, and memory."""

from __future__ import annotations

import dataclasses
import time

import pytest
from planner_cases import costs_8b

from terapipe.planner import cost_file
from terapipe.planner.costs import parameter_bytes
from terapipe.planner.pass_costs import GridCost
from terapipe.planner.slicing import SliceCosts, cost_table


def test_a_table_of_many_units_is_laid_out_in_a_moment():
    model, grid = costs_8b(sizes=(1,)), GridCost((8, 4096), (0, 4096), ((1e-3, 2e-2), (2e-3, 3e-2)))
    block = dataclasses.replace(model.layers["block"], forward={1: grid}, weight_grad={1: grid})
    stage = dataclasses.replace(model, layers={**model.layers, "block": block}).stage(1, 9)
    began = time.process_time()
    table = cost_table(stage.slice_costs(1, unit=8, units=512))
    assert time.process_time() - began < 0.5  # 0.03 s; a pair at a time took 1.5 s
    tokens = (1, 8 * 77, 8 * 123)
    assert table.cost(77, 123) == pytest.approx(stage.forward(*tokens) + stage.backward(*tokens))


def test_a_stage_is_the_sum_of_its_layers():
    model = costs_8b()
    stage = model.stage(0, 5)
    layers = [model.layers["embedding"]] + 4 * [model.layers["block"]]
    for micro, length, start in ((1, 77, 0), (3, 512, 1000)):
        expected = sum(layer.forward[micro](length, start) for layer in layers)
        assert stage.forward(micro, length, start) == pytest.approx(expected)
        last = sum(model.layers[kind].weight_grad[micro](length, start) for kind in ("block", "head"))
        assert model.stage(32, 34).weight_grad(micro, length, start) == pytest.approx(last)
    assert stage.parameters == sum(layer.parameters for layer in layers)
    whole = model.stage(0, model.num_layers)
    assert whole.parameters == model.model.parameters()  # untied
    assert whole.backward(1, 64, 9) == pytest.approx(whole.input_grad(1, 64, 9) + whole.weight_grad(1, 64, 9))
    with pytest.raises(ValueError, match=r"no stage \[3, 99\)"):
        model.stage(3, 99)
    with pytest.raises(ValueError, match="no micro size 2, only"):
        stage.forward(2, 64, 0)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_search_gets_what_the_stage_costs(recompute):
    stage, unit, units = costs_8b().stage(30, 34), 64, 16
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
    model = costs_8b(sizes=(1,))
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
    stage, kept = costs_8b().stage(1, 3), costs_8b().layers["block"].saved_bytes_per_token
    assert stage.saved_bytes(2, 100) == 2 * 100 * 2 * kept
    assert stage.cache_bytes(2, 100) == 2 * 2 * 100 * 2 * 8 * 128 * 2
    assert stage.saved_bytes(2, 100, recompute=True) == 2 * 100 * 4096 * 2
    assert parameter_bytes("fp32") == 16 and parameter_bytes("bf16") == 18 and parameter_bytes("bf16", 4) == 9
    assert stage.fixed_bytes(2, 100) == stage.parameters * 18 + 2 * 100 * 2 * 2 * 8 * 128 * 4
