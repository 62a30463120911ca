"""A whole pre-norm transformer block over one slice in one call a direction: on a CPU, in fp32, or bf16 with AMX.

x [batch, tokens, hidden] -> x + attention(norm(x)) + mlp of that sum's norm, attention behind a prefix in a cache.
csrc/cpu/block.cpp runs the kernels of `prefix_attention` and fused_rows.py and, between them, the GEMMs of torch's own
BLAS. In fp32 the bits are those of the ops one by one, gradients of biases apart; in bf16 there are fewer
roundings, and none of a parameter's gradient. What it saves is some hundred small calls a slice, each from a cold
cache.

The one trap: raw addresses. `served` says whether blocks of a shape run here at all, `fits` whether these tensors may
come; ask it again before the backward, since a parameter's memory may have been replaced. What forward leaves (`Run`)
and its inputs must live until then.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels import backends
from tpkernels.attention_ops import Settings, raw_mask
from tpkernels.dtypes import DTYPE_CODES
from tpkernels.fused_reference import NormValues
from tpkernels.mask import Mask, RawMask
from tpkernels.prefix_cache import PrefixCache
from tpkernels.slice_order import Slice, appended, claim, gone_back, place, starts_backward

try:
    from tpkernels import _core
    from tpkernels.cpu import mask_sizes, view
except ImportError:  # not built
    _core = None  # type: ignore[assignment]

MODULES = ("attention_norm", "query", "key", "value", "output", "mlp_norm", "gate", "up", "down")
"""Whose weight and bias `parameters` and `gradients` are, in this order, None where a block has none."""
GATE = 2 * MODULES.index("gate")


class BlockShape(NamedTuple):
    """norm: RMSNorm (rms) or LayerNorm with `eps`; mlp: silu(gate) * up (gated) or gelu_tanh(up)."""

    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rms: bool
    gated: bool
    eps: float


@functools.cache
def _parameter_sizes(shape: BlockShape) -> tuple[torch.Size, ...]:
    """Size of the weight and bias of each of MODULES, in order; gate's also where a block has none."""
    query, keys = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linears = {"query": (query, shape.hidden), "key": (keys, shape.hidden), "value": (keys, shape.hidden)}
    linears |= {"output": (shape.hidden, query), "gate": (shape.ffn, shape.hidden), "up": (shape.ffn, shape.hidden)}
    linears |= {"down": (shape.hidden, shape.ffn)}
    weights = [linears.get(name, (shape.hidden,)) for name in MODULES]
    return tuple(torch.Size(size) for weight in weights for size in (weight, weight[:1]))


def fits(shape: BlockShape, x: Tensor, parameters: Sequence[Tensor | None], cache: PrefixCache) -> bool:
    """Whether an address says all about each of these: x [batch, tokens, hidden] and parameters, as MODULES says, are
    plain, of one dtype, on the CPU, contiguous and of the shape's sizes; the cache's k and v are, but that their rows
    [head_dim] may lie anywhere."""
    dtype = x.dtype
    if x.dim() != 3 or x.shape[2] != shape.hidden or (parameters[GATE] is not None) != shape.gated:
        return False
    if dtype not in GEMMS or not _plain(x, dtype):
        return False
    for index, (parameter, size) in enumerate(zip(parameters, _parameter_sizes(shape), strict=True)):
        if parameter is None:
            if index % 2 == 0 and index != GATE:
                return False  # only biases may be left out
        elif parameter.shape != size or not _plain(parameter, dtype):
            return False
    rows = (x.shape[0], cache.capacity, shape.kv_heads, shape.head_dim)
    for each in (cache.k, cache.v):
        if each.shape != rows or each.dtype != dtype or not each.is_cpu:
            return False
        if each.stride(3) != 1 and shape.head_dim > 1:
            return False
    return True


def _plain(x: Tensor, dtype: torch.dtype) -> bool:
    return x.dtype == dtype and x.is_cpu and x.is_contiguous() and not x.is_neg()


