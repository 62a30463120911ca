"""Exact answers of a large problem, of one KV head of its first sequence, and the tolerance rule applied to them.

The whole of a 4096-token slice behind 128k keys has more scores than memory; one KV head with its group, taken some
query rows at a time, has not. `answer` runs the formulas of tpkernels.reference in any precision: fp64 is the truth,
the tested precision is the yardstick (error <= factor * yardstick's error + noise).

The one trap: dk and dv are sums over all rows, kept in fp64 or fp32 between the chunks, never in 16 bits: the
yardstick must not be worse than it need be.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from benchmarks.gpu_report.contenders import CAUSAL, Problem, Results
from tpkernels import reference, testing

SCORES_A_CHUNK = 1 << 26


class Verdict(NamedTuple):
    """Of the first tensor beyond its bound, else of the one nearest to it."""

    ok: bool
    text: str


def answer(problem: Problem, compute_dtype: torch.dtype) -> Results:
    """out, dq [1, T, G, D] and dk, dv [1, S, 1, D] of KV head 0 of the first sequence."""
    shape = problem.shape
    group = shape.group
    q, dout = problem.q[:1, :, :group], problem.dout[:1, :, :group]
    k, v = problem.k[:1, :, :1], problem.v[:1, :, :1]
    sums_dtype = torch.promote_types(compute_dtype, torch.float32)
    dk, dv = (torch.zeros(x.shape, dtype=sums_dtype, device=x.device) for x in (k, v))
    outs, dqs = [], []
    rows = max(1, SCORES_A_CHUNK // (shape.keys * group))
    for begin in range(0, shape.tokens, rows):
        end = min(begin + rows, shape.tokens)
        keys = shape.prefix + end  # no row of the chunk sees more
        piece = (q[:, begin:end], k[:, :keys], v[:, :keys])
        settings: dict[str, Any] = {
            "start": shape.prefix + begin,
            "mask": CAUSAL,
            "scale": problem.scale,
            "compute_dtype": compute_dtype,
        }
        out, lse = reference.attention_forward(*piece, **settings)
        gradients = reference.attention_backward(dout[:, begin:end], *piece, out, lse, **settings)
        outs.append(out)
        dqs.append(gradients.dq)
        dk[:, :keys] += gradients.dk
        dv[:, :keys] += gradients.dv
    return Results(torch.cat(outs, 1), torch.cat(dqs, 1), dk, dv)


def judge(actual: Results, exact: Results, yardstick: Results, group: int, dtype: torch.dtype) -> Verdict:
    """The tolerance rule on every tensor that `actual` has."""
    nearest = 0.0
    text = "nothing to compare"
    for name, value, truth, other in zip(Results._fields, actual, exact, yardstick, strict=True):
        if value is None:
            continue
        assert truth is not None and other is not None
        heads = group if name in ("out", "dq") else 1
        error = float((value[:1, :, :heads].double() - truth).abs().max())
        allowed = (2 if name == "out" else 3) * float((other.double() - truth).abs().max())
        allowed += testing.noise(truth, dtype)
        said = f"{name}: error {error:.3g}, allowed {allowed:.3g}"
        if not error <= allowed:  # NaN too
            return Verdict(False, said)
        if error >= nearest * allowed:
            nearest, text = error / allowed if allowed else 1.0, said
    return Verdict(True, text)
