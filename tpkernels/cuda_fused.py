"""Norms, with the addition before them, by the kernels of tpkernels._cuda; bf16 and fp16.

The functions of fused_rows.py that touch the residual stream, with the same meaning and arguments. They have not run on
a GPU yet: fused_rows.py takes them where TPK_BACKEND=cuda asks for these kernels (`norms_for`). Rows must start on 16
bytes, dims be multiples of 8; other calls raise.

The one trap: as in cuda.py, a tensor made for a call must live until the call has been queued.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from torch import Tensor

from tpkernels.cuda import DTYPES, Extension, Workspace, rows_of
from tpkernels.dtypes import DTYPE_CODES
from tpkernels.fused_reference import NormGradients, NormValues
from tpkernels.memory import norm_gradients_memory, norm_values_memory

DEVICE_TYPE = "cuda"  # tests: "cpu", where the emulator runs
MOST_CHANNELS = 16384  # of a norm; csrc/cuda/fused_launch.cuh


def norms_for(*rows: Tensor | None) -> CudaFused | None:
    """The kernels, where they are asked for and serve norms of these rows [rows, channels]; None elsewhere."""
    for x in rows:
        if x is not None and not (x.device.type == DEVICE_TYPE and x.dtype in DTYPES and _aligned(x)):
            return None
    return asked_for(os.environ.get("TPK_BACKEND"))


@functools.cache
def asked_for(requested: str | None) -> CudaFused | None:
    """The kernels if `requested`, a backend, is theirs and they are built."""
    if requested != "cuda":
        return None
    kernels = CudaFused()
    try:
        kernels.module  # noqa: B018 (imports it)
    except ImportError:
        return None
    return kernels


def _aligned(x: Tensor) -> bool:
    """Rows of whole 16-byte pieces that start on 16 bytes."""
    pieces = 16 // x.itemsize
    return (
        x.shape[-1] % pieces == 0
        and x.shape[-1] <= MOST_CHANNELS
        and not x.data_ptr() % 16
        and not x.stride(0) % pieces
    )


class CudaFused(Extension):
    """extension, device_type: tests pass the emulator's module and "cpu"."""

    def norm_forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        eps: float,
        rms: bool,
        delta: Tensor | None = None,
        total: Tensor | None = None,
        out: Tensor | None = None,
    ) -> NormValues:
        """norm(x + delta) * weight + bias of rows [rows, dim]; written to `total` and `out` where they are given."""
        rows, dim = x.shape
        total, out, mean, rstd = norm_values_memory(x, rms=rms, delta=delta, total=total, out=out)
        self.module.norm_forward(
            dtype=self._code(x, weight, bias, delta, total, out),
            rms=rms,
            rows=rows,
            dim=dim,
            eps=eps,
            x=rows_of(x),
            delta=rows_of(delta),
            total=rows_of(None if delta is None else total),
            out=rows_of(out),
            weight=weight.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            mean=0 if mean is None else mean.data_ptr(),
            rstd=rstd.data_ptr(),
            **self.place(x),
        )
        return NormValues(total, out, mean, rstd)

    def norm_backward(
        self,
        dout: Tensor,
        x: Tensor,
        weight: Tensor,
        mean: Tensor | None,
        rstd: Tensor,
        *,
        dresidual: Tensor | None = None,
        dx: Tensor | None = None,
        dweight: Tensor | None = None,
        dbias: Tensor | None = None,
    ) -> NormGradients:
        """Gradients of norm_forward; x is its `total`, dx may be dout. dweight, dbias [dim] fp32 are added to."""
        rows, dim = x.shape
        dx, dweight, dbias = norm_gradients_memory(x, rms=mean is None, dx=dx, dweight=dweight, dbias=dbias)
        workspace = Workspace(x.device)
        self.module.norm_backward(
            dtype=self._code(dout, x, weight, dresidual, dx),
            rms=mean is None,
            rows=rows,
            dim=dim,
            dout=rows_of(dout),
            x=rows_of(x),
            dresidual=rows_of(dresidual),
            dx=rows_of(dx),
            weight=weight.data_ptr(),
            mean=0 if mean is None else mean.data_ptr(),
            rstd=rstd.data_ptr(),
            dweight=dweight.data_ptr(),
            dbias=0 if dbias is None else dbias.data_ptr(),
            allocate=workspace.allocate,
            **self.place(x),
        )
        return NormGradients(dx, dweight, dbias)

    def _code(self, first: Tensor, *others: Tensor | None) -> int:
        """The kernels' code of the one dtype of all tensors."""
        tensors: list[Any] = [first, *(other for other in others if other is not None)]
        dtypes, devices = {x.dtype for x in tensors}, {x.device for x in tensors}
        if len(dtypes) > 1 or len(devices) > 1 or first.dtype not in DTYPES:
            raise ValueError(
                "cuda fused kernels: tensors must be of one dtype, bf16 or fp16, on one device, not "
                f"{', '.join(sorted(f'{x.dtype} on {x.device}' for x in tensors))}"
            )
        return DTYPE_CODES[first.dtype]
