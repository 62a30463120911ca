"""The whole block, slice by slice, against its formula over the whole sequence in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tpkernels import Mask, PrefixCache, block, prefix_attention
from tpkernels.block import MODULES, BlockShape, block_backward, block_forward
from tpkernels.fused_rows import norm_forward

pytestmark = pytest.mark.skipif(
    not block.served(BlockShape(4, 1, 1, 4, 4, True, True, 1e-5), torch.float32, Mask()),
    reason="torch's CPU library gives no sgemm_, or the cpu backend is missing",
)
needs_bf16 = pytest.mark.skipif(
    not block.served(BlockShape(4, 1, 1, 4, 4, True, True, 1e-5), torch.bfloat16, Mask()),
    reason="the kernels' ISA level is not amx_bf16, or torch's CPU library gives no gemm_bf16bf16f32_",
)
LLAMA = BlockShape(24, 4, 2, 6, 20, rms=True, gated=True, eps=1e-5)
GPT = BlockShape(13, 3, 3, 5, 9, rms=False, gated=False, eps=1e-3)
TOLERANCE = 1e-5
BF16_ROUNDING = 2**-8


@dataclass
class Case:
    shape: BlockShape
    slices: Sequence[int]
    batch: int = 1
    biases: bool = False
    rotary: bool = True
    mask: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.tokens = sum(self.slices)
        generator = torch.Generator().manual_seed(self.seed)
        draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
        given = lambda *size: draw(*size).to(self.dtype)  # noqa: E731
        s = self.shape
        q, kv = s.query_heads * s.head_dim, s.kv_heads * s.head_dim
        sizes = dict(zip(MODULES[1:5], [(q, s.hidden), (kv, s.hidden), (kv, s.hidden), (s.hidden, q)], strict=True))
        sizes |= {"gate": (s.ffn, s.hidden), "up": (s.ffn, s.hidden), "down": (s.hidden, s.ffn)}
        self.parameters: dict[str, Tensor | None] = {}
        for name in MODULES:
            size = sizes.get(name, (s.hidden,))
            left_out = name == "gate" and not s.gated
            has_bias = self.biases and not (s.rms and "norm" in name)
            self.parameters[f"{name}.weight"] = None if left_out else given(*size) / size[-1] ** 0.5
            self.parameters[f"{name}.bias"] = given(size[0]) if has_bias and not left_out else None
            if not s.rms and "norm" in name and not self.biases:
                self.parameters[f"{name}.bias"] = given(size[0])  # LayerNorm's kernel sums it anyway
        self.x, self.dout = given(self.batch, self.tokens, s.hidden), given(self.batch, self.tokens, s.hidden)
        angles = draw(self.tokens, s.head_dim // 2)
        self.turns = torch.polar(torch.ones_like(angles), angles) if self.rotary else None

    @property
    def given(self) -> list[Tensor | None]:
        return list(self.parameters.values())


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """[batch, tokens, heads, head_dim] of a whole sequence, with all scores."""
    k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], 2) for each in (k, v))
    position = torch.arange(q.shape[1])
    distance = position[:, None] - position
    seen = distance >= 0
    if mask.window[0] is not None:
        seen &= distance <= mask.window[0]
    if mask.document_starts is not None:
        seen = seen & (position >= mask.document_starts[:, :, None])[:, None]
    scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[3] ** 0.5
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def formula(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """out, dx and the gradient of every parameter, of the whole sequence in `dtype`, written out; below fp64 with
    attention by prefix_attention, whose own tests say how far its 16 bits may be off."""
    s, mask = case.shape, Mask(**case.mask)
    p = {
        name: None if value is None else value.to(dtype).requires_grad_(True) for name, value in case.parameters.items()
    }
    x = case.x.to(dtype).requires_grad_(True)

    def norm(value: Tensor, name: str) -> Tensor:
        weight = p[f"{name}.weight"]
        assert weight is not None
        if s.rms:
            return value * (value.square().mean(-1, keepdim=True) + s.eps).rsqrt() * weight
        return F.layer_norm(value, (s.hidden,), weight, p[f"{name}.bias"], s.eps)

    def linear(value: Tensor, name: str) -> Tensor:
        weight = p[f"{name}.weight"]
        assert weight is not None
        return F.linear(value, weight, p[f"{name}.bias"])

    def turned(value: Tensor) -> Tensor:
        if case.turns is None:
            return value
        pairs = torch.view_as_complex(value.double().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * case.turns.to(torch.complex128)[:, None]).flatten(-2).to(dtype)

    normed = norm(x, "attention_norm")
    q, k, v = (linear(normed, name).unflatten(-1, (-1, s.head_dim)) for name in ("query", "key", "value"))
    q, k = turned(q), turned(k)
    attended = prefix_attention(q, k, v, mask=mask) if dtype != torch.float64 else attention(q, k, v, mask)
    middle = x + linear(attended.flatten(2), "output")
    normed = norm(middle, "mlp_norm")
    up = linear(normed, "up")
    inner = F.silu(linear(normed, "gate")) * up if s.gated else F.gelu(up, approximate="tanh")
    out = middle + linear(inner, "down")
    out.backward(case.dout.to(dtype))
    found = {"out": out.detach(), "dx": x.grad}
    found |= {name: value.grad for name, value in p.items() if value is not None}
    return {name: value for name, value in found.items() if value is not None}


def computed(
    case: Case, *, wanted: Callable[[str], bool] = lambda _: True, normed: bool = False, apart: bool = False
) -> dict[str, Tensor]:
    """The same, slice by slice; gradients start from 1, which is taken off again."""
    s, mask = case.shape, Mask(**case.mask)
    cache = PrefixCache(case.batch, case.tokens, s.kv_heads, s.head_dim, dtype=case.dtype)
    for rows in (cache.k, cache.v):
        rows.fill_(torch.nan)
    gradients = {
        name: torch.ones_like(value, dtype=torch.float32) if value is not None and wanted(name) else None
        for name, value in case.parameters.items()
    }
    xs = [piece.contiguous() for piece in case.x.split(list(case.slices), 1)]
    douts = [piece.contiguous() for piece in case.dout.split(list(case.slices), 1)]
    turns = [None] * len(xs) if case.turns is None else list(case.turns.split(list(case.slices)))
    outs, runs = [], []
    weight, bias = case.parameters["attention_norm.weight"], case.parameters["attention_norm.bias"]
    assert weight is not None
    for x, turn in zip(xs, turns, strict=True):
        values = norm_forward(x.flatten(0, 1), weight, bias, eps=s.eps, rms=s.rms) if normed else None
        out, run = block_forward(s, x, case.given, cache, mask, turns=turn, normed=values, apart=apart)
        middle = run.saved[0]
        assert middle is not None
        outs.append(out + middle.view(x.shape) if apart else out)
        runs.append(run)
    cache.require_accumulator().dk.fill_(torch.nan)
    dxs = [torch.full_like(x, torch.nan) for x in xs]
    for x, dout, run, dx in reversed(list(zip(xs, douts, runs, dxs, strict=True))):
        block_backward(s, run, dout, x, case.given, list(gradients.values()), cache, mask, dx=dx)
    found = {"out": torch.cat(outs, 1), "dx": torch.cat(dxs, 1)}
    return found | {name: value - 1 for name, value in gradients.items() if value is not None}


def compare(got: dict[str, Tensor], exact: dict[str, Tensor], rounded: dict[str, Tensor] | None = None) -> None:
    """To the exact value's norm, or its neighbours': the gradient of the key's bias is zero by mathematics. rounded:
    the formula op by op in bf16, than which nothing may be twice as far off, beyond one rounding."""
    for name, value in got.items():
        scale = exact["value.bias"] if name == "key.bias" else exact[name]
        allowed = TOLERANCE * (scale.norm() + scale.numel() ** 0.5)
        if rounded is not None:
            allowed += 2 * (rounded[name] - exact[name]).norm() + BF16_ROUNDING * scale.norm()
        assert (value - exact[name]).norm() <= allowed, name


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is NaN: what is saved or used as scratch is written before it is read."""
    empty = torch.empty

    def filled(*size: Any, **options: Any) -> Tensor:
        return (
            empty(*size, **options).fill_(torch.nan)
            if options.get("dtype", torch.float32).is_floating_point
            else (empty(*size, **options))
        )

    monkeypatch.setattr(block.torch, "empty", filled)


