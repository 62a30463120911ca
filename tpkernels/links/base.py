"""What every link is: the words both ends agree on before the first step, and the interface.

A link is one direction between two ranks; activations and gradients between the same two ranks are two links. Which
slot a transfer uses and in which order transfers come is decided by the plan; nothing is negotiated at run time, and
both ends check.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tpkernels import fused_rows
from tpkernels.fused_reference import NormValues

Key = tuple[int, int, int]
"""(receiving stage, micro, slice) of a transfer."""

Transfers = Sequence[tuple[Key, tuple[int, ...]]]
"""Keys and shapes of a step's transfers, in the order in which the sender puts them."""

NO_DESCRIPTOR = "raise the limit of open files (ulimit -n)"


@dataclass(frozen=True)
class LinkSpec:
    """What both ends of a link know before the first step.

    slot_of: the slot of each transfer, out of `slots`. slot_shape: of the largest transfer (for media that reserve
    memory). resident: a taken tensor *is* the slot until its release; else `take` copies and frees the slot itself.
    """

    source: int
    destination: int
    direction: str  # "F" activations, "B" gradients
    dtype: torch.dtype
    device: torch.device
    slots: int
    slot_of: Mapping[Key, int]
    slot_shape: tuple[int, ...] = ()
    resident: bool = True

    def __str__(self) -> str:
        return f"link {self.source}->{self.destination} ({'activations' if self.direction == 'F' else 'gradients'})"

    @property
    def slot_bytes(self) -> int:
        return math.prod(self.slot_shape) * self.dtype.itemsize


class Speed(NamedTuple):
    """What a link did when it was opened: one way, without load; the bandwidth of whole slots, copied in."""

    latency_us: float
    gb_per_s: float


class Trouble(enum.Enum):
    """What the rank at the other end did instead of a hand-off."""

    CLOSED = "has closed the link"
    GONE = "is gone"
    SILENT = "stands still (stopped or frozen)"
    LATE = "is alive but did not come"
    ENDED = "had not come when another rank failed"


class LinkError(RuntimeError):
    """A hand-off did not happen. trouble: why, None where this end was closed or asked for what cannot be; peer: the
    rank at the other end, None where it could be any."""

    def __init__(self, message: str, *, peer: int | None = None, trouble: Trouble | None = None) -> None:
        super().__init__(message)
        self.peer, self.trouble = peer, trouble

    @property
    def lost_peer(self) -> int | None:
        """The rank at the other end when it is gone, has closed or stands still."""
        return self.peer if self.trouble in (Trouble.CLOSED, Trouble.GONE, Trouble.SILENT) else None

    @property
    def late(self) -> bool:
        """The other end is there, but time is up, or another rank's was."""
        return self.trouble in (Trouble.LATE, Trouble.ENDED)


class Link(Protocol):
    """One direction of hand-off between two ranks. A medium whose kernels reach the slot overrides `put_sum` and
    `take_norm`, which here do one thing after the other."""

    spec: LinkSpec
    kind: str
    norms_early: bool = False
    """Whether `take_norm` starts on rows that came while others are on their way, with the bits of `fused.norm`; else
    there is nothing to gain by it."""
    _posted_at: float = 0.0
    _waited: tuple[float, float] = (0.0, 0.0)

    def expect(self, transfers: Transfers) -> None:
        """Both: what the coming step will carry."""

    def reserve(self, key: Key) -> Tensor:
        """Sender: the tensor to compute into, before `put(key, that tensor)`; waits until its slot is free."""

    def put(self, key: Key, x: Tensor, residual: Tensor | None = None) -> None:
        """Sender: hand `x` (plus `residual`) on.  Without graph; it must not be written afterwards."""

    def put_sum(self, key: Key, x: Tensor, residual: Tensor) -> Tensor:
        """Sender: hand x + residual on and return it, which must not be written; both without graph."""
        memory = self.reserve(key)
        fits = summable(x, residual, memory.shape, memory.dtype)  # `put` will say what is wrong
        total = torch.add(x, residual, out=memory) if fits else x + residual
        self._posted_at = time.perf_counter()
        self.put(key, total)
        return total.detach()  # which autograd may give a graph, and the link has its own

    @property
    def posted_at(self) -> float:
        """When the last of what `put_sum` handed on went, in seconds of `time.perf_counter`."""
        return self._posted_at

    def take(self, key: Key) -> Tensor:
        """Receiver: the next tensor of the order, a leaf of its own; waits for it."""

    def take_norm(self, key: Key, weight: Tensor, bias: Tensor | None = None, *, eps: float, rms: bool) -> NormValues:
        """Receiver: the norm of what `take` returns, which is its `total`."""
        began = time.perf_counter()
        x = self.take(key)
        self._waited = began, time.perf_counter()
        values = fused_rows.norm_forward(fused_rows.as_rows(x), weight, bias, eps=eps, rms=rms)
        return values._replace(total=x, out=values.out.view(x.shape))

    @property
    def waited(self) -> tuple[float, float]:
        """Of the last `take_norm`, in seconds of `time.perf_counter`: when it began to wait, with memory for the norm
        at hand, and when its last wait ended, or it found the first rows there."""
        return self._waited

    def verify(self, key: Key) -> None:
        """Receiver: LinkError unless what was taken is still there; autograd cannot see another process write."""

    def release(self, key: Key) -> None:
        """Receiver: the slot of `key` may be written again.  Verifies it once more."""

    def finish(self) -> None:
        """Both: wait for what is still on its way; the step is over."""

    def measure(self) -> Speed | None:
        """Both, before the first step: what the link can do; None at the receiver and where there is nothing to
        measure."""

    def lost(self, tick_s: float) -> LinkError | None:
        """Both: why nothing will come from the peer any more, as far as this end sees without waiting; asked from a
        thread of its own, every `tick_s`."""

    def give_up(self) -> None:
        """Both: end waits of this end soon, from any thread, where the medium can; the link is then of no more use."""

    def close(self) -> None:
        """Both: let go of the medium, from any thread: a call of another thread that waits in this end gets an error,
        and so does a peer that waits. All other calls but `give_up` come from one thread at a time."""


