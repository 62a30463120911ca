"""Bits of the CPU kernels: independent of slicing, of thread count, of repetition; and accumulators are added to.

The kernels are called directly, so that slicings, strides and accumulators are exactly what the test says.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpkernels import testing
from tpkernels.backends import AttentionCall, RawSettings
from tpkernels.cpu import CpuBackend
from tpkernels.mask import RawMask
from tpkernels.testing import AttentionCase

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = CpuBackend()


def unit_of(group: int) -> int:
    return CPU.invariance_unit(AttentionCall("cpu", torch.float32, group, 1, 64, 64, deterministic=True))


@st.composite
def sliced(draw):
    """A case of up to a few tiles, and two slicings: any, and one at multiples of the unit."""
    group = draw(st.sampled_from([1, 3, 8]))
    unit = unit_of(group)
    tokens = draw(st.integers(2, 600 if group == 1 else 300))
    cuts = sorted(draw(st.sets(st.integers(1, tokens - 1), max_size=4)))
    unit_cuts = sorted({cut // unit * unit for cut in cuts} - {0})
    start = draw(st.integers(0, tokens - 1))
    case = AttentionCase(
        tokens,
        query_heads=2 * group,
        kv_heads=2,
        head_dim=draw(st.sampled_from([8, 40, 64, 111])),
        value_head_dim=draw(st.sampled_from([8, 64, 72])),
        window=(draw(st.sampled_from([None, 3, 250])), None),
        documents=draw(st.sampled_from([None, ((start, tokens - start),)])),
        softcap=draw(st.sampled_from([0.0, 4.0])),
        sinks=draw(st.booleans()),
        magnitude=draw(st.sampled_from([1.0, 30.0])),
    )
    return case, *([b - a for a, b in zip([0, *c], [*c, tokens], strict=True)] for c in (cuts, unit_cuts))


@given(sliced(), st.sampled_from(DTYPES))
def test_no_slicing_changes_a_bit(drawn, dtype):
    case, slices, unit_slices = drawn
    inputs = testing.make_inputs(case, dtype)
    whole = dict(testing.run(inputs, backend="cpu", deterministic=True, slices=[case.tokens]).items())
    for lengths, names in ((slices, ("out", "lse", "dq")), (unit_slices, ("out", "lse", "dq", "dk", "dv"))):
        got = dict(testing.run(inputs, backend="cpu", deterministic=True, slices=lengths).items())
        for name in names:
            assert torch.equal(whole[name], got[name]), (case, lengths, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 3)], ids=str)
def test_no_thread_count_changes_a_bit(heads, dtype):
    case = AttentionCase(700, 333, query_heads=heads[0], kv_heads=heads[1], head_dim=64, sinks=True)
    inputs = testing.make_inputs(case, dtype)
    first = testing.run(inputs, backend="cpu")
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        for name, value in testing.run(inputs, backend="cpu").items():
            assert torch.equal(value, dict(first.items())[name]), (threads, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fifty_repeats_are_one_result(dtype):
    torch.set_num_threads(2)
    case = AttentionCase(257, 300, query_heads=2, kv_heads=1, head_dim=40)
    inputs = testing.make_inputs(case, dtype)
    first = testing.run(inputs, backend="cpu")
    for _ in range(50):
        for name, value in testing.run(inputs, backend="cpu").items():
            assert torch.equal(value, dict(first.items())[name]), name


class Call:
    """One direct call of the kernels with its buffers."""

    def __init__(
        self, tokens, keys, *, heads=2, kv_heads=1, dim=40, value_dim=24, dtype=torch.float32, batch=1, seed=0
    ):
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=draw).to(dtype)

        self.q, self.dout = normal(batch, tokens, heads, dim), normal(batch, tokens, heads, value_dim)
        self.k, self.v = normal(batch, keys, kv_heads, dim), normal(batch, keys, kv_heads, value_dim)
        mask = RawMask(True, -1, -1, None)
        self.settings = RawSettings(keys - tokens, mask, 1 / math.sqrt(dim), deterministic=True)
        self.out = torch.full_like(self.dout, float("nan"))
        self.lse = torch.full((batch, heads, tokens), float("nan"))
        self.dq = torch.full_like(self.q, float("nan"))
        self.dk, self.dv = torch.zeros(self.k.shape), torch.zeros(self.v.shape)

    def run(self):
        CPU.forward(self.q, self.k, self.v, out=self.out, lse=self.lse, settings=self.settings)
        gradients = {"dq": self.dq, "dk": self.dk, "dv": self.dv, "dsinks": None}
        CPU.backward(self.dout, self.q, self.k, self.v, self.out, self.lse, **gradients, settings=self.settings)
        return self


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accumulators_are_added_to_in_any_layout(dtype):
    """dk and dv start non-zero, as views with gaps and swapped dimensions; nothing in the gaps is touched."""
    plain = Call(300, 421, dtype=dtype).run()
    call = Call(300, 421, dtype=dtype)
    store = torch.full((3, 500, 50), 7.0)  # [heads, tokens, dim], of which the views take a part
    call.dk = store.transpose(0, 1)[None, 11:432, 1:2, 3:43]
    store_dv = torch.full((1, 421, 1, 24), -3.0)
    call.dv = store_dv
    call.run()
    torch.testing.assert_close(call.dk, plain.dk + 7, atol=2e-5, rtol=2e-6)
    torch.testing.assert_close(call.dv, plain.dv - 3, atol=2e-5, rtol=2e-6)
    call.dk.fill_(7.0)
    assert (store == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dk_and_dv_of_unseen_keys_keep_their_bits(dtype):
    call = Call(40, 600, dtype=dtype)
    call.settings = call.settings._replace(mask=RawMask(True, 10, -1, None))
    call.dk.fill_(0.1)
    call.dv.fill_(float("nan"))
    call.run()
    assert (call.dk[:, :550] == torch.tensor(0.1)).all() and (call.dk[:, 550:] != torch.tensor(0.1)).any()
    assert call.dv[:, :550].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 200])
def test_logits_that_rise_from_tile_to_tile(window, dtype):
    """Rows whose maximum climbs by hundreds (and falls again), beside rows that stay flat: exact, and slicing-proof.
    With a window the first key of a panel depends on the slicing; where its maximum is looked at must not."""
    case = AttentionCase(900, query_heads=2, kv_heads=1, head_dim=40, scale=1.0, window=(window, None))
    inputs = testing.make_inputs(case, dtype)
    key = torch.arange(900)
    inputs.k[0, :, 0, 0] = torch.where(key < 700, key * 0.5, (900 - key) * 0.25).to(dtype)
    inputs.q[0, :, :, 0] = (key % 3 - 1)[:, None].to(dtype)  # falling, flat and rising logits side by side
    inputs.q[0, :, :, 1:] *= 0.3
    whole = testing.run(inputs, backend="cpu", deterministic=True, slices=[900])
    testing.check(whole, inputs)
    cut = dict(testing.run(inputs, backend="cpu", deterministic=True, slices=[300, 7, 593]).items())
    for name in ("out", "lse", "dq"):
        assert torch.equal(dict(whole.items())[name], cut[name]), name


@pytest.mark.parametrize("octaves", [100.0, 128.0, 130.0, 200.0, 260.0, 380.0, 390.0, 1e3, 5e4, 3e6, 3e7, 1e9])
def test_one_logit_far_above_the_rest(octaves):
    """However far a key lies above all before it, rows that climb, fall and stay flat keep the reference's numbers.
    From a million octaves on an fp32 lse is too coarse to bring probabilities back in the backward: dv is left out."""
    case = AttentionCase(400, query_heads=2, kv_heads=1, head_dim=40, scale=1.0)
    inputs = testing.make_inputs(case, torch.bfloat16)
    inputs.q[0, :, :, 0] = (torch.arange(400) % 3 - 1)[:, None]
    inputs.q[0, :, :, 1:] *= 0.3
    inputs.k[..., 0] = 0.0
    inputs.k[0, [131, 262], 0, 0] = torch.tensor([octaves, -2 * octaves], dtype=torch.bfloat16) * math.log(2.0)
    whole = testing.run(inputs, backend="cpu", deterministic=True, slices=[400])
    for row in testing.differences(whole, inputs):
        assert row.ok or (octaves > 1e6 and row.name == "dv"), row
    cut = dict(testing.run(inputs, backend="cpu", deterministic=True, slices=[130, 7, 263]).items())
    for name in ("out", "lse", "dq"):
        assert torch.equal(dict(whole.items())[name], cut[name]), name


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_a_huge_row_leaves_the_bits_of_the_rows_beside_it(softcap, dtype):
    """The checked exponentials that huge operands ask for give other rows the bits of the plain ones."""
    plain, beside = (Call(90, 150, dtype=dtype) for _ in range(2))
    beside.q[:, 40] *= 1e20
    beside.k[:, 120] *= 1e20  # the last 30 rows see it
    for call in (plain, beside):
        call.settings = call.settings._replace(softcap=softcap)
        call.run()
    others = [row for row in range(60) if row != 40]
    for name in ("out", "dq"):
        assert torch.equal(getattr(plain, name)[:, others], getattr(beside, name)[:, others]), name
    assert torch.equal(plain.lse[:, :, others], beside.lse[:, :, others])
