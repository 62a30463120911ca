"""Links between two processes of one host through shared memory: the C++ ring (`csrc/links/ring.h`) behind `Link`.

The sender computes into the slot (`reserve`, `put_sum`) or copies once (`put`); the receiver reads in place, with
`take_norm` tile by tile. A wait spins for a moment where every rank has a core, then sleeps; it ends when the slice
comes, the peer closes, dies or stands still, or time is up. The trap: autograd saves a taken tensor but cannot see the
peer write to it, so `verify` and `release` ask the slot whether it still holds this use.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels import fused_rows
from tpkernels.fused_reference import NormValues
from tpkernels.links.agreement import agree, hear, tell
from tpkernels.links.base import (
    Key,
    Link,
    LinkError,
    LinkSpec,
    Order,
    Speed,
    Transfers,
    Trouble,
    check_put,
    lost_error,
    name,
    summable,
)
from tpkernels.links.door import CLOSE_S, STAYED, log

if sys.platform == "linux":
    from tpkernels.links.segment import Offer, Segment, call, fetch

try:
    from tpkernels import _core
except ImportError:  # not built: shm_missing says so
    _core = None  # type: ignore[assignment]

TILE_ROWS, MOST_TILES = 64, 32  # rows of a tile, more where a slot would have too many: each costs a store to post
SPIN_S = 2e-3  # longer than the gap between two slices that are nearly alike
SILENCE_S, TIMEOUT_S, MEET_S = 10.0, 1800.0, 30.0
FIRST_EXCHANGE = -1  # the stage of transfers that only measure

Result = TypeVar("Result")


def shm_missing() -> str:
    """Why this process cannot use shared-memory links; empty when it can."""
    if sys.platform != "linux":
        return f"needs Linux, this is {sys.platform}"
    if not hasattr(os, "memfd_create"):
        return "this Python was built without os.memfd_create"
    return "" if hasattr(_core, "Ring") else "tpkernels._core was not built, or without links"


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


class ShmLink(Link):
    """One end. Make it with `open`, on both ranks."""

    kind = "shm"
    norms_early = True

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
        self.spec, self._poison = spec, poison
        self._segment: Segment | None = met
        self._sender, self._peer = sender, spec.destination if sender else spec.source
        self._silence_s, self._silent_s, self._heard = silence_s, 0.0, 0
        self._order = Order(spec)
        self._views: dict[tuple[int, tuple[int, ...]], Tensor] = {}
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
            dtype=spec.dtype,
            refuse=partial(_refusal, self._order, spec),  # nothing that knows this object: it would never be freed
            lose=partial(_lost, spec, self._peer),
        )

    @staticmethod
    def open(spec: LinkSpec, group: dist.ProcessGroup, **options: Any) -> ShmLink:
        """Meet the other end through `group`; options: of the constructor. LinkError on both ends when either
        cannot, or they were asked for different links."""
        agree(ShmLink.kind, spec, group)
        try:
            met, generation = meet(spec, group, lambda generation: offer_segment(spec, generation))
            try:
                return ShmLink(spec, met, generation, sender=dist.get_rank() == spec.source, **options)
            except BaseException:
                met.close()  # the peer sees it
                raise
        except (OSError, ValueError) as error:
            raise LinkError(f"{spec}: the two ends did not come together: {error}") from error

    def expect(self, transfers: Transfers) -> None:
        if self._order.expect(transfers):
            shapes = self._order.shapes
            self._ring.expect([self._transfer(key, self.spec.slot_of[key], shape) for key, shape in shapes.items()])
        self._ring.begin()

    # ---- sender

    def reserve(self, key: Key) -> Tensor:
        slot: Tensor = self._ring.reserve(key)
        return slot

    def put(self, key: Key, x: Tensor, residual: Tensor | None = None) -> None:
        if residual is None:
            self._ring.put(key, x)
        else:
            self.put_sum(key, x, residual)

    def put_sum(self, key: Key, x: Tensor, residual: Tensor) -> Tensor:
        """Each tile is on its way as soon as it is added. What it returns is the slot, a leaf."""
        code, shape, dtype = fused_rows.kernel_code(self.spec.dtype), self._order.shapes.get(key), self.spec.dtype
        if shape is None or code is None or not summable(x, residual, shape, dtype) or not x.is_cpu:
            return super().put_sum(key, x, residual)
        a, b = fused_rows.as_rows(x), fused_rows.as_rows(residual)
        views = (a.data_ptr(), a.stride(0)), (b.data_ptr(), b.stride(0))
        slot: Tensor = self._ring.put_sum(key, code, shape[-1], *views, torch.get_num_threads())
        return slot

    @property
    def posted_at(self) -> float:
        at: float = self._ring.posted_at
        return at

    # ---- receiver

    def take(self, key: Key) -> Tensor:
        x: Tensor = self._ring.take(key, not self.spec.resident)
        return x

    def take_norm(self, key: Key, weight: Tensor, bias: Tensor | None = None, *, eps: float, rms: bool) -> NormValues:
        """Of each tile as soon as it is there."""
        code, shape = fused_rows.kernel_code(self.spec.dtype), self._order.shapes.get(key)
        if code is None or shape is None or not self.spec.resident or not _fit(weight, bias, shape, self.spec.dtype):
            return super().take_norm(key, weight, bias, eps=eps, rms=rms)
        out = torch.empty(shape, dtype=self.spec.dtype, device="cpu")
        mean, rstd = (torch.empty(out.numel() // shape[-1], 1, dtype=torch.float32, device="cpu") for _ in range(2))
        biases, means = 0 if bias is None else bias.data_ptr(), 0 if rms else mean.data_ptr()
        into, threads = (out.data_ptr(), weight.data_ptr(), biases, means, rstd.data_ptr()), torch.get_num_threads()
        x = self._ring.take_norm(key, code, rms, eps, shape[-1], into, threads)
        return NormValues(x, out, None if rms else mean, rstd)

    @property
    def waited(self) -> tuple[float, float]:
        return self._ring.began_at, self._ring.arrived_at

    def verify(self, key: Key) -> None:
        if self.spec.resident and not self._ring.holds(key):
            raise LinkError(
                f"{self.spec}: slot {self.spec.slot_of[key]} no longer holds {name(key)}: it was released or written "
                f"over before its backward had run, so the gradients of this step are wrong."
            )

    def release(self, key: Key) -> None:
        self.verify(key)
        if self.spec.resident:
            self._ring.release(key, self._poison)

    # ---- both

    def finish(self) -> None:
        self._order.done = self._ring.done
        self._order.finish(self._ring.held)

    def measure(self) -> Speed | None:
        shapes: list[tuple[int, ...]] = [(1,)] * 40 + [self.spec.slot_shape] * 6
        keys = [(FIRST_EXCHANGE, 0, index) for index in range(len(shapes))]
        self._ring.expect([self._transfer(key, 0, shape) for key, shape in zip(keys, shapes, strict=True)])
        if not self._sender:
            for key in keys:
                self._ring.take(key, not self.spec.resident)
                if self.spec.resident:
                    self._ring.release(key, self._poison)
            self._ring.expect([])
            return None
        whole = torch.zeros(self.spec.slot_shape, dtype=self.spec.dtype, device="cpu")
        seconds: dict[tuple[int, ...], list[float]] = {shape: [] for shape in shapes}
        for key, shape in zip(keys, shapes, strict=True):  # each waits for the release of the one before
            x = whole.flatten()[: math.prod(shape)].view(shape)
            began = time.perf_counter()
            self._ring.put(key, x)
            seconds[shape].append(time.perf_counter() - began)
        self._ring.expect([])
        latency = statistics.median(seconds[1,]) / 2
        return Speed(latency * 1e6, self.spec.slot_bytes / min(seconds[self.spec.slot_shape][1:]) / 1e9)

    def lost(self, tick_s: float) -> LinkError | None:
        beat = self._ring.peer_beat
        self._silent_s = 0.0 if beat != self._heard else self._silent_s + tick_s
        self._heard = beat
        if self._ring.peer_gone:
            return lost_error(self.spec, self._peer, Trouble.GONE)
        return lost_error(self.spec, self._peer, Trouble.SILENT) if self._silent_s >= self._silence_s else None

    def give_up(self) -> None:
        self._ring.give_up()

    def close(self) -> None:
        self._order.closed = True
        if not self._ring.close(self._free, CLOSE_S):
            log.warning(STAYED, self.spec, CLOSE_S)

    def _free(self) -> None:
        self._views.clear()
        met, self._segment = self._segment, None  # the mapping goes with the last tensor that looks at it
        if met is not None:
            met.close()

    def _transfer(self, key: Key, slot: int, shape: tuple[int, ...]) -> tuple[Key, int, tuple[int, ...], Tensor]:
        if (slot, shape) not in self._views:
            count, offset = math.prod(shape), self._ring.slot_offset(slot)  # refuses where the end was closed
            assert self._segment is not None
            view = torch.frombuffer(self._segment.memory, dtype=self.spec.dtype, count=count, offset=offset)
            self._views[slot, shape] = view.view(shape)
        return key, slot, shape, self._views[slot, shape]


def _fit(weight: Tensor, bias: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether an address says all about a norm's weight and bias."""
    for x in (weight, bias):
        if x is not None and (x.shape != shape[-1:] or x.dtype != dtype or not x.is_cpu):
            return False
        if x is not None and (not x.is_contiguous() or x.is_neg()):
            return False
    return True


