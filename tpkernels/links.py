"""Hand-off of one slice's hidden states (or their gradient) from a rank to its neighbour: one interface, several media.

A link is one direction between two ranks; activations and gradients between the same two ranks are two links.
`kind` says how it moves:
  local   one process steps all ranks of a plan: plain tensors, one per slot (tests, debugging, a single device)
  dist    torch.distributed isend and posted irecv on a group of the link's own; gloo or NCCL, across hosts
The order of transfers and the slot of each are decided by the plan; nothing is negotiated at run time and both ends
check. The trap: gloo and NCCL match messages by order, so a link's receiver must post in the sender's order
(`expect`).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Key = tuple[int, int, int]
"""(receiving stage, micro, slice) of a transfer."""


@dataclass(frozen=True)
class LinkSpec:
    """What both ends of a link know before the first step.  `slot_of` gives the slot of each transfer, `slots` their
    number."""

    source: int
    destination: int
    direction: str  # "F" activations, "B" gradients
    dtype: torch.dtype
    device: torch.device
    slots: int
    slot_of: Mapping[Key, int]

    def __str__(self) -> str:
        return f"link {self.source}->{self.destination} ({'activations' if self.direction == 'F' else 'gradients'})"


class LinkError(RuntimeError):
    """A hand-off did not happen.  `lost_peer` is the rank at the other end when its connection is gone, else None."""

    def __init__(self, message: str, *, lost_peer: int | None = None) -> None:
        super().__init__(message)
        self.lost_peer = lost_peer


class Link(Protocol):
    """One direction of hand-off between two ranks."""

    spec: LinkSpec

    def expect(self, transfers: Sequence[tuple[Key, tuple[int, ...]]]) -> None:
        """Both: the keys and shapes of the coming step, in the order in which the sender puts them."""

    def put(self, key: Key, x: Tensor) -> None:
        """Sender: hand `x` on.  It must not be written afterwards."""

    def take(self, key: Key) -> Tensor:
        """Receiver: the next tensor of the order; waits for it."""

    def release(self, key: Key) -> None:
        """Receiver: the slot of `key` may be written again."""

    def finish(self) -> None:
        """Both: wait for what is still on its way; the step is over."""

    def close(self) -> None:
        """Both: let go of the medium; a peer that waits on this link gets an error."""


class LocalLink:
    """Slots are plain references.  `ready` and `free` let one thread step several ranks without ever blocking."""

    def __init__(self, spec: LinkSpec) -> None:
        self.spec = spec
        self._occupant: dict[int, Key] = {}
        self._arrived: dict[Key, Tensor] = {}
        self._shapes: dict[Key, tuple[int, ...]] = {}

    def free(self, key: Key) -> bool:
        """Whether `put(key)` would find its slot free."""
        return self.spec.slot_of[key] not in self._occupant

    def ready(self, key: Key) -> bool:
        """Whether `take(key)` would find its tensor."""
        return key in self._arrived

    def expect(self, transfers: Sequence[tuple[Key, tuple[int, ...]]]) -> None:
        self._shapes = dict(transfers)

    def put(self, key: Key, x: Tensor) -> None:
        _check(self.spec, self._shapes, key, x)
        slot = self.spec.slot_of[key]
        if slot in self._occupant:
            raise LinkError(f"{self.spec}: slot {slot} of {_name(key)} still holds {_name(self._occupant[slot])}.")
        self._occupant[slot] = key
        self._arrived[key] = x

    def take(self, key: Key) -> Tensor:
        if key not in self._arrived:
            raise LinkError(f"{self.spec}: asked for {_name(key)} before it was put, or a second time.")
        return self._arrived.pop(key)

    def release(self, key: Key) -> None:
        slot = self.spec.slot_of[key]
        if self._occupant.get(slot) != key:
            raise LinkError(f"{self.spec}: slot {slot} is not held by {_name(key)} but by {self._occupant.get(slot)}.")
        del self._occupant[slot]

    def finish(self) -> None:
        if self._occupant:
            raise LinkError(f"{self.spec}: slots still held at the end of the step: {self._occupant}.")

    def close(self) -> None:
        self._occupant.clear()
        self._arrived.clear()


class DistLink:
    """isend and posted irecv.  Receives are posted ahead, so that the bytes of the next slice travel while this one
    computes."""

    POSTED_AHEAD = 2  # one lands while one is waited for; more would only hold memory

    def __init__(self, spec: LinkSpec, group: dist.ProcessGroup) -> None:
        self.spec = spec
        self._group: dist.ProcessGroup | None = group
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._posted: deque[tuple[Key, dist.Work, Tensor]] = deque()
        self._coming: Iterator[tuple[Key, tuple[int, ...]]] = iter(())
        self._shapes: dict[Key, tuple[int, ...]] = {}

    def expect(self, transfers: Sequence[tuple[Key, tuple[int, ...]]]) -> None:
        self._shapes = dict(transfers)
        if dist.get_rank() == self.spec.destination:
            self._coming = iter(transfers)
            for _ in range(self.POSTED_AHEAD):
                self._post_next()

    def put(self, key: Key, x: Tensor) -> None:
        # A message longer than the receiver's buffer would end the receiving process without a word (gloo).
        _check(self.spec, self._shapes, key, x)
        # The plan's slots bound what is on its way: when every slot is in use, the oldest send has been taken, so this
        # wait cannot deadlock.
        while len(self._sent) >= self.spec.slots:
            self._wait(self._sent.popleft()[0], key)
        x = x.contiguous()
        work = self._start(dist.isend, x, self.spec.destination, key)
        self._sent.append((work, x))

    def take(self, key: Key) -> Tensor:
        if not self._posted or self._posted[0][0] != key:
            expected = _name(self._posted[0][0]) if self._posted else "nothing more"
            raise LinkError(f"{self.spec}: asked for {_name(key)}, but the plan's next transfer is {expected}.")
        _, work, x = self._posted.popleft()
        self._wait(work, key)
        self._post_next()
        return x

    def release(self, key: Key) -> None:
        pass  # the receiver's tensor is its own

    def finish(self) -> None:
        while self._sent:
            self._wait(self._sent.popleft()[0], None)
        if self._posted:
            raise LinkError(f"{self.spec}: transfers never taken: {[_name(key) for key, _, _ in self._posted]}.")

    def close(self) -> None:
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
        peer = self.spec.source if dist.get_rank() == self.spec.destination else self.spec.destination
        what = "at the end of the step" if key is None else f"with {_name(key)} on its way"
        return LinkError(f"{self.spec}: rank {peer} is gone, {what}: {_reason(error)}", lost_peer=peer)


def _check(spec: LinkSpec, shapes: Mapping[Key, tuple[int, ...]], key: Key, x: Tensor) -> None:
    """Refuse to send what the receiver does not expect."""
    if key not in shapes:
        raise LinkError(
            f"{spec}: {_name(key)} for stage {key[0]} is not among the {len(shapes)} transfers of this step."
        )
    if x.dtype != spec.dtype or tuple(x.shape) != shapes[key]:
        raise LinkError(
            f"{spec}: {_name(key)} is {x.dtype} {list(x.shape)}, but the plan says {spec.dtype} {list(shapes[key])}; "
            f"make hidden_size and dtype of the pipeline those of what the layers return."
        )


def _name(key: Key) -> str:
    return f"micro {key[1]}, slice {key[2]}"


def _reason(error: BaseException) -> str:
    """The first sentence of a backend's message, without its source path."""
    line = str(error).strip().split("\n", 1)[0]
    return re.sub(r"^\[[^\]]*\]\s*|\. This is typically.*$", "", line)
