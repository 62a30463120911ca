"""The drop-in functions against torch's own attention and against the formulas that the originals document.

Oracles run in fp64. The yardstick of every tolerance is what the formula, or the original itself, loses in the tested
precision (factor 2, gradients 3, plus testing.noise). Cases are small, some of a few numbers, so that loss is taken
relative to the largest value, and as the largest among out, dq, dk and dv.
"""

from __future__ import annotations

import inspect
import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from torch.utils.checkpoint import checkpoint

from tpkernels import PrefixCache, compat, testing
from tpkernels.compat import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)
from tpkernels.compat_intervals import interval_attention
from tpkernels.compat_pieces import mask_intervals


@pytest.fixture(autouse=True)
def _asked_for(request, monkeypatch):
    """Tests that take `backend` run on it: the originals have no argument for that."""
    if "backend" in request.fixturenames:
        monkeypatch.setenv("TPK_BACKEND", request.getfixturevalue("backend"))


def leaves(*shapes, dtype=torch.float32):
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def detached(tensors, dtype):
    return [x.detach().to(dtype).requires_grad_() for x in tensors]


def formula(q, k, v, visible, *, scale=None, softcap=0.0):
    """out and lse by the definition; visible bool [batch or 1, tokens, keys]; a row that sees nothing: 0, -inf."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    empty = ~visible.any(-1)[:, None, :, None]
    lse = scores.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True)
    weights = torch.exp(scores - lse)  # not torch.softmax, whose gradient is exactly 0 in a row of one key
    return torch.einsum("bhts,bshd->bthd", weights, v), lse.masked_fill(empty, -math.inf)[..., 0]


def check(function, oracle, tensors, *, dout=None):
    """function(*tensors) and its gradients against oracle(*tensors) in fp64, by the oracle's error in their dtype."""
    dtype = tensors[0].dtype
    results = []
    for call, precision in ((function, dtype), (oracle, dtype), (oracle, torch.float64)):
        inputs = detached(tensors, precision)
        out = call(*inputs)
        dout = torch.randn_like(out.detach()) if dout is None else dout
        gradients = torch.autograd.grad(out, inputs, dout.to(precision), allow_unused=True)
        results.append(
            [out.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(gradients, inputs, strict=True))]
        )
    losses = [relative(other, exact) for _, other, exact in zip(*results, strict=True)]
    for i, (actual, _, exact) in enumerate(zip(*results, strict=True)):
        assert actual.shape == exact.shape and actual.dtype == dtype
        if exact.numel():
            error = float((actual.double() - exact).abs().max())
            allowed = (3 if i else 2) * max(losses) * float(exact.abs().max()) + testing.noise(exact, dtype)
            assert error <= allowed, (("out", *"qkv")[i], error, allowed)


def relative(other, exact):
    return float((other.double() - exact).abs().max() / exact.abs().max()) if exact.any() else 0.0


def flash_visible(tokens, keys, causal, window):
    """As flash-attn documents it: bottom-right; a window keeps [i + Sk - Sq - left, i + Sk - Sq + right]."""
    i = torch.arange(tokens)[:, None] + keys - tokens
    j = torch.arange(keys)[None]
    left, right = window
    visible = torch.ones(tokens, keys, dtype=torch.bool)
    if causal:
        visible &= j <= i
    if left >= 0:
        visible &= j >= i - left
    if right >= 0:
        visible &= j <= i + right
    return visible[None]


# ---- the interfaces --------------------------------------------------------------------------------------------------

FLASH = [("dropout_p", 0.0), ("softmax_scale", None), ("causal", False), ("window_size", (-1, -1)), ("softcap", 0.0),
         ("alibi_slopes", None), ("deterministic", False), ("return_attn_probs", False)]  # fmt: skip
