"""A block as one node against its pieces: the same bits, and where it steps aside."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from terapipe.layer import Entry, own_gradients
from terapipe.models import ModelConfig, layers, transformer
from terapipe.models.transformer import Block
from tpkernels import GradientAccumulator, Mask, PrefixCache, block
from tpkernels.fused_rows import norm_forward

LLAMA = ModelConfig(
    vocab=11, hidden=24, layers=1, heads=4, kv_heads=2, head_dim=6, ffn_hidden=20, max_tokens=99, position="rope",
    norm="rmsnorm", mlp="swiglu", bias=False, tied_embeddings=False,
)  # fmt: skip
GPT = replace(LLAMA, kv_heads=4, position="learned", norm="layernorm", mlp="gelu", bias=True)
SLICES = (13, 1, 6)


@pytest.fixture(autouse=True)
def _needs_blas() -> None:
    if not block._gemm(torch.float32):
        pytest.skip("torch's CPU library gives no sgemm_ here")


def make(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Block:
    found = layers(config, seed=5, dtype=dtype)["blocks.0"]()
    assert isinstance(found, Block)
    return found


def run(
    made: nn.Module, *, batch: int = 2, owned: bool = False, dtype: torch.dtype = torch.float32, forwards: int = 1
) -> tuple[dict[str, Tensor], str]:
    """Values and gradients over all slices, and the name of the output's node."""
    torch.manual_seed(1)
    own_gradients(made.parameters() if owned else ())
    tokens = sum(SLICES)
    mask = Mask.from_documents([[7, tokens - 7]] * batch)
    cache = made.make_cache(batch, tokens, dtype, "cpu")  # type: ignore[operator]
    hidden = torch.randn(batch, tokens, LLAMA.hidden, dtype=dtype)
    inputs = [piece.requires_grad_() for piece in hidden.split(SLICES, 1)]  # not contiguous
    outs, start = [], 0
    for piece in inputs:
        positions = mask.positions(start, piece.shape[1])
        outs.append(made(piece, cache, mask, positions))
        start += piece.shape[1]
    for out in reversed(outs):
        (out * torch.arange(out.numel()).view(out.shape).sin()).sum().backward()
    found = {f"out{index}": out.detach() for index, out in enumerate(outs)}
    found |= {f"dx{index}": piece.grad for index, piece in enumerate(inputs) if piece.grad is not None}
    found |= {name: parameter.grad for name, parameter in made.named_parameters() if parameter.grad is not None}
    return found, type(outs[0].grad_fn).__name__


def pieces(monkeypatch: pytest.MonkeyPatch, made: nn.Module, **options: Any) -> dict[str, Tensor]:
    with monkeypatch.context() as patched:
        patched.setattr(transformer, "whole_block", lambda *_, **__: None)
        found, node = run(made, **options)
    assert node != "_WholeBlockBackward"
    return found


@pytest.mark.parametrize("owned", [False, True], ids=["autograd", "in place"])
@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_the_bits_are_those_of_the_pieces(monkeypatch: pytest.MonkeyPatch, config: ModelConfig, owned: bool) -> None:
    got, node = run(make(config), owned=owned)
    expected = pieces(monkeypatch, make(config), owned=owned)
    assert node == "_WholeBlockBackward" and got.keys() == expected.keys()
    for name, value in expected.items():
        if name.endswith("bias"):  # summed by another routine
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5, msg=name)
        else:
            assert torch.equal(got[name], value), name


@pytest.mark.parametrize("owned", [False, True], ids=["autograd", "in place"])
@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_bf16_is_as_exact_as_its_pieces(monkeypatch: pytest.MonkeyPatch, config: ModelConfig, owned: bool) -> None:
    def prepared(dtype: torch.dtype) -> Block:
        made = make(config, dtype)
        made.load_state_dict(make(config, torch.bfloat16).state_dict())
        for parameter in made.parameters() if owned else ():
            parameter.grad_dtype = torch.float64 if dtype == torch.float64 else torch.float32
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        return made

    if not block.served(make(LLAMA).shape, torch.bfloat16, Mask()):
        pytest.skip("the kernels' ISA level is not amx_bf16, or torch's CPU library gives no gemm_bf16bf16f32_")
    got, node = run(prepared(torch.bfloat16), dtype=torch.bfloat16, owned=owned)
    expected = pieces(monkeypatch, prepared(torch.bfloat16), dtype=torch.bfloat16, owned=owned)
    exact = pieces(monkeypatch, prepared(torch.float64), dtype=torch.float64, owned=owned)
    assert node == "_WholeBlockBackward" and got.keys() == expected.keys() == exact.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        scale = exact["value.bias" if name == "key.bias" else name]  # the former's gradient is zero by mathematics
        assert (got[name] - exact[name]).norm() <= 2 * (value - exact[name]).norm() + 2**-8 * scale.norm(), name


