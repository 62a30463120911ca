"""Attention of one slice over its prefix on the CPU: our kernels, torch's SDPA and torch.matmul in the same run.

Rows carry GFLOP/s (medians over the rounds), with 4 * head_dim * query_heads * visible pairs operations forward and 2.5
times that backward, beside two rates of torch.matmul in the same dtype and thread count, measured in between:
matmul_gflops is 1024^3, which the shares refer to; matmul_same_shape_gflops is q @ k^T and p @ v over all pairs of the
shape, batched over KV heads, on contiguous operands and into given outputs (a low bar: it writes and reads the scores).
Shares are medians of ratios within a round. Every shape's answer is checked against fp64 before it is timed.

The one trap: a rival leaves caches and a clock rate that cost its neighbour up to a third, and a core that multiplies
tiles lowers its clock within milliseconds. So each round has an order of its own and calls each rival again and again
for WINDOW_S: the last call counts, and the first, right after another rival, gives the `_cold` columns.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tpkernels import _core, testing
from tpkernels.backends import AttentionCall, RawSettings
from tpkernels.cpu import CpuBackend
from tpkernels.mask import RawMask
from tpkernels.prefix_cache import PrefixCache

MATMUL = 1024
WINDOW_S = 0.02
LEAST_CALLS = 3


@dataclass(frozen=True)
class Shape:
    """A slice of `tokens` after `prefix`."""

    tokens: int
    prefix: int
    head_dim: int
    query_heads: int = 8
    kv_heads: int = 8

    @property
    def keys(self) -> int:
        """Prefix and slice."""
        return self.prefix + self.tokens

    @property
    def forward_flops(self) -> float:
        """Two products over the visible pairs."""
        pairs = self.tokens * self.prefix + self.tokens * (self.tokens + 1) // 2
        return 4.0 * self.head_dim * self.query_heads * pairs


LENGTHS = ((2048, 0), (512, 1536), (256, 1792), (256, 7936))
SHAPES = tuple(
    Shape(tokens, prefix, head_dim, kv_heads=kv_heads)
    for head_dim, kv_heads in ((64, 8), (128, 2))
    for tokens, prefix in LENGTHS
)


@dataclass(frozen=True)
class Row:
    """One shape, dtype and thread count. Rates in GFLOP/s; shares are of matmul in the same round, cold of cold."""

    threads: int
    dtype: str
    head_dim: int
    heads: str
    slice: int
    prefix: int
    matmul_gflops: float
    matmul_same_shape_gflops: float
    forward: float
    forward_share: float
    forward_cold_share: float
    backward: float
    backward_share: float
    backward_cold_share: float
    sdpa_forward: float
    sdpa_backward: float
    forward_speedup: float
    backward_speedup: float
    isa_level: str


def run(
    shapes: Sequence[Shape] = SHAPES,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
    threads: Sequence[int] = (1, 2),
    rounds: int = 12,
) -> list[Row]:
    """All rows; restores torch's thread count."""
    before = torch.get_num_threads()
    try:
        rows = []
        for count in threads:
            torch.set_num_threads(count)
            rows += [measure(shape, dtype, count, rounds) for dtype in dtypes for shape in shapes]
        return rows
    finally:
        torch.set_num_threads(before)


def measure(shape: Shape, dtype: torch.dtype, threads: int, rounds: int) -> Row:
    """Checks, then times, one shape."""
    check(shape, dtype)
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    a, b = normal(MATMUL, MATMUL), normal(MATMUL, MATMUL)
    jobs: dict[str, Callable[[], object]] = {"matmul": lambda: a @ b}
    q, dout = (normal(1, shape.tokens, shape.query_heads, shape.head_dim) for _ in range(2))
    k, v = (normal(1, shape.keys, shape.kv_heads, shape.head_dim) for _ in range(2))
    jobs["same_shape"] = _same_shape(shape, q, k, v)
    jobs |= _ours(shape, q, k, v, dout) | _sdpa(shape, q, k, v, dout)
    first: dict[str, list[float]] = {name: [] for name in jobs}
    last: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():  # the backward of torch's attention needs its forward's graph
        job()
    order, shuffled = list(jobs), random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            seconds = _window(jobs[name])
            first[name].append(seconds[0])
            last[name].append(seconds[-1])
    flops = {name: shape.forward_flops * (2.5 if "backward" in name else 1.0) for name in jobs}
    flops["matmul"] = 2.0 * MATMUL**3
    flops["same_shape"] = 4.0 * shape.head_dim * shape.query_heads * shape.tokens * shape.keys

    def rate(name: str) -> float:
        return flops[name] / statistics.median(last[name]) / 1e9

    def ratio(name: str, other: str, times: dict[str, list[float]]) -> float:
        of_rounds = (theirs / ours for ours, theirs in zip(times[name], times[other], strict=True))
        return flops[name] / flops[other] * statistics.median(of_rounds)

    return Row(
        threads=threads,
        dtype=str(dtype).removeprefix("torch."),
        head_dim=shape.head_dim,
        heads=f"{shape.query_heads}:{shape.kv_heads}",
        slice=shape.tokens,
        prefix=shape.prefix,
        matmul_gflops=rate("matmul"),
        matmul_same_shape_gflops=rate("same_shape"),
        forward=rate("forward"),
        forward_share=ratio("forward", "matmul", last),
        forward_cold_share=ratio("forward", "matmul", first),
        backward=rate("backward"),
        backward_share=ratio("backward", "matmul", last),
        backward_cold_share=ratio("backward", "matmul", first),
        sdpa_forward=rate("sdpa_forward"),
        sdpa_backward=rate("sdpa_backward"),
        forward_speedup=ratio("forward", "sdpa_forward", last),
        backward_speedup=ratio("backward", "sdpa_backward", last),
        isa_level=_core.isa_level(),
    )