SIGNATURES = {
    "flash_attn_func": ["q", "k", "v", *FLASH],
    "flash_attn_varlen_func": [
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *FLASH,
        ("block_table", None),
    ],
    "flash_attn_with_kvcache": [
        *("q", "k_cache", ("v_cache", None)),  # ours may leave v_cache out, beside a PrefixCache
        *((name, None) for name in ("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx")),
        *((name, None) for name in ("cache_leftpad", "block_table", "softmax_scale")),
        *[("causal", False), ("window_size", (-1, -1)), ("softcap", 0.0), ("rotary_interleaved", True)],
        *[("alibi_slopes", None), ("num_splits", 0), ("return_softmax_lse", False)],
    ],
    "scaled_dot_product_attention": [
        *("query", "key", "value", ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False), ("scale", None)),
        ("enable_gqa", False),
    ],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_stand_in_the_originals_order_with_its_defaults(name):
    parameters = inspect.signature(getattr(compat, name)).parameters.values()
    actual = [x.name if x.default is x.empty else (x.name, x.default) for x in parameters]
    assert actual == SIGNATURES[name] and all(x.kind == x.POSITIONAL_OR_KEYWORD for x in parameters)


def test_what_is_returned_has_the_originals_form(backend):
    q, k, v = leaves((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    out, lse, dropped = flash_attn_func(q, k, v, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (2, 4, 5) and lse.dtype == torch.float32 and dropped.shape == (0,)
    assert not lse.requires_grad and torch.equal(out, flash_attn_func(q, k, v))
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 7))
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse, dropped = flash_attn_varlen_func(*packed, cu_q, cu_k, 5, 7, return_attn_probs=True)
    assert out.shape == (10, 4, 8) and lse.shape == (4, 10) and dropped.shape == (0,) and not lse.requires_grad
    with torch.no_grad():
        out, lse = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 4, 5)


# ---- flash_attn_func -------------------------------------------------------------------------------------------------

