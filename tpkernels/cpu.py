"""CpuBackend: prefix attention by the C++ SIMD kernels of tpkernels._core (csrc/cpu), in fp32, bf16 and fp16.

Every call is deterministic: bitwise the same result for any thread count and any slicing (dk, dv: slices at multiples
of `invariance_unit`), so `deterministic=` changes nothing. TPK_CPU_ISA names the ISA level (tests); the thread count
follows torch.get_num_threads().

The one trap: the extension sees raw addresses, so every tensor named here must outlive the call and have a contiguous
last dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels import _core
from tpkernels.backends import AttentionCall, RawSettings
from tpkernels.dtypes import DTYPE_CODES
from tpkernels.mask import RawMask

MAX_HEAD_DIM = 256


class CpuBackend:
    """tpkernels.backends.Backend over tpkernels._core."""

    name = "cpu"

    def unusable(self) -> str | None:
        """None; or why TPK_CPU_ISA names a level that this machine cannot run."""
        try:
            _core.isa_level()
        except ValueError as error:
            return str(error)
        return None

    def refuses(self, call: AttentionCall) -> str | None:
        """Other devices, other dtypes, head_dim above 256."""
        if call.device_type != "cpu":
            return f"it runs on CPU tensors, not on {call.device_type}"
        if call.dtype not in DTYPE_CODES:
            return f"it computes fp32, bf16 and fp16, not {str(call.dtype).removeprefix('torch.')}"
        if max(call.head_dim, call.value_head_dim) > MAX_HEAD_DIM:
            return f"head_dim {call.head_dim}/{call.value_head_dim} is above {MAX_HEAD_DIM}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, settings: RawSettings) -> None:
        """Writes out and lse."""
        sinks = _fp32(settings.sinks)
        _core.attention_forward(
            dtype=DTYPE_CODES[q.dtype],
            sizes=_sizes(q, v),
            q=view(q),
            k=view(k),
            v=view(v),
            out=view(out),
            lse=lse.data_ptr(),
            mask=mask_sizes(settings.mask, settings.start),
            scale=settings.scale,
            softcap=settings.softcap,
            sinks=_address(sinks),
            num_threads=torch.get_num_threads(),
        )

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dsinks: Tensor | None,
        settings: RawSettings,
    ) -> None:
        """Writes dq; adds into dk, dv and dsinks."""
        sinks = _fp32(settings.sinks)
        _core.attention_backward(
            dtype=DTYPE_CODES[q.dtype],
            sizes=_sizes(q, v),
            dout=view(dout),
            q=view(q),
            k=view(k),
            v=view(v),
            out=view(out),
            lse=lse.data_ptr(),
            dq=view(dq),
            dk=view(dk),
            dv=view(dv),
            dsinks=_address(dsinks),
            mask=mask_sizes(settings.mask, settings.start),
            scale=settings.scale,
            softcap=settings.softcap,
            sinks=_address(sinks),
            num_threads=torch.get_num_threads(),
        )

    def invariance_unit(self, call: AttentionCall) -> int:
        """Tokens of the backward's query tile."""
        return _core.backward_query_tokens(call.query_heads // call.kv_heads)


def view(tensor: Tensor) -> tuple[int, int, int, int]:
    """[batch, tokens, heads, dim] as the extension takes it: address and strides in elements."""
    batch, token, head, element = tensor.stride()
    assert element == 1 or tensor.shape[3] == 1, "the last dimension is contiguous (memory.py sees to it)"
    return (tensor.data_ptr(), batch, token, head)


def _sizes(q: Tensor, v: Tensor) -> tuple[int, int, int, int, int, int, int]:
    batch, tokens, query_heads, head_dim = q.shape
    _, keys, kv_heads, value_head_dim = v.shape
    return (batch, tokens, keys, query_heads, kv_heads, head_dim, value_head_dim)


def mask_sizes(mask: RawMask, start: int) -> tuple[int, int, int, int, int, int]:
    """The mask of query rows from position `start` on, as the extension takes it."""
    documents = mask.document_starts
    batch_stride = 0 if documents is None else documents.stride(0)
    return (start, int(mask.causal), mask.window_left, mask.window_right, _address(documents), batch_stride)


def _fp32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(torch.float32).contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