CASES = [
    Case(LLAMA, [1]),
    Case(LLAMA, [33, 1, 100], batch=2),
    Case(LLAMA, [70, 64], biases=True, rotary=False),
    Case(LLAMA, [5, 60], mask={"window": (7, None)}),
    Case(LLAMA, [40, 27], batch=2, mask={"document_starts": torch.tensor([[0] * 19 + [19] * 48], dtype=torch.int32)}),
    Case(GPT, [31, 2], batch=3, rotary=False),
    Case(GPT, [1, 1, 63], biases=True, rotary=False),
    Case(BlockShape(300, 2, 1, 64, 500, True, True, 1e-6), [129, 128]),
    Case(BlockShape(1, 1, 1, 1, 1, True, True, 1.0), [2, 3], rotary=False),
]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.shape}-{case.slices}")
def test_slices_give_the_formula_of_the_whole_sequence(case: Case) -> None:
    compare(computed(case), formula(case))


# Without the last: one number may be right by luck, and no other be as near.
BF16_CASES = [replace(case, dtype=torch.bfloat16) for case in CASES[:-1]] + [
    Case(BlockShape(96, 4, 2, 32, 160, True, True, 1e-5), [65, 1, 62], batch=2, dtype=torch.bfloat16),
    Case(BlockShape(64, 3, 3, 40, 100, False, False, 1e-5), [70, 59], biases=True, rotary=False, dtype=torch.bfloat16),
]


