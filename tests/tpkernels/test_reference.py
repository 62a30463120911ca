"""The oracle against torch's own softmax, attention and autograd, in fp64; every other backend is tested against it."""

from __future__ import annotations

import math

import pytest
import torch

from tpkernels import backends, prefix_attention, testing
from tpkernels.mask import RawMask
from tpkernels.reference import attention_forward, dense_mask
from tpkernels.testing import AttentionCase

CASES = [
    AttentionCase(7, 4, query_heads=6, kv_heads=2, head_dim=5, value_head_dim=3, batch=2),
    AttentionCase(7, 4, sinks=True, softcap=2.0, window=(3, None)),
    AttentionCase(7, 4, documents=((3, 5, 3),), sinks=True),
    AttentionCase(7, -3, sinks=True, cached=False),
    AttentionCase(7, -3, cached=False, causal=False, window=(2, 1), query_heads=3, kv_heads=1),
    AttentionCase(3, 9, cached=False, causal=False, scale=-0.4),
]


def by_autograd(inputs):
    """The case by torch.softmax over a dense mask with the sink as one more column, and torch's autograd."""
    case = inputs.case
    q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    sinks = None if inputs.sinks is None else inputs.sinks.clone().requires_grad_()
    mask = case.mask()
    start = case.keys - case.queries
    raw = RawMask(mask.causal, mask.window_left, mask.window_right, mask.document_starts)
    visible = dense_mask(raw, start=start, tokens=case.queries, keys=case.keys)[:, None]
    group = case.query_heads // case.kv_heads
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(group, 2)) * case.softmax_scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is None:
        column = scores.new_full((*scores.shape[:3], 1), -1e30)  # in the softmax of an empty row it takes all
    else:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1)[..., :-1]
    out = torch.einsum("bhts,bshd->bthd", weights, v.repeat_interleave(group, 2))
    (out * inputs.dout).sum().backward()
    lse = torch.logsumexp(scores, -1).detach()
    lse = lse.masked_fill(lse < -1e29, -math.inf)
    return testing.AttentionResult(out.detach(), lse, q.grad, k.grad, v.grad, None if sinks is None else sinks.grad)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_formulas_equal_torch_softmax_and_autograd(case):
    inputs = testing.make_inputs(case, torch.float64)
    expected = dict(by_autograd(inputs).items())
    for result in (testing.exact(inputs), testing.run(inputs)):
        for name, value in result.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradcheck(case):
    inputs = testing.make_inputs(case, torch.float64)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    if inputs.sinks is not None:
        leaves.append(inputs.sinks.requires_grad_())

    def attend(q, k, v, sinks=None):
        settings = {"mask": case.mask(), "scale": case.scale, "softcap": case.softcap, "sinks": sinks}
        if not case.cached:
            return prefix_attention(q, k, v, **settings)
        cache = testing.poisoned_cache(case, torch.float64)
        cut = case.prefix
        first = prefix_attention(q[:, :cut], k[:, :cut], v[:, :cut], cache, **settings)
        return torch.cat([first, prefix_attention(q[:, cut:], k[:, cut:], v[:, cut:], cache, **settings)], 1)

    torch.autograd.gradcheck(attend, leaves, fast_mode=True)


def test_a_square_causal_call_equals_scaled_dot_product_attention():
    q, k, v = (torch.randn(2, 9, 3, 8, dtype=torch.float64) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    torch.testing.assert_close(prefix_attention(q, k, v), expected.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_fp32_products_ignore_the_users_choice_of_a_lower_precision():
    inputs = testing.make_inputs(AttentionCase(33, 31, head_dim=64), torch.float32)
    expected = testing.formulas(inputs, torch.float32).out
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(testing.formulas(inputs, torch.float32).out, expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_row_of_scores_that_are_all_minus_infinity_is_not_an_empty_row():
    """Only masks make a row empty, never its scores."""
    q, k, v = torch.full((1, 1, 1, 1), -math.inf), torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1, 1)
    mask = RawMask(True, -1, -1, None)
    assert attention_forward(q, k, v, start=1, mask=mask, scale=1.0).out.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_noise_that_is_allowed_does_not_depend_on_what_few_elements_meet(dtype):
    ulp = torch.finfo(dtype).eps
    for x, expected in ((0.0, ulp / 4), (0.19, ulp / 4), (0.25, ulp / 2), (-0.75, ulp), (5.0, 4 * ulp)):
        assert testing.noise(torch.tensor([x], dtype=torch.float64), dtype) == expected
    many = torch.linspace(-3, 3, 100_001, dtype=torch.float64).to(dtype)
    met = 2 * ((many + 0.3) - 0.3 - many).abs().max()
    assert testing.noise(many.double(), dtype) in (met, met / 2)
    assert math.isnan(testing.noise(torch.tensor([1.0, float("inf")]), dtype))  # nothing is within it


def test_it_refuses_to_promise_slice_invariance():
    q = torch.randn(1, 3, 1, 8)
    with pytest.raises(ValueError, match=r"reference refuses.*deterministic.*slice invariance"):
        prefix_attention(q, q, q, deterministic=True, backend="reference")
    with pytest.raises(ValueError, match="deterministic"):
        backends.get("reference").invariance_unit(
            backends.AttentionCall("cpu", torch.float32, 1, 1, 8, 8, deterministic=True)
        )
