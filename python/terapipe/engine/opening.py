"""Opening what connects the ranks, so that no rank waits for one that fails at it.

Opening is full of waits for other ranks. So a thread does the work, while the caller looks for a failure of another
rank; then it ends those waits and leaves. A rank that fails records it before it lets go of anything, so whatever
breaks elsewhere breaks after the record.

The trap: who makes a group by `dist.new_group` stays inside until all ranks have come or time is up, holds the store of
the process meanwhile, and ranks that made different numbers of groups never come together again. So gloo's groups are
made as torch makes them, but with names of this pipeline's and a store whose waits can be ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from terapipe.engine.failure import NOWHERE, Failure, FailureBoard, PipelineError, let_go, lost_rank, words
from terapipe.schedule import Link as PlannedLink
from tpkernels.links import Link, LinkError, Trouble
from tpkernels.links.base import NO_DESCRIPTOR
from tpkernels.links.dist import break_group, reason, trouble_of

OPENING = "opening its links"
_LOOK_S = 0.1  # how often the caller looks for a failure of another rank
_LEAVE_S = 0.5  # how long it then waits for its own thread
_SEEN_S = 0.3  # a process's connections close before its end can be seen
_GLOO_DESCRIPTORS = 8  # of a group, besides one for each rank

Result = TypeVar("Result")


@dataclass(frozen=True)
class Process:
    """A rank's, as those that share `space` know it."""

    space: str
    number: int

    @staticmethod
    def own() -> Process:
        if sys.platform != "linux":
            return Process(socket.gethostname(), os.getpid())
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return Process(f"{boot} {os.readlink('/proc/self/ns/pid')}", os.getpid())
        except OSError:  # no descriptor is left: what comes next will say so
            return Process("", os.getpid())


