"""The fused ops of a transformer block on the CPU against torch's own ops, forward and backward, in the same run.

kind is the op and its dtype, mode forward or backward; bytes is what a perfect op moves: each input read once, each
output written once. Rates are of the median. The rival is the chain of torch ops that autograd runs in its place,
outputs allocated, as ours are. Every answer is checked against fp64 before it is timed.

The last rows are the ops at a stage's border, fused with the hand-off and apart (fused_hand_off.py).

The one trap: a slice's tensors fit in L2 and a whole sequence's do not, so both are here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import fused_hand_off
from tpkernels import fused_reference as formulas
from tpkernels import fused_rows, testing

EPS = 1e-5
HEAD_DIM = 64
SIZES = ((256, 256), (2048, 256), (256, 4096))
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Row:
    """One op, dtype and mode. Times in microseconds; speedup is torch's median over ours."""

    kind: str
    mode: str
    rows: int
    columns: int
    threads: int
    bytes: int
    p50_us: float
    p99_us: float
    gb_per_s: float
    torch_p50_us: float
    speedup: float


@dataclass(frozen=True)
class Job:
    """Both rivals, the exact answer of their first output, and how many [rows, columns] matrices a perfect op moves."""

    kind: str
    mode: str
    matrices: int
    ours: Callable[[], Tensor]
    torchs: Callable[[], Tensor]
    exact: Tensor


def run(rounds: int = 200) -> Sequence[Any]:
    """All rows, on torch's current threads."""
    if "RANK" in os.environ:
        return fused_hand_off.work()
    rows: list[Any] = []
    for dtype in DTYPES:
        for size in SIZES:
            jobs = [
                *_norm("add_rms_norm", *size, dtype, rms=True),
                *_norm("add_layer_norm", *size, dtype, rms=False),
                *_rotary(*size, dtype),
                *_gate("swiglu", *size, dtype, activation="silu"),
                *_gate("gelu_tanh", *size, dtype, activation="gelu_tanh"),
            ]
            for job in jobs:
                _check(job, dtype)
                rows.append(_measure(job, *size, dtype, rounds))
    return [*rows, *fused_hand_off.row_blocks(), *fused_hand_off.start()]


def _norm(kind: str, rows: int, columns: int, dtype: torch.dtype, *, rms: bool) -> list[Job]:
    x, delta, dout, dresidual = _normal(4, rows, columns, dtype)
    weight = _normal(1, 1, columns, dtype)[0][0]
    bias = None if rms else _normal(1, 1, columns, dtype)[0][0]
    total = x + delta
    exact = formulas.norm_forward(total.double(), weight.double(), _double(bias), eps=EPS, rms=rms)
    mean, rstd = None if exact.mean is None else exact.mean.float(), exact.rstd.float()
    exact_dx = formulas.norm_backward(
        dout.double(), total.double(), weight.double(), exact.mean, exact.rstd, dresidual=dresidual.double()
    ).dx
    leaves = [y.clone().requires_grad_() for y in (total, weight, bias) if y is not None]
    outs = [_torch_norm(leaves[0], leaves[1], None if rms else leaves[2], rms=rms), leaves[0] * 1.0]

    def ours() -> Tensor:
        return fused_rows.norm_forward(x, weight, bias, eps=EPS, rms=rms, delta=delta).out

    def torchs() -> Tensor:
        return _torch_norm(x + delta, weight, bias, rms=rms)

    def ours_backward() -> Tensor:
        return fused_rows.norm_backward(dout, total, weight, mean, rstd, dresidual=dresidual).dx

    def torchs_backward() -> Tensor:
        return torch.autograd.grad(outs, leaves, [dout, dresidual], retain_graph=True)[0]

    return [
        Job(kind, "forward", 4, ours, torchs, exact.out),
        Job(kind, "backward", 4, ours_backward, torchs_backward, exact_dx),
    ]


