"""The fused CUDA kernels in the emulator: norms against their formulas in fp64 by the tolerance rule; nothing for the
emulator's watch to report; no neighbour changes a row."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tpkernels import cuda_fused, fused, fused_rows, testing
from tpkernels import fused_reference as formulas
from tpkernels.cuda_fused import CudaFused

BF16, FP16 = torch.bfloat16, torch.float16
EPS = 1e-5


class Watched:
    """The fused functions of tpkernels._cuda, emulated: a call may touch its own tensors only, and must be clean."""

    def __init__(self, extension):
        self.module, self.emulator = extension.module, extension.emulator
        self.conflicts = {}

    def _run(self, name, call, rows=(), floats=(), elements=(), writes=()):
        register = self.emulator.module.register_tensor
        self.emulator.module.clear_tensors()
        for key, columns in rows:
            if call[key][0]:
                register(key, call[key][0], 2, [call["rows"], columns], [call[key][1], 1], key in writes)
        for keys, item_bytes in ((floats, 4), (elements, 2)):
            for key, count in keys:
                if call[key]:
                    register(key, call[key], item_bytes, [count], [1], key in writes)
        memory = []

        def allocate(size_bytes):
            memory.append(torch.full((size_bytes,), 255, dtype=torch.uint8))  # NaN until it is written
            register("workspace", memory[-1].data_ptr(), 1, [size_bytes], [1], True)
            return memory[-1].data_ptr()

        if "allocate" in call:
            call["allocate"] = allocate
        getattr(self.module, name)(**call)
        report = self.emulator.report()
        assert not report.findings, f"\n{report}"
        self.conflicts |= report.conflicts()

    def norm_forward(self, **call):
        rows, dim = call["rows"], call["dim"]
        wide = [(key, dim) for key in ("x", "delta", "total", "out")]
        floats, elements = [("mean", rows), ("rstd", rows)], [("weight", dim), ("bias", dim)]
        writes = ("total", "out", "mean", "rstd")
        self._run("norm_forward", call, rows=wide, floats=floats, elements=elements, writes=writes)

    def norm_backward(self, **call):
        rows, dim = call["rows"], call["dim"]
        wide = [(key, dim) for key in ("dx", "dout", "x", "dresidual")]
        floats = [("mean", rows), ("rstd", rows), ("dweight", dim), ("dbias", dim)]
        writes = ("dx", "dweight", "dbias")
        self._run("norm_backward", call, rows=wide, floats=floats, elements=[("weight", dim)], writes=writes)


@pytest.fixture
def ops(extension):
    return CudaFused(Watched(extension), "cpu")


def close(actual, exact, same_precision, dtype, factor):
    allowed = factor * (same_precision.double() - exact).abs().max().item() + testing.noise(exact, dtype)
    error = (actual.double() - exact).abs().max().item()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


SHAPES = [(1, 8), (3, 24), (17, 520), (5, 768), (2, 4096), (33, 264)]


@pytest.mark.parametrize(("rows", "dim"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("rms", [True, False], ids=["rms", "layer"])
def test_norms_are_as_close_as_their_formulas(rows, dim, dtype, rms, ops):
    draw = torch.Generator().manual_seed(rows)
    x, delta, dout, dresidual = (torch.randn(rows, dim, generator=draw).to(dtype) for _ in range(4))
    weight, bias = (torch.randn(dim, generator=draw).to(dtype) for _ in range(2))
    bias = None if rms else bias
    wide_x = torch.full((rows, dim + 8), float("nan"), dtype=dtype)  # rows of a larger tensor
    wide_x[:, :dim] = x
    values = ops.norm_forward(wide_x[:, :dim], weight, bias, eps=EPS, rms=rms, delta=delta)
    assert torch.equal(values.total, x + delta)
    exact, same = (
        formulas.norm_forward(values.total.to(t), weight.to(t), None if bias is None else bias.to(t), eps=EPS, rms=rms)
        for t in (torch.float64, dtype)
    )
    close(values.out, exact.out, same.out, dtype, 2)
    assert torch.allclose(values.rstd.double(), exact.rstd, rtol=1e-5)

    before = torch.randn(2, dim, generator=draw)
    dweight, dbias = before.clone()
    found = ops.norm_backward(
        dout, values.total, weight, values.mean, values.rstd, dresidual=dresidual, dweight=dweight, dbias=dbias
    )
    exact_gradients, same_gradients = (
        formulas.norm_backward(
            dout.to(t), values.total.to(t), weight.to(t), statistics.mean, statistics.rstd, dresidual=dresidual.to(t)
        )
        for t, statistics in ((torch.float64, exact), (dtype, same))
    )
    close(found.dx, exact_gradients.dx, same_gradients.dx, dtype, 3)
    assert torch.allclose(dweight.double(), before[0] + exact_gradients.dweight, rtol=1e-5, atol=1e-4)
    if not rms:
        assert torch.allclose(dbias.double(), before[1] + exact_gradients.dbias, rtol=1e-5, atol=1e-4)
    assert ops.module.conflicts == {}


def test_no_neighbour_changes_a_row_and_dx_may_be_dout(ops):
    draw = torch.Generator().manual_seed(0)
    x, delta, dout = (torch.randn(40, 272, generator=draw).to(BF16) for _ in range(3))
    weight = torch.randn(272, generator=draw).to(BF16)
    whole = ops.norm_forward(x, weight, None, eps=EPS, rms=True, delta=delta)
    piece = ops.norm_forward(x[7:19], weight, None, eps=EPS, rms=True, delta=delta[7:19])
    assert torch.equal(whole.out[7:19], piece.out) and torch.equal(whole.rstd[7:19], piece.rstd)
    dx = ops.norm_backward(dout, whole.total, weight, None, whole.rstd).dx
    place = dout.clone()
    ops.norm_backward(place, whole.total, weight, None, whole.rstd, dx=place)
    assert torch.equal(place, dx)


def test_what_the_kernels_do_not_serve_is_refused_with_values(ops):
    x = torch.randn(4, 20).to(BF16)
    weight = torch.ones(20, dtype=BF16)
    with pytest.raises(ValueError, match="norm over 20 channels; it serves multiples of 8 up to 16384"):
        ops.norm_forward(x, weight, None, eps=EPS, rms=True)
    with pytest.raises(ValueError, match=r"one dtype, bf16 or fp16, on one device, not .*float32"):
        ops.norm_forward(x.float(), weight, None, eps=EPS, rms=True)
    shifted = torch.randn(4, 33).to(BF16)[:, 1:]
    with pytest.raises(ValueError, match="x has rows that do not start at a multiple of 16 bytes"):
        ops.norm_forward(shifted, torch.ones(32, dtype=BF16), None, eps=EPS, rms=True)


@pytest.fixture
def asked(monkeypatch, ops):
    """The emulator's kernels in place of those that TPK_BACKEND=cuda asks for; names of the calls they get."""
    calls = []
    for name in ("norm_forward", "norm_backward"):
        own = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *a, own=own, name=name, **o: (calls.append(name), own(*a, **o))[1])
    monkeypatch.setattr(cuda_fused, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(cuda_fused, "asked_for", lambda requested: ops if requested == "cuda" else None)
    monkeypatch.setenv("TPK_BACKEND", "cuda")
    return calls


@pytest.mark.parametrize("rms", [True, False], ids=["rms", "layer"])
def test_norms_of_a_model_run_on_them_where_they_are_asked_for(rms, asked, monkeypatch):
    draw = torch.Generator().manual_seed(1)
    given = [torch.randn(2, 5, 24, generator=draw).to(BF16) for _ in range(2)]
    weight = torch.randn(24, generator=draw).to(BF16)
    bias = None if rms else torch.randn(24, generator=draw).to(BF16)

    def run(dtype):
        x, delta, w, b = (None if t is None else t.to(dtype).clone().requires_grad_() for t in (*given, weight, bias))
        total, out = fused.add_norm(x, delta, w, b, eps=EPS, rms=rms)
        (fused.norm(out, w, b, eps=EPS, rms=rms) + total).square().sum().backward()
        return [out.detach(), *(t.grad for t in (x, delta, w, b) if t is not None)]

    found = run(BF16)
    assert asked == ["norm_forward"] * 2 + ["norm_backward"] * 2
    exact = run(torch.float64)
    monkeypatch.delenv("TPK_BACKEND")
    same = run(BF16)
    assert len(asked) == 4
    for actual, wide, narrow in zip(found, exact, same, strict=True):
        close(actual, wide, narrow, BF16, 3)


def test_rows_that_they_cannot_take_go_elsewhere(asked):
    weight = torch.ones(24, dtype=BF16)
    shifted = torch.randn(4, 25).to(BF16)[:, 1:]
    for x in (torch.randn(4, 20).to(BF16), torch.randn(4, 24), shifted, torch.randn(1, 16392).to(BF16)):
        fused_rows.norm_forward(x, torch.ones(x.shape[1], dtype=x.dtype), None, eps=EPS, rms=True)
    fine = torch.randn(4, 24).to(BF16)
    assert not asked and fused_rows.norm_forward(fine, weight, None, eps=EPS, rms=True).out.shape == fine.shape
    assert asked == ["norm_forward"]
    rstd = fused_rows.norm_forward(fine, weight, None, eps=EPS, rms=True).rstd
    fused_rows.norm_backward(shifted, fine, weight, None, rstd)
    assert "norm_backward" not in asked


def test_without_the_extension_or_the_wish_there_are_none():
    assert cuda_fused.asked_for(None) is None and cuda_fused.asked_for("triton") is None
    built = importlib.util.find_spec("tpkernels._cuda") is not None
    assert (cuda_fused.asked_for("cuda") is not None) == built
