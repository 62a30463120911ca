"""How much of this machine others used while a run was timed, so that a disturbed measurement can be seen and repeated.

Linux only (/proc/stat); elsewhere nothing is known and the share is 0. The trap: time stolen by the host from a virtual
machine counts as foreign, and a process that is stopped costs wall time without using anything.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

LIMIT = 0.05  # of one core: beyond it a measurement is worth repeating


@dataclass(frozen=True)
class Sample:
    """Seconds: the machine's busy time, this process's own, the wall clock."""

    busy_s: float
    own_s: float
    wall_s: float


def sample() -> Sample:
    """Of this process alone."""
    own = os.times()
    return Sample(_busy(), own.user + own.system, time.perf_counter())


def foreign_cores(before: Sample, after: Sample) -> float:
    """Cores that others kept busy between two samples, on average; a collective call if there are several ranks, which
    must share one machine."""
    own = torch.tensor([after.own_s - before.own_s], dtype=torch.float64)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(own)
    wall = max(after.wall_s - before.wall_s, 1e-9)
    shared = [max(0.0, after.busy_s - before.busy_s - float(own)) / wall]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _busy() -> float:
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
