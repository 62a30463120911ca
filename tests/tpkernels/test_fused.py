"""The differentiable fused ops against plain torch: values, gradients, what only torch may do, and what is refused."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tpkernels import fused, fused_rows

EPS = 1e-5


def inputs(dtype: torch.dtype, count: int, columns: int = 24) -> list[Tensor]:
    return [torch.randn(2, 5, columns).to(dtype).requires_grad_() for _ in range(count)]


def everything(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Each public op once: (leaves, outputs)."""
    a, b, c = inputs(dtype, 3)
    weight, bias = (torch.randn(24).to(dtype).requires_grad_() for _ in range(2))
    angles = torch.randn(1, 5, 1, 4, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    turns = torch.polar(torch.ones_like(angles), angles)
    total, normed = fused.add_norm(a, b, weight, eps=EPS, rms=True)
    outs = [
        total,
        normed,
        fused.norm(c, weight, bias, eps=EPS, rms=False),
        fused.rotary(a.unflatten(-1, (3, 8)), turns),
        fused.swiglu(b, c),
        fused.gelu_tanh(a),
    ]
    return [a, b, c, weight, bias], outs


def gradients_of(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(3)
    leaves, outs = everything(dtype)
    loss = functools.reduce(
        torch.add, [(out.double() * torch.linspace(1, 2, out.numel()).view(out.shape)).sum() for out in outs]
    )
    loss.backward()
    return [*(out.detach() for out in outs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def test_public_ops_equal_plain_torch(monkeypatch):
    ours = gradients_of(torch.float32)
    monkeypatch.setattr(fused_rows, "_core", None)  # what an installation without the extension does
    plain = gradients_of(torch.float32)
    assert len(ours) == len(plain) == 11
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


NOTED = {
    "a sign": lambda x: torch._neg_view(-x),
    "zeros": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype) if not x.is_complex() else x,
    "a conjugation": lambda x: x.conj().resolve_conj().conj() if x.is_complex() else x,
    "strides": lambda x: torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0],
    "one value for all": lambda x: x.flatten()[:1].expand(x.shape) if x.dim() == 1 else x,
}
"""Tensors whose memory does not say all about them."""


@pytest.mark.parametrize("how", NOTED)
def test_what_memory_does_not_say_is_heeded(how):
    x, up, dout = (torch.randn(2, 5, 3, 8) for _ in range(3))
    weight, bias, turns = torch.randn(8), torch.randn(8), torch.randn(2, 5, 1, 4, dtype=torch.complex64)
    given = [NOTED[how](each) for each in (x, up, dout, weight, bias, turns)]

    def results(x, up, dout, weight, bias, turns):
        x, up, weight, bias = (each.detach().requires_grad_() for each in (x, up, weight, bias))
        outs = [fused.norm(x, weight, bias, eps=EPS, rms=False), fused.norm(x, weight, eps=EPS, rms=True)]
        outs += [*fused.add_norm(x, up, weight, bias, eps=EPS, rms=False), fused.rotary(x, turns)]
        outs += [fused.swiglu(x, up), fused.gelu_tanh(up)]
        return [*outs, *torch.autograd.grad(outs, [x, up, weight, bias], [dout] * len(outs))]

    expected = results(*(each.to(torch.complex128 if each.is_complex() else torch.float64) for each in given))
    for found, exact in zip(results(*given), expected, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-5)


def test_second_derivatives_are_refused():
    """Also a penalty on the gradient of a sum, which autograd took for a constant."""
    x, weight = torch.randn(2, 5, 3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    turns = torch.randn(2, 5, 1, 4, dtype=torch.complex64)
    outs = [fused.norm(x, weight, eps=EPS, rms=True), fused.add_norm(x, x, weight, weight, eps=EPS, rms=False)[1]]
    for out in (*outs, fused.rotary(x, turns), fused.swiglu(x, x), fused.gelu_tanh(x)):
        for gradient in (torch.ones_like(out), torch.ones_like(out, requires_grad=True)):
            with pytest.raises(NotImplementedError, match="create_graph=True"):
                torch.autograd.grad(out, x, gradient, create_graph=True, retain_graph=True)
        assert torch.autograd.grad(out, x, torch.ones_like(out))[0].isfinite().all()


def test_shapes_that_do_not_fit_are_torchs_to_broadcast_or_to_refuse():
    x, one = torch.randn(3, 8), torch.randn(1, 8)
    weight = torch.randn(8)
    for total, out in (
        fused.add_norm(x, one, weight, eps=EPS, rms=True),
        fused.add_norm(one, x, weight, eps=EPS, rms=True),
    ):
        torch.testing.assert_close(total, x + one)
        torch.testing.assert_close(out, torch.nn.functional.rms_norm(x + one, (8,), weight, EPS))
    torch.testing.assert_close(fused.swiglu(x, one), torch.nn.functional.silu(x) * one)
    for bad in (torch.ones(7), torch.ones(9), torch.ones(2, 4), torch.ones(8, device="meta")):
        with pytest.raises((RuntimeError, ValueError)):
            fused.norm(x, bad, eps=EPS, rms=True)
        with pytest.raises((RuntimeError, ValueError)):
            fused.norm(x, weight, bad, eps=EPS, rms=False)
    rows = torch.randn(2, 4, 3, 8)
    for shape in ((2, 1, 1, 4), (1, 4, 3, 4), (4, 1, 4), (1, 4, 1, 3)):
        with pytest.raises(ValueError, match="rotary: turns are"):
            fused.rotary(rows, torch.randn(shape, dtype=torch.complex64))
    assert fused.gelu_tanh(torch.tensor(1.0)).shape == () and fused.gelu_tanh(torch.empty(0)).shape == (0,)
    assert fused.norm(torch.empty(2, 0), torch.empty(0), eps=EPS, rms=True).shape == (2, 0)


def test_fp64_is_plain_torch():
    leaves, outs = everything(torch.float64)
    assert not any("_Norm" in str(out.grad_fn) or "_Gated" in str(out.grad_fn) for out in outs)
    assert torch.autograd.gradcheck(lambda x, w: fused.norm(x, w, eps=EPS, rms=True), (leaves[0], leaves[3]))


def test_norm_whose_total_alone_is_used():
    a, b = inputs(torch.float32, 2)
    total, _ = fused.add_norm(a, b, torch.ones(24), eps=EPS, rms=True)
    total.sum().backward()
    assert torch.equal(a.grad, torch.ones_like(a)) and torch.equal(b.grad, torch.ones_like(b))


def test_where_something_looks_on_it_is_plain_torch():
    def step(x, y, w):
        return fused.swiglu(fused.norm(x, w, eps=EPS, rms=True), y) + fused.gelu_tanh(x)

    x, y = inputs(torch.float32, 2)
    w = torch.randn(24)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="eager")(x, y, w)
    torch.testing.assert_close(compiled, step(x, y, w))
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "_Gated" not in str(fused.swiglu(x, y).grad_fn)
    with FlopCounterMode(display=False):
        assert "_Gated" not in str(fused.swiglu(x, y).grad_fn)
    found = torch.func.grad(lambda x: step(x, y.detach(), w).sum())(x.detach())
    torch.testing.assert_close(found, torch.autograd.grad(step(x, y, w).sum(), x)[0])


def test_turns_of_any_number_of_tokens_compile():
    torch._dynamo.reset()
    compiled = torch.compile(fused.rotary, fullgraph=True, backend="eager", dynamic=True)
    for batch, tokens in ((2, 5), (1, 7), (3, 6)):
        x, turns = torch.randn(batch, tokens, 3, 8), torch.randn(batch, tokens, 1, 4, dtype=torch.complex64)
        torch.testing.assert_close(compiled(x, turns), fused.rotary(x, turns))
