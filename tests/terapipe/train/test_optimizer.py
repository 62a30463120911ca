"""AdamW against its formula written out here; schedule, clipping, fp32 masters, what is decayed."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from terapipe.train.config import OptimizerSettings
from terapipe.train.optimizer import Optimizer, clip_factor, learning_rate

SETTINGS = OptimizerSettings(
    learning_rate=0.01, min_learning_rate=0.001, warmup_steps=3, weight_decay=0.2, clip=1.0, beta1=0.8, beta2=0.9
)


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    shapes = {"blocks.0.up.weight": (5, 3), "blocks.0.norm.weight": (7,), "head.output.weight": (3, 4)}
    return {name: nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for name, shape in shapes.items()}


def gradients(step: int, like: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(value.shape, generator=random).double() for name, value in like.items()}


def norm(grads: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))


def test_updates_follow_the_formula_with_clipping_and_decay_of_matrices_only() -> None:
    own = parameters()
    optimizer = Optimizer(own, SETTINGS, steps=10)
    expected = {name: value.detach().clone() for name, value in own.items()}
    first = {name: torch.zeros_like(value) for name, value in expected.items()}
    second = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step in range(10):
        grads = gradients(step, own)
        for name, value in own.items():
            value.grad = grads[name].clone()
        rate = optimizer.step(norm(grads))
        assert rate == learning_rate(step, SETTINGS, steps=10)
        for name, grad in grads.items():
            clipped = grad * min(1.0, 1.0 / norm(grads))
            first[name] = 0.8 * first[name] + 0.2 * clipped
            second[name] = 0.9 * second[name] + 0.1 * clipped**2
            decay = 0.2 if grad.dim() >= 2 else 0.0
            direction = first[name] / (1 - 0.8 ** (step + 1)) / ((second[name] / (1 - 0.9 ** (step + 1))).sqrt() + 1e-8)
            expected[name] = expected[name] * (1 - rate * decay) - rate * direction
    for name, value in own.items():
        torch.testing.assert_close(value.detach(), expected[name], rtol=1e-12, atol=1e-12)


def test_the_rate_warms_up_then_falls_to_the_minimum_at_the_last_step() -> None:
    rates = [learning_rate(step, SETTINGS, steps=20) for step in range(20)]
    assert rates[:4] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.01])
    assert all(before > after for before, after in itertools.pairwise(rates[3:]))
    assert rates[-1] == pytest.approx(0.001)
    assert learning_rate(500, SETTINGS, steps=20) == pytest.approx(0.001)
    assert learning_rate(0, OptimizerSettings(warmup_steps=0), steps=1) == pytest.approx(3e-3)


@pytest.mark.parametrize(
    ("norm", "clip", "factor"), [(4.0, 1.0, 0.25), (0.5, 1.0, 1.0), (9.0, 0.0, 1.0), (0.0, 1.0, 1.0)]
)
def test_clipping_only_ever_shrinks(norm: float, clip: float, factor: float) -> None:
    assert clip_factor(norm, clip) == factor


def test_bf16_keeps_fp32_masters_so_that_small_updates_are_not_lost() -> None:
    wide, narrow = parameters(torch.float32), parameters(torch.bfloat16)
    with torch.no_grad():
        for name in wide:
            wide[name].copy_(narrow[name])
    tiny = OptimizerSettings(learning_rate=1e-4, min_learning_rate=1e-4, warmup_steps=0, weight_decay=0.0, clip=0.0)
    pair = [Optimizer(wide, tiny, steps=100), Optimizer(narrow, tiny, steps=100)]
    for _ in range(100):
        for own in (wide, narrow):
            for value in own.values():
                value.grad = torch.ones(value.shape)
        for optimizer in pair:
            optimizer.step(1.0)
    for name in wide:
        assert torch.equal(pair[1].masters[name], wide[name])
        assert torch.equal(narrow[name], wide[name].bfloat16())
        assert pair[1].masters[name].dtype == torch.float32


def test_bf16_gradients_add_up_in_fp32() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    Optimizer({"w": parameter}, SETTINGS, steps=1)
    for _ in range(512):
        (parameter * torch.tensor(1.0, dtype=torch.bfloat16)).sum().backward()
    assert parameter.grad is not None and parameter.grad.dtype == torch.float32
    assert parameter.grad.tolist() == [512.0] * 4  # bf16 sums stop at 256


def test_a_norm_that_is_not_finite_stops_before_anything_is_written() -> None:
    own = parameters()
    before = {name: value.detach().clone() for name, value in own.items()}
    optimizer = Optimizer(own, SETTINGS, steps=10)
    for value in own.values():
        value.grad = torch.full_like(value, math.nan)
    with pytest.raises(RuntimeError, match="gradient norm at step 0 is nan; weights are unchanged"):
        optimizer.step(math.nan)
    assert all(torch.equal(value, before[name]) for name, value in own.items())
    assert optimizer.step_count == 0


def test_a_parameter_with_two_names_is_updated_once_and_one_without_gradient_stays() -> None:
    shared, idle = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = Optimizer({"a": shared, "b": shared, "c": idle}, SETTINGS, steps=4)
    assert list(optimizer.masters) == ["a", "c"]
    shared.grad = torch.ones(2, 2)
    optimizer.step(2.0)
    assert torch.equal(idle, torch.ones(2, 2))
    assert not torch.equal(shared, torch.ones(2, 2))
    optimizer.zero_grad()
    assert shared.grad is None


def test_a_stage_without_parameters_steps_too() -> None:
    optimizer = Optimizer({}, SETTINGS, steps=4)
    optimizer.step(1.0)
    assert optimizer.step_count == 1 and optimizer.moments() == {}
