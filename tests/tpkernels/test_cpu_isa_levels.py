"""Every ISA level this machine can run computes every case in every dtype within the tolerance rule."""

from __future__ import annotations

import math

import pytest
import torch

from tpkernels import Mask, _core, prefix_attention, testing
from tpkernels.cpu import CpuBackend
from tpkernels.testing import CASES, AttentionCase

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LEVELS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16")
# Long enough for several key tiles and query tiles, odd everywhere.
LONG = [
    AttentionCase(301, 700, query_heads=3, kv_heads=1, head_dim=72, value_head_dim=40),
    AttentionCase(515, 3, query_heads=8, kv_heads=1, head_dim=40, window=(300, None)),
    AttentionCase(130, 391, query_heads=2, kv_heads=2, head_dim=111, value_head_dim=104, softcap=20.0, sinks=True),
    AttentionCase(333, 300, query_heads=2, kv_heads=1, head_dim=64, documents=((100, 233, 7, 293),)),
    AttentionCase(290, -33, query_heads=2, kv_heads=1, head_dim=16, causal=False, window=(280, 9), cached=False),
    AttentionCase(300, 0, query_heads=2, kv_heads=2, head_dim=256, value_head_dim=8),
]


@pytest.fixture
def level(request, monkeypatch):
    if request.param not in _core.isa_levels():
        pytest.skip(f"this machine has no {request.param}; it runs {', '.join(_core.isa_levels())}")
    monkeypatch.setenv("TPK_CPU_ISA", request.param)
    assert _core.isa_level() == request.param
    return request.param


@pytest.mark.parametrize("level", LEVELS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*CASES[1::2], *LONG], ids=str)
def test_every_level_is_as_close_as_the_same_precision_reference(case, dtype, level):
    inputs = testing.make_inputs(case, dtype)
    testing.check(testing.run(inputs, backend="cpu"), inputs)


@pytest.mark.parametrize("level", LEVELS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_level_is_slice_invariant(dtype, level):
    case = AttentionCase(421, query_heads=6, kv_heads=2, head_dim=40, value_head_dim=24, window=(333, None))
    inputs = testing.make_inputs(case, dtype)
    whole = testing.run(inputs, backend="cpu", deterministic=True, slices=[421])
    cut = testing.run(inputs, backend="cpu", deterministic=True, slices=[32, 128, 96, 160, 5])
    for name, value in whole.items():
        assert torch.equal(value, dict(cut.items())[name]), name


@pytest.mark.parametrize("level", LEVELS, indirect=True)
def test_probabilities_too_small_to_be_normal_count_as_zero(level):
    """2^-130 of the second key times its value of 1e38 would be 7e-2; such numbers slow products down by a hundred."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, -130 * math.log(2.0)]).view(1, 2, 1, 1)
    v = torch.tensor([1.0, 1e38]).view(1, 2, 1, 1)
    assert prefix_attention(q, k, v, scale=1.0, mask=Mask(causal=False), backend="cpu").item() == 1.0
    assert (torch.tensor([1e-39]) * 0.5).item() > 0  # the caller's arithmetic is as before


@pytest.mark.parametrize("level", LEVELS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("power", [6, 10, 11, 12, 20, 30])
@pytest.mark.parametrize("with_sink", [False, True])
def test_a_row_whose_scores_are_past_fp32_is_right_or_nan_never_something_else(power, with_sink, dtype, level):
    """Rounding the reference of 1e11 costs hundreds of octaves: rows were 0, or had the lse of an empty one."""
    q, k, v = (torch.randn(40, 17, 1, 16) for _ in range(3))
    k[:, 1, 0, 6] = 10.0**power * (1 + torch.rand(40))
    q, k, v = (x.to(dtype).requires_grad_() for x in (q.abs(), k, v))
    sinks = torch.zeros(1) if with_sink else None
    out, lse = prefix_attention(q, k, v, sinks=sinks, backend="cpu", return_lse=True)
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
    lost, rows, value = lse[:, 0, 1:].isnan(), out.detach()[:, 1:, 0], v.detach()[:, 1:2, 0].expand(-1, 16, -1)
    if level == "baseline" or power == 6:  # without fma the reference rounds as the scores do
        assert not lost.any()
    else:
        assert lost.any() and (power < 20 or lost.all())
    assert rows[lost].isnan().all() and dq[:, 1:, 0][lost].isnan().all()
    torch.testing.assert_close(rows[~lost], value[~lost], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("wrong", ["avx", "AVX512", "neon", "amx"])
def test_an_unusable_level_is_an_error_that_names_the_usable_ones(wrong, monkeypatch):
    monkeypatch.setenv("TPK_CPU_ISA", wrong)
    with pytest.raises(ValueError, match=f"TPK_CPU_ISA={wrong} .* usable: baseline"):
        _core.isa_level()
    reason = CpuBackend().unusable()
    assert reason is not None and "baseline" in reason


def test_levels_differ_only_by_rounding():
    """Levels are different code: equal bits in bf16 would mean that the override does nothing."""
    levels = _core.isa_levels()
    if len(levels) < 2:
        pytest.skip("this machine runs the baseline only")
    inputs = testing.make_inputs(AttentionCase(200, head_dim=64), torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        outs = []
        for name in ("baseline", levels[-1]):
            patch.setenv("TPK_CPU_ISA", name)
            outs.append(testing.run(inputs, backend="cpu").out)
    assert not torch.equal(*outs)
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)