def _rotary(rows: int, columns: int, dtype: torch.dtype) -> list[Job]:
    x, dout = _normal(2, rows, columns, dtype)
    angles = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turns = torch.polar(torch.ones_like(angles), angles)

    def product(y: Tensor, by: Tensor) -> Tensor:
        pairs = torch.view_as_complex(y.float().view(rows, -1, HEAD_DIM // 2, 2))
        return torch.view_as_real(pairs * by[:, None]).view(rows, columns).to(dtype)

    def job(mode: str, y: Tensor, *, inverse: bool) -> Job:
        exact = formulas.rotate(
            y.double().unflatten(1, (-1, HEAD_DIM)), turns.to(torch.complex128), inverse=inverse
        ).flatten(1)
        by = turns.conj().resolve_conj() if inverse else turns
        return Job(
            "rotary",
            mode,
            2,
            lambda: fused_rows.rotate(y, turns, head_dim=HEAD_DIM, inverse=inverse),
            lambda: product(y, by),
            exact,
        )

    return [job("forward", x, inverse=False), job("backward", dout, inverse=True)]


def _gate(kind: str, rows: int, columns: int, dtype: torch.dtype, *, activation: formulas.Activation) -> list[Job]:
    gate, other, dout = _normal(3, rows, columns, dtype)
    up = other if activation == "silu" else None
    exact = formulas.gated_backward(dout.double(), gate.double(), _double(up), activation=activation)
    leaves = [y.clone().requires_grad_() for y in (gate, up) if y is not None]
    graph = _torch_gate(*leaves)

    def ours() -> Tensor:
        return fused_rows.gated_forward(gate, up, activation=activation)

    def torchs() -> Tensor:
        return _torch_gate(gate, up)

    def ours_backward() -> Tensor:
        return fused_rows.gated_backward(dout, gate, up, activation=activation).dgate

    def torchs_backward() -> Tensor:
        return torch.autograd.grad(graph, leaves, dout, retain_graph=True)[0]

    return [
        Job(kind, "forward", 2 if up is None else 3, ours, torchs, exact.out),
        Job(kind, "backward", 4 if up is None else 6, ours_backward, torchs_backward, exact.dgate),
    ]


def _torch_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, rms: bool) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS) if rms else F.layer_norm(x, weight.shape, weight, bias, EPS)


def _torch_gate(gate: Tensor, up: Tensor | None = None) -> Tensor:
    return F.gelu(gate, approximate="tanh") if up is None else F.silu(gate) * up


def _check(job: Job, dtype: torch.dtype) -> None:
    """AssertionError unless ours is as close to fp64 as the tolerance rule asks, with torch's op as the yardstick."""
    ours, theirs = ((run().double() - job.exact).abs().max() for run in (job.ours, job.torchs))
    allowed = 3 * theirs + testing.noise(job.exact, dtype)
    assert ours <= allowed, f"{job.kind} {job.mode} {dtype}: error {ours}, allowed {allowed}"


def _measure(job: Job, rows: int, columns: int, dtype: torch.dtype, rounds: int) -> Row:
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    for _ in range(rounds):
        for name, call in (("ours", job.ours), ("torch", job.torchs)):
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e6)
    ours, theirs = sorted(times["ours"]), sorted(times["torch"])
    moved = job.matrices * rows * columns * dtype.itemsize
    p50 = ours[rounds // 2]
    return Row(
        kind=f"{job.kind} {str(dtype).removeprefix('torch.')}",
        mode=job.mode,
        rows=rows,
        columns=columns,
        threads=torch.get_num_threads(),
        bytes=moved,
        p50_us=p50,
        p99_us=ours[int(rounds * 0.99)],
        gb_per_s=moved / p50 / 1e3,
        torch_p50_us=theirs[rounds // 2],
        speedup=theirs[rounds // 2] / p50,
    )


def _normal(count: int, rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows + columns)
    return [torch.randn(rows, columns, generator=generator).to(dtype) for _ in range(count)]


def _double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()