class Run(NamedTuple):
    """What a forward leaves for its backward.

    saved: what csrc/cpu/block.h calls BlockSaved, first `middle`, which is x + attention; then out, mean and rstd of
    the norm of x, None where nobody gave them. keys, values: the cache's k and v.
    """

    saved: Sequence[Tensor | None]
    piece: Slice
    generation: int
    mask: RawMask
    turns: Tensor | None
    keys: Tensor
    values: Tensor


def served(shape: BlockShape, dtype: torch.dtype, mask: Mask) -> bool:
    """Whether blocks of this shape run here: the extension is built, torch has a BLAS for the dtype, attention's
    backend is `cpu`."""
    documents = mask.document_starts is not None
    backend, isa = os.environ.get("TPK_BACKEND"), os.environ.get("TPK_CPU_ISA")
    return _served(shape, dtype, mask.window != (None, None), documents, backend, isa)


@functools.cache
def _served(
    shape: BlockShape, dtype: torch.dtype, window: bool, documents: bool, requested: str | None, _isa: str | None
) -> bool:
    if _core is None or not _gemm(dtype) or shape.head_dim > 256 or shape.query_heads % shape.kv_heads:
        return False
    if dtype == torch.bfloat16 and _core.isa_level() != "amx_bf16":
        return False  # where a BLAS only imitates bf16, torch's own routines are ahead
    call = backends.AttentionCall(
        device_type="cpu",
        dtype=dtype,
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        value_head_dim=shape.head_dim,
        window=window,
        softcap=False,
        sinks=False,
        documents=documents,
        deterministic=False,
    )
    return backends.select(call, requested).name == "cpu"


GEMMS = {torch.float32: "sgemm_", torch.bfloat16: "gemm_bf16bf16f32_"}
"""Fortran names; both sum in fp32 and write fp32."""


@functools.cache
def _gemm(dtype: torch.dtype) -> int:
    """Address of the dtype's GEMM in the BLAS that torch's CPU library is linked with, once it has multiplied well; 0:
    none."""
    library = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    try:
        function: Any = getattr(ctypes.CDLL(str(library)), GEMMS[dtype])
    except (OSError, AttributeError, KeyError):
        return 0
    # Columns first: 2 x 3, 3 x 4, 2 x 4. Whatever torch's defaults are, this memory is on the CPU.
    a, b = (torch.arange(size, dtype=dtype, device="cpu") for size in (6, 12))
    c = torch.full((8,), torch.nan, dtype=torch.float32, device="cpu")
    sizes = [ctypes.byref(ctypes.c_int64(size)) for size in (2, 4, 3)]
    one, none = ctypes.byref(ctypes.c_float(1.0)), ctypes.byref(ctypes.c_float(0.0))
    rows, _, inner = sizes
    address_a, address_b, address_c = (ctypes.c_void_p(x.data_ptr()) for x in (a, b, c))
    function(b"N", b"N", *sizes, one, address_a, rows, address_b, inner, none, address_c, rows)
    right = torch.equal(c.view(4, 2), b.float().view(4, 3) @ a.float().view(3, 2))
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0) if right else 0


@functools.cache
def _kernel(shape: BlockShape, dtype: torch.dtype) -> _core.Block:
    return _core.Block(_gemm(dtype), DTYPE_CODES[dtype], *shape)


