"""How much of this machine others used while a run was timed, so that a disturbed measurement can be seen and repeated.

Linux only (/proc/stat); elsewhere nothing is known and the share is 0. The trap: time stolen by the host from a virtual
machine counts as foreign, and a process that is stopped costs wall time without using anything.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 0.05  # of one core: beyond it a measurement is worth repeating
LEAST_S = 1.0  # the kernel counts in hundredths of a second, so of less time than this it tells little


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
    """Cores that others kept busy between two samples, on average, on the machine where it was most; a collective call
    if there are several ranks."""
    mine = (_machine(), after.own_s - before.own_s, after.busy_s - before.busy_s, after.wall_s - before.wall_s)
    everyone: list[Any] = [mine]
    if dist.is_available() and dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    own_s: dict[str, float] = {}
    for machine, own, _, _ in everyone:
        own_s[machine] = own_s.get(machine, 0.0) + own
    return max(max(0.0, busy - own_s[machine]) / max(wall, 1e-9) for machine, _, busy, wall in everyone)


def disturbance(foreign: float, *, local_ranks: int) -> str:
    """Words for a measurement during which others kept so many cores busy; none if the ranks had cores of their own."""
    cores = os.cpu_count() or 1
    free = max(0, cores - local_ranks * torch.get_num_threads())
    if foreign <= free + LIMIT:
        return ""
    return f"disturbed: others kept {foreign:.2f} of {cores} cores busy meanwhile, so measure again when they do not"


def _machine() -> str:
    """The same for all processes that see the same /proc/stat."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""


def _busy() -> float:
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