def _window(job: Callable[[], object]) -> list[float]:
    """Seconds of each call, one after another until WINDOW_S is over, LEAST_CALLS or more."""
    seconds: list[float] = []
    end = time.perf_counter() + WINDOW_S
    while len(seconds) < LEAST_CALLS or time.perf_counter() < end:
        start = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - start)
    return seconds


def check(shape: Shape, dtype: torch.dtype) -> None:
    """AssertionError unless one KV head of the shape is within the tolerance rule of tpkernels.testing."""
    case = testing.AttentionCase(
        shape.tokens,
        shape.prefix,
        query_heads=shape.query_heads // shape.kv_heads,
        kv_heads=1,
        head_dim=shape.head_dim,
        cached=False,
    )
    inputs = testing.make_inputs(case, dtype)
    testing.check(testing.run(inputs, backend="cpu"), inputs)


def _same_shape(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
    """The two products of the forward as torch.matmul does them, without a softmax and without a mask."""
    rows = shape.tokens * shape.query_heads // shape.kv_heads
    queries = q.transpose(1, 2).reshape(shape.kv_heads, rows, shape.head_dim)
    keys, values = (x[0].transpose(0, 1).contiguous() for x in (k, v))
    probabilities = torch.rand(shape.kv_heads, rows, shape.keys).to(q.dtype)
    scores, out = torch.empty_like(probabilities), torch.empty_like(queries)

    def products() -> None:
        torch.matmul(queries, keys.transpose(1, 2), out=scores)
        torch.matmul(probabilities, values, out=out)

    return products


def _ours(
    shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """Whole kernel calls on a prefix cache, packing and the addition into its fp32 accumulators included."""
    backend = CpuBackend()
    call = AttentionCall("cpu", q.dtype, shape.query_heads, shape.kv_heads, shape.head_dim, shape.head_dim)
    assert backend.unusable() is None and backend.refuses(call) is None
    out, dq = torch.empty_like(q), torch.empty_like(q)
    lse = torch.empty(1, shape.query_heads, shape.tokens)
    cache = PrefixCache(1, shape.keys, shape.kv_heads, shape.head_dim, dtype=q.dtype)
    sums = cache.require_accumulator()
    cache.k.copy_(k)
    cache.v.copy_(v)
    sums.dk.zero_()
    sums.dv.zero_()
    mask = RawMask(True, -1, -1, None)
    settings = RawSettings(shape.prefix, mask, shape.head_dim**-0.5, deterministic=True)

    def forward() -> None:
        backend.forward(q, cache.k, cache.v, out=out, lse=lse, settings=settings)

    def backward() -> None:
        backend.backward(
            dout, q, cache.k, cache.v, out, lse, dq=dq, dk=sums.dk, dv=sums.dv, dsinks=None, settings=settings
        )

    return {"forward": forward, "backward": backward}


def _sdpa(
    shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """torch's attention on the same values; with a prefix its causal mask has to be given as a tensor."""
    group = shape.query_heads // shape.kv_heads
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    gradient = dout.transpose(1, 2)
    mask = None
    if shape.prefix:
        mask = torch.ones(shape.tokens, shape.keys, dtype=torch.bool).tril(shape.prefix)
    graph: list[torch.Tensor] = []

    def forward() -> None:
        settings: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": group > 1}
        graph[:] = [F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], **settings)]

    def backward() -> None:
        torch.autograd.grad(graph[0], leaves, gradient, retain_graph=True)

    return {"sdpa_forward": forward, "sdpa_backward": backward}