FLASH_CASES = [
    # tokens, keys, heads, kv_heads, head_dim, settings
    (1, 1, 1, 1, 5, {}),
    (17, 33, 6, 2, 24, {}),
    (33, 17, 6, 2, 24, {}),
    (65, 65, 3, 1, 40, {"causal": True}),
    (3, 130, 4, 4, 72, {"causal": True}),
    (37, 19, 4, 2, 16, {"causal": True}),
    (61, 70, 4, 2, 16, {"causal": True, "window_size": (9, -1)}),
    (61, 70, 4, 2, 16, {"causal": True, "window_size": (9, 4)}),
    (61, 70, 4, 2, 16, {"window_size": (9, 4)}),
    (61, 70, 4, 2, 16, {"window_size": (-1, 0)}),
    (70, 61, 4, 2, 16, {"window_size": (0, -1), "softcap": 2.0}),
    (29, 31, 2, 1, 8, {"causal": True, "softcap": 5.0, "softmax_scale": 0.7}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", FLASH_CASES, ids=str)
def test_flash_attn_func_is_its_documented_formula(case, dtype, backend):
    tokens, keys, heads, kv_heads, dim, settings = case
    visible = flash_visible(tokens, keys, settings.get("causal", False), settings.get("window_size", (-1, -1)))
    tensors = leaves((2, tokens, heads, dim), (2, keys, kv_heads, dim), (2, keys, kv_heads, dim), dtype=dtype)
    options = {"scale": settings.get("softmax_scale"), "softcap": settings.get("softcap", 0.0)}

    def oracle(q, k, v):
        return formula(q, k, v, visible, **options)[0]

    check(lambda q, k, v: flash_attn_func(q, k, v, **settings), oracle, tensors)
    _, lse, _ = flash_attn_func(*tensors, **settings, return_attn_probs=True)
    expected = formula(*detached(tensors, torch.float64), visible, **options)[1].float()
    torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 0.05)


# ---- flash_attn_varlen_func ------------------------------------------------------------------------------------------


def totals(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def packed_by_sequence(q, k, v, q_lengths, k_lengths, **settings):
    """Each sequence by the formula, then the rows behind the last one."""
    q_parts, k_parts, v_parts = q.split(q_lengths), k.split(k_lengths), v.split(k_lengths)
    causal, window = settings.get("causal", False), settings.get("window_size", (-1, -1))
    return torch.cat([
        formula(a[None], b[None], c[None], flash_visible(len(a), len(b), causal, window))[0][0]
        for a, b, c in zip(q_parts, k_parts, v_parts, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "settings", [{}, {"causal": True}, {"causal": True, "window_size": (5, -1)}, {"window_size": (3, 2)}], ids=str
)
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [([19, 1, 33], [19, 1, 33]), ([4, 0, 9, 1, 20], [4, 5, 0, 70, 3]), ([7], [11])],
    ids=["same", "apart", "one"],
)
def test_packed_sequences_are_the_formula_one_by_one(q_lengths, k_lengths, settings, dtype, backend):
    tensors = leaves(*((sum(n), h, 16) for n, h in ((q_lengths, 6), (k_lengths, 2), (k_lengths, 2))), dtype=dtype)
    arguments = (totals(q_lengths), totals(k_lengths), max(q_lengths), max(k_lengths))
    check(
        lambda q, k, v: flash_attn_varlen_func(q, k, v, *arguments, **settings),
        lambda q, k, v: packed_by_sequence(q, k, v, q_lengths, k_lengths, **settings),
        tensors,
    )


@hypothesis.given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=5),
    spare=st.integers(0, 3),
    causal=st.booleans(),
    left=st.integers(-1, 6),
)
def test_any_packing_equals_separate_calls(backend, lengths, spare, causal, left):
    """`spare` rows lie behind the last sequence: their queries see nothing, their keys are seen by none."""
    q_lengths, k_lengths = (list(part) for part in zip(*lengths, strict=True))
    torch.manual_seed(0)
    shapes = [(sum(n) + spare, heads, 4) for n, heads in ((q_lengths, 4), (k_lengths, 2), (k_lengths, 2))]
    q, k, v = leaves(*shapes)
    settings = {"causal": causal, "window_size": (left, -1), "return_attn_probs": True}
    bounds = (totals(q_lengths), totals(k_lengths), max(q_lengths), max(k_lengths))
    out, lse, _ = flash_attn_varlen_func(q, k, v, *bounds, **settings)
    parts = [x.split([*n, spare]) for x, n in ((q, q_lengths), (k, k_lengths), (v, k_lengths))]
    outs, lses = [], []
    for number, (a, b, c) in enumerate(zip(*parts, strict=True)):
        seen = slice(None) if number < len(lengths) else slice(0)
        one, one_lse, _ = flash_attn_func(a[None], b[None, seen], c[None, seen], **settings)
        outs.append(one[0])
        lses.append(one_lse[0])
    separate = torch.cat(outs)
    torch.testing.assert_close(out, separate, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, torch.cat(lses, 1), rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(out)
    gradients = [torch.autograd.grad(x, (q, k, v), dout) for x in (out, separate)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# ---- flash_attn_with_kvcache -----------------------------------------------------------------------------------------


def nan_cache(batch, capacity, kv_heads, dim, lengths, dtype=torch.float32):
    """k and v caches, NaN but for the first lengths[b] tokens of row b."""
    caches = [torch.full((batch, capacity, kv_heads, dim), math.nan, dtype=dtype) for _ in range(2)]
    for cache in caches:
        for row, length in enumerate(lengths):
            cache[row, :length] = torch.randn(length, kv_heads, dim)
    return caches


LENGTHS = {"int": (11, [11, 11, 11]), "equal": (torch.tensor([11] * 3, dtype=torch.int32), [11] * 3),
           "apart": (torch.tensor([11, 0, 24], dtype=torch.int32), [11, 0, 24])}  # fmt: skip


@pytest.mark.parametrize("window", [(-1, -1), (6, -1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_cache_is_written_and_read_with_gradients(tokens, lengths, causal, window, backend):
    given, per_row = LENGTHS[lengths]
    k_cache, v_cache = nan_cache(3, 29, 2, 8, per_row)
    prefix = [[cache[row, :length].clone() for row, length in enumerate(per_row)] for cache in (k_cache, v_cache)]
    tensors = leaves((3, tokens, 4, 8), (3, tokens, 2, 8), (3, tokens, 2, 8))
    settings = {"causal": causal, "window_size": window}

    def oracle(q, k, v):
        rows = []
        for row, length in enumerate(per_row):
            keys, values = (
                torch.cat([old[row].to(q.dtype), new[row]])[None] for old, new in zip(prefix, (k, v), strict=True)
            )
            rows.append(
                formula(q[row : row + 1], keys, values, flash_visible(tokens, length + tokens, causal, window))[0]
            )
        return torch.cat(rows)

    check(
        lambda q, k, v: flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=given, **settings),
        oracle,
        tensors,
    )
    for cache, old, new in zip((k_cache, v_cache), prefix, tensors[1:], strict=True):
        for row, length in enumerate(per_row):
            assert torch.equal(cache[row, : length + tokens], torch.cat([old[row], new[row]]))
            assert cache[row, length + tokens :].isnan().all()
    with torch.no_grad():  # works on the cache itself, not on a copy
        plain = flash_attn_with_kvcache(*tensors[:1], k_cache, v_cache, *tensors[1:], cache_seqlens=given, **settings)
    torch.testing.assert_close(
        plain, flash_attn_with_kvcache(*tensors[:1], k_cache, v_cache, *tensors[1:], cache_seqlens=given, **settings)
    )


def test_a_cache_that_is_only_read(backend):
    k_cache, v_cache = nan_cache(2, 9, 2, 8, [9, 9])
    whole = leaves((2, 3, 4, 8))
    check(
        lambda q: flash_attn_with_kvcache(q, k_cache, v_cache, causal=True),
        lambda q: formula(q, k_cache.to(q.dtype), v_cache.to(q.dtype), flash_visible(3, 9, True, (-1, -1)))[0],
        whole,
    )
    lengths = torch.tensor([4, 7], dtype=torch.int32)
    out = flash_attn_with_kvcache(*whole, k_cache, v_cache, cache_seqlens=lengths, causal=True)
    for row, length in enumerate(lengths.tolist()):
        one = [x[row : row + 1] for x in (whole[0], k_cache, v_cache)]
        expected = flash_attn_with_kvcache(*one, cache_seqlens=length, causal=True)
        torch.testing.assert_close(out[row : row + 1], expected)


def test_rows_of_a_larger_cache_and_left_padding(backend):
    """cache_batch_idx and cache_leftpad, as flash-attn describes them."""
    k_cache, v_cache = nan_cache(5, 20, 2, 8, [20] * 5)
    rows, pad = torch.tensor([3, 0], dtype=torch.int32), torch.tensor([2, 5], dtype=torch.int32)
    lengths = torch.tensor([9, 12], dtype=torch.int32)
    before = k_cache.clone()
    tensors = leaves((2, 3, 4, 8), (2, 3, 2, 8), (2, 3, 2, 8))

    def oracle(q, k, v):
        parts = []
        for i, (row, begin, length) in enumerate(zip(rows.tolist(), pad.tolist(), lengths.tolist(), strict=True)):
            keys, values = (
                torch.cat([cache[row, begin:length].to(q.dtype), new[i]])[None]
                for cache, new in ((before, k), (v_before, v))
            )
            visible = flash_visible(3, length + 3 - begin, True, (-1, -1))
            parts.append(formula(q[i : i + 1], keys, values, visible)[0])
        return torch.cat(parts)

    v_before = v_cache.clone()
    settings = {"cache_seqlens": lengths, "cache_batch_idx": rows, "cache_leftpad": pad, "causal": True}
    check(lambda q, k, v: flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **settings), oracle, tensors)
    assert torch.equal(k_cache[[1, 2, 4]], before[[1, 2, 4]]) and torch.equal(k_cache[3, 9:12], tensors[1][0])


def test_writes_after_a_forward_do_not_change_its_gradient(backend):
    """The cache of a decoding loop is overwritten, even rewound, before the backward runs."""
    for given in (6, torch.tensor([6, 2], dtype=torch.int32)):
        k_cache, v_cache = nan_cache(2, 12, 2, 8, [6, 6])
        q, k, v = leaves((2, 3, 4, 8), (2, 3, 2, 8), (2, 3, 2, 8))
        out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=given, causal=True)
        expected = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
        k_cache.fill_(math.nan)
        v_cache.zero_()
        for a, b in zip(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)), expected, strict=True):
            assert torch.equal(a, b)


def test_decoding_token_by_token_equals_one_call(backend):
    q, k, v = (x.detach() for x in leaves((2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)))
    k_cache, v_cache = nan_cache(2, 16, 2, 8, [0, 0])
    steps = []
    for i, (a, b, c) in enumerate(zip(*(x.split(1, 1) for x in (q, k, v)), strict=True)):
        steps.append(flash_attn_with_kvcache(a, k_cache, v_cache, b, c, cache_seqlens=i, causal=True))
    torch.testing.assert_close(torch.cat(steps, 1), flash_attn_func(q, k, v, causal=True))


def test_a_prefix_cache_accumulates_gradients_over_slices(backend):
    tensors = leaves((2, 23, 4, 8), (2, 23, 2, 8), (2, 23, 2, 8))

    def sliced(q, k, v):
        cache = PrefixCache(2, 23, 2, 8)
        pieces = []
        for i, part in enumerate(
            zip(q.split([9, 1, 13], 1), k.split([9, 1, 13], 1), v.split([9, 1, 13], 1), strict=True)
        ):
            keys = (cache, cache) if i == 1 else (cache, None)
            pieces.append(
                flash_attn_with_kvcache(part[0], *keys, *part[1:], cache_seqlens=[0, 9, None][i], causal=True)
            )
        return torch.cat(pieces, 1)

    check(sliced, lambda q, k, v: formula(q, k, v, flash_visible(23, 23, True, (-1, -1)))[0], tensors)


# ---- scaled_dot_product_attention ------------------------------------------------------------------------------------


def as_torch(query, key, value, **settings):
    """The original; a row without a key is 0 there too (its softmax is a safe one)."""
    return torch_sdpa(query, key, value, **settings)


I, J = torch.arange(23)[:, None], torch.arange(31)[None]
BATCH = torch.arange(3)[:, None, None, None]
SDPA_MASKS = {
    "causal": J <= I,
    "to the last key": J <= I + 8,
    "window": (J <= I) & (J > I - 5),
    "keys padded on the right": (J < BATCH * 9 + 3) & (I >= 0),
    "one row for all queries": J[None, None] < BATCH * 9 + 3,
    "keys padded on the left, causal": (J <= I + 8) & (J - 10 * BATCH >= 0),
    "documents": (I // 7) == (J // 7),
    "causal documents": ((I // 7) == (J // 7)) & (J <= I),
    "three dimensions": ((J <= I) & (J > I - 5))[None],
    "the same for each head": ((J <= I) & (J > I - 5)).expand(3, 4, 23, 31),
    "queries that see nothing": (J <= I - 4) & (I < 20),
}


@pytest.mark.parametrize("name", SDPA_MASKS)
def test_a_boolean_mask_of_intervals_is_torchs(name, backend):
    tensors = leaves((3, 4, 23, 8), (3, 4, 31, 8), (3, 4, 31, 8))
    settings = {"attn_mask": SDPA_MASKS[name], "scale": 0.4}
    check(
        lambda *x: scaled_dot_product_attention(*x, **settings), lambda *x: as_torch(*x, **settings), tensors
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("tokens", "keys"), [(2, 2), (19, 19), (7, 40), (40, 7), (2, 33)])
def test_causal_is_top_left_as_in_torch(tokens, keys, is_causal, dtype, backend):
    """pytorch #108108, #144858, #103082: which corner is_causal means when queries and keys differ in number."""
    tensors = leaves((2, 6, tokens, 24), (2, 2, keys, 24), (2, 2, keys, 24), dtype=dtype)
    settings = {"is_causal": is_causal, "enable_gqa": True}
    check(lambda *x: scaled_dot_product_attention(*x, **settings), lambda *x: as_torch(*x, **settings), tensors)


def test_causal_biases_of_torch_and_three_dimensions(backend):
    tensors = leaves((2, 4, 9, 8), (2, 4, 13, 8), (2, 4, 13, 8))
    for bias in (causal_lower_right, causal_upper_left):
        mask = bias(9, 13)
        check(
            lambda *x, mask=mask: scaled_dot_product_attention(*x, attn_mask=mask),
            lambda *x, mask=mask: as_torch(*x, attn_mask=mask),
            tensors,
        )
    flat = [x.detach()[:, 0].requires_grad_() for x in tensors]
    padded = (J[:, :13] < BATCH[:2, 0] * 5 + 4) & (I[:9] >= 0)
    for settings in ({"is_causal": True}, {"attn_mask": J[:, :13] <= I[:9]}, {"attn_mask": padded}):
        check(
            lambda *x, settings=settings: scaled_dot_product_attention(*x, **settings),
            lambda *x, settings=settings: as_torch(*x, **settings),
            flat,
        )


# ---- modes of torch --------------------------------------------------------------------------------------------------


def call_flash(q, k, v):
    return flash_attn_func(q, k, v, causal=True, window_size=(4, -1))


def call_varlen(q, k, v):
    lengths = torch.tensor([0, 5, 5, 18], dtype=torch.int32)
    return flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), lengths, lengths, 13, 13, causal=True).view_as(
        q
    )


def call_cache(q, k, v):
    caches = torch.zeros(2, 14, 2, 8, dtype=k.dtype), torch.zeros(2, 14, 2, 8, dtype=k.dtype)
    return flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=4, causal=True)


def call_cache_lengths(q, k, v):
    caches = torch.ones(2, 14, 2, 8, dtype=k.dtype), torch.ones(2, 14, 2, 8, dtype=k.dtype)
    return flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=torch.tensor([4, 2], dtype=torch.int32), causal=True)


