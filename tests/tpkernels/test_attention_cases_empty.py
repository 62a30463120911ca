"""Bugs of other attention kernels with rows that see no key and sequences that have none, as cases for ours.

Each docstring names where it was found; FA is Dao-AILab/flash-attention. Each test states the right value; where our
contract differs (tpkernels/attention.py), ours holds.
"""

from __future__ import annotations

import math

import pytest
import torch
from formulas import cumulative, grads, leaves

from tpkernels import Mask, PrefixCache, prefix_attention
from tpkernels.compat import flash_attn_varlen_func, flash_attn_with_kvcache, scaled_dot_product_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.on_gpu_too


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_queries_than_keys_leave_the_first_rows_empty(with_sinks, dtype, backend):
    """FA #1778 (2048 queries, 1024 keys: the first 1024 rows must be exactly 0), FA PR #978 (their lse was +inf).

    A sink of -inf leaves lse at -inf, and must not make the sink's gradient NaN."""
    q, k, v = leaves((1, 150, 2, 16), (1, 70, 2, 16), (1, 70, 2, 16), dtype=dtype)
    sinks = torch.tensor([0.5, -math.inf], requires_grad=True) if with_sinks else None
    settings = {"sinks": sinks, "backend": backend}
    out, lse = prefix_attention(q, k, v, return_lse=True, **settings)
    dout = torch.randn_like(out)
    dq, dk, dv, *dsinks = grads(out, dout, q, k, v, *([] if sinks is None else [sinks]))
    assert (out[:, :80] == 0).all() and (dq[:, :80] == 0).all()
    expected = torch.full((2,), -math.inf) if sinks is None else sinks.detach()
    assert (lse[0, :, :80] == expected[:, None]).all()
    rest = prefix_attention(q[:, 80:], k, v, **settings)
    assert torch.equal(out[:, 80:], rest)
    rest_of = grads(rest, dout[:, 80:], k, v, *([] if sinks is None else [sinks]))
    for name, a, b in zip("kvs", (dk, dv, *dsinks), rest_of, strict=False):
        torch.testing.assert_close(a, b, msg=name)


@pytest.fixture
def drop_in(backend, monkeypatch):
    """The drop-in functions have no argument for it."""
    monkeypatch.setenv("TPK_BACKEND", backend)


def test_packed_pieces_with_fewer_keys_than_queries_are_finite(drop_in):
    """FA #443: varlen cu_q=[0, 76, 110, 256], cu_k=[0, 1, 2, 3], head_dim 32, inputs times 3, causal: dQ was NaN."""
    q, k, v = leaves((256, 1, 32), (3, 1, 32), (3, 1, 32), factor=3)
    cu_q, cu_k = cumulative(0, 76, 110, 256), cumulative(0, 1, 2, 3)
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 146, 1, causal=True, return_attn_probs=True)
    gradients = grads(out, torch.randn_like(out), q, k, v)
    assert out.isfinite().all() and all(x.isfinite().all() for x in gradients)
    last = torch.zeros(256, dtype=torch.bool)
    last[[75, 109, 255]] = True  # the only queries that see a key, one each
    assert (out[~last] == 0).all() and (gradients[0][~last] == 0).all() and (lse[:, ~last] == -math.inf).all()
    torch.testing.assert_close(out[last], v)


def test_sequences_without_queries_or_keys(drop_in):
    """FA #2562, #1713, PR #2568: cu_q=[0, 0, 1208, 2048, 2048], cu_k=[0, 2538, 4280, 5120, 8192]: dK and dV of keys
    whose sequence has no queries were uninitialised. And the mirror image: queries whose sequence has no keys."""
    cu_q, cu_k = cumulative(0, 0, 1208, 2048, 2048), cumulative(0, 2538, 4280, 5120, 8192)
    q, k, v = leaves((2048, 1, 8), (8192, 1, 8), (8192, 1, 8))
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 1208, 3072, causal=True)
    _, dk, dv = grads(out, torch.randn_like(out), q, k, v)
    for x in (dk, dv):
        assert (x[:2538] == 0).all() and (x[5120:] == 0).all() and (x[2538:5120] != 0).any() and x.isfinite().all()
    q, k, v = leaves((40, 2, 8), (20, 2, 8), (20, 2, 8))
    out = flash_attn_varlen_func(q, k, v, cumulative(0, 15, 25, 40), cumulative(0, 0, 20, 20), 15, 20)
    dq, dk, dv = grads(out, torch.randn_like(out), q, k, v)
    for x in (out, dq):
        assert (x[:15] == 0).all() and (x[25:] == 0).all() and (x[15:25] != 0).any()
    assert dk.isfinite().all() and dv.isfinite().all()