@needs_bf16
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", BF16_CASES, ids=lambda case: f"{case.shape}-{case.slices}")
def test_bf16_is_as_near_to_the_formula_as_its_ops_one_by_one(case: Case) -> None:
    compare(computed(case), formula(case), formula(case, torch.bfloat16))


@given(
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 5),
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
)
@example(7, 1, 1, 4, [16, 16], 2, True, False, 3)
@settings(max_examples=60, deadline=None)
def test_any_sizes(
    hidden: int,
    kv_heads: int,
    group: int,
    half: int,
    slices: list[int],
    batch: int,
    llama: bool,
    biases: bool,
    seed: int,
) -> None:
    shape = BlockShape(hidden, kv_heads * group, kv_heads, 2 * half, hidden + 2, llama, llama, 1e-2)
    case = Case(shape, slices, batch, biases=biases, rotary=llama, seed=seed)
    compare(computed(case), formula(case))


def test_a_norm_that_is_known_and_a_sum_that_is_wanted_apart_change_no_bit() -> None:
    case = CASES[1]
    plain = computed(case)
    for found in (computed(case, normed=True), computed(case, apart=True)):
        for name, value in plain.items():
            if name == "out":  # two roundings instead of one
                torch.testing.assert_close(found[name], value)
            else:
                assert torch.equal(found[name], value), name


def test_gradients_that_nobody_wants_are_left_out() -> None:
    frozen = ("query.weight", "attention_norm.weight", "down.weight", "up.bias", "mlp_norm.bias")
    case = CASES[6]
    whole, part = computed(case), computed(case, wanted=lambda name: name not in frozen)
    assert whole.keys() - part.keys() == set(frozen)
    assert all(torch.equal(value, whole[name]) for name, value in part.items())


def test_threads_change_no_bit() -> None:
    case = CASES[7]
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(computed(case))
    finally:
        torch.set_num_threads(threads)
    compare(found[1], formula(case))
    assert torch.equal(found[0]["out"], found[1]["out"])


def test_a_refused_slice_leaves_the_cache_as_it_was() -> None:
    case = Case(LLAMA, [4, 3])
    cache = PrefixCache(1, 6, LLAMA.kv_heads, LLAMA.head_dim)
    first, second = (piece.contiguous() for piece in case.x.split([4, 3], 1))
    assert case.turns is not None
    _, run = block_forward(LLAMA, first, case.given, cache, Mask(), turns=case.turns[:4])
    kept = cache.k.clone(), cache.v.clone(), cache.position.clone(), cache.progress.clone()
    with pytest.raises(ValueError, match="needs 7 tokens but the cache's capacity is 6"):
        block_forward(LLAMA, second, case.given, cache, Mask(), turns=case.turns[4:])
    for before, now in zip(kept, (cache.k, cache.v, cache.position, cache.progress), strict=True):
        assert torch.equal(before.nan_to_num(), now.nan_to_num())

    def backward() -> None:
        dout, dx = case.dout[:, :4].contiguous(), torch.empty_like(first)
        block_backward(LLAMA, run, dout, first, case.given, [None] * 18, cache, Mask(), dx=dx)

    backward()
    with pytest.raises(ValueError, match="would be appended to a cache whose backward has reached 0 of 4"):
        block_forward(LLAMA, second[:, :1], case.given, cache, Mask(), turns=case.turns[:1])
    cache.reset()
    with pytest.raises(ValueError, match=r"reset\(\) after its forward"):
        backward()


def test_without_a_blas_or_with_another_backend_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    assert block.served(LLAMA, torch.float32, Mask())
    monkeypatch.setenv("TPK_BACKEND", "reference")
    assert not block.served(LLAMA, torch.float32, Mask())
    monkeypatch.delenv("TPK_BACKEND")
    assert not block.served(LLAMA._replace(head_dim=257), torch.float32, Mask())
    assert not block.served(LLAMA, torch.float16, Mask())
    monkeypatch.setattr(block, "_gemm", lambda dtype: 0)
    block._served.cache_clear()
    assert not block.served(LLAMA, torch.float32, Mask())
    block._served.cache_clear()


@needs_bf16
@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512", "avx512_bf16"])
def test_below_amx_bf16_runs_in_ops(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    assert block.served(LLAMA, torch.bfloat16, Mask())
    monkeypatch.setenv("TPK_CPU_ISA", level)
    assert not block.served(LLAMA, torch.bfloat16, Mask()) and block.served(LLAMA, torch.float32, Mask())


def test_a_library_without_sgemm_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    assert block._gemm.__wrapped__(torch.float32) == 0
