"""Links over torch.distributed, gloo or NCCL, on one host or across hosts: isend and posted irecv.

The trap: gloo and NCCL match messages by order, so a link's receiver must post in the sender's order (`expect`).
"""

from __future__ import annotations

import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.links.base import (
    Key,
    Link,
    LinkError,
    LinkSpec,
    Speed,
    Transfers,
    Trouble,
    check_put,
    closed_error,
    name,
)
from tpkernels.links.door import Door, inside
from tpkernels.memory import readable

_NEVER_SENT = 1  # a tag; slices have 0


class DistLink(Link):
    """One end, on a group of the link's own.  Receives are posted ahead, so that the bytes of the next slice travel
    while this one computes."""

    kind = "dist"
    POSTED_AHEAD = 2  # one lands while one is waited for; more would only hold memory

    def __init__(self, spec: LinkSpec, group: dist.ProcessGroup) -> None:
        self.spec = spec
        self._peer = spec.source if dist.get_rank() == spec.destination else spec.destination
        self._group: dist.ProcessGroup | None = group
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._posted: deque[tuple[Key, dist.Work, Tensor]] = deque()
        self._coming: Iterator[tuple[Key, tuple[int, ...]]] = iter(())
        self._shapes: dict[Key, tuple[int, ...]] = {}
        self._given_up = False
        self._door = Door(spec, self._break, self._free)

    @inside
    def expect(self, transfers: Transfers) -> None:
        self._shapes = dict(transfers)
        if dist.get_rank() == self.spec.destination:
            self._coming = iter(transfers)
            for _ in range(self.POSTED_AHEAD):
                self._post_next()

    @inside
    def reserve(self, key: Key) -> Tensor:
        return torch.empty(self._shapes[key], dtype=self.spec.dtype, device=self.spec.device)

    @inside
    def put(self, key: Key, x: Tensor, residual: Tensor | None = None) -> None:
        # A message longer than the receiver's buffer would end the receiving process without a word (gloo).
        check_put(self.spec, self._shapes, key, x)
        # The plan's slots bound what is on its way: when every slot is in use, the oldest send has been taken, so this
        # wait cannot deadlock.
        while len(self._sent) >= self.spec.slots:
            self._wait(self._sent.popleft()[0], key)
        x = readable(x).contiguous() if residual is None else x + residual
        work = self._start(dist.isend, x, self.spec.destination, key)
        self._sent.append((work, x))

    @inside
    def take(self, key: Key) -> Tensor:
        if not self._posted or self._posted[0][0] != key:
            expected = name(self._posted[0][0]) if self._posted else "nothing more"
            raise LinkError(f"{self.spec}: asked for {name(key)}, but the plan's next transfer is {expected}.")
        _, work, x = self._posted.popleft()
        self._wait(work, key)
        self._post_next()
        return x

    @inside
    def verify(self, key: Key) -> None:
        pass  # the receiver's tensor is its own

    @inside
    def release(self, key: Key) -> None:
        pass

    @inside
    def finish(self) -> None:
        while self._sent:
            self._wait(self._sent.popleft()[0], None)
        if self._posted:
            raise LinkError(f"{self.spec}: transfers never taken: {[name(key) for key, _, _ in self._posted]}.")

    @inside
    def measure(self) -> Speed | None:
        """Sends a number back and forth, then whole slots; also makes the connection, so that no action has to."""
        number = torch.zeros(1, dtype=self.spec.dtype, device=self.spec.device)
        whole = torch.zeros(self.spec.slot_shape, dtype=self.spec.dtype, device=self.spec.device)
        sender = dist.get_rank() == self.spec.source
        seconds: dict[int, list[float]] = {number.numel(): [], whole.numel(): []}
        for x in (number, number, number, number, number, whole, whole, whole):  # the first of a size is warm-up
            began = time.perf_counter()
            if sender:
                dist.send(x, self.spec.destination, group=self._group)
                dist.recv(number, self.spec.destination, group=self._group)
                number.sum().item()
            else:
                dist.recv(x, self.spec.source, group=self._group)
                dist.send(number, self.spec.source, group=self._group)
            seconds[x.numel()].append(time.perf_counter() - began)
        if not sender:
            return None
        latency = statistics.median(seconds[number.numel()][1:]) / 2
        transfer = max(statistics.median(seconds[whole.numel()][1:]) - latency, 1e-9)
        return Speed(latency * 1e6, self.spec.slot_bytes / transfer / 1e9)

    def lost(self, tick_s: float) -> LinkError | None:
        return None  # gloo tells the one that waits

    def give_up(self) -> None:
        self._given_up = True
        self._break()

    def close(self) -> None:
        self._door.close()

    def _break(self) -> None:
        if self._group is not None and self.spec.device.type == "cpu":  # NCCL's waits do not hold the host up
            break_group(self._group, self._peer)

    def _free(self) -> None:
        # gloo closes a connection when the last reference to its group is gone; the peer's wait then raises at once.
        self._sent.clear()
        self._posted.clear()
        if self._group is not None:
            group, self._group = self._group, None
            dist.destroy_process_group(group)

    def _post_next(self) -> None:
        for key, shape in self._coming:
            x = torch.empty(shape, dtype=self.spec.dtype, device=self.spec.device)
            self._posted.append((key, self._start(dist.irecv, x, self.spec.source, key), x))
            return

    def _start(self, operation: Callable[..., dist.Work | None], x: Tensor, peer: int, key: Key) -> dist.Work:
        try:
            work = operation(x, peer, group=self._group)
        except RuntimeError as error:
            raise self._lost(key, error) from error
        assert work is not None, "a link's group holds both of its ranks"
        return work

    def _wait(self, work: dist.Work, key: Key | None) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(key, error) from error

    def _lost(self, key: Key | None, error: RuntimeError) -> LinkError:
        if self._door.closed:
            return closed_error(self.spec, key)
        what = "at the end of the step" if key is None else f"with {name(key)} on its way"
        if self._given_up:
            ended = Trouble.ENDED
            return LinkError(f"{self.spec}: rank {self._peer} {ended.value}, {what}", peer=self._peer, trouble=ended)
        trouble = Trouble.LATE if trouble_of(error) is Trouble.LATE else Trouble.GONE  # whatever else gloo says
        state = "did not come in time" if trouble is Trouble.LATE else trouble.value
        return LinkError(
            f"{self.spec}: rank {self._peer} {state}, {what}: {reason(error)}", peer=self._peer, trouble=trouble
        )


