"""register_with_transformers: attn_implementation="tpkernels" for the models of Hugging Face transformers, from 4.57.

Two functions under one name: attention (query [batch, heads, tokens, head_dim] -> out [batch, tokens, heads, head_dim])
and the mask builder, which turns a model's mask rule and padding into int32 [batch, 1, tokens, 2], the interval of keys
each query sees, once a forward and shared by its layers: padded, packed (position_ids that start again), sliding,
chunked and static-cache batches. A plain causal batch has no mask at all. A rule whose rows are not intervals raises.

The one trap: without a mask builder under the same name transformers passes no mask, and padding would be seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.attention import prefix_attention
from tpkernels.compat_intervals import interval_attention
from tpkernels.compat_pieces import Sequences, Window, mask_intervals
from tpkernels.mask import Mask

_ROWS_AT_A_TIME = 1024  # query rows of the dense mask that exist at once while intervals are read off it


def register_with_transformers(name: str = "tpkernels") -> None:
    """Make attn_implementation=`name` work in transformers models; call it before a model is built.

    It registers an attention function and a mask function under one name, as transformers' AttentionInterface and
    AttentionMaskInterface ask for. Calling it again changes nothing.

    Raises ValueError when transformers is not installed or older than 4.57. A model raises ValueError in its forward
    for attention dropout, position biases, output_attentions, additive masks and masks that are not intervals.
    """
    try:
        import transformers
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
    except ImportError as error:
        raise ValueError(
            f"register_with_transformers: transformers 4.57 or newer is needed ({error}); pip install transformers"
        ) from error
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (4, 57):
        raise ValueError(
            f"register_with_transformers: transformers {transformers.__version__} builds masks another way; 4.57 or "
            "newer is needed"
        )
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _intervals)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function. Of `others` only what would change the result is looked at."""
    if dropout:
        raise ValueError(
            f"tpkernels: attention dropout {dropout} is not served; set the config's attention_dropout (attn_pdrop in "
            "GPT-2) to 0, or call model.eval()"
        )
    for argument in ("position_bias", "output_attentions", "head_mask"):
        if others.get(argument) is not None and others[argument] is not False:
            raise ValueError(f'tpkernels: {argument} is not served; use attn_implementation="eager" for it')
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    settings: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    left = sliding_window - 1 if sliding_window is not None and causal else None
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    if all(others.get(name) is not None for name in names):  # a flattened batch says itself where its sequences are
        sequences = Sequences(*(others[name] for name in names))
        window = Window(causal, -1 if left is None else left)
        return interval_attention(q, k, v, sequences=sequences, window=window, **settings), None
    if attention_mask is None:
        return prefix_attention(q, k, v, mask=Mask(causal=causal, window=(left, None)), **settings), None
    if attention_mask.dtype == torch.bool:  # a mask of the user's own, already dense
        if attention_mask.dim() != 4 or attention_mask.shape[1] != 1:
            raise ValueError(
                f"tpkernels: a boolean mask must be [batch, 1, tokens, keys], got {list(attention_mask.shape)}"
            )
        attention_mask = mask_intervals(attention_mask[..., : k.shape[1]])
    elif attention_mask.dtype != torch.int32 or attention_mask.dim() != 4:
        raise ValueError(
            f"tpkernels: attention_mask is {attention_mask.dtype} {list(attention_mask.shape)}; biases on scores are "
            "not served, pass a boolean mask [batch, 1, tokens, keys] (mask == 0 for one of 0 and -inf)"
        )
    return interval_attention(q, k, v, attention_mask[:, 0], **settings), None


def _intervals(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    cache_position: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """transformers' mask function: None for plain causal attention, else int32 [batch, 1, q_length, 2].

    Versions before 5.4 say where the queries are by `cache_position`, later ones by q_length and q_offset.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    compiling = torch.compiler.is_compiling()
    if cache_position is not None:
        q_length = cache_position.shape[0]
        q_offset = cache_position[0] if compiling else int(cache_position[0])
    assert q_length is not None
    if attention_mask is not None and not compiling and bool(attention_mask.all()):
        attention_mask = None if attention_mask.shape[-1] >= kv_length + kv_offset else attention_mask
    plain = mask_function is None or mask_function is causal_mask_function
    if plain and attention_mask is None and isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length:
        return None
    rows = q_length if compiling else _ROWS_AT_A_TIME
    parts = []
    for begin in range(0, q_length, max(rows, 1)):
        end = min(begin + rows, q_length)
        if cache_position is not None:
            queries: dict[str, Any] = {"cache_position": cache_position[begin:end]}
        else:
            queries = {"q_length": end - begin, "q_offset": q_offset + begin, "device": device}
        dense = sdpa_mask(
            batch_size=batch_size,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=causal_mask_function if mask_function is None else mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            **queries,
        )
        parts.append(mask_intervals(dense))
    intervals = torch.cat(parts, 2) if len(parts) != 1 else parts[0]
    return intervals if compiling else intervals.cpu()
