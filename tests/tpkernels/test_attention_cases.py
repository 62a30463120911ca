"""Bugs that other attention kernels had, as cases for ours. Each docstring names where it was found.

FA is Dao-AILab/flash-attention. Each test states the right value; where our contract differs, ours holds.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from formulas import formula, grads, leaves

from tpkernels import Mask, PrefixCache, prefix_attention, testing
from tpkernels.testing import AttentionCase

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.on_gpu_too


# ---- memory that must not be read or written -------------------------------------------------------------------------


def test_batch_rows_and_memory_behind_the_slice_never_leak(backend):
    """pytorch #176793, FA PR #2324, FA #2709: uninitialised memory behind the last token reached results."""
    case = AttentionCase(70, 59, batch=2, query_heads=3, kv_heads=1, head_dim=40)
    inputs = testing.make_inputs(case, torch.float32)
    big = [torch.full((2, 200, heads, 40), float("nan")) for heads in (3, 1, 1)]
    views = []
    for x, source in zip(big, (inputs.q, inputs.k, inputs.v), strict=True):
        x[:, 11:140] = source
        views.append(x[:, 11:140])
    cache = testing.poisoned_cache(case, torch.float32, spare=100)
    pieces = [[x[:, a:b] for x in views] for a, b in ((0, 59), (59, 129))]
    out = torch.cat([prefix_attention(*piece, cache, backend=backend) for piece in pieces], 1)
    assert torch.equal(out, testing.run(inputs, backend=backend).out)
    assert cache.k[:, 129:].isnan().all() and cache.v[:, 129:].isnan().all()


def test_rows_behind_the_slice_of_the_accumulator_stay_untouched(backend):
    case = AttentionCase(7, 5, head_dim=8)
    cache = testing.poisoned_cache(case, torch.float32, spare=50)
    testing.run(testing.make_inputs(case, torch.float32), backend=backend, cache=cache)
    assert cache.accumulator.dk[:, 12:].isnan().all() and cache.accumulator.dv[:, 12:].isnan().all()


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 5, 2, 8), (1, 16, 8)), ((1, 2, 2, 8), (16, 1, 8)), ((1, 5, 2, 8), (16, 8, 1))],
    ids=["batch", "token", "head"],
)
def test_offsets_beyond_two_to_the_31(shape, strides, backend):
    """FA #2611, PR #1500, PR #2260, #1311, #407, pytorch #190857, fla #1080: 32-bit offsets wrapped. One buffer, and a
    stride of more than 2^31 elements (where it says 1) between batch rows, tokens or heads, of dout as well."""
    far = 2**31 + 64
    buffer = torch.empty(far + 4096, dtype=torch.bfloat16)  # touched in two places only
    small = torch.randn(4, *shape).bfloat16()
    views = []
    for i in range(4):
        view = buffer[i * 1024 :].as_strided(shape, (*(far if stride == 1 else stride for stride in strides), 1))
        view.copy_(small[i])
        views.append(view)
    results = []
    for q, k, v, dout in (views, list(small)):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = prefix_attention(q, k, v, backend=backend)
        results.append((out, *grads(out, dout, q, k, v)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 7, 72, 104, 111])