def break_group(group: dist.ProcessGroup, peer: int) -> None:
    """End all waits in a group of gloo's, of this process and of its other ranks; `peer` is one of them.  gloo lets
    nobody leave a wait, but closes a group's connections when one of its waits runs out of time."""
    try:
        work = dist.irecv(torch.empty(1), peer, group=group, tag=_NEVER_SENT)
        if work is not None:
            work.wait(timedelta(milliseconds=1))
    except RuntimeError:  # as intended, or the connection was gone before
        pass


def trouble_of(error: BaseException) -> Trouble | None:
    """What another rank did instead of coming, None where `error` does not tell. All that torch gives when a wait of a
    backend of its fails is a RuntimeError, the same for every cause, and a sentence; so here, and nowhere else, the
    sentence is read."""
    if isinstance(error, LinkError):
        return error.trouble
    if isinstance(error, ConnectionError):
        return Trouble.GONE
    if not isinstance(error, RuntimeError):
        return None
    if "imed out" in reason(error):  # "Timed out waiting 1000ms for recv operation to complete"
        return Trouble.LATE
    return Trouble.GONE if "onnection" in str(error) else None  # "Connection closed by peer", "Connection refused"


def reason(error: BaseException) -> str:
    """The first sentence of a backend's message, without its source path."""
    line = str(error).strip().split("\n", 1)[0]
    return re.sub(r"^\[[^\]]*\]\s*|\. This is typically.*$", "", line)
