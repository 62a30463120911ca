"""What the drop-in functions do not serve, and refuse by name: arguments, shapes, dtypes, masks, caches."""

from __future__ import annotations

import math

import pytest
import torch
from formulas import cumulative
from torch.nn.attention.bias import causal_lower_right

from tpkernels import PrefixCache
from tpkernels.compat import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)

pytestmark = pytest.mark.usefixtures("asked_for")


def bshd(tokens=4, keys=4, heads=4, kv_heads=2):
    return [torch.randn(1, n, h, 8) for n, h in ((tokens, heads), (keys, kv_heads), (keys, kv_heads))]


def bhsd(**sizes):
    return [x.transpose(1, 2) for x in bshd(**sizes)]


ALIBI, PAGES = torch.ones(4), torch.zeros(1, 2, dtype=torch.int32)


def flash(**settings):
    return flash_attn_func(*bshd(), **settings)


def varlen(cu_q=(0, 4), cu_k=(0, 4), max_q=4, max_k=4, **settings):
    cu_q, cu_k = (x if isinstance(x, torch.Tensor) else cumulative(*x) for x in (cu_q, cu_k))
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
    (lambda: flash_attn_varlen_func(*bshd(), cumulative(0, 4), cumulative(0, 4), 4, 4), {}, LAYOUT),
    (
        lambda: flash_attn_varlen_func(*(x[0] for x in bshd()), cumulative(0, 4), None, 4, 4),
        {},
        "cu_seqlens_k is a NoneType; it must be an int32 tensor",
    ),
    (varlen, {"cu_q": cumulative(0, 4).long()}, r"cu_seqlens_q is torch.int64 \[2\].*\.to\(torch.int32\)"),
    (varlen, {"cu_k": (0, 0, 4)}, r"cu_seqlens_k is torch.int32 \[3\]"),
    (varlen, {"cu_q": (0, 4, 2), "cu_k": (0, 4, 4)}, r"cu_seqlens_q is \[0, 4, 2\]; it starts with 0, never falls"),
    (varlen, {"cu_q": (1, 4)}, r"cu_seqlens_q is \[1, 4\]; it starts with 0"),
    (varlen, {"cu_k": (0, 5), "max_k": 5}, "ends at the 4 tokens of k"),
    (varlen, {"softcap": -1.0}, r"softcap is -1.0; it must be 0 \(off\) or positive"),
    (varlen, {"max_q": 3}, "max_seqlen_q is 3 but a sequence has 4 tokens; pass max_seqlen_q=4"),
    (kvcache, {"block_table": PAGES}, "block_table.*PrefixCache"),
    (kvcache, {"rotary_cos": ALIBI}, "rotary_cos.*rotate q and k before the call"),
    (kvcache, {"alibi_slopes": ALIBI}, "flash_attn_with_kvcache: alibi_slopes"),
    (lambda: flash_attn_with_kvcache(*bshd(), bshd()[1], cache_seqlens=1), {}, "both k and v, or neither"),
    (kvcache, {"cache_seqlens": None}, "without cache_seqlens, which says where to write"),
    (kvcache, {"cache_seqlens": 7}, "is 7 in row 0 and 2 tokens are to be written, but the cache holds 8"),
    (kvcache, {"cache_seqlens": torch.tensor([7])}, "is 7 in row 0 and 2 tokens"),
    (kvcache, {"cache_seqlens": -1}, "cache_seqlens is -1 in row 0"),
    (kvcache, {"cache_seqlens": 1.5}, r"cache_seqlens is torch.float32 \[\]; it must be int32 \[1\]"),
    (kvcache, {"cache_seqlens": PAGES}, r"cache_seqlens is torch.int32 \[1, 2\]; it must be int32 \[1\]"),
    (flash, {"window_size": 3}, r"flash_attn_func: window_size is 3; it must be \(left, right\), -1 for no bound"),
    (varlen, {"window_size": (1, 2, 3)}, r"flash_attn_varlen_func: window_size is \(1, 2, 3\)"),
    (
        lambda: kvcache(*caches(requires_grad=True)),
        {},
        r"k_cache requires a gradient.*k_cache.detach\(\), or a PrefixC",
    ),
    (lambda: kvcache(*caches(dtype=torch.half)), {}, r"k is torch.float32 \[1, 2, 2, 8\].*must be torch.float16"),
    (lambda: kvcache(*caches(rows=2)), {}, "cache_batch_idx picks rows"),
    (lambda: kvcache(caches()[0], caches(rows=3)[0]), {}, "the caches equal but for head_dim"),
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
    one = torch.ones(1, dtype=torch.int32)
    wrong = {"cache_seqlens": [7], "softmax_scale": [math.inf], "softcap": [-1.0], "window_size": [None]}
    wrong |= {"cache_leftpad": [-one, 9 * one, PAGES, one.float()], "cache_batch_idx": [one, -one, one.bool()]}
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with pytest.raises(ValueError, match=f"{name.removeprefix('softmax_')} is"):
            kvcache(*cache, **{name: value})
    q, k, v = bshd(tokens=2, keys=2, heads=3)
    with pytest.raises(ValueError, match="3 query heads cannot be shared out over 2 KV heads"):
        flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=1)
    assert not any(x.any() for x in cache)
    wide = torch.zeros(2, 1, 8, 2, 300)
    q, k, v = torch.ones(3, 1, 2, 2, 300)
    if backend != "reference":  # which takes any head_dim
        with pytest.raises(ValueError, match="head_dim 300/300"):
            flash_attn_with_kvcache(q, *wide, k, v, cache_seqlens=1)
    assert not wide.any()
