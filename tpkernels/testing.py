"""Cases, inputs, exact answers and the tolerance rule of prefix attention, shared by tests and benchmarks.

AttentionCase says what is computed, make_inputs draws it, exact and same_precision answer it with the formulas of
reference.py, run answers it through the public op, and differences applies the tolerance rule:

    max|x - exact| <= factor * max|same_precision - exact| + noise       factor 2 for out and lse, 3 for gradients
    noise = 2 * max|((exact + 0.3) - 0.3) - exact| in the tested precision

exact is fp64; same_precision runs the same formulas, matmuls included, in the tested precision. fp64 itself is held to
1e-12 of the largest value, since nothing more precise is at hand.

The one trap: a case whose exact gradient is zero by mathematics (one visible key a row) has no scale to compare with,
so it is no case here; test_attention_cases.py bounds it from the rounding of its terms.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpkernels import reference
from tpkernels.attention import prefix_attention
from tpkernels.mask import Mask, RawMask, Window
from tpkernels.prefix_cache import GradientAccumulator, PrefixCache, accumulator_dtype


@dataclass(frozen=True)
class AttentionCase:
    """One problem. Cached: a slice of `prefix` tokens, then one of `tokens`, both with gradients. Not cached: `tokens`
    queries over prefix + tokens keys (a negative prefix: queries before the first key see nothing)."""

    tokens: int
    prefix: int = 0
    batch: int = 1
    query_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    value_head_dim: int | None = None
    causal: bool = True
    window: Window = (None, None)
    documents: tuple[tuple[int, ...], ...] | None = None
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    magnitude: float = 1.0
    cached: bool = True

    @property
    def keys(self) -> int:
        """Keys that the last query may see."""
        return self.prefix + self.tokens

    @property
    def queries(self) -> int:
        """Query rows in the inputs: with a cache the prefix has queries too."""
        return self.keys if self.cached else self.tokens

    @property
    def slices(self) -> tuple[int, ...]:
        """Slice lengths of the sequence."""
        return (self.prefix, self.tokens) if self.cached and self.prefix else (self.tokens,)

    @property
    def dv(self) -> int:
        """Value head dim."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def softmax_scale(self) -> float:
        """The scale, default resolved."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def mask(self, device: torch.device | str = "cpu") -> Mask:
        """The mask as the public op takes it."""
        if self.documents is not None:
            return Mask.from_documents(self.documents, window=self.window, device=device)
        return Mask(causal=self.causal, window=self.window)

    def __str__(self) -> str:
        parts = [f"t{self.tokens}+p{self.prefix}", f"b{self.batch}", f"h{self.query_heads}:{self.kv_heads}"]
        parts.append(f"d{self.head_dim}" + (f":{self.dv}" if self.dv != self.head_dim else ""))
        left, right = self.window
        parts += [] if self.causal else ["full"]
        parts += [] if self.window == (None, None) else [f"w{left}:{right}"]
        parts += [f"docs{sum(map(len, self.documents))}"] if self.documents else []
        parts += [f"cap{self.softcap:g}"] if self.softcap else []
        parts += ["sinks"] if self.sinks else []
        parts += [] if self.scale is None else [f"scale{self.scale:g}"]
        parts += [] if self.magnitude == 1 else [f"x{self.magnitude:g}"]
        parts += [] if self.cached else ["plain"]
        return "-".join(parts)


def _cases() -> tuple[AttentionCase, ...]:
    case = AttentionCase
    lengths = [
        (1, 1),
        (1, 238),
        (5, 0),
        (17, 0),
        (2, 3),
        (3, 796),
        (113, 90),
        (127, 385),
        (127, 386),
        (130, 0),
        (64, 64),
    ]
    plain = [(1, 238), (3, 796), (113, 98), (128, 89), (108, 148), (37, -36), (80, -64), (257, 0), (255, 1)]
    dims = [1, 3, 8, 32, 40, 59, 64, 72, 80, 96, 104, 111, 128, 160, 192, 224, 256]
    value_dims = [(8, 24), (64, 40), (40, 72), (192, 128), (111, 8), (72, 256)]
    heads = [(1, 1), (3, 1), (7, 1), (8, 1), (6, 2), (24, 3), (7, 7)]
    windows: list[tuple[bool, Window]] = [
        (True, (5, None)),
        (True, (64, None)),
        (True, (31, 7)),
        (False, (None, None)),
        (False, (17, 3)),
        (False, (None, 5)),
        (False, (9, None)),
        (False, (0, 33)),
    ]
    documents = [((76, 34, 40),), ((1, 149),), ((0, 100, 0, 50),), ((1,) * 9 + (141,),), ((50, 50, 50),)]
    cases = [case(tokens, prefix) for tokens, prefix in lengths]
    cases += [case(tokens, prefix, cached=False) for tokens, prefix in plain]
    cases += [case(37, 29, head_dim=dim) for dim in dims]
    cases += [case(29, 37, head_dim=dim, value_head_dim=value_dim) for dim, value_dim in value_dims]
    cases += [case(41, 23, query_heads=hq, kv_heads=hk, batch=2, head_dim=24) for hq, hk in heads]
    cases += [case(77, 73, causal=causal, window=window) for causal, window in windows]
    cases += [case(53, 60, causal=causal, window=window, cached=False) for causal, window in windows]
    cases += [case(83, 67, documents=rows) for rows in documents]
    cases += [
        case(83, 67, batch=2, documents=((76, 34, 40), (9, 141)), query_heads=6, kv_heads=2),
        case(83, 67, documents=((76, 34, 40),), window=(20, None), sinks=True),
        case(83, 67, documents=((76, 34, 40),), cached=False),
        case(61, -20, cached=False, sinks=True),
        case(61, -20, cached=False, causal=False, window=(4, 4)),
        case(45, 33, softcap=5.0, magnitude=3.0),
        case(45, 33, softcap=30.0, sinks=True, query_heads=6, kv_heads=2, head_dim=40),
        case(45, 33, sinks=True, window=(7, None)),
        case(45, 33, sinks=True, causal=False, query_heads=8, kv_heads=1),
        case(17, 0, magnitude=5.0),
        case(5, 12, magnitude=5.0, query_heads=3, kv_heads=1, head_dim=72),
        case(45, 33, scale=-0.3),
        case(45, 33, scale=1.7),
        case(300, 301, query_heads=3, kv_heads=1, head_dim=64, batch=2),
    ]
    return tuple(cases)


CASES = _cases()


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """q, dout [batch, queries, ...], k, v [batch, keys, ...], sinks [query_heads] or None, of one case."""

    case: AttentionCase
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """The tested precision."""
        return self.q.dtype


@dataclass(frozen=True, eq=False)
class AttentionResult:
    """What a case is checked on: forward, and the gradients of sum(out * dout)."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None

    def items(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of what is there."""
        pairs = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return [(name, value) for name, value in pairs if value is not None]


def make_inputs(
    case: AttentionCase, dtype: torch.dtype, *, seed: int = 0, device: torch.device | str | None = None
) -> AttentionInputs:
    """Random normal inputs, q times case.magnitude, drawn on the CPU in fp32 (fp64 for fp64) and rounded once.

    device: torch's default if None.
    """
    device = torch.get_default_device() if device is None else device
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = accumulator_dtype(dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=drawn, device="cpu")

    q = normal(case.batch, case.queries, case.query_heads, case.head_dim) * case.magnitude
    k = normal(case.batch, case.keys, case.kv_heads, case.head_dim)
    v = normal(case.batch, case.keys, case.kv_heads, case.dv)
    dout = normal(case.batch, case.queries, case.query_heads, case.dv)
    sinks = normal(case.query_heads).to(device) if case.sinks else None
    q, k, v, dout = (x.to(device, dtype) for x in (q, k, v, dout))
    return AttentionInputs(case, q, k, v, dout, sinks)


def poisoned_cache(
    case: AttentionCase, dtype: torch.dtype, *, spare: int = 7, device: torch.device | str | None = None
) -> PrefixCache:
    """A cache with `spare` tokens more than the case needs; it and its accumulator are full of NaN."""
    device = torch.get_default_device() if device is None else device
    sizes = (case.batch, case.keys + spare, case.kv_heads, case.head_dim, case.dv)
    accumulator = GradientAccumulator(*sizes, dtype=accumulator_dtype(dtype), device=device)
    cache = PrefixCache(*sizes, dtype=dtype, device=device, accumulator=accumulator)
    for tensor in (cache.k, cache.v, accumulator.dk, accumulator.dv):
        tensor.fill_(float("nan"))
    return cache


def formulas(inputs: AttentionInputs, compute_dtype: torch.dtype) -> AttentionResult:
    """The case by reference.py, all arithmetic in compute_dtype.

    In one piece, so that slices are compared with no slicing; but slice by slice where queries see past themselves,
    since then a slice ends what its queries can see.
    """
    case = inputs.case
    mask = case.mask(inputs.q.device)
    q, k, v, dout = (x.to(compute_dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dsinks = None if inputs.sinks is None else torch.zeros_like(inputs.sinks, dtype=compute_dtype)
    outs, lses = [], []
    row = 0
    for length in case.slices if case.cached and not case.causal else (case.queries,):
        rows = slice(row, row + length)
        row += length
        start = row - length + case.keys - case.queries
        keys = slice(0, start + length)
        starts = None if mask.document_starts is None else mask.document_starts[:, start : start + length]
        settings: dict[str, Any] = {
            "start": start,
            "mask": RawMask(mask.causal, mask.window_left, mask.window_right, starts),
            "scale": case.softmax_scale,
            "softcap": case.softcap,
            "sinks": inputs.sinks,
            "compute_dtype": compute_dtype,
        }
        out, lse = reference.attention_forward(q[:, rows], k[:, keys], v[:, keys], **settings)
        gradients = reference.attention_backward(
            dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out, lse, **settings
        )
        outs.append(out)
        lses.append(lse)
        dq[:, rows] = gradients.dq
        dk[:, keys] += gradients.dk
        dv[:, keys] += gradients.dv
        if dsinks is not None and gradients.dsinks is not None:
            dsinks += gradients.dsinks
    return AttentionResult(torch.cat(outs, 1), torch.cat(lses, 2), dq, dk, dv, dsinks)


@functools.lru_cache(maxsize=8)
def exact(inputs: AttentionInputs) -> AttentionResult:
    """The answer, in fp64."""
    return formulas(inputs, torch.float64)


@functools.lru_cache(maxsize=8)
def same_precision(inputs: AttentionInputs) -> AttentionResult:
    """The yardstick: the same formulas in the tested precision."""
    return formulas(inputs, inputs.dtype)


def run(
    inputs: AttentionInputs,
    *,
    backend: str | None = None,
    slices: Sequence[int] | None = None,
    deterministic: bool = False,
    cache: PrefixCache | None = None,
) -> AttentionResult:
    """The case through the public op: slices forward in order, backward last to first, in a poisoned cache by default.

    slices: lengths that sum to the keys; default the case's own. Not cached: one call with all keys.
    """
    case = inputs.case
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    sinks = None if inputs.sinks is None else inputs.sinks.detach().requires_grad_()
    mask = case.mask(q.device)
    if case.cached and cache is None:
        cache = poisoned_cache(case, inputs.dtype, device=q.device)
    outs, lses = [], []
    start = 0
    for length in (slices or case.slices) if case.cached else (case.tokens,):
        end = start + length
        pieces = (q[:, start:end], k[:, start:end], v[:, start:end]) if case.cached else (q, k, v)
        out, lse = prefix_attention(
            *pieces,
            cache if case.cached else None,
            mask=mask,
            scale=case.scale,
            softcap=case.softcap,
            sinks=sinks,
            deterministic=deterministic,
            backend=backend,
            return_lse=True,
        )
        outs.append(out)
        lses.append(lse)
        start = end
    ends = [sum(out.shape[1] for out in outs[: i + 1]) for i in range(len(outs))]
    for out, end in reversed(list(zip(outs, ends, strict=True))):
        out.backward(inputs.dout[:, end - out.shape[1] : end])
    return AttentionResult(
        torch.cat(outs, 1).detach(),
        torch.cat(lses, 2),
        _gradient(q),
        _gradient(k),
        _gradient(v),
        None if sinks is None else _gradient(sinks),
    )


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def noise(exact: Tensor, dtype: torch.dtype) -> float:
    """Rounding that nobody can avoid: 2 * max|((x + 0.3) - 0.3) - x| in the tested precision, at the worst that an x of
    this size can meet, an ulp of max|x| + 0.3. What a few elements meet themselves is luck, and may be 0."""
    largest = _largest(exact) + 0.3
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest)) if math.isfinite(largest) else math.nan


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


@dataclass(frozen=True)
class Difference:
    """One tensor of a result against the tolerance rule. ok is False for NaN and for -inf (an empty row) misplaced."""

    name: str
    error: float
    allowed: float
    ok: bool

    def __str__(self) -> str:
        return f"{self.name}: error {self.error:.3g}, allowed {self.allowed:.3g}{'' if self.ok else '  <-- too far'}"


def differences(actual: AttentionResult, inputs: AttentionInputs) -> list[Difference]:
    """Each tensor of `actual` under the tolerance rule."""
    exact_result, yardstick = dict(exact(inputs).items()), dict(same_precision(inputs).items())
    rows = []
    for name, value in actual.items():
        truth, other = exact_result[name], yardstick[name].double()
        empty = truth == float("-inf")
        same_empty = bool((empty == (value == float("-inf"))).all()) and value.shape == truth.shape
        if not same_empty:
            rows.append(Difference(name, float("nan"), 0.0, False))
            continue
        truth, other = truth.masked_fill(empty, 0), other.masked_fill(empty, 0)
        error = _largest(value.double().masked_fill(empty, 0) - truth)
        if inputs.dtype == torch.float64:
            allowed = 1e-12 * max(1.0, _largest(truth))
        else:
            factor = 2 if name in ("out", "lse") else 3
            allowed = factor * _largest(other - truth) + noise(truth, inputs.dtype)
        rows.append(Difference(name, error, allowed, error <= allowed))
    return rows


def check(actual: AttentionResult, inputs: AttentionInputs) -> None:
    """AssertionError with every tensor's error and bound when one breaks the tolerance rule."""
    rows = differences(actual, inputs)
    assert all(row.ok for row in rows), f"{inputs.case} {inputs.dtype}:\n  " + "\n  ".join(map(str, rows))