@pytest.mark.parametrize("granted", [None, torch.float32], ids=["any dtype", "fp32"])
def test_gradients_have_the_dtype_of_the_pieces(monkeypatch: pytest.MonkeyPatch, granted: torch.dtype | None) -> None:
    def prepared() -> Block:
        made = make(GPT, torch.bfloat16)
        for parameter in made.parameters():
            parameter.grad_dtype = granted
        return made

    got = run(prepared(), dtype=torch.bfloat16)[0]
    expected = pieces(monkeypatch, prepared(), dtype=torch.bfloat16)
    for name, _ in make(GPT).named_parameters():
        assert got[name].dtype == expected[name].dtype == (granted or torch.bfloat16), name


def test_frozen_parameters_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = ("query.weight", "down.bias", "mlp_norm.weight")
    made = make(GPT)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name not in frozen)
    got, _ = run(made)
    assert not got.keys() & set(frozen)
    for name, value in pieces(monkeypatch, copy.deepcopy(make(GPT))).items():
        assert name in frozen or torch.allclose(got[name], value, rtol=1e-5, atol=1e-5), name


def _hook(made: Block) -> None:
    made.up.register_forward_hook(lambda *_: None)


def _subclass(made: Block) -> None:
    made.make_cache = lambda batch, capacity, dtype, device: type("Own", (PrefixCache,), {})(  # type: ignore[assignment, misc]
        batch, capacity, made.shape.kv_heads, made.shape.head_dim, dtype=dtype, device=device
    )


def _scattered(made: Block) -> None:
    def make_cache(batch: int, capacity: int, dtype: torch.dtype, device: str) -> PrefixCache:
        heads, dim = made.shape.kv_heads, made.shape.head_dim
        cache = PrefixCache(batch, capacity, heads, dim, dtype=dtype, device=device)
        cache.v = torch.empty(batch, capacity, dim, heads, dtype=dtype, device=device).transpose(2, 3)
        return copy.copy(cache)  # whose view for backwards is made anew

    made.make_cache = make_cache  # type: ignore[method-assign, assignment]


def _strided(made: Block) -> None:
    made.down.weight = nn.Parameter(made.down.weight.detach().t().contiguous().t())


def _double(made: Block) -> None:
    made.up = nn.Linear(LLAMA.hidden, LLAMA.ffn_hidden, bias=False)  # type: ignore[assignment]
    made.up.weight = nn.Parameter(make(LLAMA).up.weight.detach().clone())


def _narrower(made: Block) -> None:
    for name in ("gate", "up"):
        getattr(made, name).weight = nn.Parameter(getattr(made, name).weight.detach()[:9].clone())
    made.down.weight = nn.Parameter(made.down.weight.detach()[:, :9].contiguous())


def _other_eps(made: Block) -> None:
    made.mlp_norm.eps = 0.1


def _wide_turns(made: Block) -> None:
    angles = made.angles
    assert angles is not None

    def wide(positions: Tensor, *, dtype: torch.dtype) -> Tensor:
        return angles(positions, dtype=torch.float64)

    made.angles = wide  # type: ignore[assignment]


@pytest.mark.parametrize(
    "change", [_hook, _subclass, _scattered, _strided, _double, _narrower, _other_eps, _wide_turns]
)
def test_what_one_call_cannot_compute_runs_as_pieces(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Block], None]
) -> None:
    made, alike = make(LLAMA), make(LLAMA)
    for each in (made, alike):
        change(each)
    expected = pieces(monkeypatch, alike)
    got, node = run(made)
    assert node != "_WholeBlockBackward" and got.keys() == expected.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's, about its own rms_norm
def test_other_dtypes_and_backends_and_autocast_run_as_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(make(LLAMA, torch.float16), dtype=torch.float16)[1] == "_MlpBackward"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "Whole" not in run(make(LLAMA), dtype=torch.bfloat16)[1]
    monkeypatch.setenv("TPK_BACKEND", "reference")
    assert run(make(LLAMA))[1] == "_MlpBackward"


