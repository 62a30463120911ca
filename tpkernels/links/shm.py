"""Links between two processes of one host through shared memory: the C++ ring (`csrc/links/ring.h`) behind `Link`.

The sender computes into the slot (`reserve`) or copies once (`put`); the receiver reads in place. A wait spins for a
moment where every rank has a core, then sleeps; it ends when the slice comes, the peer closes, dies or stands still, or
time is up. The trap: autograd saves a taken tensor but cannot see the peer write to it, so `verify` and `release` ask
the slot whether it still holds this use.
"""

from __future__ import annotations

import math
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.links.base import Key, LinkError, LinkSpec, Speed, Transfers, check_put, name, unplanned

if sys.platform == "linux":
    from tpkernels.links.segment import Offer, Segment, connect

try:
    from tpkernels import _core
except ImportError:  # not built: shm_missing says so
    _core = None  # type: ignore[assignment]

TILE_ROWS, MOST_TILES = 64, 32  # rows of a tile, more where a slot would have too many: each costs a store to post
SPIN_S = 2e-3  # longer than the gap between two slices that are nearly alike
SILENCE_S, TIMEOUT_S, MEET_S = 10.0, 1800.0, 30.0


def shm_missing() -> str:
    """Why this process cannot use shared-memory links; empty when it can."""
    if sys.platform != "linux":
        return f"needs Linux, this is {sys.platform}"
    return "" if hasattr(_core, "Ring") else "tpkernels._core was not built, or without links"


@dataclass(frozen=True)
class _Place:
    """Where a transfer lies."""

    slot: int
    num_bytes: int
    view: Tensor


def ring_geometry(spec: LinkSpec) -> Any:
    rows = math.prod(spec.slot_shape[:-1])
    tile_rows = max(TILE_ROWS, math.ceil(rows / MOST_TILES))
    tile_bytes = tile_rows * spec.slot_shape[-1] * spec.dtype.itemsize
    return _core.RingGeometry(slots=spec.slots, slot_bytes=spec.slot_bytes, tile_bytes=tile_bytes)


def offer_segment(spec: LinkSpec, generation: int, first_epoch: int = 0) -> Offer:
    """Memory for the link, formatted; epochs count from `first_epoch`. OSError when it cannot be had."""
    geometry = ring_geometry(spec)
    offer = Offer(geometry.bytes)
    geometry.format(offer.memory, generation, first_epoch)
    return offer