def test_a_head_dim_that_needs_padding_equals_zero_padded_inputs(dim, backend):
    """FA PR #2896 (dQ wrong for 72 and 104), #2492 (104 refused), #1347 (not a multiple of 8)."""
    q, k, v = leaves((1, 67, 2, dim), (1, 67, 2, dim), (1, 67, 2, dim))
    padded = [torch.nn.functional.pad(x.detach(), (0, 128 - dim)).requires_grad_() for x in (q, k, v)]
    out = prefix_attention(q, k, v, backend=backend)
    wide = prefix_attention(*padded, scale=dim**-0.5, backend=backend)
    torch.testing.assert_close(out, wide[..., :dim], rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(out)
    expected = grads(wide, torch.nn.functional.pad(dout, (0, 128 - dim)), *padded)
    for a, b in zip(grads(out, dout, q, k, v), expected, strict=True):
        torch.testing.assert_close(a, b[..., :dim], rtol=1e-5, atol=1e-5)
        assert (b[..., dim:] == 0).all()


@pytest.mark.parametrize("tokens", [1, 2, 5, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_short_sequences_with_large_inputs_stay_finite(tokens, dtype, backend):
    """FA test_flash_attn_bwd_overflow: lengths 1, 2, 5, 17, q times 5, k and v times 3: NaN dQ from the tile's tail."""
    q, k, v = leaves(*[(1, tokens, 2, 128)] * 3, dtype=dtype, factor=3)
    with torch.no_grad():
        q.mul_(5 / 3)
    out = prefix_attention(q, k, v, backend=backend)
    assert out.isfinite().all()
    assert all(x.isfinite().all() for x in grads(out, torch.randn_like(out), q, k, v))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_key_a_row_gives_its_value_and_no_gradient_for_q_and_k(dtype, backend):
    """l = 1 and c = 0: out = v and dq = dk = 0, up to the rounding of dout.v - dout.out."""
    for q_shape, window in (((2, 1, 6, 40), None), ((2, 33, 6, 40), 0)):
        kv_shape = (*q_shape[:2], 2, 40)
        q, k, v = leaves(q_shape, kv_shape, kv_shape, dtype=dtype)
        out = prefix_attention(q, k, v, mask=Mask(window=(window, None)), backend=backend)
        torch.testing.assert_close(out, v.repeat_interleave(3, 2), rtol=2 * torch.finfo(dtype).eps, atol=0)
        dout = torch.randn_like(out)
        dq, dk, dv = grads(out, dout, q, k, v)
        terms = (dout.float() * out.float()).abs().sum(-1, keepdim=True).max()  # what cancels in dP - delta
        bound = 4 * torch.finfo(dtype).eps * terms * q_shape[-1] ** -0.5
        assert dq.abs().max() <= bound * k.abs().max()
        assert dk.abs().max() <= bound * 3 * q.abs().max()
        torch.testing.assert_close(dv, dout.float().unflatten(2, (2, 3)).sum(3).to(dtype))


@pytest.mark.parametrize("shape", [(0, 5, 4, 8), (2, 0, 4, 8), (2, 5, 0, 8)], ids=["batch", "tokens", "heads"])
@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
def test_empty_dimensions(shape, cached, backend):
    kv_shape = (*shape[:2], shape[2] // 2, 8)
    q, k, v = leaves(shape, kv_shape, kv_shape)
    cache = PrefixCache(shape[0], 9, kv_shape[2], 8, device=q.device) if cached else None
    out, lse = prefix_attention(q, k, v, cache, backend=backend, return_lse=True)
    assert out.shape == shape and lse.shape == (shape[0], shape[2], shape[1])
    dq, dk, dv = grads(out, torch.ones_like(out), q, k, v)
    assert dq.shape == shape and dk.shape == kv_shape and dv.shape == kv_shape


def test_more_heads_and_rows_than_a_grid_dimension_holds(backend):
    """Batch times heads beyond 65535, the limit of a GPU's grid in y and z; FA PR #2260 (8300 x 1 x 16 x 128)."""
    q, k, v = leaves((8200, 2, 8, 4), (8200, 2, 8, 4), (8200, 2, 8, 4))
    out = prefix_attention(q, k, v, backend=backend)
    dq, _, _ = grads(out, out.detach(), q, k, v)
    few = [x[-3:].detach().requires_grad_() for x in (q, k, v)]
    last = prefix_attention(*few, backend=backend)
    torch.testing.assert_close(out[-3:], last)
    torch.testing.assert_close(dq[-3:], grads(last, last.detach(), *few)[0])


def test_a_batch_of_8300_single_tokens():
    """FA PR #2260, whole: 8300 x 1 x 16 x 128 in a backward. One key a row: out = v, dv = dout."""
    q, k, v = (x.detach().requires_grad_() for x in torch.randn(3, 8300, 1, 16, 128, dtype=torch.bfloat16))
    out = prefix_attention(q, k, v, backend="cpu")
    dout = torch.randn_like(out)
    assert torch.equal(out, v) and torch.equal(grads(out, dout, v)[0], dout)


# ---- alignment and masks ---------------------------------------------------------------------------------------------


def test_the_last_query_sees_the_last_key(backend):
    """pytorch #108108, #144858, #103082; SageAttention #372; sparkinfer #4; ffpa PR #300: top-left instead of
    bottom-right, or a prefix forgotten in the backward. Equal logits: row i averages keys 0..i+2."""
    q = torch.zeros(1, 3, 1, 5, requires_grad=True)
    k = torch.zeros(1, 5, 1, 5, requires_grad=True)
    v = torch.eye(5).view(1, 5, 1, 5).requires_grad_()
    out = prefix_attention(q, k, v, backend=backend)
    expected = torch.tensor([[1 / 3] * 3 + [0] * 2, [1 / 4] * 4 + [0], [1 / 5] * 5])
    torch.testing.assert_close(out[0, :, 0], expected)
    dv = grads(out, torch.ones_like(out), v)[0]
    torch.testing.assert_close(dv[0, :, 0, 0], expected.sum(0))


def test_causal_off_is_not_ignored_in_the_backward(backend):
    """triton #4541, #5660, #4174: the tutorial's backward ignored causal=False."""
    q, k, v = leaves((1, 33, 1, 8), (1, 33, 1, 8), (1, 33, 1, 8))
    out = prefix_attention(q, k, v, mask=Mask(causal=False), backend=backend)
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    for a, b in zip(grads(out, dout, q, k, v), grads(expected, dout, q, k, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [AttentionCase(1025, 0), AttentionCase(196, 61, cached=False)], ids=str)
def test_lengths_just_past_a_tile(case, backend):
    """pytorch #153799 (NaN gradients at 1025), triton #2059, #1975, MagiAttention #137 (196 queries, 257 keys)."""
    inputs = testing.make_inputs(case, torch.float32)
    testing.check(testing.run(inputs, backend=backend), inputs)


def test_every_batch_row_is_computed(backend):
    """pytorch #139462: batch rows after the first were zero. Rows with the same content give the same result."""
    q, k, v = (torch.randn(1, 50, 3, 16).expand(3, -1, -1, -1).requires_grad_() for _ in range(3))
    out = prefix_attention(q, k, v, backend=backend)
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2]) and out.abs().sum() > 0


def test_packed_documents_equal_separate_ones(backend):
    """A document never sees another: the packed result is bit for bit built from the same keys, within rounding."""
    lengths = (19, 1, 44)
    q, k, v = leaves((1, 64, 6, 24), (1, 64, 2, 24), (1, 64, 2, 24))
    cache = PrefixCache(1, 64, 2, 24, device=q.device)
    mask = Mask.from_documents([lengths])
    cuts = (0, 30, 41, 64)  # slices cross the borders of documents
    pieces = [
        prefix_attention(*(x[:, a:b] for x in (q, k, v)), cache, mask=mask, backend=backend)
        for a, b in itertools.pairwise(cuts)
    ]
    packed = torch.cat(pieces, 1)
    parts = [x.split(lengths, 1) for x in (q, k, v)]
    separate = torch.cat([prefix_attention(*part, backend=backend) for part in zip(*parts, strict=True)], 1)
    torch.testing.assert_close(packed, separate)
    dout = torch.randn_like(packed)
    for a, b in zip(grads(packed, dout, q, k, v), grads(separate, dout, q, k, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_mask_of_more_positions_than_tokens(backend):
    """pytorch #136232: gradients were NaN where the mask had been made for more positions than the first call has
    tokens, lse was asked for and took part in the loss. The kind: one mask for sequences of all lengths, lse in the
    loss. Right: as with a mask of just these positions; lse is a constant there."""
    mask = Mask.from_documents([[29, 1, 64, 6]])
    for tokens in (61, 100, 33, 1):
        q, k, v = leaves((1, tokens, 4, 16), (1, tokens, 2, 16), (1, tokens, 2, 16))
        results = []
        for starts in (mask.document_starts, mask.document_starts[:, :tokens]):
            settings = {"mask": Mask(document_starts=starts), "return_lse": True, "backend": backend}
            out, lse = prefix_attention(q, k, v, **settings)
            loss = (out * lse.exp().transpose(1, 2)[..., None]).sum()
            results.append([out, lse, *grads(loss, None, q, k, v)])
        keys = torch.arange(tokens)
        visible = (keys <= keys[:, None]) & (keys >= mask.document_starts[0, :tokens, None])
        expected, weights = formula(q, k, v, visible[None])
        loss = (expected * weights.detach().exp().transpose(1, 2)[..., None]).sum()
        for a, b, c in zip(*results, [expected, weights, *grads(loss, None, q, k, v)], strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)


# ---- values ----------------------------------------------------------------------------------------------------------


def test_adding_a_constant_to_every_logit_changes_nothing(backend):
    """flashinfer #4267, #4401: logits all below -5e4 gave zeros (a finite number stood for -inf)."""
    q, k, v = torch.randn(1, 70, 1, 8), torch.randn(1, 70, 1, 8), torch.randn(1, 70, 1, 8)
    q[..., 0], k[..., 0] = 1.0, 0.0
    expected, lse = prefix_attention(q, k, v, scale=1.0, backend=backend, return_lse=True)
    for shift in (-65536.0, 65536.0):  # powers of two: q.k keeps its last bits but for the sum's rounding
        k[..., 0] = shift
        out, shifted = prefix_attention(q, k, v, scale=1.0, backend=backend, return_lse=True)
        assert out.isfinite().all() and (shifted - lse - shift).abs().max() < 0.05
        torch.testing.assert_close(out, expected, rtol=0.1, atol=0.1)


def test_a_negative_zero_is_a_zero(backend):
    """-0 in inputs, which a maximum or a comparison of bits might take for less than 0."""
    inputs = [torch.randn(1, 37, heads, 8) * (torch.rand(1, 37, heads, 8) > 0.5) for heads in (2, 1, 1)]
    results = []
    for zero in (0.0, -0.0):
        tensors = [torch.where(x == 0, zero, x).requires_grad_() for x in inputs]
        out = prefix_attention(*tensors, backend=backend)
        results.append([out, *grads(out, torch.ones_like(out), *tensors)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) and a.isfinite().all()


def test_sinks_far_from_the_scores(backend):
    """A sink of 300 would overflow exp() if it took no part in the maximum; -inf is no sink at all."""
    q, k, v = leaves((1, 40, 3, 8), (1, 40, 3, 8), (1, 40, 3, 8))
    sinks = torch.tensor([300.0, -300.0, -math.inf], requires_grad=True)
    out, lse = prefix_attention(q, k, v, sinks=sinks, backend=backend, return_lse=True)
    plain, plain_lse = prefix_attention(q, k, v, backend=backend, return_lse=True)
    assert (out[:, :, 0] == 0).all() and (lse[:, 0] == 300).all()
    torch.testing.assert_close(out[:, :, 1:], plain[:, :, 1:])
    torch.testing.assert_close(lse[:, 1:], plain_lse[:, 1:])
    gradients = grads(out, torch.randn_like(out), q, k, v, sinks)
    assert all(x.isfinite().all() for x in gradients) and (gradients[3] == 0).all()


@pytest.mark.parametrize("scale", [0.0, -0.2, 1e4])
def test_any_finite_scale(scale, backend):
    q, k, v = leaves((1, 40, 2, 8), (1, 40, 2, 8), (1, 40, 2, 8))
    out = prefix_attention(q, k, v, scale=scale, backend=backend)
    dq, dk, dv = grads(out, torch.randn_like(out), q, k, v)
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))
    if scale == 0:
        mean = v.cumsum(1) / torch.arange(1, 41).view(1, -1, 1, 1)
        torch.testing.assert_close(out, mean)
        assert (dq == 0).all() and (dk == 0).all()


def test_nan_in_a_query_stays_in_its_row(backend):
    q, k, v = leaves((1, 90, 2, 16), (1, 90, 2, 16), (1, 90, 2, 16))
    clean = prefix_attention(q, k, v, backend=backend)
    broken = q.detach().clone()
    broken[0, 70, 1, 3] = float("nan")
    broken.requires_grad_()
    out, lse = prefix_attention(broken, k, v, backend=backend, return_lse=True)
    assert out[0, 70, 1].isnan().all() and lse[0, 1, 70].isnan()
    rest = torch.ones(90, 2, dtype=torch.bool)
    rest[70, 1] = False
    assert torch.equal(out[0][rest], clean[0][rest])
    dq = grads(out, torch.ones_like(out), broken)[0]
    assert dq[0, 70, 1].isnan().all() and dq[0][rest].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_in_a_sink_stays_in_its_head(dtype, backend):
    """The scores are finite: only lse tells the backward."""
    q, k, v = leaves((1, 70, 4, 16), (1, 70, 2, 16), (1, 70, 2, 16), dtype=dtype)
    sinks = torch.tensor([0.0, math.nan, 1.0, 2.0], requires_grad=True)
    out, lse = prefix_attention(q, k, v, sinks=sinks, backend=backend, return_lse=True)
    dq, dk, dv, dsinks = grads(out, torch.ones_like(out), q, k, v, sinks)
    for x, head in ((out, 1), (dq, 1), (dk, 0), (dv, 0), (lse.mT, 1), (dsinks[None], 1)):
        heads = x.movedim(2 if x.ndim == 4 else -1, 0)
        assert heads[head].isnan().all()
        assert heads[head + 1 :].isfinite().all() and heads[:head].isfinite().all()


def test_infinite_scores(backend):
    """A key with score -inf has no weight; one with +inf gives NaN, as softmax does."""
    q, k, v = torch.ones(1, 2, 1, 2), torch.zeros(1, 2, 1, 2), torch.randn(1, 2, 1, 2)
    k[0, 0] = -math.inf
    out = prefix_attention(q, k, v, backend=backend)
    torch.testing.assert_close(out[0, 1], v[0, 1])
    k[0, 0] = math.inf
    assert prefix_attention(q, k, v, backend=backend)[0, 1].isnan().all()


# ---- strides ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_of_a_sum_has_stride_zero(dtype, backend):
    """FA #355, #325: out.sum().backward() hands over a dout of stride 0."""
    inputs = leaves((2, 33, 6, 16), (2, 33, 2, 16), (2, 33, 2, 16), dtype=dtype)
    out = prefix_attention(*inputs, backend=backend)
    expected = grads(out, torch.ones_like(out), *inputs)
    actual = grads(prefix_attention(*inputs, backend=backend).sum(), None, *inputs)
    rows = torch.ones(1, 1, 1, 16, dtype=dtype).expand(2, 33, 6, 16)
    outer = grads(prefix_attention(*inputs, backend=backend), rows, *inputs)
    for a, b, c in zip(actual, expected, outer, strict=True):
        assert torch.equal(a, b) and torch.equal(c, b)


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
def test_any_strides(cached, backend):
    """A last dimension that is not contiguous is copied; other strides are taken as they are (FA: an error)."""

    def attend(*x):
        cache = PrefixCache(2, 21, 2, 8, device=torch.get_default_device()) if cached else None
        return prefix_attention(*x, cache, backend=backend)

    plain = leaves((2, 21, 6, 8), (2, 21, 2, 8), (2, 21, 2, 8))
    dout = torch.randn(2, 21, 6, 8)
    expected = attend(*plain)
    gradients = grads(expected, dout, *plain)
    layouts = {
        "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "last dim strided": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
        "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
        "batch last": lambda x: x.movedim(0, 2).contiguous().movedim(2, 0),
    }
    for name, layout in layouts.items():
        strided = [layout(x.detach()).requires_grad_() for x in plain]
        out = attend(*strided)
        assert torch.equal(out, expected), name
        for a, b in zip(grads(out, layout(dout), *strided), gradients, strict=True):
            assert torch.equal(a, b), name


# ---- repeatability ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(150, 107, batch=2, query_heads=6, kv_heads=2, head_dim=24),
        AttentionCase(300, -281, head_dim=128, cached=False),  # few keys, many queries add to each: FA #359
    ],
    ids=str,
)
def test_repeats_are_bitwise_equal_on_two_threads(case, backend):
    """FA #359, PR #2481, llama.cpp #13438 (races); FA #2244, #1596, #414 (a backward not bitwise repeatable)."""
    torch.set_num_threads(1 if backend == "reference" else 2)  # torch's own threads are not ours to test
    inputs = testing.make_inputs(case, torch.bfloat16)
    first = testing.run(inputs, backend=backend)
    for _ in range(20):
        for (name, a), (_, b) in zip(testing.run(inputs, backend=backend).items(), first.items(), strict=True):
            assert torch.equal(a, b), name
