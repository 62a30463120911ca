"""What the CPU kernels read and write: any strides, NaN that must not spread, huge offsets, extreme logits."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch
from torch import Tensor

from tpkernels.backends import RawSettings
from tpkernels.cpu import CpuBackend
from tpkernels.mask import RawMask

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = CpuBackend()
NAN = float("nan")


class Outcome:
    """Forward and backward of one call; every output starts as NaN, every accumulator as 0."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **changes):
        start, mask = k.shape[1] - q.shape[1], RawMask(True, -1, -1, None)
        settings = RawSettings(start, mask, q.shape[3] ** -0.5, deterministic=True)._replace(**changes)
        self.out = torch.full((*q.shape[:3], v.shape[3]), NAN, dtype=q.dtype)
        self.lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), NAN)
        self.dq = torch.full(q.shape, NAN, dtype=q.dtype)
        self.dk, self.dv = torch.zeros(k.shape), torch.zeros(v.shape)
        CPU.forward(q, k, v, out=self.out, lse=self.lse, settings=settings)
        gradients = {"dq": self.dq, "dk": self.dk, "dv": self.dv, "dsinks": None}
        CPU.backward(dout, q, k, v, self.out, self.lse, **gradients, settings=settings)

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("out", "lse", "dq", "dk", "dv")}

    def assert_equal(self, other: Outcome) -> None:
        for name, value in self.tensors().items():
            assert torch.equal(value, other.tensors()[name]), name


def draw(
    tokens: int, keys: int, dtype: torch.dtype, *, heads=2, kv_heads=1, dim=24, value_dim=40, batch=1
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens + keys)
    shapes = [(tokens, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, value_dim), (tokens, heads, value_dim)]
    return [torch.randn(batch, *shape, generator=generator).to(dtype) for shape in shapes]


# ---- strides ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(dtype):
    tensors = draw(67, 300, dtype, batch=2)
    plain = Outcome(*tensors)
    head_major = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    gaps = [torch.full((x.shape[0], x.shape[1] + 3, x.shape[2] + 1, x.shape[3] + 5), NAN, dtype=dtype) for x in tensors]
    padded = [gap[:, 2:-1, 1:, 4:-1] for gap in gaps]
    for target, source in zip(padded, tensors, strict=True):
        target.copy_(source)
    backwards_batch = [x.flip(0) for x in tensors]
    plain.assert_equal(Outcome(*head_major))
    plain.assert_equal(Outcome(*padded))
    assert torch.equal(Outcome(*backwards_batch).dq.flip(0), plain.dq)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stride_zero_is_a_repeated_row(dtype):
    q, k, v, _ = draw(67, 200, dtype)
    dout = torch.ones((), dtype=dtype).expand(1, 67, 2, 40)
    key = k[:, :1].expand(-1, 200, -1, -1)
    dout_rows = torch.ones(1, 1, 1, 40, dtype=dtype).expand(1, 67, 2, 40)
    assert dout_rows.stride() == (40, 0, 0, 1)
    Outcome(q, key, v, dout_rows).assert_equal(Outcome(q, key.contiguous(), v, dout.contiguous()))


@pytest.mark.skipif(sys.platform != "linux", reason="reserves address space the Linux way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offsets_beyond_32_bits(dtype):
    """Rows 2^31 elements and more apart, in address space that is never filled."""
    tensors = draw(3, 5, dtype, dim=8, value_dim=8, heads=2)
    stride = 2**31 + 64
    size = stride * 4 + 4096
    no_reserve = 0x4000  # MAP_NORESERVE, which Python names from 3.12 on
    area = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    flat = torch.frombuffer(area, dtype=dtype)
    offset = 0
    far = []
    for tensor in tensors:
        batch, tokens, heads, dim = tensor.shape
        view = flat.as_strided((batch, tokens, heads, dim), (0, stride if tokens == 5 else dim * heads, dim, 1), offset)
        view.copy_(tensor)
        far.append(view)
        offset += 256
    Outcome(*tensors).assert_equal(Outcome(*far))


# ---- NaN and infinity ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [1, 31, 67, 256, 300])
def test_memory_outside_the_tensors_is_not_read(keys, dtype):
    tokens = min(keys, 67)
    tensors = draw(tokens, keys, dtype)
    poisoned = []
    for tensor in tensors:
        area = torch.full((1, tensor.shape[1] + 64, *tensor.shape[2:]), NAN, dtype=dtype)
        area[:, 32:-32] = tensor
        poisoned.append(area[:, 32:-32])
    Outcome(*tensors).assert_equal(Outcome(*poisoned))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["k", "v", "both"])
