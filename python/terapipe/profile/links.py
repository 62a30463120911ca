"""Latency and bandwidth of each kind of link on this machine, from transfers there and back between ranks 0 and 1."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from terapipe.planner.costs import LinkModel
from terapipe.planner.fit import non_negative_least_squares
from tpkernels.links import LinkSpec, open_link, shm_missing

LINK_BYTES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
LINK_PAUSE_S = 0.002
TURNS, WARM_UP_TURNS = 15, 3
LEAST_SHARE = 0.01  # of the largest transfer's time that its bytes must explain

logger = logging.getLogger("terapipe")


def measure_links() -> dict[str, LinkModel]:
    """Latency and bandwidth between ranks 0 and 1 by kind of link, from transfers there and back; the kind that the
    engine would choose first."""
    kinds = ["dist"] if shm_missing() else ["shm", "dist"]
    everyone = dist.new_group(backend="gloo")
    return {kind: _measure_link(kind, everyone) for kind in kinds}


def _measure_link(kind: str, everyone: dist.ProcessGroup) -> LinkModel:
    """Each transfer finds its receiver asleep, as one that waits for a slice is; both ends' pauses are taken off."""
    rank, key = dist.get_rank(), (0, 0, 0)
    groups = [dist.new_group([0, 1]) if kind == "dist" else everyone for _ in range(2)]
    crowded = dist.get_world_size() * torch.get_num_threads() > len(os.sched_getaffinity(0))
    options = {"spin_s": 0.0} if kind == "shm" and crowded else {}  # as the engine chooses
    times: list[float] = []
    if rank < 2:
        cpu, shape = torch.device("cpu"), (max(LINK_BYTES),)
        out, back = (
            open_link(kind, LinkSpec(end, 1 - end, way, torch.uint8, cpu, 1, {key: 0}, shape), group=group, **options)
            for end, way, group in zip((0, 1), "FB", groups, strict=True)
        )
        mine, other = (out, back) if rank == 0 else (back, out)
        for size in LINK_BYTES:
            x = torch.zeros(size, dtype=torch.uint8)
            for _ in range(TURNS):
                for link in (out, back):
                    link.expect([(key, (size,))])
                if rank == 1:
                    other.take(key)
                    other.release(key)
                began = time.perf_counter()
                time.sleep(LINK_PAUSE_S)
                paused = time.perf_counter()
                mine.put(key, x)
                if rank == 0:
                    other.take(key)
                    other.release(key)
                for link in (out, back):
                    link.finish()
                # Rank 0: from its put to the answer. Rank 1: how long the answer was held back.
                times.append(time.perf_counter() - paused if rank == 0 else paused - began)
        for link in (out, back):
            link.close()
    everybody: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, times)
    one_way = [(there - held) / 2 for there, held in zip(*everybody[:2], strict=True)]
    medians = [
        (size, max(1e-9, statistics.median(one_way[index * TURNS + WARM_UP_TURNS : (index + 1) * TURNS])))
        for index, size in enumerate(LINK_BYTES)
    ]
    return fit_link(kind, medians)


def fit_link(kind: str, times: Sequence[tuple[int, float]]) -> LinkModel:
    """The line through pairs of bytes and seconds, with the smallest relative errors. Where the times do not grow with
    the bytes it has no slope: a warning says so, and the bandwidth is the rate of the largest transfer, latency
    included, so that it is predicted to take twice its time at worst."""
    rows = [[1 / seconds, size / seconds] for size, seconds in times]
    latency, per_byte = non_negative_least_squares(rows, [1.0] * len(rows))
    size, seconds = max(times)
    if per_byte * size >= LEAST_SHARE * seconds:
        return LinkModel(latency, 1 / per_byte)
    if not dist.is_initialized() or dist.get_rank() == 0:
        least, least_s = min(times)
        logger.warning(
            "link %s: bandwidth could not be told, since %d bytes took %.3g s and %d took %.3g s; measure again.",
            *(kind, least, least_s, size, seconds),
        )
    return LinkModel(latency, size / seconds)
