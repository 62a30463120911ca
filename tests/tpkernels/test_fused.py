"""The fused kernels against their formulas in fp64, by the tolerance rule, on every ISA level; and their bits: no
slicing, no thread count and no neighbour changes a row."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tpkernels import _core, fused, testing
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
        """By the kernels, outputs poisoned."""

        def nan() -> Tensor:
            return torch.full((self.rows, self.columns), float("nan"), dtype=self.dtype)

        if self.op == "rotary":
            turned = fused.rotate(self.x, self.turns, head_dim=self.head_dim, out=nan())
            back = fused.rotate(self.dout, self.turns, head_dim=self.head_dim, inverse=True, out=nan())
            return {"out": turned, "dx": back}
        if self.op in ("silu", "gelu_tanh"):
            up = self.delta if self.op == "silu" else None
            out = fused.gated_forward(self.x, up, activation=self.op, out=nan())
            found = fused.gated_backward(self.dout, self.x, up, activation=self.op, out=nan())
            assert torch.equal(found.out, out)
            return {"out": out, "dgate": found.dgate} | ({} if found.dup is None else {"dup": found.dup})
        rms = self.op == "rms"
        values = fused.norm_forward(
            self.x, self.weight, self.bias, eps=EPS, rms=rms, delta=self.delta, total=nan(), out=nan()
        )
        found = fused.norm_backward(
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_gaps_are_read_and_written_in_place_and_the_gaps_stay(dtype):
    case = Case("rms", 9, 21, dtype)
    plain = case.run()
    store = torch.full((9, 40), float("nan"), dtype=dtype)
    spaced = store[:, 3:24]
    spaced.copy_(case.x)
    total = torch.full((4, 9, 30), 7.0, dtype=dtype)
    values = fused.norm_forward(
        spaced, case.weight, None, eps=EPS, rms=True, delta=case.delta, total=total[2, :, :21], out=spaced
    )
    assert torch.equal(values.out, plain["out"]) and torch.equal(spaced, plain["out"])
    assert torch.equal(total[2, :, :21], plain["total"])
    assert store[:, :3].isnan().all() and store[:, 24:].isnan().all()
    total[2, :, :21] = 7.0
    assert (total == 7.0).all()
    dout = case.dout.clone()
    found = fused.norm_backward(dout, values.total, case.weight, None, values.rstd, dresidual=case.dresidual, dx=dout)
    assert found.dx is dout


def test_norm_gradients_are_added_to_what_is_there():
    case = Case("layer", 50, 19, torch.bfloat16)
    plain = case.run()
    values = fused.norm_forward(case.x, case.weight, case.bias, eps=EPS, rms=False, delta=case.delta)
    sums = torch.full((19,), 2.0), torch.full((19,), -3.0)
    fused.norm_backward(case.dout, values.total, case.weight, values.mean, values.rstd, dweight=sums[0], dbias=sums[1])
    torch.testing.assert_close(sums[0], plain["dweight"] + 2, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(sums[1], plain["dbias"] - 3, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_far_out(activation, dtype):
    x = torch.tensor([[-60000.0, -200.0, -90.0, -20.0, -0.0, 0.0, 20.0, 90.0, 60000.0, float("nan")]]).to(dtype)
    one = torch.ones_like(x)
    found = fused.gated_backward(one, x, None, activation=activation)
    assert found.out[0, -1].isnan() and found.dgate[0, -1].isnan()
    exact = (
        torch.nn.functional.silu(x.double())
        if activation == "silu"
        else torch.nn.functional.gelu(x.double(), approximate="tanh")
    )
    torch.testing.assert_close(found.out[:, :-1].double(), exact[:, :-1], rtol=4 * torch.finfo(dtype).eps, atol=1e-7)
    slopes = torch.tensor([[0.0, 0, 0, 0, 0.5, 0.5, 1, 1, 1]])
    torch.testing.assert_close(found.dgate[:, :-1].float(), slopes, rtol=0, atol=1e-7)


# ---- the differentiable ops ------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(fused, "_core", None)  # what an installation without the extension does
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
        with pytest.raises(RuntimeError, match="weight or bias is"):
            fused.norm_forward(x, bad, None, eps=EPS, rms=True)
        with pytest.raises(RuntimeError, match="weight or bias is"):
            fused.norm_backward(x, x, bad, None, torch.ones(3, 1))
    for other in (one, x.double(), x.to("meta")):
        with pytest.raises(RuntimeError, match="must be alike"):
            fused.norm_forward(x, weight, None, eps=EPS, rms=True, delta=other)
        with pytest.raises(RuntimeError, match="must be alike"):
            fused.gated_forward(x, other, activation="silu")
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


def test_under_compile_and_autocast_it_is_plain_torch():
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


def test_turns_of_any_number_of_tokens_compile():
    torch._dynamo.reset()
    compiled = torch.compile(fused.rotary, fullgraph=True, backend="eager", dynamic=True)
    for batch, tokens in ((2, 5), (1, 7), (3, 6)):
        x, turns = torch.randn(batch, tokens, 3, 8), torch.randn(batch, tokens, 1, 4, dtype=torch.complex64)
        torch.testing.assert_close(compiled(x, turns), fused.rotary(x, turns))


def test_empty_rows():
    x = torch.empty(0, 8)
    values = fused.norm_forward(x, torch.ones(8), None, eps=EPS, rms=True)
    found = fused.norm_backward(x, x, torch.ones(8), None, values.rstd)
    assert values.out.shape == (0, 8) and torch.equal(found.dweight, torch.zeros(8))
    assert fused.gated_forward(x, x, activation="silu").shape == (0, 8)
    assert fused.rotate(x, torch.empty(0, 2, dtype=torch.complex64), head_dim=4).shape == (0, 8)


def test_rows_that_do_not_fit_each_other_are_refused():
    x, w = torch.randn(4, 6), torch.ones(6)
    rstd = fused.norm_forward(x, w, None, eps=EPS, rms=True).rstd
    for other in (x[:, :4], x[:2], x.bfloat16()):  # bf16: a backward that runs under autocast
        with pytest.raises(RuntimeError, match="must be alike"):
            fused.gated_backward(other, x, x, activation="silu")
        with pytest.raises(RuntimeError, match="must be alike"):
            fused.norm_backward(other, x, w, None, rstd)
    for turns in (torch.empty(0, 3), torch.empty(3, 3), torch.empty(4, 2), torch.empty(4, 3, device="meta")):
        with pytest.raises(ValueError, match="rotary: turns are"):
            fused.rotate(x, turns.to(torch.complex64), head_dim=6)


def test_torchs_default_dtype_is_not_the_kernels():
    x = torch.randn(5, 6)
    torch.set_default_dtype(torch.float16)
    try:
        values = fused.norm_forward(x, torch.ones_like(x[0]), None, eps=EPS, rms=False)
        found = fused.norm_backward(x, x, torch.ones_like(x[0]), values.mean, values.rstd)
    finally:
        torch.set_default_dtype(torch.float32)
    for each in (values.mean, values.rstd, found.dweight, found.dbias):
        assert each.dtype == torch.float32