def call_sdpa(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k[:, :, :6], v[:, :, :6], is_causal=True, enable_gqa=True).transpose(1, 2)


def call_mask(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    return scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


CALLS = [call_flash, call_varlen, call_cache, call_cache_lengths, call_sdpa, call_mask]
SHAPES = ((2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))


@pytest.mark.parametrize("call", CALLS)
def test_compiled_in_one_graph_it_gives_the_same(call):
    torch._dynamo.reset()
    tensors = leaves(*SHAPES)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    dout = torch.randn(SHAPES[0])
    actual, expected = ((out, *torch.autograd.grad(out, tensors, dout)) for out in (compiled(*tensors), call(*tensors)))
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_one_graph_serves_every_length_of_a_cache():
    """A decoding loop compiles twice (one length, any length), not once a token."""
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in leaves((2, 1, 4, 8), (2, 1, 2, 8), (2, 1, 2, 8)))
    caches = [nan_cache(2, 16, 2, 8, [0, 0]) for _ in range(2)]
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend=count, dynamic=None)
    for i in range(8):
        out = step(q, *caches[0], k, v, cache_seqlens=i, causal=True)
        torch.testing.assert_close(out, flash_attn_with_kvcache(q, *caches[1], k, v, cache_seqlens=i, causal=True))
    assert len(graphs) <= 3