class ShmLink:
    """One end. Make it with `open`, on both ranks."""

    kind = "shm"

    def __init__(
        self,
        spec: LinkSpec,
        met: Segment,
        generation: int,
        *,
        sender: bool,
        spin_s: float = SPIN_S,
        silence_s: float = SILENCE_S,
        timeout_s: float = TIMEOUT_S,
        poison: bool = False,
    ) -> None:
        """spin_s: how long a wait spins before it sleeps; silence_s: a peer without a heartbeat for so long counts as
        lost; timeout_s: the longest wait; poison: fill released slots with NaN, for tests. ValueError when the memory
        was made for another spec or another meeting."""
        self._ring = _core.Ring(
            met.memory,
            ring_geometry(spec),
            generation=generation,
            sender=sender,
            spin_s=spin_s,
            silence_s=silence_s,
            timeout_s=timeout_s,
            socket=met.socket.fileno(),
            pidfd=met.pidfd,
        )
        self.spec, self._segment, self._poison = spec, met, poison
        self._peer = spec.destination if sender else spec.source
        self._places: dict[tuple[Key, tuple[int, ...]], _Place] = {}
        self._step: dict[Key, _Place] = {}
        self._shapes: dict[Key, tuple[int, ...]] = {}
        self._order: list[Key] = []
        self._done = 0
        self._held: set[Key] = set()
        self._reserved: Key | None = None

    @staticmethod
    def open(spec: LinkSpec, group: dist.ProcessGroup, **options: Any) -> ShmLink:
        """Meet the other end through `group`; options: of the constructor. LinkError on both ends when either
        cannot."""
        try:
            met, generation = meet(spec, group, lambda generation: offer_segment(spec, generation))
            sender = dist.get_rank() == spec.source
            return ShmLink(spec, met, generation, sender=sender, **options)
        except (OSError, ValueError) as error:
            raise LinkError(f"{spec}: the two ends did not come together: {error}") from error

    def expect(self, transfers: Transfers) -> None:
        shapes = dict(transfers)
        if shapes != self._shapes or not self._step:
            self._shapes, self._order = shapes, list(shapes)
            self._step = {key: self._place(key, shape) for key, shape in shapes.items()}
        self._done, self._reserved = 0, None
        self._held.clear()

    def reserve(self, key: Key) -> Tensor:
        place = self._next(key)
        trouble = self._ring.reserve(place.slot)
        if trouble is not None:
            raise self._lost(key, trouble)
        self._reserved = key
        return place.view

    def put(self, key: Key, x: Tensor, residual: Tensor | None = None) -> None:
        place = self._next(key)
        if x.dtype is not self.spec.dtype or x.shape != place.view.shape:
            check_put(self.spec, self._shapes, key, x)
        if self._reserved is None and residual is None:
            if not x.is_contiguous():
                x = x.contiguous()
            trouble = self._ring.put(place.slot, x.data_ptr(), place.num_bytes)
            if trouble is not None:
                raise self._lost(key, trouble)
        else:
            slot = place.view if self._reserved == key else self.reserve(key)
            if residual is not None:
                torch.add(x, residual, out=slot)
            elif x.data_ptr() != slot.data_ptr():
                slot.copy_(x)
            self._reserved = None
            self._ring.post(place.slot, place.num_bytes)
        self._done += 1

    def take(self, key: Key) -> Tensor:
        place = self._next(key)
        self._done += 1
        if self.spec.resident:
            x = place.view.detach()  # a leaf of its own: no gradient or hook of an earlier use
            self._held.add(key)
            trouble = self._ring.take(place.slot, place.num_bytes)
        else:
            x = torch.empty_like(place.view)
            trouble = self._ring.take_copy(place.slot, x.data_ptr(), place.num_bytes)
        if trouble is not None:
            raise self._lost(key, trouble)
        return x

    def verify(self, key: Key) -> None:
        if self.spec.resident and not (key in self._held and self._ring.holds(self.spec.slot_of[key])):
            raise LinkError(
                f"{self.spec}: slot {self.spec.slot_of[key]} no longer holds {name(key)}: it was released or written "
                f"over before its backward had run, so the gradients of this step are wrong."
            )

    def release(self, key: Key) -> None:
        self.verify(key)
        if self.spec.resident:
            self._held.remove(key)
            self._ring.release(self.spec.slot_of[key], self._poison)

    def finish(self) -> None:
        if self._done != len(self._order):
            raise LinkError(f"{self.spec}: transfers never made: {[name(key) for key in self._order[self._done :]]}.")
        if self._held:
            held = [name(key) for key in self._held]
            raise LinkError(f"{self.spec}: slots still held at the end of the step: {held}.")

    def measure(self) -> Speed | None:
        ring, rounds = self._ring, [0] * 40 + [self.spec.slot_bytes] * 6
        if self._peer == self.spec.source:
            for num_bytes in rounds:
                self._check(ring.take(0, num_bytes))
                ring.release(0, self._poison)
            return None
        whole = torch.zeros(self.spec.slot_shape, dtype=self.spec.dtype)
        seconds: dict[int, list[float]] = {num_bytes: [] for num_bytes in rounds}
        for num_bytes in rounds:  # each waits for the release of the one before
            began = time.perf_counter()
            self._check(ring.put(0, whole.data_ptr(), num_bytes))
            seconds[num_bytes].append(time.perf_counter() - began)
        latency = statistics.median(seconds[0]) / 2
        return Speed(latency * 1e6, self.spec.slot_bytes / min(seconds[self.spec.slot_bytes][1:]) / 1e9)

    def close(self) -> None:
        self._ring.close()
        self._segment.close()
        self._step.clear()
        self._places.clear()

    def _next(self, key: Key) -> _Place:
        place = self._step.get(key)
        if place is None or self._done == len(self._order) or self._order[self._done] != key:
            raise self._out_of_order(key)
        return place

    def _out_of_order(self, key: Key) -> LinkError:
        if not self._step and self._order:
            return LinkError(f"{self.spec}: this end was closed, {name(key)} cannot go over it.")
        if key not in self._shapes:
            return unplanned(self.spec, self._shapes, key)
        expected = name(self._order[self._done]) if self._done < len(self._order) else "nothing more"
        return LinkError(f"{self.spec}: asked for {name(key)}, but the plan's next transfer is {expected}.")

    def _place(self, key: Key, shape: tuple[int, ...]) -> _Place:
        if (key, shape) not in self._places:
            slot, dtype = self.spec.slot_of[key], self.spec.dtype
            count = torch.Size(shape).numel()
            view = torch.frombuffer(
                self._segment.memory, dtype=dtype, count=count, offset=self._ring.slot_offset(slot)
            ).view(shape)
            self._places[key, shape] = _Place(slot, count * dtype.itemsize, view)
        return self._places[key, shape]

    def _check(self, trouble: Any) -> None:
        if trouble is not None:
            raise self._lost(None, trouble)

    def _lost(self, key: Key | None, trouble: Any) -> LinkError:
        state = {
            "closed": "has closed the link",
            "gone": "is gone",
            "silent": "stands still (stopped or frozen)",
            "late": "is alive but did not come",
        }[trouble.outcome]
        what = "the first exchange" if key is None else f"stage {key[0]}, {name(key)}"
        return LinkError(
            f"{self.spec}: rank {self._peer} {state}: waited {trouble.seconds:.1f} s for {what} (slot {trouble.slot}, "
            f"tile {trouble.tile}, wanted epoch {trouble.wanted}, saw {trouble.seen}).",
            lost_peer=None if trouble.outcome == "late" else self._peer,
        )


def meet(spec: LinkSpec, group: dist.ProcessGroup, offer: Callable[[int], Offer]) -> tuple[Segment, int]:
    """The two ends meet through `group`: the memory that the receiver's `offer(generation)` made, and the generation.
    OSError on both when either cannot."""
    if dist.get_rank() == spec.source:
        address, generation = _hear(spec, group)
        return connect(address, MEET_S), generation
    generation = secrets.randbits(31)
    try:
        offered = offer(generation)
    except OSError as error:
        _say(spec, group, f"!rank {spec.destination} cannot share its slots: {error}")
        raise
    _say(spec, group, f"{offered.address} {generation}")
    return offered.accept(MEET_S), generation


_LETTER_BYTES = 512


def _say(spec: LinkSpec, group: dist.ProcessGroup, text: str) -> None:
    letter = torch.frombuffer(bytearray(text.encode()[:_LETTER_BYTES].ljust(_LETTER_BYTES)), dtype=torch.uint8)
    dist.send(letter, spec.source, group=group)


def _hear(spec: LinkSpec, group: dist.ProcessGroup) -> tuple[str, int]:
    letter = torch.zeros(_LETTER_BYTES, dtype=torch.uint8)
    dist.recv(letter, spec.destination, group=group)
    text = bytes(letter.tolist()).decode(errors="replace").strip()
    if text.startswith("!"):
        raise OSError(text[1:])
    address, generation = text.split()
    return address, int(generation)
