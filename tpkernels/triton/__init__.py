"""TritonBackend: prefix attention by Triton kernels on NVIDIA GPUs (sm_80 and newer), fp32, bf16, fp16.

Also the interpreter: with TRITON_INTERPRET=1 in the environment before triton is imported, the same kernels run on CPU
tensors, slowly, for tests. Triton 3.6 to 3.9. Tile sizes: tiles.py; from a call to launches: problem.py,
plan_forward.py, plan_backward.py, launch.py; kernels: forward.py, backward.py, backward_queries.py.

The one trap: importing this module must work without triton and without a GPU, so everything that needs them is
imported inside the methods.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpkernels.triton import tiles

if TYPE_CHECKING:
    from tpkernels.backends import AttentionCall, RawSettings

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OLDEST, _TOO_NEW = (3, 6), (4, 0)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


class TritonBackend:
    """tpkernels.backends.Backend over the kernels of this package."""

    name = "triton"

    def unusable(self) -> str | None:
        """No triton, one too old, a triton that cannot be imported, or neither a GPU nor the interpreter."""
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed (pip install triton)"
        try:
            import triton
            import triton.language as tl

            version = _release(triton.__version__)
            interpreted_language = type(getattr(tl, "max", None)).__name__ == "InterpretedFunction"
        except Exception as error:  # a broken installation is a reason, whatever it raises
            return f"triton cannot be imported ({type(error).__name__}: {error})"
        if not _OLDEST <= version < _TOO_NEW:
            return f"triton {triton.__version__} is not supported; 3.6 to 3.9 are"
        if _interpreted():
            if not interpreted_language:
                return "TRITON_INTERPRET=1 was set after triton had been imported; set it before Python starts"
            import numpy  # which it computes with, by conversions that numpy 2.4 refuses

            if version == (3, 6) and _release(numpy.__version__) >= (2, 4):
                return f"the interpreter of triton 3.6 needs numpy below 2.4, not {numpy.__version__}"
            return None
        if not torch.cuda.is_available():
            return "there is no CUDA device (TRITON_INTERPRET=1 runs it on CPU tensors, slowly)"
        if torch.version.hip is not None:
            return "it runs on NVIDIA GPUs only"
        return None

    def refuses(self, call: AttentionCall) -> str | None:
        """Other devices, GPUs before sm_80, other dtypes (in the interpreter bf16 too), head_dim above 256."""
        if call.dtype not in _DTYPES:
            return f"it computes fp32, bf16 and fp16, not {str(call.dtype).removeprefix('torch.')}"
        if max(call.head_dim, call.value_head_dim) > tiles.MAX_HEAD_DIM:
            return f"head_dim {call.head_dim}/{call.value_head_dim} is above {tiles.MAX_HEAD_DIM}"
        if _interpreted():
            if call.device_type not in ("cpu", "cuda"):
                return f"its interpreter runs on CPU and CUDA tensors, not on {call.device_type}"
            if call.dtype == torch.bfloat16:
                return "Triton's interpreter multiplies the raw bits of bf16; use fp16 or fp32"
            return None
        if call.device_type != "cuda":
            return f"it runs on CUDA tensors (with TRITON_INTERPRET=1 on CPU tensors), not on {call.device_type}"
        try:
            tiles.architecture(torch.device("cuda", call.device_index))
        except ValueError as error:
            return str(error)
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, settings: RawSettings) -> None:
        """Writes out and lse. Raises ValueError where rows or programs of the call exceed 32 bits."""
        from tpkernels.triton import launch
        from tpkernels.triton.plan_forward import plan_forward
        from tpkernels.triton.problem import fp32

        launches = plan_forward(
            q,
            k,
            v,
            out=out,
            lse=lse,
            settings=settings._replace(sinks=fp32(settings.sinks)),
            architecture=_architecture(q.device),
            processors=launch.processors_of(q.device),
        )
        launch.run(launches, q.device)

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
        """Writes dq; adds into dk, dv and dsinks. Raises ValueError as forward does."""
        from tpkernels.triton import launch
        from tpkernels.triton.plan_backward import plan_backward
        from tpkernels.triton.problem import fp32

        launches = plan_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            dq=dq,
            dk=dk,
            dv=dv,
            dsinks=dsinks,
            settings=settings._replace(sinks=fp32(settings.sinks)),
            architecture=_architecture(q.device),
            processors=launch.processors_of(q.device),
        )
        launch.run(launches, q.device)

    def invariance_unit(self, call: AttentionCall) -> int:
        """Tokens after which the backward's query tile, of packed (token, head) rows, starts anew."""
        head_dim = max(call.head_dim, call.value_head_dim)
        architecture = _architecture(torch.device(call.device_type, call.device_index))
        rows = tiles.find(architecture, head_dim, call.dtype.itemsize, "keys").rows
        return rows // math.gcd(rows, call.query_heads // call.kv_heads)


def _architecture(device: torch.device) -> str:
    return tiles.INTERPRETER if _interpreted() else tiles.architecture(device)