@pytest.mark.parametrize("call", CALLS)
def test_activation_checkpointing_and_inference_mode(call, backend):
    tensors = leaves(*SHAPES)
    out = call(*tensors)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, tensors, dout)
    again = checkpoint(call, *tensors, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(again, tensors, dout), expected, strict=True):
        assert torch.equal(a, b)
    with torch.inference_mode():
        torch.testing.assert_close(call(*tensors), out.detach())


@pytest.mark.parametrize("call", CALLS)
def test_autocast_computes_in_its_dtype(call, backend):
    tensors = leaves(*SHAPES)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(*tensors)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), call(*tensors), rtol=0.05, atol=0.05)
    gradients = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert all(x.dtype == torch.float32 and x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("packed", [False, True], ids=["intervals", "sequences"])
def test_opcheck(packed, requires_grad, monkeypatch):
    monkeypatch.setenv("TPK_BACKEND", "reference")
    heads_first = leaves((1, 4, 9, 8), (1, 2, 9, 8), (1, 2, 9, 6))  # other strides in than out: MagiAttention #137
    q, k, v = (x.detach().transpose(1, 2).requires_grad_(requires_grad) for x in heads_first)
    sinks = torch.randn(4, requires_grad=requires_grad)
    intervals = mask_intervals(torch.ones(1, 9, 9, dtype=torch.bool).tril())
    which = (None, cu(0, 4, 9), cu(0, 4, 9), 5, 5) if packed else (intervals, None, None, 0, 0)
    settings = (True, -1, -1, 0.3, 0.0, False, "")
    torch.library.opcheck(torch.ops.tpkernels.interval_attention.default, (q, k, v, sinks, *which, *settings))
    if not requires_grad:
        out, lse = torch.ops.tpkernels.interval_attention(q, k, v, sinks, *which, *settings)
        arguments = (torch.randn_like(out), q, k, v, out, lse, sinks, *which, *settings)
        torch.library.opcheck(torch.ops.tpkernels.interval_attention_backward.default, arguments)


def test_sinks_get_their_gradient_through_pieces(backend):
    """interval_attention alone, with sinks, against the formula with a key of score `sink` and value 0."""
    mask = (J <= I) & (J - 4 * torch.arange(2)[:, None, None] >= 0)
    tensors = [*leaves((2, 23, 4, 8), (2, 31, 2, 8), (2, 31, 2, 8)), torch.randn(4, requires_grad=True)]

    def oracle(q, k, v, sinks):
        k, v = (x.repeat_interleave(2, 2) for x in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) * 8**-0.5
        scores = scores.masked_fill(~mask[:, None], -math.inf)
        scores = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, -1, 23, 1).to(q.dtype)], -1)
        weights = torch.exp(scores - scores.logsumexp(-1, keepdim=True))[..., :-1]
        return torch.einsum("bhts,bshd->bthd", weights, v)

    intervals = mask_intervals(mask)
    check(lambda q, k, v, s: interval_attention(q, k, v, intervals, sinks=s), oracle, tensors)


