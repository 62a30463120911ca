"""The linear layer for slices against nn.Linear: values, gradients, and where it adds in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from terapipe.layer import own_gradients, owned_gradient
from terapipe.models.linear import Linear, Table


def pair(*, bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Linear, nn.Linear]:
    torch.manual_seed(0)
    ours, plain = (kind(5, 7, bias=bias, dtype=dtype) for kind in (Linear, nn.Linear))
    plain.load_state_dict(ours.state_dict())
    own_gradients(ours.parameters())
    return ours, plain


def slices(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, tokens, 5, dtype=dtype, requires_grad=True) for tokens in (3, 1, 4)]


@pytest.mark.parametrize("bias", [False, True])
def test_three_slices_give_the_gradients_of_a_plain_linear(bias: bool) -> None:
    ours, plain = pair(bias=bias)
    inputs = slices()
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    for x, y in zip(inputs, copies, strict=True):
        ours(x).sin().sum().backward()
        plain(y).sin().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-13, atol=1e-13)
    for own, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-13, atol=1e-13)


def test_later_slices_add_to_the_same_memory() -> None:
    ours, _ = pair(bias=False)
    first, *others = slices()
    ours(first).sum().backward()
    assert ours.weight.grad is not None
    memory, before = ours.weight.grad.data_ptr(), ours.weight.grad.clone()
    for x in others:
        ours(x).sum().backward()
    assert ours.weight.grad.data_ptr() == memory
    assert not torch.equal(ours.weight.grad, before)


def test_16_bit_weights_keep_their_fp32_gradient() -> None:
    ours, plain = pair(bias=True, dtype=torch.bfloat16)
    for parameter in (*ours.parameters(), *plain.parameters()):
        parameter.grad_dtype = torch.float32
    for x in slices(torch.bfloat16):
        ours(x).sum().backward()
        plain(x.detach()).sum().backward()
    for own, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None and own.grad.dtype == torch.float32
        assert torch.equal(own.grad, other.grad)


def test_frozen_weights_and_inputs_without_gradient() -> None:
    ours, _ = pair(bias=True)
    x = slices()[0]
    ours.weight.requires_grad_(False)
    ours(x).sum().backward()
    assert ours.weight.grad is None and x.grad is not None
    ours.weight.requires_grad_(True)
    ours(x.detach()).sum().backward()
    assert ours.weight.grad is not None


def test_a_gradient_whose_memory_was_exchanged_for_less_is_not_written_past() -> None:
    """What lay behind it was torch's own state of the backward, which then never ended."""
    ours, _ = pair(bias=False)
    ours.weight.grad = torch.zeros_like(ours.weight)
    ours.weight.grad.data = torch.zeros(2, 2, dtype=torch.float64)
    assert owned_gradient(ours.weight) is None
    with pytest.raises(RuntimeError, match=r"size of tensor a \(2\) must match"):
        ours(slices()[0]).sum().backward()
    assert not ours.weight.grad.any()


def test_without_the_mark_it_is_a_plain_linear() -> None:
    ours = Linear(5, 7)
    x = torch.randn(2, 3, 5)
    ours(x).sum().backward()
    assert ours.weight.grad is not None
    kept = ours.weight.grad.clone()
    (alone,) = torch.autograd.grad(ours(x).sum(), ours.weight)
    assert torch.equal(ours.weight.grad, kept) and torch.equal(alone, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("gradient_dtype", ["default", None, torch.float32], ids=["the weight's", "any", "fp32"])
def test_a_tables_gradient_is_rounded_once(dtype: torch.dtype, gradient_dtype: torch.dtype | str | None) -> None:
    torch.manual_seed(2)
    table = Table(7, 5, dtype=dtype, device="cpu")
    if not isinstance(gradient_dtype, str) and dtype != torch.float64:
        table.weight.grad_dtype = gradient_dtype
    ids = (torch.rand(3, 400) ** 4 * 7).long()
    gradient = torch.randn(3, 400, 5).abs().to(dtype)
    found = table(ids)
    assert torch.equal(found, table.weight[ids])
    found.backward(gradient)
    exact = torch.zeros(7, 5, dtype=torch.float64).index_add_(0, ids.flatten(), gradient.flatten(0, 1).double())
    assert table.weight.grad is not None and table.weight.grad.dtype == (table.weight.grad_dtype or dtype)
    rounding = torch.finfo(table.weight.grad.dtype).eps / 2
    torch.testing.assert_close(table.weight.grad.double(), exact, rtol=1.01 * rounding + 1e-5, atol=0)


def test_a_table_runs_compiled_and_under_functorch() -> None:
    table = Table(7, 5, dtype=torch.bfloat16, device="cpu")
    ids = torch.tensor([[0, 6, 6]])
    compiled = torch.compile(table, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(ids), table(ids))
    weight = table.weight.detach()
    taken = torch.func.grad(lambda w: torch.func.functional_call(table, {"weight": w}, (ids,)).sum())(weight)
    assert taken.sum(1).tolist() == [5, 0, 0, 0, 0, 0, 10]
