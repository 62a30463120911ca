"""The drop-in functions: their interfaces, torch's own attention as the oracle of its drop-in, and torch's modes.

Oracles run in fp64. The yardstick of every tolerance is what the formula, or the original itself, loses in the tested
precision (factor 2, gradients 3, plus testing.noise). Cases are small, some of a few numbers, so that loss is taken
relative to the largest value, and as the largest among out, dq, dk and dv.
"""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from formulas import check, cumulative, leaves, nan_cache
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from torch.utils.checkpoint import checkpoint

from tpkernels import compat
from tpkernels.compat import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)
from tpkernels.compat_intervals import interval_attention
from tpkernels.compat_pieces import mask_intervals

pytestmark = pytest.mark.usefixtures("asked_for")


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


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("call", CALLS)
def test_compiled_in_one_graph_it_gives_the_same(call, dynamic):
    torch._dynamo.reset()
    tensors = leaves(*SHAPES)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
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
    which = (None, cumulative(0, 4, 9), cumulative(0, 4, 9), 5, 5) if packed else (intervals, None, None, 0, 0)
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


@pytest.mark.parametrize("call", [call_flash, call_varlen, call_sdpa, call_mask])
def test_on_the_meta_device_it_gives_shapes(call):
    """A device without values and without autocast."""
    tensors = [x.detach().to("meta").requires_grad_() for x in leaves(*SHAPES)]
    out = call(*tensors)
    assert out.is_meta and out.shape == SHAPES[0]
    assert [x.shape for x in torch.autograd.grad(out.sum(), tensors)] == [x.shape for x in tensors]


@pytest.mark.parametrize("call", CALLS)
def test_vmap_is_refused_clearly(call):
    with pytest.raises(NotImplementedError, match=r"use.*the batch dimension"):
        torch.vmap(call)(*(x.detach()[None] for x in leaves(*SHAPES)))


@pytest.mark.parametrize("transform", ["grad", "jvp", "dual", "twice"])
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
        elif transform == "dual":  # whose tangent an op without a formula would drop
            with torch.autograd.forward_ad.dual_level():
                attend(torch.autograd.forward_ad.make_dual(q, q))
        else:
            leaf = q.requires_grad_()
            torch.autograd.grad(attend(leaf).sum(), leaf, create_graph=True)[0].sum().backward()
