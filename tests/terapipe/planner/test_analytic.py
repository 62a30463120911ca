"""Costs from a description: what tensor degrees divide and add, and the FLOPs of a model."""

from __future__ import annotations

import math

import pytest
from planner_cases import costs_8b

from terapipe.models.presets import PRESETS
from terapipe.planner.analytic import matmul_weights, model_flops


def test_tensor_degrees_cut_weights_and_add_reductions():
    one, two = costs_8b(), costs_8b(tensor=2)
    assert two.layers["block"].parameters == math.ceil(one.layers["block"].parameters / 2)
    assert one.stage(1, 2).forward(1, 4096, 0) / 2 < two.stage(1, 2).forward(1, 4096, 0)
    assert two.stage(1, 2).forward(1, 4096, 0) < one.stage(1, 2).forward(1, 4096, 0)
    with pytest.raises(ValueError, match="tensor degree 3 does not divide the model's heads 32"):
        costs_8b(tensor=3)


def test_flops_of_a_model():
    model = PRESETS["gpt3_175b"]()
    assert matmul_weights(model, "block") == 12 * model.hidden**2
    flops = model_flops(model, tokens=2048, sequences=2)
    assert flops == pytest.approx(6 * 175e9 * 4096, rel=0.03)