class Order:
    """The transfers of a step in the plan's order, as one end of a link goes through them."""

    def __init__(self, spec: LinkSpec) -> None:
        self._spec = spec
        self.shapes: dict[Key, tuple[int, ...]] = {}
        self.keys: list[Key] = []
        self.done = 0
        self.closed = False

    def expect(self, transfers: Transfers) -> bool:
        """A step begins; whether its transfers differ from those of the step before."""
        self.done, shapes = 0, dict(transfers)
        if shapes == self.shapes and list(shapes) == self.keys:
            return False
        self.shapes, self.keys = shapes, list(shapes)
        return True

    def check(self, key: Key) -> None:
        """LinkError unless `key` is due."""
        if self.closed or self.done == len(self.keys) or self.keys[self.done] != key:
            raise self.refusal(key)

    def refusal(self, key: Key | None) -> LinkError:
        """Why `key` cannot go now; None for a call without one."""
        if self.closed or key is None:
            return closed_error(self._spec, key)
        if key not in self.shapes:
            return unplanned(self._spec, self.shapes, key)
        expected = name(self.keys[self.done]) if self.done < len(self.keys) else "nothing more"
        return LinkError(f"{self._spec}: asked for {name(key)}, but the plan's next transfer is {expected}.")

    def finish(self, held: Sequence[Key]) -> None:
        """LinkError unless every transfer was made and no slot is `held`."""
        if self.closed:
            raise closed_error(self._spec)
        if self.done != len(self.keys):
            left = [name(key) for key in self.keys[self.done :]]
            raise LinkError(f"{self._spec}: transfers never made: {left}.")
        if held:
            raise LinkError(f"{self._spec}: slots still held at the end of the step: {[name(key) for key in held]}.")


def closed_error(spec: object, key: Key | None = None) -> LinkError:
    what = "nothing can" if key is None else f"{name(key)} cannot"
    return LinkError(f"{spec}: this end was closed, {what} go over it.")


def lost_error(spec: LinkSpec, peer: int, trouble: Trouble) -> LinkError:
    return LinkError(f"{spec}: rank {peer} {trouble.value}.", peer=peer, trouble=trouble)


def summable(x: Tensor, residual: Tensor, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether x + residual needs neither broadcasting nor a conversion to be what the plan says."""
    return x.shape == residual.shape == shape and x.dtype == residual.dtype == dtype and x.device == residual.device


def check_put(spec: LinkSpec, shapes: Mapping[Key, tuple[int, ...]], key: Key, x: Tensor) -> None:
    """Refuse to send what the receiver does not expect."""
    if key not in shapes:
        raise unplanned(spec, shapes, key)
    if x.device.type != spec.device.type:
        raise LinkError(
            f"{spec}: {name(key)} is on {x.device}, but the pipeline computes on {spec.device}; make the "
            "layers return their tensors there."
        )
    if x.dtype != spec.dtype or tuple(x.shape) != shapes[key]:
        raise LinkError(
            f"{spec}: {name(key)} is {x.dtype} {list(x.shape)}, but the plan says {spec.dtype} {list(shapes[key])}; "
            f"make hidden_size and dtype of the pipeline those of what the layers return."
        )


def unplanned(spec: LinkSpec, shapes: Mapping[Key, tuple[int, ...]], key: Key) -> LinkError:
    count = len(shapes)
    return LinkError(f"{spec}: {name(key)} for stage {key[0]} is not among the {count} transfers of this step.")


def name(key: Key) -> str:
    return f"micro {key[1]}, slice {key[2]}"
