"""CudaBackend: prefix attention by the CUDA C++ kernels of tpkernels._cuda (csrc/cuda), bf16 and fp16, sm_80 and newer.

head_dim 64 and 128, the same for values. deterministic=True: bitwise the same for any slicing (dk, dv: slices at
multiples of `invariance_unit`). Used without being asked only on architectures on which its tests have passed on
hardware (PROVEN). Calls run on torch's current stream and never synchronise, so CUDA graphs can capture them.

The one trap: the extension sees raw addresses; a tensor that this file makes for a call must live until the call has
been queued, and torch's allocator then keeps its memory in stream order.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import torch
from torch import Tensor

from tpkernels.backends import AttentionCall, RawSettings
from tpkernels.dtypes import DTYPE_CODES

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)
PROVEN: frozenset[int] = frozenset()  # compute capabilities (90 is 9.0); none yet


class Extension:
    """tpkernels._cuda and where its calls run. Tests pass the emulator's module, which has the same functions, and
    "cpu"."""

    def __init__(self, module: Any = None, device_type: str = "cuda") -> None:
        self._given = module
        self.device_type = device_type

    @property
    def module(self) -> Any:
        """Imported when it is first needed; ImportError where it was not built."""
        return _import() if self._given is None else self._given

    def place(self, tensor: Tensor) -> dict[str, int]:
        """Arguments for a call on the tensor's device and torch's current stream there."""
        if self.device_type != "cuda":
            return {"device": 0, "stream": 0}
        return {"device": tensor.get_device(), "stream": torch.cuda.current_stream(tensor.device).cuda_stream}


class CudaBackend(Extension):
    """tpkernels.backends.Backend over tpkernels._cuda."""

    name = "cuda"

    def unusable(self) -> str | None:
        """Not built, no usable driver, no device, or a torch without CUDA."""
        try:
            count = self.module.device_count()
        except ImportError as error:
            return f"tpkernels._cuda is not built; TPK_CUDA=1 pip install . builds it, with nvcc ({error})"
        except RuntimeError as error:
            return str(error)
        if count == 0:
            return "there is no CUDA device"
        if self.device_type == "cuda" and not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no CUDA device (a CPU build of torch?)"
        return None

    def refuses(self, call: AttentionCall) -> str | None:
        """Other devices, dtypes and head dims, GPUs before sm_80."""
        if call.device_type != self.device_type:
            return f"it runs on CUDA tensors, not on {call.device_type}"
        if call.dtype not in DTYPES:
            return f"it computes bf16 and fp16, not {str(call.dtype).removeprefix('torch.')}"
        if call.head_dim not in HEAD_DIMS or call.value_head_dim != call.head_dim:
            return f"head_dim {call.head_dim}/{call.value_head_dim} is neither 64 nor 128 for keys and values alike"
        try:
            self.module.capability(call.device_index)
        except RuntimeError as error:
            return str(error)
        return None

    def unproven(self, call: AttentionCall) -> str | None:
        """Why the call's device is not served without being asked for; None: it is."""
        capability = self.module.capability(call.device_index)
        if capability in PROVEN:
            return None
        return (
            f"its tests have not passed on hardware of compute capability {capability // 10}.{capability % 10} yet; "
            "ask for it with backend='cuda' or TPK_BACKEND=cuda"
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, settings: RawSettings) -> None:
        """Writes out and lse."""
        _same_device(q, k, v, out, lse, settings.mask.document_starts, settings.sinks)
        q, k, v = _aligned(q), _aligned(k), _aligned(v)
        sinks = _fp32(settings.sinks)
        workspace = Workspace(q.device)
        self.module.attention_forward(
            dtype=DTYPE_CODES[q.dtype],
            sizes=_sizes(q, k, v),
            q=view_of(q),
            k=view_of(k),
            v=view_of(v),
            out=view_of(out),
            lse=lse.data_ptr(),
            mask=_mask(settings),
            scale=settings.scale,
            softcap=settings.softcap,
            sinks=_address(sinks),
            deterministic=settings.deterministic,
            allocate=workspace.allocate,
            **self.place(q),
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
        _same_device(q, k, v, out, lse, dout, dq, dk, dv, dsinks, settings.mask.document_starts, settings.sinks)
        dout, q, k, v, out = (_aligned(x) for x in (dout, q, k, v, out))
        sums_k, sums_v = _aligned(dk), _aligned(dv)
        sinks = _fp32(settings.sinks)
        workspace = Workspace(q.device)
        self.module.attention_backward(
            dtype=DTYPE_CODES[q.dtype],
            sizes=_sizes(q, k, v),
            dout=view_of(dout),
            q=view_of(q),
            k=view_of(k),
            v=view_of(v),
            out=view_of(out),
            lse=lse.data_ptr(),
            dq=view_of(dq),
            dk=view_of(sums_k),
            dv=view_of(sums_v),
            dsinks=_address(dsinks),
            mask=_mask(settings),
            scale=settings.scale,
            softcap=settings.softcap,
            sinks=_address(sinks),
            deterministic=settings.deterministic,
            allocate=workspace.allocate,
            **self.place(q),
        )
        for given, summed in ((dk, sums_k), (dv, sums_v)):
            if summed is not given:
                given.copy_(summed)

    def invariance_unit(self, call: AttentionCall) -> int:
        """Tokens after which the backward's query tile, of packed (token, head) rows, starts anew."""
        rows = int(self.module.invariance_rows(call.head_dim, call.device_index))
        return rows // math.gcd(rows, call.query_heads // call.kv_heads)


class Workspace:
    """Memory of a call besides its tensors, held until the call has been queued."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Tensor | None = None

    def allocate(self, size_bytes: int) -> int:
        """The address."""
        self._memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        return self._memory.data_ptr()


@functools.cache
def _import() -> Any:
    return importlib.import_module("tpkernels._cuda")


def _same_device(first: Tensor, *others: Tensor | None) -> None:
    for other in others:
        if other is not None and other.device != first.device:
            raise ValueError(f"attention backend cuda: tensors on {first.device} and {other.device} in one call")


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy whose rows start on 16 bytes and whose last dimension is contiguous."""
    unit = 16 // tensor.element_size()
    strides = [stride for stride, size in zip(tensor.stride()[:3], tensor.shape[:3], strict=True) if size > 1]
    if tensor.stride(3) == 1 and tensor.data_ptr() % 16 == 0 and not any(stride % unit for stride in strides):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def view_of(tensor: Tensor | None) -> tuple[int, int, int, int]:
    """Address and strides; that of a dimension of one is arbitrary, and 0 here."""
    if tensor is None:
        return (0, 0, 0, 0)
    if tensor.stride(3) != 1:
        raise ValueError(f"a tensor with strides {tuple(tensor.stride())}: its last dimension must be contiguous")
    batch, token, head = (s if n > 1 else 0 for s, n in zip(tensor.stride()[:3], tensor.shape[:3], strict=True))
    return (tensor.data_ptr(), batch, token, head)


def rows_of(tensor: Tensor | None) -> tuple[int, int]:
    """Address and stride of rows [rows, columns]."""
    if tensor is None:
        return (0, 0)
    if tensor.stride(1) != 1:
        raise ValueError(f"rows with strides {tuple(tensor.stride())}: their elements must be contiguous")
    return (tensor.data_ptr(), tensor.stride(0) if tensor.shape[0] > 1 else 0)


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int, int, int, int]:
    return (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])


def _mask(settings: RawSettings) -> tuple[int, int, int, int, int, int]:
    mask = settings.mask
    documents = mask.document_starts
    batch_stride = 0 if documents is None or documents.shape[0] == 1 else documents.stride(0)
    return (settings.start, int(mask.causal), mask.window_left, mask.window_right, _address(documents), batch_stride)


def _fp32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(torch.float32).contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