def block_forward(
    shape: BlockShape,
    x: Tensor,
    parameters: Sequence[Tensor | None],
    cache: PrefixCache,
    mask: Mask,
    *,
    turns: Tensor | None,
    normed: NormValues | None = None,
    apart: bool = False,
) -> tuple[Tensor, Run]:
    """x [batch, tokens, hidden], parameters as MODULES says -> out [batch, tokens, hidden] and what the backward needs.

    turns: complex64 [turn rows, head_dim / 2], contiguous, turn q and k. normed: of x. apart: out is the MLP's summand
    alone; the other one is `Run.saved[0]`. ValueError for slices out of order, as prefix_attention."""
    batch, tokens, _ = x.shape
    settings = _settings(mask, shape)
    start = cache.recomputed_start
    piece, append, generation = place(cache.position, cache.progress, start, tokens, capacity=cache.capacity)
    rows = raw_mask(settings, mask.document_starts, piece, batch)
    kernel = _kernel(shape, x.dtype)
    if normed is not None:
        wanted = {"out": x.numel(), "mean": 0 if shape.rms else batch * tokens, "rstd": batch * tokens}
        for name, size in wanted.items():
            each, dtype = getattr(normed, name), x.dtype if name == "out" else torch.float32
            assert (each is None) == (size == 0), f"the norm's {name} is {each}"
            assert each is None or (_plain(each, dtype) and each.numel() == size), f"{name} {each.shape}, {each.dtype}"
    *sizes, statistics = kernel.saved_sizes(batch, tokens)
    parts = [torch.empty(size, dtype=x.dtype, device=x.device) for size in sizes]
    parts.append(torch.empty(statistics, dtype=torch.float32, device=x.device))
    known = [None] * 3 if normed is None else [normed.out, normed.mean, normed.rstd]
    out, run = torch.empty_like(x), Run([*parts, *known], piece, generation, rows, turns, cache.k, cache.v)
    kernel.forward(*_call(x, parameters, cache, settings.scale, run), append, apart, out.data_ptr())
    if append:
        appended(cache.position, piece)
    return out, run


def block_backward(
    shape: BlockShape,
    run: Run,
    dout: Tensor,
    x: Tensor,
    parameters: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    cache: PrefixCache,
    mask: Mask,
    *,
    dx: Tensor,
) -> None:
    """dout [batch, tokens, hidden] -> dx, contiguous, other memory. Adds into `gradients` (as MODULES says, None: not
    wanted) and into the cache's accumulator. ValueError for backwards out of order, RuntimeError for a cache whose
    tensors are others than in the forward, and for a Run whose are of another dtype, size or layout."""
    if cache.k is not run.keys or cache.v is not run.values:
        raise RuntimeError(
            f"prefix_attention: backward of slice {run.piece}, whose cache has been given another k or v since its "
            "forward; run the backward of every slice before"
        )
    kernel = _kernel(shape, x.dtype)
    *sizes, statistics = kernel.saved_sizes(*x.shape[:2])
    rows = x.shape[0] * x.shape[1]
    kept = [(size, x.dtype) for size in sizes] + [(statistics, torch.float32)]
    kept += [(x.numel(), x.dtype), (rows, torch.float32), (rows, torch.float32)]
    for each, (size, dtype) in zip(run.saved, kept, strict=True):
        if each is not None and (each.numel() != size or not _plain(each, dtype)):
            raise RuntimeError(
                f"tpkernels: backward of slice {run.piece} of a block, whose forward saved {size} values of {dtype}, "
                f"gets back {list(each.shape)} {each.dtype}, strides {each.stride()}; hooks on saved tensors must give "
                "back what they were given, contiguous"
            )
    accumulator = cache.require_accumulator()
    dk, dv, state = accumulator.dk, accumulator.dv, accumulator.state
    if starts_backward(run.piece, run.generation, cache.position, cache.progress, state):
        claim(state, cache.position, dk[:, : run.piece.end], dv[:, : run.piece.end])
    call = _call(x, parameters, cache, _settings(mask, shape).scale, run)
    kernel.backward(*call, _addresses(gradients), view(dk), view(dv), dout.data_ptr(), dx.data_ptr())
    gone_back(run.piece, run.generation, cache.progress, state)


def _settings(mask: Mask, shape: BlockShape) -> Settings:
    return Settings(mask.causal, mask.window_left, mask.window_right, shape.head_dim**-0.5, 0.0, False, "")


def _call(
    x: Tensor, parameters: Sequence[Tensor | None], cache: PrefixCache, scale: float, run: Run
) -> tuple[Any, ...]:
    """The arguments that forward and backward share."""
    batch, tokens, _ = x.shape
    saved = _addresses(run.saved)
    turns = (0, 0) if run.turns is None else (run.turns.data_ptr(), run.turns.shape[0])
    return (
        batch,
        tokens,
        _addresses(parameters),
        x.data_ptr(),
        saved[-3:],
        turns,
        view(cache.k),
        view(cache.v),
        mask_sizes(run.mask, run.piece.start),
        scale,
        saved[:-3],
        torch.get_num_threads(),
    )


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
