"""The CUDA kernels in the emulator: exact answers under the tolerance rule (tpkernels.testing), bits that no slicing
changes, and nothing for the emulator's watch to report.

Every call of these tests is checked by EmulatedExtension (conftest.py): no race, no read of unwritten memory, no access
outside the tensors of the call, no missed barrier.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tpkernels import invariance_unit, testing
from tpkernels.testing import AttentionCase

BF16, FP16 = torch.bfloat16, torch.float16


def _runs() -> list[tuple[AttentionCase, torch.dtype, bool]]:
    """(case, dtype, deterministic): the grid of all backends at the head_dims of the kernels, each case twice.

    Not the one with a single key, whose exact gradients are zero (below).
    """
    runs = []
    cases = [dataclasses.replace(case, head_dim=64, value_head_dim=None) for case in testing.CASES if case.keys > 1]
    for index, case in enumerate(dict.fromkeys(cases)):
        wide = dataclasses.replace(case, head_dim=128)
        bf16, deterministic = index % 2 == 0, index // 2 % 2 == 0
        runs.append((case, BF16 if bf16 else FP16, deterministic))
        runs.append((wide, FP16 if bf16 else BF16, not deterministic))
    return runs


RUNS = _runs()


def name_of(run: tuple[AttentionCase, torch.dtype, bool]) -> str:
    case, dtype, deterministic = run
    return f"{case}-{str(dtype).removeprefix('torch.')}-{'deterministic' if deterministic else 'fast'}"


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_results_are_as_close_as_the_same_precision_reference(run, extension):
    case, dtype, deterministic = run
    inputs = testing.make_inputs(case, dtype)
    testing.check(testing.run(inputs, backend="cuda", deterministic=deterministic), inputs)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_one_key_leaves_nothing_but_rounding_for_its_gradient(deterministic, head_dim, extension):
    """p is 1, so ds = dout v - delta is zero but for the order of two fp32 sums; out is v to the bit."""
    case = AttentionCase(37, -36, cached=False, head_dim=head_dim)
    inputs = testing.make_inputs(case, BF16)
    result = testing.run(inputs, backend="cuda", deterministic=deterministic)
    assert torch.equal(result.out[:, 36], inputs.v[:, 0]) and (result.out[:, :36] == 0).all()
    assert torch.equal(result.dv[:, 0], inputs.dout[:, 36])
    terms = (inputs.v[:, 0].float() * inputs.dout[:, 36].float()).abs().sum(-1, keepdim=True)
    ds = terms * head_dim * torch.finfo(torch.float32).eps * case.softmax_scale
    assert (result.dq[:, :36] == 0).all()
    assert (result.dq[:, 36].float().abs() <= ds * inputs.k[:, 0].float().abs()).all()
    assert (result.dk[:, 0].float().abs() <= ds * inputs.q[:, 36].float().abs()).all()


def test_the_grid_covers_both_modes_of_both_formats_at_both_sizes():
    assert {(case.head_dim, dtype, deterministic) for case, dtype, deterministic in RUNS} == {
        (dim, dtype, deterministic) for dim in (64, 128) for dtype in (BF16, FP16) for deterministic in (False, True)
    }
    assert len(RUNS) > 100


# ---- splits, devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    "features", [{}, {"sinks": True, "query_heads": 6}, {"window": (600, None), "softcap": 8.0}], ids=str
)
def test_split_keys(features, dtype, extension):
    """Few rows behind many keys: their tiles are shared among blocks, and a second kernel merges the parts."""
    case = AttentionCase(5, 1120, cached=False, **{"query_heads": 2, "kv_heads": 1, "head_dim": 64, **features})
    inputs = testing.make_inputs(case, dtype)
    testing.check(testing.run(inputs, backend="cuda"), inputs)
    assert extension.blocks["attention_combine"] > 0 and extension.blocks["attention_forward"] > 1
    extension.blocks.clear()
    testing.check(testing.run(inputs, backend="cuda", deterministic=True), inputs)
    assert extension.blocks["attention_combine"] == 0


@pytest.mark.parametrize(("capability", "shared_kib"), [(80, 163), (89, 99), (90, 227)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_device_computes_the_same(head_dim, capability, shared_kib, extension):
    """Tiles follow from the shared memory of the device."""
    case = AttentionCase(101, 67, query_heads=3, kv_heads=1, head_dim=head_dim)
    inputs = testing.make_inputs(case, BF16)
    extension.emulator.module.set_device(capability, 132, shared_kib * 1024)
    for deterministic in (False, True):
        testing.check(testing.run(inputs, backend="cuda", deterministic=deterministic), inputs)


# ---- slices ----------------------------------------------------------------------------------------------------------


FEATURES = [{}, {"window": (100, None), "softcap": 4.0}, {"sinks": True, "documents": ((150, 112),)}]


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize(("head_dim", "dtype", "heads"), [(64, BF16, (3, 1)), (128, FP16, (2, 1))], ids=str)
def test_no_slicing_changes_a_bit(features, head_dim, dtype, heads, extension):
    """out, lse and dq for any slicing; dk and dv too for slices at multiples of the unit."""
    case = AttentionCase(262, query_heads=heads[0], kv_heads=heads[1], head_dim=head_dim, **features)
    unit = invariance_unit(
        query_heads=heads[0], kv_heads=heads[1], head_dim=head_dim, dtype=dtype, device="cpu", backend="cuda"
    )
    assert unit <= 128
    inputs = testing.make_inputs(case, dtype)
    whole = testing.run(inputs, backend="cuda", deterministic=True, slices=[262])
    testing.check(whole, inputs)
    for slices in ((13, 1, 120, 128), (unit, 262 - unit), (unit, unit, 262 - 2 * unit)):
        result = testing.run(inputs, backend="cuda", deterministic=True, slices=slices)
        for name in ("out", "lse", "dq", *(("dk", "dv") if slices[0] == unit else ())):
            assert torch.equal(getattr(whole, name), getattr(result, name)), (slices, name)


def test_many_slices_accumulate_in_fast_mode(extension):
    case = AttentionCase(200, query_heads=2, kv_heads=1, head_dim=64, batch=2)
    inputs = testing.make_inputs(case, BF16)
    for slices in ((50, 50, 50, 50), (1, 129, 7, 63)):
        testing.check(testing.run(inputs, backend="cuda", slices=slices), inputs)


def test_the_order_in_which_threads_run_changes_no_bit(extension):
    case = AttentionCase(90, 75, query_heads=4, kv_heads=2, head_dim=64, batch=2, sinks=True)
    inputs = testing.make_inputs(case, FP16)
    first = testing.run(inputs, backend="cuda", deterministic=True)
    extension.emulator.configure(backwards=True)
    second = testing.run(inputs, backend="cuda", deterministic=True)
    for (name, a), (_, b) in zip(first.items(), second.items(), strict=True):
        assert torch.equal(a, b), name


# ---- shared memory ---------------------------------------------------------------------------------------------------


def test_no_access_to_shared_memory_waits_for_a_bank(extension):
    """Every instruction of every kernel takes the least number of turns: the swizzle does what swizzle.cuh says."""
    for head_dim in (64, 128):
        for deterministic in (False, True):
            case = AttentionCase(150, 60, query_heads=2, kv_heads=1, head_dim=head_dim)
            testing.run(testing.make_inputs(case, BF16), backend="cuda", deterministic=deterministic)
    assert extension.operations["ldmatrix"] > 1000 and extension.operations["cp.async"] > 1000
    slow = {place: turns / phases for place, (phases, turns) in extension.banks.items() if turns > phases}
    assert slow == {}