def _refusal(order: Order, spec: LinkSpec, key: Key | None, x: Tensor | None, done: int) -> LinkError:
    order.done = done
    if key is not None and x is not None:
        try:
            check_put(spec, order.shapes, key, x)
        except LinkError as error:
            return error
    return order.refusal(key)


def _lost(spec: LinkSpec, peer: int, key: Key, wait: Any) -> LinkError:
    what = "the first exchange" if key[0] == FIRST_EXCHANGE else f"stage {key[0]}, {name(key)}"
    trouble = Trouble[wait.outcome.upper()]
    return LinkError(
        f"{spec}: rank {peer} {trouble.value}: waited {wait.seconds:.1f} s for {what} "
        f"(slot {wait.slot}, tile {wait.tile}, wanted epoch {wait.wanted}, saw {wait.seen}).",
        peer=peer,
        trouble=trouble,
    )


def meet(spec: LinkSpec, group: dist.ProcessGroup, offer: Callable[[int], Offer]) -> tuple[Segment, int]:
    """The two ends meet through `group`: the memory that the receiver's `offer(generation)` made, and the generation.
    OSError on both, naming the rank that could not. Each waits for a letter of the other, whatever became of it."""
    sends = dist.get_rank() == spec.source
    own, other = (spec.source, spec.destination) if sends else (spec.destination, spec.source)

    def does(what: str, action: Callable[[], Result], letter: Callable[[Result], str]) -> Result:
        try:
            result = action()
        except Exception as error:  # whatever it is, the other waits to hear of it
            tell(f"!rank {own} cannot {what}: {error}", other, group)
            raise OSError(f"rank {own} cannot {what}: {error}") from error
        tell(letter(result), other, group)
        return result

    if sends:
        address, generation = _hear(other, group).split()
        connection = does("reach the slots of its peer", lambda: call(address), lambda _: "connected")
        try:
            _hear(other, group)
        except BaseException:
            connection.close()
            raise
        met = does("map the slots of its peer", lambda: fetch(connection, MEET_S), lambda _: "mapped")
        return met, int(generation)
    made = secrets.randbits(31)
    offered = does("share its slots", lambda: offer(made), lambda offered: f"{offered.address} {made}")
    with contextlib.ExitStack() as undo:
        undo.callback(offered.withdraw)
        _hear(other, group)
        met = does("hand over its slots", lambda: offered.accept(MEET_S), lambda _: "handed over")
        undo.callback(met.close)
        _hear(other, group)
        undo.pop_all()
    return met, made


def _hear(source: int, group: dist.ProcessGroup) -> str:
    text = hear(source, group)
    if text.startswith("!"):
        raise OSError(text[1:])
    return text
