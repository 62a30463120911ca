"""Backend registry: which implementation serves a call, decided from data, logged once, never a silent wrong number.

Order: cuda, triton, cpu, reference; the oracle `reference` is automatic only for fp64, `triton` never on CPU tensors
(its interpreter), `cuda` only on GPUs whose architecture its tests have passed on. TPK_BACKEND or backend= asks for one
by name, and then its refusal is an error instead of a step to the next. A backend lives in the module tpkernels.<name>
as the class <Name>Backend; modules that do not exist are not listed.

The one trap: nothing is imported until it is needed, so a broken extension shows up as a reason here, not at import.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tpkernels.mask import RawMask

log = logging.getLogger("tpkernels")

ORDER = ("cuda", "triton", "cpu", "reference")


@dataclass(frozen=True)
class AttentionCall:
    """What a backend must be able to do; window, softcap, sinks and documents say whether the call uses them.

    device_index: which of its type the tensors are on, whatever device is current; GPUs of a machine may differ.
    """

    device_type: str
    dtype: torch.dtype
    query_heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    documents: bool = False
    deterministic: bool = False
    device_index: int = 0


class RawSettings(NamedTuple):
    """What a kernel gets beside its tensors. start: position of the first query, negative where there are more queries
    than keys; sinks [query_heads] in fp32 at least; the rest as `prefix_attention`."""

    start: int
    mask: RawMask
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    deterministic: bool = False


class Backend(Protocol):
    """q [B,T,Hq,D], k [B,S,Hkv,D], v [B,S,Hkv,Dv]: views, any outer strides, last dim contiguous, no empty dimension.

    out [B,T,Hq,Dv], lse [B,Hq,T], dq are contiguous. backward writes dq and ADDS into dk, dv (views of the
    accumulators, any outer strides) and dsinks, which are fp32 (fp64 for fp64).
    """

    name: str

    def unusable(self) -> str | None:
        """Why it cannot be used on this machine; None: it can."""

    def refuses(self, call: AttentionCall) -> str | None:
        """Why it does not serve this call; None: it does."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, settings: RawSettings) -> None: ...

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
    ) -> None: ...

    def invariance_unit(self, call: AttentionCall) -> int:
        """Slices at multiples of this many tokens give bitwise the same dk, dv as no slicing (deterministic=True)."""


class BackendStatus(NamedTuple):
    """One row of `terapipe env`."""

    name: str
    usable: bool
    reason: str


class _Entry(NamedTuple):
    backend: Backend | None
    reason: str | None


@functools.cache
def names() -> tuple[str, ...]:
    """Backends that exist in this installation, in order of preference."""
    return tuple(name for name in ORDER if importlib.util.find_spec(f"tpkernels.{name}") is not None)


@functools.cache
def _load(name: str) -> _Entry:
    try:
        backend: Backend = getattr(importlib.import_module(f"tpkernels.{name}"), f"{name.capitalize()}Backend")()
    except ImportError as error:
        return _Entry(None, f"it cannot be imported ({error})")
    return _Entry(backend, backend.unusable())


def get(name: str) -> Backend:
    """The named backend; ValueError when there is none or this machine cannot use it."""
    if name not in names():
        raise ValueError(f"unknown attention backend {name!r}; this installation has {', '.join(names())}")
    backend, reason = _load(name)
    if backend is None or reason is not None:
        raise ValueError(f"attention backend {name} is not usable here: {reason}")
    return backend


def describe() -> list[BackendStatus]:
    """Every backend that exists, in order of preference, and why an unusable one is not usable."""
    rows = []
    for name in names():
        reason = _load(name).reason
        rows.append(BackendStatus(name, reason is None, reason or ""))
    return rows


def select(call: AttentionCall, requested: str | None = None) -> Backend:
    """The backend for this call: `requested`, else TPK_BACKEND, else the first that is usable and does not refuse.

    Raises ValueError: a requested backend that is unknown, unusable or refuses; or no backend, with each one's reason.
    """
    return _select(call, requested or os.environ.get("TPK_BACKEND") or None)


@functools.cache
def _select(call: AttentionCall, requested: str | None) -> Backend:
    if requested is not None:
        backend = get(requested)
        reason = backend.refuses(call)
        if reason is not None:
            raise ValueError(f"attention backend {requested} refuses {_words(call)}: {reason}")
        return _announce(backend, call, "asked for")
    reasons = []
    for name in names():
        backend_or_none, reason = _load(name)
        if backend_or_none is not None and reason is None:
            reason = backend_or_none.refuses(call)
            if reason is None and name == "reference" and call.dtype != torch.float64:
                reason = (
                    "the slow oracle is automatic only for fp64; ask for it with backend='reference' or "
                    "TPK_BACKEND=reference"
                )
            if reason is None and name == "triton" and call.device_type == "cpu":
                reason = (
                    "its interpreter is a test of the kernels, never automatic; ask for it with backend='triton' or "
                    "TPK_BACKEND=triton"
                )
            if reason is None and name == "cuda":
                reason = getattr(backend_or_none, "unproven", lambda call: None)(call)
            if reason is None:
                return _announce(backend_or_none, call, "first that fits")
        reasons.append(f"{name}: {reason}")
    raise ValueError(f"no attention backend serves {_words(call)}. " + "; ".join(reasons))


def _announce(backend: Backend, call: AttentionCall, why: str) -> Backend:
    log.info("attention backend %s (%s) for %s", backend.name, why, _words(call))
    return backend


def _words(call: AttentionCall) -> str:
    used = [what for what in ("window", "softcap", "sinks", "documents", "deterministic") if getattr(call, what)]
    return (
        f"{call.device_type} {str(call.dtype).removeprefix('torch.')}, {call.query_heads} query and {call.kv_heads} KV "
        f"heads, head_dim {call.head_dim}/{call.value_head_dim}" + (f", {', '.join(used)}" if used else "")
    )