# ---- refusals --------------------------------------------------------------------------------------------------------


def bshd(tokens=4, keys=4, heads=4, kv_heads=2):
    return [torch.randn(1, n, h, 8) for n, h in ((tokens, heads), (keys, kv_heads), (keys, kv_heads))]


def bhsd(**sizes):
    return [x.transpose(1, 2) for x in bshd(**sizes)]


def cu(*values):
    return torch.tensor(values, dtype=torch.int32)


ALIBI, PAGES = torch.ones(4), torch.zeros(1, 2, dtype=torch.int32)


def flash(**settings):
    return flash_attn_func(*bshd(), **settings)


def varlen(cu_q=(0, 4), cu_k=(0, 4), max_q=4, max_k=4, **settings):
    cu_q, cu_k = (x if isinstance(x, torch.Tensor) else cu(*x) for x in (cu_q, cu_k))
    return flash_attn_varlen_func(*(x[0] for x in bshd()), cu_q, cu_k, max_q, max_k, **settings)


def caches(rows=1, dtype=torch.float32, **settings):
    return [torch.zeros(rows, 8, 2, 8, dtype=dtype, **settings) for _ in range(2)]


def kvcache(*cache, **settings):
    q, k, v = bshd(tokens=2, keys=2)
    return flash_attn_with_kvcache(q, *(cache or caches()), k, v, **({"cache_seqlens": 3} | settings))


