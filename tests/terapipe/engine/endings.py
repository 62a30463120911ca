"""Ways to leave a pipeline that are no failure of a layer, as a scenario of worker.py: by `close`, by losing it, by
Ctrl-C, and by calls that differ between ranks.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from faults import of_links
from worker import Mix, _batch, _pipeline

from terapipe.engine import Pipeline, wiring
from terapipe.schedule import make_plan

PATIENCE = timedelta(seconds=2)
KINDS = ("shm", "dist")
CLOSED = ("closed", "lost", "closed in the sum", "closed before the sum")
ENDINGS = (*CLOSED, "interrupted", "evaluates", "late")


def endings(rank: int, ranks: int) -> dict[Any, Any]:
    """What each rank hears; rank 1 is the one that ends it. Last, what an unclosed pipeline leaves."""
    heard: dict[Any, Any] = {}
    for links in KINDS:
        for how in ENDINGS:
            dist.barrier()
            heard[links, how] = _one(rank, links, how)
        dist.barrier()
        heard[links, "left"] = _left_by_a_lost_one(links)
    dist.barrier()
    heard["no links"] = _no_links(rank)
    return heard


def _no_links(rank: int) -> str:
    """Rank 1 fails where its links are opened."""
    opens = wiring.open_link
    wiring.open_link = _no_descriptors if rank == 1 else opens
    try:
        _pipeline(2, links="shm", link_timeout=PATIENCE)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        wiring.open_link = opens
    return ""


def _no_descriptors(*_: Any, **__: Any) -> Any:
    raise RuntimeError("too many open files")


def _one(rank: int, links: str, how: str) -> list[str]:
    pipeline: Any = _pipeline(2, links=links, link_timeout=PATIENCE)
    if how == "evaluates":  # with one slice neither has to wait for the other until the sum
        plan = make_plan(layers=4, ranks=2, slices=1, tokens=7, micros=2, schedule="terapipe")
        pipeline = Pipeline([Mix(seed) for seed in range(4)], plan, hidden_size=4, links=links, link_timeout=PATIENCE)
    pipeline.step(_batch())
    dist.barrier()
    call: Callable[..., Any] = pipeline.evaluate if how == "evaluates" and rank == 0 else pipeline.step
    if rank == 1:
        if how == "closed":
            pipeline.close()
        elif how == "lost":
            pipeline = call = None  # type: ignore[assignment]
        elif how == "interrupted":
            next(iter(pipeline.layers().values())).register_forward_pre_hook(_interrupt)
        elif how == "late":
            time.sleep(PATIENCE.total_seconds() + 0.5)
    if how.endswith("the sum"):
        wires = pipeline._wiring
        late, sums = (how == "closed in the sum") == (rank == 0), wires.sum_over_ranks
        wires.sum_over_ranks = lambda values: (time.sleep(1.0 if late else 0.0), sums(values))[1]
        if rank == 1:
            threading.Timer(0.5, pipeline.close).start()
    heard = []
    for _ in range(2):
        try:
            if call is not None:
                call(_batch(1))
                heard.append("done")
        except BaseException as error:
            heard.append(f"{type(error).__name__}: {error}")
    if pipeline is not None:
        pipeline.close()
    return heard


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _left_by_a_lost_one(links: str) -> list[str]:
    gc.collect()  # the failed ones before
    before = len(os.listdir("/proc/self/fd"))
    pipeline = _pipeline(2, links=links)
    pipeline.step(_batch())
    dist.barrier()
    del pipeline
    gc.collect()
    for _ in range(50):  # gloo's threads end after the call that ends them
        if len(os.listdir("/proc/self/fd")) == before:
            break
        time.sleep(0.02)
    more = len(os.listdir("/proc/self/fd")) - before
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:terapipe" in line]
    return [name for name in of_links() if "terapipe" in name] + maps + [f"{more} descriptors"] * (more > 0)
