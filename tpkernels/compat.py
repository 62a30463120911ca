"""Drop-in interfaces over this package's op: flash-attn's, torch's scaled_dot_product_attention and transformers'.

    from tpkernels.compat import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
    from tpkernels.compat import register_with_transformers, scaled_dot_product_attention

The one trap: causal is aligned bottom-right in the flash functions (the last query sees the last key) and top-left in
scaled_dot_product_attention (query 0 sees key 0), as in the originals; they differ when queries and keys differ in
number.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from tpkernels.attention import prefix_attention
from tpkernels.compat_flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tpkernels.compat_intervals import interval_attention
from tpkernels.compat_pieces import mask_intervals
from tpkernels.compat_transformers import register_with_transformers
from tpkernels.mask import CAUSAL, Mask

__all__ = [
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "register_with_transformers",
    "scaled_dot_product_attention",
]

FULL = Mask(causal=False)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention: query [batch, heads, tokens, head_dim], key and value [batch,
    kv_heads, keys, head_dim] -> [batch, heads, tokens, value_head_dim]; three dimensions are [batch, tokens, head_dim].

    is_causal: query i sees keys 0 .. i. attn_mask: boolean, True where a query sees a key, any shape that broadcasts to
    [batch, heads, tokens, keys]; the same for all heads, and each row one run of True (causal, windows, padding, packed
    documents, prefixes, in any combination); or torch.nn.attention.bias.causal_upper_left / causal_lower_right. A row
    without True gives 0. scale: default head_dim ** -0.5. enable_gqa: kv_heads may divide heads. A boolean mask is read
    on the host, a sync on a GPU.

    Raises ValueError for dropout_p, masks that are not boolean, differ between heads or are not intervals, a mask
    beside is_causal, unequal heads without enable_gqa, and for what prefix_attention refuses (dtypes, devices).
    """
    name = "scaled_dot_product_attention"
    if dropout_p:
        raise ValueError(f"{name}: dropout_p is {dropout_p}; dropout on attention weights is not served, pass 0.0")
    if not (query.dim() == key.dim() == value.dim() and query.dim() in (3, 4)):
        shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
        raise ValueError(f"{name}: the tensors must be [batch, heads, tokens, head_dim], got {shapes}")
    if query.dim() == 3:
        mask = attn_mask if attn_mask is None or attn_mask.dim() < 3 else attn_mask[:, None]
        query, key, value = (x[:, None] for x in (query, key, value))
        return scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale)[:, 0]
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and not enable_gqa:
        raise ValueError(
            f"{name}: {heads} query heads and {kv_heads} KV heads; pass enable_gqa=True to share KV heads out"
        )
    if attn_mask is not None and is_causal:
        raise ValueError(f"{name}: is_causal=True and attn_mask exclude each other; put causality into the mask")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    tokens, keys = q.shape[1], k.shape[1]
    if isinstance(attn_mask, CausalBias):
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (tokens, keys):
            raise ValueError(
                f"{name}: attn_mask is for {attn_mask.seq_len_q} queries and {attn_mask.seq_len_kv} keys, but there "
                f"are {tokens} and {keys}"
            )
        is_causal = attn_mask.variant == CausalVariant.UPPER_LEFT
        if not is_causal:
            return prefix_attention(q, k, v, mask=CAUSAL, scale=scale).transpose(1, 2)
    elif attn_mask is not None:
        intervals = mask_intervals(_dense_mask(attn_mask, heads, tokens, keys))
        return interval_attention(q, k, v, intervals, scale=scale).transpose(1, 2)
    visible = FULL
    if is_causal and tokens <= keys:  # keys behind the last query are seen by none
        k, v, visible = k[:, :tokens], v[:, :tokens], CAUSAL
    elif is_causal:  # query i sits at position keys - tokens + i, and sees keys 0 .. i
        visible = Mask(causal=False, window=(None, tokens - keys))
    return prefix_attention(q, k, v, mask=visible, scale=scale).transpose(1, 2)


def _dense_mask(mask: Tensor, heads: int, tokens: int, keys: int) -> Tensor:
    """The boolean mask as [batch or 1, tokens, keys]."""
    name = "scaled_dot_product_attention"
    if mask.dtype != torch.bool:
        raise ValueError(
            f"{name}: attn_mask is {mask.dtype}; biases on scores are not served. A mask of 0 and -inf alone can be "
            "passed as attn_mask == 0"
        )
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    # Each size by itself: Dynamo finds a symbolic size in no tuple.
    if len(shape) > 4 or any(n != 1 and n != full for n, full in zip(shape[1:], (heads, tokens, keys), strict=True)):
        raise ValueError(
            f"{name}: attn_mask {list(mask.shape)} does not broadcast to [batch, {heads}, {tokens}, {keys}]"
        )
    mask = mask.reshape(shape)
    if shape[1] > 1:
        if torch.compiler.is_compiling():
            raise ValueError(f"{name}: a compiled attn_mask must have one head, [batch, 1, tokens, keys]; all share it")
        if not bool((mask == mask[:, :1]).all()):
            raise ValueError(f"{name}: attn_mask differs between heads; pass one mask for all of them")
    return mask[:, 0].expand(-1, tokens, keys)