class Opening:
    """`run` opens; what it opens it puts into `links` and `groups`. processes: of all ranks. timeout: of the groups.
    agreed: the error that all ranks came to together."""

    def __init__(self, rank: int, processes: Sequence[Process], board: FailureBoard, timeout: timedelta) -> None:
        self.rank, self.timeout = rank, timeout
        here = processes[rank].space
        self._numbers = {other: process.number for other, process in enumerate(processes) if process.space == here}
        self.links: dict[PlannedLink, Link] = {}
        self.groups: list[dist.ProcessGroup] = []
        self.agreed: LinkError | None = None
        self._board, self._num_groups = board, 0
        self._lock, self._left = threading.Lock(), False
        self._done, self._ended = threading.Event(), threading.Event()
        self._store = _EndingStore(board.store or dist.HashStore(), self._ended)  # a rank that is alone has none

    def group(self, ranks: Sequence[int] | None = None, *, backend: str | None = None) -> dist.ProcessGroup | None:
        """A new group, None for a rank outside of it; a collective call of all ranks. backend: as for new_group."""
        members = list(range(dist.get_world_size())) if ranks is None else sorted(ranks)
        self._num_groups += 1
        if (backend or dist.get_backend()) != "gloo":
            group = dist.new_group(members, timeout=self.timeout, backend=backend)
        elif self.rank in members:
            group = self._gloo_group(members)
        if self.rank not in members:
            return None
        self.groups.append(group)
        return group

    def _gloo_group(self, members: list[int]) -> dist.ProcessGroup:
        _check_descriptors(len(members) + _GLOO_DESCRIPTORS)
        name = distributed_c10d.GroupName(f"{self._board.name or id(self)} {self._num_groups}")
        group, _ = distributed_c10d._new_process_group_helper(
            len(members),
            members.index(self.rank),
            members,
            dist.Backend("gloo"),
            self._store,
            name,
            timeout=self.timeout,
        )
        distributed_c10d._world.pg_group_ranks[group] = {member: place for place, member in enumerate(members)}
        return group

    def run(self, work: Callable[[], Result]) -> Result:
        """What `work` returns. If it fails on any rank, every rank leaves soon and nothing stays open: the first with
        its own error, the others with a PipelineError that names it; all with `agreed` if that is set."""
        results: list[Result] = []
        errors: list[BaseException] = []
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def open_all() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # of a thread
                results.append(work())
            except BaseException as error:
                errors.append(error)
            self._done.set()
            with self._lock:
                if self._left:
                    self._close()

        lost: LinkError | None = None
        thread: threading.Thread | None = None
        try:
            thread = threading.Thread(target=open_all, name="terapipe-opening", daemon=True)
            thread.start()
            while not self._done.wait(_LOOK_S):
                lost = self._lost()
                if lost is not None:
                    self._done.wait(_LEAVE_S)  # who left may have been the first to know what all agreed on
                if lost is not None or self._board.origin(wait=0) is not None:
                    break
            if results:
                return results[0]
        except BaseException as error:  # no thread was to be had; Ctrl-C
            errors.insert(0, error)
        cause = self.agreed or (errors[0] if errors else lost)
        origin = None if self.agreed is not None else self._origin(cause)
        self._leave()
        if thread is not None and thread.ident is not None:
            thread.join(_LEAVE_S)
        if cause is not None:
            let_go(cause)
        if cause is not None and (origin is None or origin.rank == self.rank):
            raise cause
        assert origin is not None
        raise PipelineError(origin, here=self.rank) from cause

    def _origin(self, cause: BaseException | None) -> Failure:
        """The first failure, which is this rank's if none is recorded."""
        origin = self._board.origin(wait=0)
        if origin is not None or cause is None:
            assert origin is not None, "without a cause another rank's failure ended the wait"
            return origin
        gone = cause.lost_peer if isinstance(cause, LinkError) else None
        deadline = time.monotonic() + (_SEEN_S if trouble_of(cause) is Trouble.GONE else 0.0)
        while gone is None and (gone := self._gone()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if gone is not None:
            noticed = f"Rank {self.rank} noticed in {OPENING}"
            return self._board.record(lost_rank(gone, NOWHERE, noticed=noticed, cause=cause))
        return self._board.record(Failure(self.rank, OPENING, _told(cause)))

    def _lost(self) -> LinkError | None:
        """That a rank has ended, or a neighbour stands still."""
        if (gone := self._gone()) is not None:
            return LinkError(f"rank {gone} is gone.", peer=gone, trouble=Trouble.GONE)
        return next((found for link in list(self.links.values()) if (found := link.lost(_LOOK_S))), None)

    def _gone(self) -> int | None:
        """A rank whose process has ended, be it that its parent has not noticed."""
        for rank, number in self._numbers.items():
            try:
                descriptor = os.pidfd_open(number)
            except ProcessLookupError:
                return rank
            except (OSError, AttributeError):
                continue
            try:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                if poll.poll(0):
                    return rank
            finally:
                os.close(descriptor)
        return None

    def _leave(self) -> None:
        self._ended.set()
        if not self._done.is_set():
            for link in list(self.links.values()):
                link.give_up()
            break_groups(self.groups)
            self._done.wait(_LEAVE_S)
        with self._lock:
            self._left = True
            self._close()

    def _close(self) -> None:
        for link in self.links.values():
            link.close()
        for group in self.groups:
            with contextlib.suppress(RuntimeError, ValueError):  # destroyed before
                dist.destroy_process_group(group)
        self.links.clear()
        self.groups.clear()


class _EndingStore(dist.Store):
    """`store`, whose waits end with a RuntimeError once `ended` is set."""

    def __init__(self, store: dist.Store, ended: threading.Event) -> None:
        super().__init__()
        self._store, self._ended = store, ended

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(minutes=5))
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]
        deadline = time.monotonic() + timeout.total_seconds()
        while not self._store.check(keys):
            if self._ended.is_set():
                raise RuntimeError("another rank has failed")
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out after {timeout.total_seconds():.0f} s")
            time.sleep(0.002)


def _check_descriptors(count: int) -> None:
    """OSError where the process may not open `count` more: a group that is half made keeps the others waiting."""
    with contextlib.ExitStack() as undo:
        try:
            for _ in range(count):
                undo.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: a group of ranks needs {count} more") from error


def _told(cause: BaseException) -> str:
    """`cause` in words for users; what to do about it becomes a note of the error, too."""
    told = words(cause)
    if type(cause) is RuntimeError:  # of torch's: with a source path and more lines
        what = "RuntimeError" if trouble_of(cause) is None else "the ranks did not come together"
        told = f"{what}: {reason(cause)}"
    if "Too many open files" not in told or NO_DESCRIPTOR in told:
        return told
    cause.add_note(NO_DESCRIPTOR)
    return f"{told}; {NO_DESCRIPTOR}"


def break_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """End all waits in those that are gloo's, here and on their other ranks."""
    for group in list(groups):
        if dist.get_backend(group) == "gloo":
            here = dist.get_rank()
            others = [rank for rank in dist.get_process_group_ranks(group) if rank != here]
            if others:
                break_group(group, others[0])
