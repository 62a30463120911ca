"""The fused kernels against their formulas in fp64, by the tolerance rule, on every ISA level; and their bits: no
slicing, no thread count and no neighbour changes a row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tpkernels import _core, fused_rows, testing
from tpkernels import fused_reference as formulas

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(40, 1), (25, 2), (7, 13), (5, 47), (33, 64), (70, 130), (2, 1000)]
LEVELS = ("baseline", "avx2", "avx512", "avx512_bf16")
EPS = 1e-5
OPS = ("rms", "layer", "layer_plain", "silu", "gelu_tanh", "rotary")


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch):
    if request.param not in _core.isa_levels():
        pytest.skip(f"this machine has no {request.param}; it runs {', '.join(_core.isa_levels())}")
    monkeypatch.setenv("TPK_CPU_ISA", request.param)


class Case:
    """One op on random rows, and its results by the kernels or by the formulas in a dtype: name -> tensor."""

    def __init__(self, op: str, rows: int, columns: int, dtype: torch.dtype, *, seed: int = 0, magnitude: float = 1.0):
        draw = torch.Generator().manual_seed(seed)
        self.op, self.rows, self.columns, self.dtype = op, rows, columns, dtype
        self.head_dim = 2 if op != "rotary" else max(2, columns // 3 // 2 * 2)
        if op == "rotary":
            self.columns = columns = self.head_dim * 3
        names = ("x", "delta", "dout", "dresidual")
        for name in names:
            setattr(self, name, (torch.randn(rows, columns, generator=draw) * magnitude).to(dtype))
        self.weight, self.bias = (torch.randn(columns, generator=draw).to(dtype) for _ in range(2))
        angles = torch.randn(rows, self.head_dim // 2, generator=draw) * 3
        self.turns = torch.polar(torch.ones_like(angles), angles)
        if op in ("rms", "layer_plain"):
            self.bias = None

    def cut(self, first: int, end: int) -> Case:
        """The same op on rows [first, end)."""
        piece = Case(self.op, 1, 1, self.dtype)
        piece.__dict__.update(self.__dict__)
        piece.rows = end - first
        for name in ("x", "delta", "dout", "dresidual", "turns"):
            setattr(piece, name, getattr(self, name)[first:end])
        return piece

    def run(self) -> dict[str, Tensor]:
        """By the kernels, into poisoned outputs, all of which are written."""
        given: list[Tensor] = []

        def nan() -> Tensor:
            given.append(torch.full((self.rows, self.columns), float("nan"), dtype=self.dtype))
            return given[-1]

        results = self._into(nan)
        assert not any(out.isnan().any() for out in given)
        return results

    def _into(self, nan: Callable[[], Tensor]) -> dict[str, Tensor]:
        if self.op == "rotary":
            turned = fused_rows.rotate(self.x, self.turns, head_dim=self.head_dim, out=nan())
            back = fused_rows.rotate(self.dout, self.turns, head_dim=self.head_dim, inverse=True, out=nan())
            return {"out": turned, "dx": back}
        if self.op in ("silu", "gelu_tanh"):
            up = self.delta if self.op == "silu" else None
            out = fused_rows.gated_forward(self.x, up, activation=self.op, out=nan())
            found = fused_rows.gated_backward(self.dout, self.x, up, activation=self.op, out=nan())
            assert torch.equal(found.out, out)
            return {"out": out, "dgate": found.dgate} | ({} if found.dup is None else {"dup": found.dup})
        rms = self.op == "rms"
        values = fused_rows.norm_forward(
            self.x, self.weight, self.bias, eps=EPS, rms=rms, delta=self.delta, total=nan(), out=nan()
        )
        found = fused_rows.norm_backward(
            self.dout, values.total, self.weight, values.mean, values.rstd, dresidual=self.dresidual, dx=nan()
        )
        results = {"total": values.total, "out": values.out, "dx": found.dx, "dweight": found.dweight}
        return results if rms else results | {"dbias": found.dbias}

    def formulas(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All arithmetic in dtype (16 bits: in fp32, rounded at the end)."""
        x, delta, dout, dresidual, weight = (
            getattr(self, name).to(dtype) for name in ("x", "delta", "dout", "dresidual", "weight")
        )
        if self.op == "rotary":
            turns = self.turns.to(torch.complex128) if dtype == torch.float64 else self.turns
            results = (
                formulas.rotate(y.unflatten(1, (-1, self.head_dim)), turns, inverse=inverse).flatten(1)
                for y, inverse in ((x, False), (dout, True))
            )
            return dict(zip(("out", "dx"), results, strict=True))
        if self.op in ("silu", "gelu_tanh"):
            gated = formulas.gated_backward(dout, x, delta if self.op == "silu" else None, activation=self.op)
            return {name: value for name, value in gated._asdict().items() if value is not None}
        total = (formulas.wide(self.x) + formulas.wide(self.delta)).to(self.dtype).to(dtype)  # rounded once, always
        bias = None if self.bias is None else self.bias.to(dtype)
        values = formulas.norm_forward(total, weight, bias, eps=EPS, rms=self.op == "rms")
        found = formulas.norm_backward(dout, total, weight, values.mean, values.rstd, dresidual=dresidual)
        results = {"total": total, "out": values.out, "dx": found.dx, "dweight": found.dweight}
        return results if found.dbias is None else results | {"dbias": found.dbias}

    def check(self) -> None:
        """The tolerance rule: as close to fp64 as twice (gradients: three times) the formulas in this precision."""
        exact, yardstick = self.formulas(torch.float64), self.formulas(self.dtype)
        results = self.run()
        assert set(results) == set(exact)
        for name, value in results.items():
            truth = exact[name]
            assert value.shape == truth.shape
            precision = torch.float32 if name in ("dweight", "dbias") else self.dtype
            factor = 3 if name.startswith("d") else 2
            allowed = factor * (yardstick[name].double() - truth).abs().max() + testing.noise(truth, precision)
            error = (value.double() - truth).abs().max()
            assert error <= allowed, f"{self.op} {self.rows}x{self.columns} {self.dtype} {name}: {error} > {allowed}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_every_level_is_as_close_as_the_same_precision_formulas(op, dtype, level):
    for index, (rows, columns) in enumerate(SHAPES):
        if columns < 7 and op in ("rms", "layer", "layer_plain"):
            continue  # the gradient of a row of one or two is zero but for eps: nothing to compare with
        Case(op, rows, columns, dtype, seed=index).check()
        Case(op, rows, columns, dtype, seed=index, magnitude=30.0).check()


