"""How long a job takes: median and spread over repeats, on the GPU by events, each repeat with a cold L2 cache.

Before each repeat the GPU is given a buffer larger than its L2 to clear and then told to spin for a while: the host is
ahead when the job's kernels begin, so launches cost nothing that a training step would not hide. What the host spends
is reported beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

SECONDS = 0.4  # of repeats
FEWEST, MOST = 5, 60
L2_BYTES = 256 << 20
SPIN_CYCLES = 800_000  # about half a millisecond


class Times(NamedTuple):
    """Milliseconds: median, the 20th and 80th percentile, and what the host spent in one call (median)."""

    ms: float
    low_ms: float
    high_ms: float
    host_ms: float
    repeats: int


Sampler = Callable[[Callable[[], object]], tuple[float, float]]  # a job -> its and the host's milliseconds


def measure(job: Callable[[], object], device: str, sample: Sampler | None = None) -> Times:
    """Two calls to warm up, one to guess the number of repeats, then those."""
    sample = sample or (_events() if device == "cuda" else _host)
    for _ in range(2):
        job()
    guess = max(sample(job)[0], 1e-3)
    repeats = int(min(max(1000 * SECONDS / guess, FEWEST), MOST))
    samples = [sample(job) for _ in range(repeats)]
    spans = sorted(span for span, _ in samples)
    low, high = spans[round(0.2 * (repeats - 1))], spans[round(0.8 * (repeats - 1))]
    return Times(statistics.median(spans), low, high, statistics.median(host for _, host in samples), repeats)


def _host(job: Callable[[], object]) -> tuple[float, float]:
    began = time.perf_counter()
    job()
    span = 1000 * (time.perf_counter() - began)
    return span, span


def _events() -> Sampler:
    cold = torch.empty(L2_BYTES, dtype=torch.int8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(job: Callable[[], object]) -> tuple[float, float]:
        cold.zero_()
        torch.cuda._sleep(SPIN_CYCLES)
        begin.record()
        began = time.perf_counter()
        job()
        host = 1000 * (time.perf_counter() - began)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end), host

    return sample