def test_what_a_link_knows_and_wants_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(LLAMA)
    cache, mask = made.make_cache(1, 5, torch.float32, "cpu"), Mask()
    positions = mask.positions(0, 5)
    hidden = torch.randn(1, 5, LLAMA.hidden, requires_grad=True)
    norm = made.attention_norm
    values = norm_forward(hidden.detach()[0], norm.weight, None, eps=norm.eps, rms=True)
    memory = torch.full_like(hidden, torch.nan)
    summands = []

    def add(x: Tensor, residual: Tensor) -> Tensor:
        summands.append((x.clone(), residual.clone()))
        return x + residual

    entry = Entry(values)
    out = made(hidden, cache, mask, positions, entry=entry, out=add)
    entry.gradient = lambda: memory  # as a stage does, which knows its memory only then
    (x, residual), *more = summands
    assert not more and torch.equal(out, x + residual)
    out.sum().backward()
    assert hidden.grad is not None and torch.equal(hidden.grad, memory) and hidden.grad.data_ptr() == memory.data_ptr()
    values.out.mul_(2)  # another norm, another result: it is not computed again
    cache.reset()
    assert not torch.equal(made(hidden, cache, mask, positions, entry=Entry(values), out=add), out)
    cache.reset()
    cache.reset()
    grad = hidden.grad.clone()
    wide = torch.empty(1, 5, 2 * LLAMA.hidden)
    for odd in (torch.empty(3), wide[..., ::2], torch.empty_like(hidden, device="meta"), hidden.detach().double()):
        for whole in (transformer.whole_block, lambda *_, **__: None):  # memory that does not fit is left alone
            hidden.grad = None
            monkeypatch.setattr(transformer, "whole_block", whole)
            made(
                hidden, cache, mask, positions, entry=Entry(None, functools.partial(odd.view, odd.shape))
            ).sum().backward()
            torch.testing.assert_close(hidden.grad, grad)
            cache.reset()


def test_a_graph_runs_twice_and_second_derivatives_are_refused() -> None:
    made = make(LLAMA)
    mask = Mask()
    cache = made.make_cache(1, 5, torch.float32, "cpu")
    hidden = torch.randn(1, 5, LLAMA.hidden, requires_grad=True)
    loss = made(hidden, cache, mask, mask.positions(0, 5)).square().sum()
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, hidden, retain_graph=True)[0])
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_an_input_changed_before_the_backward_is_noticed() -> None:
    made, mask = make(LLAMA), Mask()
    hidden = torch.randn(1, 5, LLAMA.hidden, requires_grad=True)
    moved = hidden * 1
    loss = made(moved, made.make_cache(1, 5, torch.float32, "cpu"), mask, mask.positions(0, 5)).sum()
    moved.data.add_(0)  # allowed: no version
    moved.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def once(made: Block, cache: PrefixCache | None = None, mask: Any = None, positions: Tensor | None = None) -> Tensor:
    """Of two sequences of five tokens."""
    mask = Mask() if mask is None else mask
    cache = made.make_cache(2, 5, torch.float32, "cpu") if cache is None else cache
    hidden = torch.arange(2 * 5 * LLAMA.hidden, dtype=torch.float32, device="cpu").sin().view(2, 5, -1)
    hidden.requires_grad_()
    found = made(hidden, cache, mask, Mask().positions(0, 5) if positions is None else positions)
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("name", ["attention_norm", "mlp_norm"])
def test_no_kernel_reads_a_norm_on_another_device(name: str) -> None:
    made = make(LLAMA)
    getattr(made, name).to("meta")
    try:
        assert once(made).is_meta  # torch's own ops go on with a shape
    except (RuntimeError, ValueError) as error:
        assert "meta" in str(error)


def test_caches_turns_and_masks_that_do_not_fit_are_refused_as_by_the_pieces() -> None:
    made = make(LLAMA)
    for sizes in ((1, 6), (2, 4), (4, 6), (2, 16), (2, 6, 9)):
        with pytest.raises(ValueError, match=r"\bthe cache holds\b"):
            once(made, PrefixCache(2, 5, *sizes))
    for positions in (
        torch.arange(4)[None],
        torch.zeros(1, 0, dtype=torch.int64),
        torch.arange(5, device="meta")[None],
    ):
        with pytest.raises(ValueError, match="rotary: turns are"):
            once(made, positions=positions)
    with pytest.raises(TypeError, match="mask is a str"):
        once(made, mask="causal")
    made.up.weight = None  # type: ignore[assignment]
    with pytest.raises((AttributeError, TypeError)):
        once(made)


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_torchs_default_dtype_and_device_are_not_the_blocks(config: ModelConfig) -> None:
    made, expected = make(config), run(make(config))[0]
    cache, mask, positions = made.make_cache(2, 5, torch.float32, "cpu"), Mask(), torch.arange(5)[None]
    block._gemm.cache_clear()
    block._served.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert block._gemm(torch.float32)
            found = once(made, cache, mask, positions)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32 and found.is_cpu and torch.equal(found, once(make(config)))
    assert all(torch.equal(value, expected[name]) for name, value in run(made)[0].items())