def sdpa(kv_heads=4, **settings):
    return scaled_dot_product_attention(*bhsd(kv_heads=kv_heads), **settings)


HOLE = torch.eye(4).bool() | (torch.arange(4) == 2)
OWN_MASKS = torch.arange(4)[:, None, None] >= torch.arange(4).expand(4, 4)
SLICES = [PrefixCache(1, 8, 2, 8), PrefixCache(1, 8, 2, 8)]
LAYOUT = r"must be \[total tokens, heads, head_dim\], got q \[1, 4, 4, 8\]"
REFUSED = [
    (flash, {"dropout_p": 0.1}, "flash_attn_func: dropout_p is 0.1, which is not served; pass 0.0"),
    (flash, {"alibi_slopes": ALIBI}, r"alibi_slopes is a tensor \[4\].*rotary"),
    (varlen, {"dropout_p": 0.5}, "flash_attn_varlen_func: dropout_p is 0.5"),
    (varlen, {"block_table": PAGES}, r"block_table is a tensor \[1, 2\].*gather the pages"),
    (lambda: flash_attn_varlen_func(*bshd(), cu(0, 4), cu(0, 4), 4, 4), {}, LAYOUT),
    (varlen, {"cu_q": cu(0, 4).long()}, r"cu_seqlens_q is torch.int64 \[2\].*\.to\(torch.int32\)"),
    (varlen, {"cu_k": (0, 0, 4)}, r"cu_seqlens_k is torch.int32 \[3\]"),
    (varlen, {"cu_q": (0, 4, 2), "cu_k": (0, 4, 4)}, r"cu_seqlens_q is \[0, 4, 2\]; it starts with 0, never falls"),
    (varlen, {"cu_q": (1, 4)}, r"cu_seqlens_q is \[1, 4\]; it starts with 0"),
    (varlen, {"cu_k": (0, 5), "max_k": 5}, "ends at the 4 tokens of k"),
    (varlen, {"max_q": 3}, "max_seqlen_q is 3 but a sequence has 4 tokens; pass max_seqlen_q=4"),
    (kvcache, {"block_table": PAGES}, "block_table.*PrefixCache"),
    (kvcache, {"rotary_cos": ALIBI}, "rotary_cos.*rotate q and k before the call"),
    (kvcache, {"alibi_slopes": ALIBI}, "flash_attn_with_kvcache: alibi_slopes"),
    (lambda: flash_attn_with_kvcache(*bshd(), bshd()[1], cache_seqlens=1), {}, "both k and v, or neither"),
    (kvcache, {"cache_seqlens": None}, "without cache_seqlens, which says where to write"),
    (kvcache, {"cache_seqlens": 7}, "is 7 in row 0 and 2 tokens are to be written, but the cache holds 8"),
    (kvcache, {"cache_seqlens": torch.tensor([7])}, "is 7 in row 0 and 2 tokens"),
    (kvcache, {"cache_seqlens": -1}, "cache_seqlens is -1 in row 0"),
    (
        lambda: kvcache(*caches(requires_grad=True)),
        {},
        r"k_cache requires a gradient.*k_cache.detach\(\), or a PrefixC",
    ),
    (lambda: kvcache(*caches(dtype=torch.half)), {}, r"k is torch.float32 \[1, 2, 2, 8\].*must be torch.float16"),
    (lambda: kvcache(*caches(rows=2)), {}, "cache_batch_idx picks rows"),
    (lambda: kvcache(caches()[0], None), {}, "v_cache is a NoneType"),
    (lambda: kvcache(*SLICES), {}, "v_cache is None or the same PrefixCache"),
    (lambda: kvcache(SLICES[0], None, cache_seqlens=torch.zeros(1)), {}, "rows of a PrefixCache are equally long"),
    (lambda: flash_attn_with_kvcache(bshd()[0], SLICES[0]), {}, "pass k and v too"),
    (sdpa, {"dropout_p": 0.1}, "dropout_p is 0.1; dropout on attention weights is not served"),
    (sdpa, {"attn_mask": torch.zeros(4, 4)}, r"attn_mask is torch.float32; biases.*attn_mask == 0"),
    (sdpa, {"attn_mask": torch.ones(4, 4).bool(), "is_causal": True}, "exclude each other"),
    (sdpa, {"kv_heads": 2}, "4 query heads and 2 KV heads; pass enable_gqa=True"),
    (sdpa, {"attn_mask": HOLE}, "query 0 of batch row 0 sees are not one interval"),
    (sdpa, {"attn_mask": OWN_MASKS}, "differs between heads"),
    (sdpa, {"attn_mask": torch.ones(3, 4).bool()}, r"attn_mask \[3, 4\] does not broadcast to \[batch, 4, 4, 4\]"),
    (lambda: scaled_dot_product_attention(*(x[0, 0] for x in bshd())), {}, r"must be \[batch, heads, tokens"),
    (sdpa, {"attn_mask": causal_lower_right(4, 5)}, "for 4 queries and 5 keys, but there are 4 and 4"),
]


