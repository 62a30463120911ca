"""Bugs that other attention kernels had, as cases for the Triton ones: rows, shapes, values, strides.

../test_attention_cases.py has them for all other backends, test_attention_memory.py those about memory and offsets.

The same cases at sizes the interpreter can take: its tiles are 32 x 32, so 33 is "just past a tile". Each docstring
names where the bug was found; FA is Dao-AILab/flash-attention.
"""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch

from tpkernels import Mask, PrefixCache, prefix_attention, testing
from tpkernels.testing import AttentionCase

# numpy, which the interpreter computes with, warns of exp(-inf) and 0 / 0 in rows that see no key.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def leaves(device):
    def make(*shapes, dtype=torch.float32, factor=1.0):
        return [(torch.randn(shape) * factor).to(device, dtype).requires_grad_() for shape in shapes]

    return make


def attend(*arguments, **settings):
    return prefix_attention(*arguments, backend="triton", **settings)


def grads(out, dout, *inputs):
    return torch.autograd.grad(out, inputs, dout)


# ---- rows that see no key --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_more_queries_than_keys_leave_the_first_rows_empty(with_sinks, deterministic, leaves, device):
    """FA #1778 (2048 queries, 1024 keys: the first 1024 rows must be exactly 0), FA PR #978 (their lse was +inf)."""
    q, k, v = leaves((1, 75, 2, 16), (1, 35, 2, 16), (1, 35, 2, 16))
    sinks = torch.tensor([0.5, -1.0], device=device) if with_sinks else None
    settings = {"sinks": sinks, "deterministic": deterministic}
    out, lse = attend(q, k, v, return_lse=True, **settings)
    dout = torch.randn_like(out)
    dq, dk, dv = grads(out, dout, q, k, v)
    assert (out[:, :40] == 0).all() and (dq[:, :40] == 0).all()
    expected = sinks if with_sinks else torch.full((2,), -math.inf, device=device)
    assert (lse[0, :, :40] == expected[:, None]).all()
    rest = attend(q[:, 40:], k, v, **settings)
    torch.testing.assert_close(out[:, 40:], rest, rtol=1e-5, atol=1e-6)
    for name, a, b in zip("kv", (dk, dv), grads(rest, dout[:, 40:], k, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def test_a_dead_band_of_a_window_is_not_nan(leaves):
    """pytorch #127055, #103963: NaN for long masked runs of a band mask."""
    q, k, v = leaves((1, 140, 1, 8), (1, 40, 1, 8), (1, 40, 1, 8))
    out, lse = attend(q, k, v, mask=Mask(causal=False, window=(3, 3)), return_lse=True)
    dq, dk, dv = grads(out, torch.randn_like(out), q, k, v)
    assert (out[:, :97] == 0).all() and (lse[..., :97] == -math.inf).all() and (dq[:, :97] == 0).all()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv)) and lse[..., 97:].isfinite().all()


