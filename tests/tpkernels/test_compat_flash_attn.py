"""The flash-attn functions against the formulas that the original documents.

Oracles run in fp64. The yardstick of every tolerance is what the formula, or the original itself, loses in the tested
precision (factor 2, gradients 3, plus testing.noise). Cases are small, some of a few numbers, so that loss is taken
relative to the largest value, and as the largest among out, dq, dk and dv.
"""

from __future__ import annotations

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from formulas import check, detached, flash_visible, formula, leaves, nan_cache

from tpkernels import PrefixCache
from tpkernels.compat import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

pytestmark = pytest.mark.usefixtures("asked_for")


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


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**63 - 1, 2**70])
def test_a_window_beyond_all_keys_is_none(size, backend):
    """Such as sys.maxsize: its sum with a position must not wrap."""
    q, k, v = (x.detach() for x in leaves((1, 9, 4, 8), (1, 5, 2, 8), (1, 5, 2, 8)))
    window = {"window_size": (size, size)}
    expected = flash_attn_func(q, k, v)
    assert torch.equal(flash_attn_func(q, k, v, **window), expected)
    packed = flash_attn_varlen_func(q[0], k[0], v[0], totals([9]), totals([5]), 9, 5, **window)
    torch.testing.assert_close(packed[None], expected)
    lengths = torch.tensor([5], dtype=torch.int32)
    torch.testing.assert_close(flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **window), expected)


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


@pytest.mark.parametrize(("given", "padding"), [([9, 12], [2, 5]), (9, None)], ids=["padded", "one length"])
def test_rows_of_a_larger_cache_and_left_padding(given, padding, backend):
    """cache_batch_idx and cache_leftpad, as flash-attn describes them."""
    k_cache, v_cache = nan_cache(5, 20, 2, 8, [20] * 5)
    rows = torch.tensor([3, 0], dtype=torch.int32)
    lengths = given if isinstance(given, int) else torch.tensor(given, dtype=torch.int32)
    pad = None if padding is None else torch.tensor(padding, dtype=torch.int32)
    before = k_cache.clone()
    tensors = leaves((2, 3, 4, 8), (2, 3, 2, 8), (2, 3, 2, 8))

    def oracle(q, k, v):
        parts = []
        places = zip(rows.tolist(), padding or [0, 0], [9, 9] if given == 9 else given, strict=True)
        for i, (row, begin, length) in enumerate(places):
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