@pytest.mark.parametrize(("call", "settings", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_not_served_is_refused_by_name(call, settings, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call(**settings)


def test_a_refused_call_leaves_the_cache_alone(backend):
    cache = caches()
    for settings in ({"cache_seqlens": 7}, {"softmax_scale": math.inf}, {"softcap": -1.0}):
        with pytest.raises(ValueError):
            kvcache(*cache, **settings)
    q, k, v = bshd(tokens=2, keys=2, heads=3)
    with pytest.raises(ValueError, match="3 query heads cannot be shared out over 2 KV heads"):
        flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=1)
    assert not any(x.any() for x in cache)


@pytest.mark.parametrize("call", CALLS)
def test_vmap_is_refused_clearly(call):
    with pytest.raises(NotImplementedError, match=r"use.*the batch dimension"):
        torch.vmap(call)(*(x.detach()[None] for x in leaves(*SHAPES)))


@pytest.mark.parametrize("transform", ["grad", "jvp", "twice"])
def test_derivatives_of_masked_attention_that_do_not_exist_are_refused_clearly(transform):
    q = torch.randn(2, 4, 5, 8)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    mask[0, :, :, 0] = False

    def attend(q):
        return scaled_dot_product_attention(q, q, q, attn_mask=mask)

    with pytest.raises(
        NotImplementedError, match=r"use backward\(\)" if transform != "twice" else "first derivatives only"
    ):
        if transform == "grad":
            torch.func.grad(lambda q: attend(q).sum())(q)
        elif transform == "jvp":
            torch.func.jvp(attend, (q,), (q,))
        else:
            leaf = q.requires_grad_()
            torch.autograd.grad(attend(leaf).sum(), leaf, create_graph=True)[0].sum().backward()