def test_a_bad_key_reaches_only_the_rows_that_see_it(which, bad, dtype):
    q, k, v, dout = draw(90, 150, dtype)
    at, position = 101, 150 - 90
    clean = Outcome(q, k, v, dout)
    if which != "v":
        k[:, at, :, 5] = bad
    if which != "k":
        v[:, at, :, 7] = bad
    got = Outcome(q, k, v, dout)
    before = at - position  # query rows before it do not see key `at`
    for name in ("out", "dq"):
        assert torch.equal(got.tensors()[name][:, :before], clean.tensors()[name][:, :before]), name
    assert torch.equal(got.lse[:, :, :before], clean.lse[:, :, :before])
    if which == "v":
        assert not got.out[:, before:, :, 7].isfinite().any()
        assert torch.equal(got.out[:, before:, :, :7], clean.out[:, before:, :, :7])
        assert torch.equal(got.lse, clean.lse)
    elif bad != bad:
        assert got.out[:, before:].isnan().all() and got.dq[:, before:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", ["q", "dout"])
def test_a_bad_query_row_stays_alone(which, dtype):
    """Its own out (for q) and dq are NaN; other rows keep their bits, and so do dk, dv of the keys it does not see."""
    q, k, v, dout = draw(90, 150, dtype)
    clean = Outcome(q, k, v, dout)
    row, seen = 40, 150 - 90 + 40 + 1
    (q if which == "q" else dout)[:, row, 1, 3] = NAN
    got = Outcome(q, k, v, dout)
    others = [i for i in range(90) if i != row]
    for name in ("out", "dq"):
        assert torch.equal(got.tensors()[name][:, others], clean.tensors()[name][:, others]), name
        assert torch.equal(got.tensors()[name][:, row, 0], clean.tensors()[name][:, row, 0]), name
    assert got.dq[:, row, 1].isnan().all()
    assert got.out[:, row, 1].isnan().all() == (which == "q")
    for name in ("dk", "dv"):
        assert torch.equal(got.tensors()[name][:, seen:], clean.tensors()[name][:, seen:]), name
    assert got.dv[:, :seen, :, 3].isnan().all()


# ---- extreme logits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("logit", [1e4, -1e4, -6e4])
def test_huge_logits_give_the_same_softmax(logit, dtype):
    """A constant added to every logit of a row changes lse only; one huge logit makes a one-hot row."""
    q, k, v, dout = draw(40, 300, dtype, kv_heads=2, dim=8)
    q[..., 0], k[..., 0] = 0, 0
    base = Outcome(q, k, v, dout, scale=1.0)
    q[..., 0], k[..., 0] = 256.0, logit / 256.0
    moved = Outcome(q, k, v, dout, scale=1.0)
    logit = float(k[0, 0, 0, 0]) * 256.0
    tolerance = {"atol": 2e-2, "rtol": 2e-2}  # logits of 1e4 carry errors of 1e-3 in fp32
    torch.testing.assert_close(moved.out, base.out, **tolerance)
    torch.testing.assert_close(moved.lse - logit, base.lse, **tolerance)
    assert all(value.isfinite().all() for value in moved.tensors().values())
    k[:, 77, :, 0] = abs(k[:, 77, :, 0]) + 200
    sharp = Outcome(q, k, v, dout, scale=1.0)
    torch.testing.assert_close(sharp.out, v[:, 77:78].expand_as(sharp.out))


def test_infinite_logits():
    """+inf: NaN, as in the formula. -inf on one key: that key has no weight."""
    q, k, v, dout = draw(4, 40, torch.float32)
    q[..., 0] = 1.0
    k[:, 7, :, 0] = float("-inf")
    without = Outcome(q, k, v, dout).out
    assert without.isfinite().all()
    k[:, 7, :, 0] = float("inf")
    assert Outcome(q, k, v, dout).out.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_scale_zero_and_negative(scale, dtype):
    q, k, v, dout = draw(40, 300, dtype)
    got = Outcome(q, k, v, dout, scale=scale)
    mirrored = Outcome(-q, k, v, dout, scale=-scale)
    assert torch.equal(got.out, mirrored.out) and torch.equal(got.dk, mirrored.dk)
    assert torch.equal(got.dq, -mirrored.dq)
    if scale == 0:
        mean = v.float()[:, :300].cumsum(1)[:, 260:] / torch.arange(261, 301)[None, :, None, None]
        torch.testing.assert_close(got.out.float(), mean.expand(-1, -1, 2, -1), atol=2e-2, rtol=2e-2)
        assert not got.dq.any() and not got.dk.any()


# ---- empty -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sink", [None, 0.25])
def test_rows_without_keys(sink, dtype):
    q, k, v, dout = draw(80, 30, dtype)
    sinks = None if sink is None else torch.full((2,), sink)
    got = Outcome(q, k, v, dout, sinks=sinks)
    assert not got.out[:, :50].any() and not got.dq[:, :50].any()
    assert (got.lse[:, :, :50] == (float("-inf") if sink is None else sink)).all()
    alone = Outcome(q[:, 50:], k, v, dout[:, 50:], sinks=sinks)
    assert torch.equal(alone.out, got.out[:, 50:])
    torch.testing.assert_close(alone.dk, got.dk, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("batch", "tokens"), [(0, 4), (1, 0)])
def test_nothing_to_do(batch, tokens):
    tensors = [x[:batch] for x in draw(max(tokens, 0), 9, torch.float32)]
    got = Outcome(*tensors)
    assert not got.dk.any() and not got.dv.any()
