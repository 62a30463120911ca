"""What the engine and a layer tell each other: which gradients may be added to, and that the engine needs no models."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from terapipe.layer import disown_gradients, own_gradients, owned_gradient, residual_sum


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_an_owned_gradient_is_there_wide_enough_and_plain(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mine, other = (nn.Parameter(torch.randn(3, 4, dtype=dtype)) for _ in range(2))
    own_gradients([mine])
    assert owned_gradient(None) is None and owned_gradient(mine) is None
    if dtype == torch.bfloat16:
        assert mine.grad_dtype == torch.float32 and other.grad_dtype == dtype
    mine.grad = torch.zeros(3, 4, dtype=wide)
    assert owned_gradient(mine) is mine.grad
    other.grad_dtype = wide
    other.grad = torch.zeros(3, 4, dtype=wide)
    assert owned_gradient(other) is None
    for unfit in (torch.zeros(4, 3, dtype=wide).t(), torch.zeros(3, 4, dtype=wide)._neg_view()):
        mine.grad = unfit
        assert owned_gradient(mine) is None
    if dtype != torch.float64:
        mine.grad_dtype = mine.grad = None
        mine.grad = torch.zeros(3, 4, dtype=torch.float64)
        assert owned_gradient(mine) is None


def test_an_owner_that_leaves_takes_only_its_own_claim() -> None:
    parameter = nn.Parameter(torch.randn(3))
    parameter.grad = torch.zeros(3)
    own_gradients([parameter])
    own_gradients([parameter])
    disown_gradients([parameter])
    assert owned_gradient(parameter) is parameter.grad
    disown_gradients([parameter])
    assert owned_gradient(parameter) is None
    disown_gradients([parameter])
    own_gradients([parameter])
    assert owned_gradient(parameter) is parameter.grad


def test_a_sum_goes_where_it_is_wanted_and_its_gradient_to_both_summands() -> None:
    x, residual = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(2))
    memory, given, weight = torch.zeros(2, 3, 4), [], torch.randn(2, 3, 4)

    def out(*summands: Tensor) -> Tensor:
        given.append(torch.is_grad_enabled())
        return torch.add(*summands, out=memory)

    total = residual_sum(2 * x, residual, out)
    (total * weight).sum().backward()
    assert total.data_ptr() == memory.data_ptr() and torch.equal(total, 2 * x + residual) and total.requires_grad
    assert torch.equal(x.grad, 2 * weight) and torch.equal(residual.grad, weight)  # type: ignore[arg-type]
    for other in (torch.randn(4), torch.randn(2, 3, 4).double()):  # broadcast, or of another dtype: gradients differ
        assert torch.equal(residual_sum(x, other, out), x + other)
    assert given == [False]


def test_the_engine_runs_layers_without_knowing_any() -> None:
    code = "import sys; sys.modules['terapipe.models'] = None; import terapipe.engine"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
