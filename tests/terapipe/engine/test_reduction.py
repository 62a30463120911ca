"""Reduction: the norm is one fp64 sum per parameter in global order, and a tied family gets one sum, in one order."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from terapipe.engine.census import Census
from terapipe.engine.reduction import copy_tied_values, squared_norms, sum_tied_gradients
from terapipe.engine.wiring import open_local_wiring

CENSUS = Census(("a", "b", "c", "d"), dict.fromkeys("abcd", 0), (("a", "c"), ("a", "d")))
WIRING = open_local_wiring({})


def _parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.randn(3).to(dtype)) for name in "abcd"}


def _set(parameters: dict[str, nn.Parameter], **gradients: Tensor) -> None:
    for name, gradient in gradients.items():
        parameters[name].grad = gradient


def test_squares_are_fp64_in_global_order_without_tied_copies() -> None:
    parameters = _parameters()
    _set(parameters, a=torch.full((3,), 1e-3), c=torch.ones(3), d=torch.ones(3))
    assert squared_norms(parameters, CENSUS) == [
        float((torch.full((3,), 1e-3).double() ** 2).sum().sqrt() ** 2),
        0,
        0,
        0,
    ]
    huge = torch.full((3,), 1e30)
    _set(parameters, b=huge)
    assert math.isclose(squared_norms(parameters, CENSUS)[1], 3 * float(huge[0].double()) ** 2, rel_tol=1e-12)
    assert squared_norms({"c": parameters["c"]}, CENSUS) == [0.0] * 4


def test_a_family_gets_one_sum_each_with_memory_of_its_own() -> None:
    parameters = _parameters()
    gradients = {name: torch.randn(3) for name in "acd"}
    _set(parameters, b=torch.ones(3), **{name: gradient.clone() for name, gradient in gradients.items()})
    sum_tied_gradients(parameters, CENSUS, WIRING)
    total = gradients["a"] + gradients["c"] + gradients["d"]
    for name in "acd":
        assert torch.equal(parameters[name].grad, total)
    assert len({parameters[name].grad.data_ptr() for name in "acd"}) == 3
    assert torch.equal(parameters["b"].grad, torch.ones(3))


def test_a_copy_that_no_slice_reached_counts_as_zero_and_a_frozen_family_stays_without() -> None:
    parameters = _parameters(torch.bfloat16)
    for parameter in parameters.values():
        parameter.grad_dtype = torch.float32
    _set(parameters, c=torch.ones(3))
    sum_tied_gradients(parameters, CENSUS, WIRING)
    assert all(torch.equal(parameters[name].grad, torch.ones(3)) for name in "acd")
    for parameter in parameters.values():
        parameter.requires_grad_(False).grad = None
    sum_tied_gradients(parameters, CENSUS, WIRING)
    assert all(parameter.grad is None for parameter in parameters.values())


def test_copies_start_from_the_originals_value() -> None:
    parameters = _parameters()
    original, other = parameters["a"].detach().clone(), parameters["b"].detach().clone()
    copy_tied_values(parameters, CENSUS, WIRING)
    assert all(torch.equal(parameters[name], original) for name in "acd")
    assert torch.equal(parameters["b"], other)