def _halved(made: Block, cache: PrefixCache) -> None:
    made.half()


def _resized(made: Block, cache: PrefixCache) -> None:
    made.down.weight.data = made.down.weight.data[:, :9].contiguous()


def _other_keys(made: Block, cache: PrefixCache) -> None:
    cache.k = cache.k.clone()


def _small_sums(made: Block, cache: PrefixCache) -> None:
    cache.accumulator = GradientAccumulator(2, 3, LLAMA.kv_heads, LLAMA.head_dim)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_halved, "another size, dtype"),
        (_resized, "another size, dtype"),
        (_other_keys, "another k or v"),
        (_small_sums, "capacity or more"),
    ],
)
def test_memory_exchanged_before_the_backward_is_an_error(
    change: Callable[[Block, PrefixCache], None], says: str
) -> None:
    made = make(LLAMA)
    cache = made.make_cache(2, 5, torch.float32, "cpu")
    loss = once(made, cache).sum()
    change(made, cache)
    with pytest.raises((RuntimeError, ValueError), match=says):
        loss.backward()
    assert cache.backward_end == 5 and all(parameter.grad is None for parameter in made.parameters())


def test_gradients_of_another_dtype_are_left_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared() -> Block:
        made = make(GPT)
        for parameter in made.parameters():
            parameter.grad_dtype = torch.float64
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float64)
        return made

    got, _ = run(prepared(), owned=True)
    expected, plain = pieces(monkeypatch, prepared(), owned=True), run(make(GPT))[0]
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5, msg=name)
        torch.testing.assert_close(value.float(), plain[name], rtol=1e-4, atol=1e-4, msg=name)


def test_a_gradient_behind_a_negative_view_is_left_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared() -> Block:
        made = make(GPT)
        for parameter in made.parameters():
            parameter.grad = torch._neg_view(torch.full_like(parameter, 100))
        return made

    got, plain = run(prepared(), owned=True)[0], run(make(GPT))[0]
    expected = pieces(monkeypatch, prepared(), owned=True)
    for name in dict(make(GPT).named_parameters()):
        for value in (got[name], expected[name]):
            torch.testing.assert_close(value, plain[name] - 100, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    "unpack",
    [lambda x: x[:3], lambda x: x.double(), lambda x: torch.stack([x, x], 1)[:, 0]],
    ids=["shorter", "wider", "strided"],
)
def test_saved_values_that_a_hook_changes_are_an_error(unpack: Callable[[Tensor], Tensor]) -> None:
    made = make(LLAMA)
    cache = made.make_cache(2, 5, torch.float32, "cpu")
    for saved in range(8):
        flat = [-1]  # of the tensors that block_forward made, each is one row; parameters' come before them

        def changed(x: Tensor, saved: int = saved, flat: list[int] = flat) -> Tensor:
            flat[0] += x.dim() == 1 and not isinstance(x, nn.Parameter)
            return unpack(x) if x.numel() and flat[0] == saved and x.dim() == 1 else x

        cache.reset()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, changed):
            loss = once(made, cache).sum()
        with pytest.raises(RuntimeError, match="hooks on saved tensors must give back"):
            loss.backward()
        assert cache.backward_end == 5 and all(parameter.grad is None for parameter in made.parameters())


def test_what_a_backward_needs_is_autograds_to_keep_and_to_free() -> None:
    made, seen = make(LLAMA), list[Tensor]()

    def keep(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        once(made)
    rows = 2 * 5
    sizes = [rows * LLAMA.hidden] * 3 + [rows * 24] * 2 + [rows * LLAMA.ffn_hidden] * 2
    assert sorted(sizes) == sorted(x.numel() for x in seen if x.dim() == 1 and x.numel() >= min(sizes))


def test_a_slice_that_autograd_cannot_save_is_not_in_the_cache() -> None:
    made = make(LLAMA)
    cache = made.make_cache(2, 5, torch.float32, "cpu")
    with torch.inference_mode():
        hidden = torch.randn(2, 5, LLAMA.hidden)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        made(hidden, cache, Mask(), Mask().positions(0, 5))
    assert cache.length == 0


def test_gemms_wanted_in_bf16_are_torchs() -> None:
    made = make(LLAMA)
    torch.set_float32_matmul_precision("medium")
    try:
        assert run(made)[1] == "_MlpBackward"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert run(made)[1] == "_WholeBlockBackward"