def test_no_keys_and_empty_dimensions(leaves, device):
    """FA #2562: zero-length keys gave uninitialised results."""
    q, k, v = leaves((2, 3, 4, 8), (2, 0, 2, 8), (2, 0, 2, 6))
    out, lse = attend(q, k, v, return_lse=True)
    assert out.shape == (2, 3, 4, 6) and (out == 0).all() and (lse == -math.inf).all()
    for shape in ((0, 5, 4, 8), (2, 0, 4, 8), (2, 5, 0, 8)):
        kv_shape = (*shape[:2], shape[2] // 2, 8)
        q, k, v = leaves(shape, kv_shape, kv_shape)
        out = attend(q, k, v)
        assert out.shape == shape and grads(out, torch.ones_like(out), k)[0].shape == kv_shape


def test_keys_that_no_query_sees_get_a_zero_gradient(leaves, device):
    """FA #2562, #1713, PR #2568: dK and dV of keys whose sequence has no queries were uninitialised."""
    q, k, v = leaves((1, 20, 2, 16), (1, 120, 2, 16), (1, 120, 2, 16))
    mask = Mask.from_documents([[40, 0, 70, 10]], window=(15, None), device=device)
    out = attend(q, k, v, mask=mask)
    _, dk, dv = grads(out, torch.randn_like(out), q, k, v)
    assert (dk[:, :85] == 0).all() and (dv[:, :85] == 0).all() and (dv[:, 85:] != 0).any()


# ---- shapes and values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [7, 72, 104])
def test_a_head_dim_that_needs_padding_equals_zero_padded_inputs(dim, leaves):
    """FA PR #2896 (dQ wrong for 72 and 104), #2492 (104 refused), #1347 (not a multiple of 8)."""
    q, k, v = leaves((1, 35, 2, dim), (1, 35, 2, dim), (1, 35, 2, dim))
    padded = [torch.nn.functional.pad(x.detach(), (0, 128 - dim)).requires_grad_() for x in (q, k, v)]
    out, wide = attend(q, k, v), attend(*padded, scale=dim**-0.5)
    torch.testing.assert_close(out, wide[..., :dim], rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(out)
    expected = grads(wide, torch.nn.functional.pad(dout, (0, 128 - dim)), *padded)
    for a, b in zip(grads(out, dout, q, k, v), expected, strict=True):
        torch.testing.assert_close(a, b[..., :dim], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 5, 17])
def test_short_sequences_with_large_inputs_stay_finite(tokens, leaves):
    """FA test_flash_attn_bwd_overflow: lengths 1, 2, 5, 17, q times 5, k and v times 3: NaN dQ from the tile's tail."""
    q, k, v = leaves(*[(1, tokens, 2, 128)] * 3, dtype=torch.float16, factor=3)
    with torch.no_grad():
        q.mul_(5 / 3)
    out = attend(q, k, v)
    assert out.isfinite().all() and all(x.isfinite().all() for x in grads(out, torch.randn_like(out), q, k, v))


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_one_key_a_row_gives_its_value_and_no_gradient_for_q_and_k(deterministic, leaves):
    """l = 1 and c = 0, and windows of one key: out = v, dv = dout, and dq = dk = 0 up to the sums' rounding."""
    for tokens, window in ((1, None), (33, 0)):
        q, k, v = leaves((2, tokens, 6, 40), (2, tokens, 2, 40), (2, tokens, 2, 40))
        out = attend(q, k, v, mask=Mask(window=(window, None)), deterministic=deterministic)
        torch.testing.assert_close(out, v.repeat_interleave(3, 2), rtol=1e-6, atol=1e-6)
        dout = torch.randn_like(out)
        dq, dk, dv = grads(out, dout, q, k, v)
        assert dq.abs().max() < 1e-5 and dk.abs().max() < 1e-5
        torch.testing.assert_close(dv, dout.unflatten(2, (2, 3)).sum(3), rtol=1e-5, atol=1e-6)


def test_the_last_query_sees_the_last_key(device):
    """pytorch #108108, #144858, #103082; SageAttention #372; sparkinfer #4; ffpa PR #300: top-left instead of
    bottom-right, or a prefix forgotten in the backward. Equal logits: row i averages keys 0..i+2."""
    q = torch.zeros(1, 3, 1, 5, device=device, requires_grad=True)
    k = torch.zeros(1, 5, 1, 5, device=device, requires_grad=True)
    v = torch.eye(5, device=device).view(1, 5, 1, 5).requires_grad_()
    out = attend(q, k, v)
    expected = torch.tensor([[1 / 3] * 3 + [0] * 2, [1 / 4] * 4 + [0], [1 / 5] * 5], device=device)
    torch.testing.assert_close(out[0, :, 0], expected)
    torch.testing.assert_close(grads(out, torch.ones_like(out), v)[0][0, :, 0, 0], expected.sum(0))


def test_causal_off_is_not_ignored_in_the_backward(leaves):
    """triton #4541, #5660, #4174: the tutorial's backward ignored causal=False; #2059, #1975: 33 is past a tile."""
    q, k, v = leaves((1, 33, 1, 8), (1, 33, 1, 8), (1, 33, 1, 8))
    out = attend(q, k, v, mask=Mask(causal=False))
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    dout = torch.randn_like(out)
    for a, b in zip(grads(out, dout, q, k, v), grads(expected, dout, q, k, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_every_batch_row_is_computed(device):
    """pytorch #139462: batch rows after the first were zero."""
    q, k, v = (torch.randn(1, 20, 3, 16, device=device).expand(3, -1, -1, -1) for _ in range(3))
    out = attend(q, k, v)
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2]) and out.abs().sum() > 0


def test_packed_documents_equal_separate_ones(leaves, device):
    """Slices cross the borders of documents; each document must see itself only."""
    lengths = (19, 1, 44)
    q, k, v = leaves((1, 64, 6, 24), (1, 64, 2, 24), (1, 64, 2, 24))
    cache = PrefixCache(1, 64, 2, 24, device=device)
    mask = Mask.from_documents([lengths], device=device)
    pieces = [attend(*(x[:, a:b] for x in (q, k, v)), cache, mask=mask) for a, b in itertools.pairwise((0, 30, 41, 64))]
    packed = torch.cat(pieces, 1)
    parts = zip(*(x.split(lengths, 1) for x in (q, k, v)), strict=True)
    separate = torch.cat([attend(*part) for part in parts], 1)
    torch.testing.assert_close(packed, separate, rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(packed)
    for a, b in zip(grads(packed, dout, q, k, v), grads(separate, dout, q, k, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_mask_of_more_positions_than_tokens(leaves, device):
    """pytorch #136232: gradients were NaN where the mask had been made for more positions than the first call has
    tokens, lse took part in the loss, and all was compiled. Right: as the reference backend with a mask of just these
    positions, lse being a constant."""
    mask = Mask.from_documents([[29, 1, 42, 8]], device=device)
    torch._dynamo.reset()

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def step(q, k, v):
        out, lse = attend(q, k, v, mask=mask, return_lse=True)
        return out * lse.exp().transpose(1, 2)[..., None]

    for tokens in (61, 80):
        inputs = leaves((1, tokens, 4, 16), (1, tokens, 2, 16), (1, tokens, 2, 16))
        exact = Mask(document_starts=mask.document_starts[:, :tokens])
        out, lse = prefix_attention(*inputs, mask=exact, return_lse=True, backend="reference")
        expected = out * lse.exp().transpose(1, 2)[..., None]
        actual = step(*inputs)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        dout = torch.randn_like(expected)
        for a, b in zip(grads(actual, dout, *inputs), grads(expected, dout, *inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_adding_a_constant_to_every_logit_changes_nothing(device):
    """flashinfer #4267, #4401: logits all below -5e4 gave zeros (a finite number stood for -inf)."""
    q, k, v = (torch.randn(1, 40, 1, 8, device=device) for _ in range(3))
    q[..., 0], k[..., 0] = 1.0, 0.0
    expected, lse = attend(q, k, v, scale=1.0, return_lse=True)
    for shift in (-65536.0, 65536.0):
        k[..., 0] = shift
        out, shifted = attend(q, k, v, scale=1.0, return_lse=True)
        assert (shifted - lse - shift).abs().max() < 0.05
        torch.testing.assert_close(out, expected, rtol=0.1, atol=0.1)


def test_a_negative_zero_is_a_zero(device):
    """-0 in inputs, which a maximum or a comparison of bits might take for less than 0."""
    shape = (1, 37, 2, 8)
    inputs = [torch.randn(shape, device=device) * (torch.rand(shape, device=device) > 0.5) for _ in range(3)]
    results = []
    for zero in (0.0, -0.0):
        tensors = [torch.where(x == 0, zero, x).requires_grad_() for x in inputs]
        out = attend(*tensors, deterministic=True)
        results.append([out, *grads(out, torch.ones_like(out), *tensors)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) and a.isfinite().all()


def test_sinks_far_from_the_scores(leaves, device):
    """A sink of 300 would overflow exp() if it took no part in the maximum; -inf is no sink at all."""
    q, k, v = leaves((1, 40, 3, 8), (1, 40, 3, 8), (1, 40, 3, 8))
    sinks = torch.tensor([300.0, -300.0, -math.inf], device=device, requires_grad=True)
    out, lse = attend(q, k, v, sinks=sinks, return_lse=True)
    plain, plain_lse = attend(q, k, v, return_lse=True)
    assert (out[:, :, 0] == 0).all() and (lse[:, 0] == 300).all()
    torch.testing.assert_close(out[:, :, 1:], plain[:, :, 1:])
    torch.testing.assert_close(lse[:, 1:], plain_lse[:, 1:])
    gradients = grads(out, torch.randn_like(out), q, k, v, sinks)
    assert all(x.isfinite().all() for x in gradients) and (gradients[3] == 0).all()


@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_any_finite_scale(scale, leaves, device):
    q, k, v = leaves((1, 40, 2, 8), (1, 40, 2, 8), (1, 40, 2, 8))
    out = attend(q, k, v, scale=scale)
    dq, dk, dv = grads(out, torch.randn_like(out), q, k, v)
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))
    if scale == 0:
        mean = v.cumsum(1) / torch.arange(1, 41, device=device).view(1, -1, 1, 1)
        torch.testing.assert_close(out, mean, rtol=1e-5, atol=1e-5)
        assert (dq == 0).all() and (dk == 0).all()


def test_nan_in_a_query_stays_in_its_row(leaves):
    q, k, v = leaves((1, 50, 2, 16), (1, 50, 2, 16), (1, 50, 2, 16))
    clean = attend(q, k, v)
    broken = q.detach().clone()
    broken[0, 40, 1, 3] = math.nan
    broken.requires_grad_()
    out, lse = attend(broken, k, v, return_lse=True)
    assert out[0, 40, 1].isnan().all() and lse[0, 1, 40].isnan()
    rest = torch.ones(50, 2, dtype=torch.bool)
    rest[40, 1] = False
    assert torch.equal(out[0][rest], clean[0][rest])
    dq = grads(out, torch.ones_like(out), broken)[0]
    assert dq[0, 40, 1].isnan().all() and dq[0][rest].isfinite().all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_nan_in_a_sink_stays_in_its_head(deterministic, leaves, device):
    """The scores are finite: only lse tells the backward."""
    q, k, v = leaves((1, 40, 4, 16), (1, 40, 2, 16), (1, 40, 2, 16))
    sinks = torch.tensor([0.0, math.nan, 1.0, 2.0], device=device, requires_grad=True)
    out = attend(q, k, v, sinks=sinks, deterministic=deterministic)
    dq, dk, dv, dsinks = grads(out, torch.ones_like(out), q, k, v, sinks)
    for x, head in ((out, 1), (dq, 1), (dk, 0), (dv, 0), (dsinks[None], 1)):
        heads = x.movedim(2 if x.ndim == 4 else -1, 0)
        assert heads[head].isnan().all()
        assert heads[head + 1 :].isfinite().all() and heads[:head].isfinite().all()


@pytest.mark.parametrize("keys", [2, 70], ids=["one tile", "a tile of them"])
def test_infinite_scores(keys, device):
    """A key with score -inf has no weight, also when a whole tile of keys has it; one with +inf gives NaN, as does a
    row that sees nothing but -inf: only a mask empties a row."""
    q, k = torch.ones(1, 2, 1, 2, device=device), torch.zeros(1, keys, 1, 2, device=device)
    v = torch.randn(1, keys, 1, 2, device=device)
    k[0, : keys - 1] = -math.inf
    out, lse = attend(q, k, v, return_lse=True)
    torch.testing.assert_close(out[0, 1], v[0, -1])
    assert out[0, 0].isnan().all() and lse[0, 0, 0].isnan() and lse[0, 0, 1] == 0
    k[0, 0] = math.inf
    assert attend(q, k, v)[0, 1].isnan().all()


# ---- strides, repeats ------------------------------------------------------------------------------------------------


def test_strides_of_any_kind(leaves):
    """FA #355, #325: a dout that is not contiguous, or of stride 0 (out.sum().backward()), was wrong or raised."""
    plain = leaves((2, 21, 6, 8), (2, 21, 2, 8), (2, 21, 2, 8))
    dout = torch.randn_like(plain[0])
    expected = attend(*plain, deterministic=True)
    gradients = grads(expected, dout, *plain)
    layouts = {
        "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "last dim strided": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
        "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
        "batch last": lambda x: x.movedim(0, 2).contiguous().movedim(2, 0),
        "off by one": lambda x: torch.nn.functional.pad(x, (1, 2))[..., 1:-2],
    }
    for name, layout in layouts.items():
        strided = [layout(x.detach()).requires_grad_() for x in plain]
        out = attend(*strided, deterministic=True)
        assert torch.equal(out, expected), name
        for a, b in zip(grads(out, layout(dout), *strided), gradients, strict=True):
            assert torch.equal(a, b), name
    actual = grads(attend(*plain, deterministic=True).sum(), None, *plain)
    ones = grads(attend(*plain, deterministic=True), torch.ones_like(dout), *plain)
    for a, b in zip(actual, ones, strict=True):
        assert torch.equal(a, b)


def test_repeats_are_bitwise_equal(device):
    """FA #359, PR #2481, llama.cpp #13438 (races); FA #2244, #1596, #414 (a backward that was not deterministic)."""
    case = AttentionCase(50, 27, query_heads=6, kv_heads=2, head_dim=24)
    if device == "cuda":
        case = AttentionCase(500, 527, batch=8, query_heads=6, kv_heads=2, head_dim=128)
    inputs = testing.make_inputs(case, torch.float16, device=device)
    first = testing.run(inputs, backend="triton", deterministic=True)
    for _ in range(50 if device == "cuda" else 2):
        repeat = testing.run(inputs, backend="triton", deterministic=True)
        for (name, a), (_, b) in zip(repeat.items(), first.items(), strict=True):
            assert torch.equal(a, b), name