@given(
    st.sampled_from(OPS), st.sampled_from(DTYPES), st.integers(2, 300), st.integers(1, 70), st.data(), st.integers(1, 3)
)
def test_no_slicing_and_no_thread_count_changes_a_bit_of_a_row(op, dtype, rows, columns, data, threads):
    case = Case(op, rows, columns, dtype)
    whole = case.run()
    cut = data.draw(st.integers(1, rows - 1))
    torch.set_num_threads(threads)
    pieces = [case.cut(0, cut).run(), case.cut(cut, rows).run()]
    for name, value in whole.items():
        if name not in ("dweight", "dbias"):
            assert torch.equal(value, torch.cat([piece[name] for piece in pieces])), name
    again = case.run()
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


@pytest.mark.parametrize("op", ["rms", "layer", "silu", "rotary"])
def test_many_threads_give_the_bits_of_one(op):
    case = Case(op, 515, 260, torch.float32)
    alone = case.run()
    torch.set_num_threads(4)
    for name, value in case.run().items():
        assert torch.equal(value, alone[name]), name


@pytest.mark.parametrize("op", OPS)
def test_rows_without_kernels_are_plain_torch(op):
    case = Case(op, 7, 13, torch.float64)
    exact = case.formulas(torch.float64)
    for name, value in case.run().items():
        torch.testing.assert_close(value, exact[name], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_turns_come_again_after_their_last(number):
    case = Case("rotary", 10, 24, torch.float32)
    few = fused_rows.rotate(case.x, case.turns[:number], head_dim=case.head_dim)
    case.turns = case.turns[:number].repeat(10 // number, 1)
    assert torch.equal(few, case.run()["out"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_gaps_are_read_and_written_in_place_and_the_gaps_stay(dtype):
    case = Case("rms", 9, 21, dtype)
    plain = case.run()
    store = torch.full((9, 40), float("nan"), dtype=dtype)
    spaced = store[:, 3:24]
    spaced.copy_(case.x)
    total = torch.full((4, 9, 30), 7.0, dtype=dtype)
    values = fused_rows.norm_forward(
        spaced, case.weight, None, eps=EPS, rms=True, delta=case.delta, total=total[2, :, :21], out=spaced
    )
    assert torch.equal(values.out, plain["out"]) and torch.equal(spaced, plain["out"])
    assert torch.equal(total[2, :, :21], plain["total"])
    assert store[:, :3].isnan().all() and store[:, 24:].isnan().all()
    total[2, :, :21] = 7.0
    assert (total == 7.0).all()
    dout = case.dout.clone()
    found = fused_rows.norm_backward(
        dout, values.total, case.weight, None, values.rstd, dresidual=case.dresidual, dx=dout
    )
    assert found.dx is dout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_norm_gradients_are_added_to_what_is_there(dtype):
    case = Case("layer", 50, 19, dtype)
    plain = case.run()
    values = fused_rows.norm_forward(case.x, case.weight, case.bias, eps=EPS, rms=False, delta=case.delta)
    sums = [torch.full_like(plain["dweight"], value) for value in (2.0, -3.0)]
    fused_rows.norm_backward(
        case.dout, values.total, case.weight, values.mean, values.rstd, dweight=sums[0], dbias=sums[1]
    )
    torch.testing.assert_close(sums[0], plain["dweight"] + 2, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(sums[1], plain["dbias"] - 3, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_far_out(activation, dtype):
    x = torch.tensor([[-60000.0, -200.0, -90.0, -20.0, -0.0, 0.0, 20.0, 90.0, 60000.0, float("nan")]]).to(dtype)
    one = torch.ones_like(x)
    found = fused_rows.gated_backward(one, x, None, activation=activation)
    assert found.out[0, -1].isnan() and found.dgate[0, -1].isnan()
    exact = (
        torch.nn.functional.silu(x.double())
        if activation == "silu"
        else torch.nn.functional.gelu(x.double(), approximate="tanh")
    )
    torch.testing.assert_close(found.out[:, :-1].double(), exact[:, :-1], rtol=4 * torch.finfo(dtype).eps, atol=1e-7)
    slopes = torch.tensor([[0.0, 0, 0, 0, 0.5, 0.5, 1, 1, 1]])
    torch.testing.assert_close(found.dgate[:, :-1].float(), slopes, rtol=0, atol=1e-7)


def test_empty_rows():
    x = torch.empty(0, 8)
    values = fused_rows.norm_forward(x, torch.ones(8), None, eps=EPS, rms=True)
    found = fused_rows.norm_backward(x, x, torch.ones(8), None, values.rstd)
    assert values.out.shape == (0, 8) and torch.equal(found.dweight, torch.zeros(8))
    assert fused_rows.gated_forward(x, x, activation="silu").shape == (0, 8)
    assert fused_rows.rotate(x, torch.empty(0, 2, dtype=torch.complex64), head_dim=4).shape == (0, 8)


def test_rows_that_do_not_fit_each_other_are_refused():
    x, w = torch.randn(4, 6), torch.ones(6)
    rstd = fused_rows.norm_forward(x, w, None, eps=EPS, rms=True).rstd
    for other in (x[:, :4], x[:2], x.bfloat16()):  # bf16: a backward that runs under autocast
        with pytest.raises(RuntimeError, match="must be alike"):
            fused_rows.gated_backward(other, x, x, activation="silu")
        with pytest.raises(RuntimeError, match="must be alike"):
            fused_rows.norm_backward(other, x, w, None, rstd)
    one, far = x[:1], x.to("meta")
    for other in (one, x.double(), far):
        with pytest.raises(RuntimeError, match="must be alike"):
            fused_rows.norm_forward(x, w, None, eps=EPS, rms=True, delta=other)
        with pytest.raises(RuntimeError, match="must be alike"):
            fused_rows.gated_forward(x, other, activation="silu")
    for bad in (w[:5], torch.ones(7), w.bfloat16(), w[None], w.to("meta")):
        with pytest.raises(RuntimeError, match="weight or bias is"):
            fused_rows.norm_forward(x, bad, None, eps=EPS, rms=True)
        with pytest.raises(RuntimeError, match="weight or bias is"):
            fused_rows.norm_forward(x, w, bad, eps=EPS, rms=False)
        with pytest.raises(RuntimeError, match="weight or bias is"):
            fused_rows.norm_backward(x, x, bad, None, rstd)
    for turns in (torch.empty(0, 3), torch.empty(3, 3), torch.empty(4, 2), torch.empty(4, 3, device="meta")):
        with pytest.raises(ValueError, match="rotary: turns are"):
            fused_rows.rotate(x, turns.to(torch.complex64), head_dim=6)


def test_torchs_default_dtype_is_not_the_kernels():
    x = torch.randn(5, 6)
    torch.set_default_dtype(torch.float16)
    try:
        values = fused_rows.norm_forward(x, torch.ones_like(x[0]), None, eps=EPS, rms=False)
        found = fused_rows.norm_backward(x, x, torch.ones_like(x[0]), values.mean, values.rstd)
    finally:
        torch.set_default_dtype(torch.float32)
    for each in (values.mean, values.rstd, found.dweight, found.dbias):
        assert each.dtype == torch.float32