@pytest.fixture
def poison():
    """torch.empty gives NaN, not whatever lay there."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(7).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
def test_nothing_uninitialised_comes_out(poison, drop_in):
    """pytorch #176793, FA PR #2324: rows behind cu_seqlens[-1] kept what the allocator gave, NaN gradients. The kind:
    every result that a kernel may leave unwritten: rows behind the last sequence, keys nobody sees, rows without keys,
    unused capacity, queries a mask empties."""
    q, k, v = leaves((30, 4, 8), (40, 2, 8), (40, 2, 8))
    results = [flash_attn_varlen_func(q, k, v, cumulative(0, 5, 9), cumulative(0, 3, 14), 5, 11, causal=True)]
    assert (results[0][9:] == 0).all()
    caches = [torch.empty(3, 25, 2, 8), torch.empty(3, 25, 2, 8)]
    pieces = [x.view(3, 10, -1, 8) for x in (q, k[:30], v[:30])]
    lengths = cumulative(0, 4, 15)
    for i, length in enumerate(lengths.tolist()):
        for cache in caches:
            cache[i, :length] = 1.0
    results.append(flash_attn_with_kvcache(pieces[0], *caches, *pieces[1:], cache_seqlens=lengths, causal=True))
    results.append(prefix_attention(*pieces, PrefixCache(3, 25, 2, 8, device=torch.get_default_device())))
    results.append(prefix_attention(q[None], k[None, :9], v[None, :9]))  # rows before the first key
    results.append(prefix_attention(q[None, :9], k[None], v[None], mask=Mask(window=(3, None))))  # keys unseen
    results.append(prefix_attention(q[None], k[None, :0], v[None, :0]))
    heads_first = [x[:30].view(3, 10, -1, 8).transpose(1, 2) for x in (q, k, v)]
    mask = torch.ones(10, 10, dtype=torch.bool).tril(-4)
    results.append(scaled_dot_product_attention(*heads_first, mask, enable_gqa=True))
    for number, out in enumerate(results):
        gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert out.isfinite().all() and all(x.isfinite().all() for x in gradients), number


def test_a_cache_shorter_than_the_queries(drop_in):
    """FA #1778 as it comes through a cache: rows that end before the queries begin see nothing."""
    q, k, v = leaves((2, 9, 2, 8), (2, 12, 2, 8), (2, 12, 2, 8))
    settings = {"cache_seqlens": cumulative(3, 12), "causal": True, "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(q, k.detach(), v.detach(), **settings)
    assert (out[0, :6] == 0).all() and (lse[0, :, :6] == -math.inf).all() and lse[0, :, 6:].isfinite().all()
    dq = grads(out, torch.ones_like(out), q)[0]
    assert (dq[0, :6] == 0).all() and dq.isfinite().all()
    torch.testing.assert_close(out[0, 6], v[0, 0])


def test_a_dead_band_of_a_window_is_not_nan(backend):
    """pytorch #127055, #103963: CPU attention gave NaN for long masked runs of a band mask at n = 640.

    A query window that lies wholly before the first key: rows [0, 100) see nothing, with keys following later.
    """
    q, k, v = leaves((1, 740, 1, 8), (1, 640, 1, 8), (1, 640, 1, 8))
    mask = Mask(causal=False, window=(3, 3))
    out, lse = prefix_attention(q, k, v, mask=mask, backend=backend, return_lse=True)
    dq, dk, dv = grads(out, torch.randn_like(out), q, k, v)
    assert (out[:, :97] == 0).all() and (lse[..., :97] == -math.inf).all() and (dq[:, :97] == 0).all()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv)) and lse[..., 97:].isfinite().all()


def test_no_keys_at_all(backend):
    """FA #2562: zero-length keys gave uninitialised results."""
    q, k, v = leaves((2, 3, 4, 8), (2, 0, 2, 8), (2, 0, 2, 6))
    sinks = torch.arange(4.0, requires_grad=True)
    out, lse = prefix_attention(q, k, v, sinks=sinks, backend=backend, return_lse=True)
    assert out.shape == (2, 3, 4, 6) and (out == 0).all() and torch.equal(lse[1, :, 2], sinks.detach())
    dq, dk, dv, dsinks = grads(out, torch.ones_like(out), q, k, v, sinks)
    assert (dq == 0).all() and dk.shape == k.shape and dv.shape == v.shape and (dsinks == 0).all()


def test_keys_that_no_query_sees_get_a_zero_gradient(backend):
    """FA #2562, #1713, PR #2568: dK and dV of keys whose sequence has no queries were uninitialised."""
    q, k, v = leaves((1, 20, 2, 16), (1, 300, 2, 16), (1, 300, 2, 16))
    mask = Mask.from_documents([[100, 0, 190, 10]], window=(15, None))
    out = prefix_attention(q, k, v, mask=mask, backend=backend)
    _, dk, dv = grads(out, torch.randn_like(out), q, k, v)
    assert (dk[:, :265] == 0).all() and (dv[:, :265] == 0).all() and (dv[:, 265:] != 0).any()
