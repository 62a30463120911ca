"""Ways to fail while links are opened, as scenarios of worker.py for three ranks: what each rank hears, and when."""

from __future__ import annotations

import _thread
import contextlib
import errno
import gc
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from faults import of_links
from worker import _batch, _pipeline

from terapipe.engine import opening, wiring
from terapipe.engine import pipeline as engine
from tpkernels.links import ShmLink, segment

PATIENCE = timedelta(seconds=60)  # nobody may need it


@dataclass(frozen=True)
class Case:
    """`rank` has `owner.name` replaced by something that fails (None: it is given other options)."""

    rank: int
    owner: Any = None
    name: str = ""
    fails: Callable[..., Any] | None = None
    options: dict[str, Any] | None = None


def _raises(kind: type[BaseException], *arguments: Any) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise kind(*arguments)

    return fail


def _interrupted(*_: Any) -> Any:
    _thread.interrupt_main()
    time.sleep(0.3)


def _lacks(code: int) -> Callable[..., Any]:
    return _raises(OSError, code, os.strerror(code))


AGREED = {
    "memory": Case(1, os, "posix_fallocate", _lacks(errno.ENOSPC)),
    "mapping": Case(2, segment, "_map", _lacks(errno.ENOMEM)),
    "socket": Case(0, segment, "_socket", _lacks(errno.EMFILE)),
    "memfd": Case(1, os, "memfd_create", _lacks(errno.EMFILE)),
    "handing over": Case(1, segment.Offer, "accept", _lacks(errno.EMFILE)),
}
"""After these the ranks agree that there is no shared memory."""

ALONE = {
    "place": Case(1, wiring._Place, "here", _lacks(errno.EMFILE)),
    "thread": Case(1, ShmLink, "__init__", _raises(RuntimeError, "Resource temporarily unavailable")),
    "first exchange": Case(2, ShmLink, "measure", _raises(RuntimeError, "broken on purpose")),
    "interrupted": Case(0, wiring._Place, "here", _interrupted),
    "option": Case(2, options={"link_timeout": 5}),
    "watchdog": Case(0, engine, "Watchdog", _raises(RuntimeError, "can't start new thread")),
    "links": Case(1, options={"links": "shared"}),
    "device": Case(2, options={"device": "gpu"}),
}
"""These happen to one rank, and the others hear of it."""


def openings(rank: int, ranks: int) -> dict[str, Any]:
    """(seconds, what was heard, what of links is left) by case; last of a rank without a descriptor for the group of
    all, and of the same ranks once it has some."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has it ignored
    heard: dict[str, Any] = {name: _outcome(case, rank, ranks) for name, case in (AGREED | ALONE).items()}
    dist.barrier()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 3, limits[1]))
    heard["group"] = [*_attempt(ranks), of_links()]
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    dist.barrier()
    heard["afterwards"] = _attempt(ranks)
    return heard


def killed(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 1 ends where the first group is made."""
    if rank == 1:
        opening.Opening.group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    dist.barrier()
    return {"heard": _attempt(ranks)}


def _outcome(case: Case, rank: int, ranks: int) -> list[Any]:
    dist.barrier()
    found = []
    with _replaced(case) if rank == case.rank else contextlib.nullcontext():
        found = _attempt(ranks, **(case.options or {} if rank == case.rank else {}))
    gc.collect()
    return [*found, of_links()]


@contextlib.contextmanager
def _replaced(case: Case) -> Iterator[None]:
    if case.owner is None:
        yield
        return
    before = case.owner.__dict__[case.name]
    setattr(case.owner, case.name, case.fails)
    try:
        yield
    finally:
        setattr(case.owner, case.name, before)


def _attempt(ranks: int, **options: Any) -> list[Any]:
    began = time.monotonic()
    try:
        with _pipeline(ranks, **({"links": "shm", "link_timeout": PATIENCE} | options)) as pipeline:
            pipeline.step(_batch())
        return [time.monotonic() - began, "stepped"]
    except BaseException as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        return [time.monotonic() - began, f"{type(error).__name__}: {error}{notes}"]
