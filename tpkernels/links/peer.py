"""Links between two GPUs of one host: kernels write a slice into the slot in the receiver's memory by tiles, and the
receiver's first kernel starts on the tiles that came (tpkernels/hand_off.py; memory: peer_memory.py). The kernels are
Triton's or, by request, those in CUDA C++.

Nothing here waits on the host: a call launches kernels on the current stream, and one link is used from one stream. A
wait that fails says so in words that the host reads at its next call and at `finish`, which alone synchronises. A
thread of the link watches the peer; when that is gone or stands still, it ends the waits.

The trap: after a failed wait kernels skip without a word, so what they should have written is garbage until the error
is raised; `finish` of a step always does.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels import cuda_peer, hand_off
from tpkernels.cuda import CudaBackend
from tpkernels.fused_reference import NormValues
from tpkernels.hand_off import Language, Slot
from tpkernels.links.agreement import agree
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
    closed_error,
    lost_error,
    name,
    summable,
)
from tpkernels.links.door import Door, inside
from tpkernels.links.shm import MEET_S, SILENCE_S, TIMEOUT_S, meet, shm_missing
from tpkernels.memory import readable

if sys.platform == "linux":
    from tpkernels.links import peer_memory
    from tpkernels.links.peer_memory import PeerMemory
    from tpkernels.links.peer_watch import PeerWatch


def peer_missing(device: torch.device | None = None, language: str = "triton") -> str:
    """Why this process cannot use peer links by kernels in `language`, for tensors on `device` if that is given; empty
    when it can. On a CPU they are for tests, in Triton's interpreter."""
    if missing := shm_missing():  # the two ends meet as those of `shm`
        return missing
    if language == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed (pip install triton)"
        if device is not None and device.type == "cpu":
            from tpkernels.triton import launch

            return "" if launch.INTERPRETED else "its ranks compute on a CPU"
    elif device is not None and device.type == "cpu":
        return "its ranks compute on a CPU"
    elif reason := CudaBackend().unusable():
        return reason
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    count = torch.cuda.device_count()
    if count < 2:
        return "one GPU is visible to this process, a link needs two (leave CUDA_VISIBLE_DEVICES alike on all ranks)"
    if not any(torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b):
        return f"no two of the {count} GPUs can access each other's memory (nvidia-smi topo -p2p r)"
    return ""


def load_language(name: Language | str | None, device: torch.device) -> Language:
    """Kernels by name; None: Triton's, but where those in CUDA C++ have passed their tests on hardware. ValueError for
    an unknown name."""
    if name is None:
        name = "cuda" if device.type == "cuda" and _capability(device) in cuda_peer.PROVEN else "triton"
    if not isinstance(name, str):
        return name
    if name == "cuda":
        return cuda_peer.CudaPeer()
    if name != "triton":
        raise ValueError(f"unknown language {name!r} of the kernels of a peer link; choose 'triton' or 'cuda'.")
    from tpkernels.triton import plan_hand_off

    return plan_hand_off


class Product(NamedTuple):
    """x is what was taken, out its product."""

    x: Tensor
    out: Tensor


@dataclass(frozen=True)
class _Place:
    """Where a transfer lies. rows: the slot's words, and its tensor as rows; view: as the plan shapes it."""

    slot: Slot
    tiles: int
    rows: Tensor
    view: Tensor


class PeerLink(Link):
    """One end. Make it with `open`, on both ranks. It does not say `norms_early`: its kernels sum a row in an order of
    their own, and which link a stage reads from must not change a bit of what it computes."""

    kind = "peer"

    def __init__(
        self,
        spec: LinkSpec,
        memory: PeerMemory,
        *,
        sender: bool,
        silence_s: float = SILENCE_S,
        timeout_s: float = TIMEOUT_S,
        poison: bool = False,
        language: Language | str | None = None,
    ) -> None:
        """silence_s, timeout_s, poison: as for `ShmLink`; timeout_s ends a wait inside a kernel. language: of this
        end's kernels, "triton" or "cuda"."""
        self._kernels = load_language(language, spec.device)
        self.spec, self._memory, self._poison, self._sender = spec, memory, poison, sender
        self._peer = spec.destination if sender else spec.source
        cuda = spec.device.type == "cuda"
        self._words = torch.zeros(hand_off.HOST_WORDS, dtype=torch.int32, pin_memory=cuda)
        own: dict[str, Any] = {"dtype": torch.int32, "device": spec.device}
        direction, layout = int(spec.direction == "B"), memory.layout
        control = torch.tensor([0, 0, direction, peer_memory.signed(layout.generation)], **own)
        uses = torch.full((spec.slots,), peer_memory.signed(layout.first_epoch), **own)
        self._slots = [
            Slot(
                index,
                memory.data(index, (layout.rows, layout.columns)),
                memory.claim(index),
                memory.flags(index),
                memory.credit(index),
                uses[index:],
                torch.zeros(layout.tiles, **own),
                control,
                self._words,
                int(timeout_s * self._kernels.TICKS_PER_S),
                layout.tile_rows,
            )
            for index in range(spec.slots)
        ]
        self._step: dict[Key, _Place] = {}
        self._order = Order(spec)
        self._held: set[Key] = set()
        self._reserved: Key | None = None
        self._uses = [layout.first_epoch] * spec.slots  # the host's copy, to name the slice of an epoch
        self._key_of: dict[tuple[int, int], Key] = {}
        self._watch = PeerWatch(memory, self._words, sender=sender, silence_s=silence_s)
        self._door = Door(spec, self.give_up, self._free)

    @staticmethod
    def open(spec: LinkSpec, group: dist.ProcessGroup, *, first_epoch: int = 0, **options: Any) -> PeerLink:
        """Meet the other end through `group`; options: of the constructor. LinkError on both ends when either cannot.
        On CPU tensors only in Triton's interpreter."""
        kernels = load_language(options.pop("language", None), spec.device)
        missing = peer_missing(spec.device, "cuda" if isinstance(kernels, cuda_peer.CudaPeer) else "triton")
        if spec.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            missing = f"its kernels add in fp32, too few bits for {spec.dtype}"
        agree(PeerLink.kind, spec, group, trouble=f"links 'peer' cannot be had: {missing}." if missing else "")
        sender = dist.get_rank() == spec.source
        try:
            met, generation = meet(
                spec,
                group,
                lambda generation: peer_memory.offer_memory(
                    peer_memory.layout_of(spec, kernels.TILE_ROWS, generation, first_epoch), spec.device
                ),
            )
            layout = peer_memory.layout_of(spec, kernels.TILE_ROWS, generation, first_epoch)
            try:
                memory = peer_memory.map_memory(met, layout, spec.device, sender=sender, timeout_s=MEET_S)
            except BaseException:
                met.close()  # so that the other end need not wait for a handle
                raise
            return PeerLink(spec, memory, sender=sender, language=kernels, **options)
        except (OSError, ValueError) as error:
            raise LinkError(f"{spec}: the two ends did not come together: {error}") from error

    @inside
    def expect(self, transfers: Transfers) -> None:
        if self._order.expect(transfers):
            self._step = {key: self._place(key, shape) for key, shape in self._order.shapes.items()}
        self._reserved = None
        self._held.clear()
        self._key_of.clear()

    # ---- sender

    @inside
    def reserve(self, key: Key) -> Tensor:
        """Takes the slot's credit; the tensor is this GPU's own, as other ops cannot write the peer's memory."""
        place = self._next(key)
        self._begin(key, place)
        self._launch(self._kernels.take_credit(place.slot))
        self._reserved = key
        return torch.empty(self._order.shapes[key], dtype=self.spec.dtype, device=self.spec.device)

    @inside
    def put(self, key: Key, x: Tensor, residual: Tensor | None = None) -> None:
        check_put(self.spec, self._order.shapes, key, x)
        rows = None if residual is None else _rows(residual)
        self._put(key, lambda slot: self._kernels.add_put(slot, _rows(x), rows))

    @inside
    def put_sum(self, key: Key, x: Tensor, residual: Tensor) -> Tensor:
        """Each tile is on its way as soon as it is added. What it returns is the slot, a leaf."""
        place = self._step.get(key)
        if place is None or not summable(x, residual, place.view.shape, self.spec.dtype):
            return super().put_sum(key, x, residual)
        self.put(key, x, residual)
        self._posted_at = time.perf_counter()
        return place.view.detach()

    @inside
    def put_matmul(
        self, key: Key, a: Tensor, b: Tensor, residual: Tensor | None = None, *, transposed: bool = True
    ) -> None:
        """Puts a [..., K] @ b (+ residual), the product's last kernel writing into the slot; b: a weight [N, K], or
        [K, N] without `transposed`. The credit comes before the product."""
        columns = b.shape[0 if transposed else 1]
        check_put(self.spec, self._order.shapes, key, a[..., :1].expand(*a.shape[:-1], columns))
        rows = None if residual is None else _rows(residual)
        self._put(
            key,
            lambda slot: self._kernels.matmul_add_put(slot, _rows(a), b.contiguous(), rows, transposed=transposed),
        )

    # ---- receiver

    @inside
    def take(self, key: Key) -> Tensor:
        return self._take(key, None)

    @inside
    def take_norm(self, key: Key, weight: Tensor, bias: Tensor | None = None, *, eps: float, rms: bool) -> NormValues:
        """Of each tile as soon as it is there."""
        place = self._next(key)
        out, rstd = torch.empty_like(place.rows), self._statistics(place)
        mean = None if rms else self._statistics(place)
        norm = self._kernels.wait_norm(
            place.slot, weight, bias, rows=place.rows.shape[0], eps=eps, out=out, mean=mean, rstd=rstd
        )
        return NormValues(self._take(key, norm), out.view(place.view.shape), mean, rstd)

    @inside
    def take_matmul(self, key: Key, b: Tensor, *, transposed: bool = True) -> Product:
        """The next slice @ b, as `put_matmul` has it."""
        place = self._next(key)
        rows, columns = place.rows.shape[0], b.shape[0 if transposed else 1]
        out = torch.empty(rows, columns, dtype=self.spec.dtype, device=self.spec.device)
        matmul = self._kernels.wait_matmul(place.slot, b.contiguous(), rows=rows, transposed=transposed, out=out)
        return Product(self._take(key, matmul), out.view(*place.view.shape[:-1], columns))

    @inside
    def verify(self, key: Key) -> None:
        if self.spec.resident:
            self._end(key, release=False)

    @inside
    def release(self, key: Key) -> None:
        if not self.spec.resident:
            return
        if self._poison:
            self._end(key, release=False)
            self._step[key].rows.fill_(torch.nan)
        self._end(key, release=True)
        self._held.discard(key)

    # ---- both

    @inside
    def finish(self) -> None:
        if self.spec.device.type == "cuda":
            torch.cuda.current_stream(self.spec.device).synchronize()
        self._check()
        self._order.finish(list(self._held))

    @inside
    def measure(self) -> Speed | None:
        """Puts one row back and forth, then whole slots, each waiting for the release of the one before."""
        slot = self._slots[0]
        rounds = [1] * 12 + [slot.data.shape[0]] * 6  # the last goes untimed
        if not self._sender:
            for rows in rounds:
                self._count(slot)
                self._launch(
                    self._kernels.begin_use(slot, -(-rows // slot.tile_rows)), self._kernels.end_use(slot, release=True)
                )
            self._settle()
            return None
        whole = torch.zeros(slot.data.shape, dtype=self.spec.dtype, device=self.spec.device)
        seconds: dict[int, list[float]] = {rows: [] for rows in rounds}
        began, before = 0.0, 0
        for rows in rounds:
            self._count(slot)
            self._launch(self._kernels.take_credit(slot))
            self._settle()
            now = time.perf_counter()
            if before:
                seconds[before].append(now - began)
            began, before = now, rows
            self._launch(self._kernels.add_put(slot, whole[:rows], None))
        latency = statistics.median(seconds[1][2:]) / 2
        return Speed(latency * 1e6, self.spec.slot_bytes / min(seconds[rounds[-1]][1:]) / 1e9)

    def lost(self, tick_s: float) -> LinkError | None:
        trouble = self._watch.trouble
        return None if trouble in (None, Trouble.CLOSED) else lost_error(self.spec, self._peer, trouble)

    def give_up(self) -> None:
        self._words[0] = 1

    def close(self) -> None:
        self._door.closed = True  # first: a wait that the word ends asks why it ended
        self._words[0] = 1  # for kernels that wait while nobody waits for them
        self._door.close()

    def _free(self) -> None:
        self._watch.stop()
        self._memory.close()
        self._step.clear()

    # ---- within

    def _next(self, key: Key) -> _Place:
        self._check()
        self._order.check(key)
        return self._step[key]

    def _put(self, key: Key, plan_put: Callable[[Slot], Any]) -> None:
        place = self._next(key)
        if self._reserved != key:
            self.reserve(key)
        self._reserved = None
        self._launch(plan_put(place.slot))
        self._order.done += 1

    def _take(self, key: Key, consumer: Any | None) -> Tensor:
        """Begins a use and runs `consumer`, which waits for its tiles itself."""
        place = self._next(key)
        self._begin(key, place)
        self._order.done += 1
        gate = self._kernels.begin_use(place.slot, place.tiles if consumer is None else 1)
        self._launch(gate, *([] if consumer is None else [consumer]))
        if self.spec.resident:
            self._held.add(key)
            return place.view.detach()  # a leaf of its own: no gradient or hook of an earlier use
        x = place.view.clone()
        self._launch(self._kernels.end_use(place.slot, release=True))
        return x

    def _end(self, key: Key, *, release: bool) -> None:
        slot = self.spec.slot_of[key]
        if key not in self._held:
            raise self._overwritten(key, slot)
        self._launch(self._kernels.end_use(self._slots[slot], release=release))

    def _begin(self, key: Key, place: _Place) -> None:
        self._key_of[place.slot.index, self._count(place.slot)] = key

    def _count(self, slot: Slot) -> int:
        self._uses[slot.index] = (self._uses[slot.index] + 1) % 2**32
        return self._uses[slot.index]

    def _launch(self, *launches: Any) -> None:
        self._kernels.run(launches, self.spec.device)
        if self.spec.device.type == "cpu":  # the interpreter has run them by now
            self._check()

    def _settle(self) -> None:
        if self.spec.device.type == "cuda":
            torch.cuda.current_stream(self.spec.device).synchronize()
        self._check()

    def _place(self, key: Key, shape: tuple[int, ...]) -> _Place:
        slot = self._slots[self.spec.slot_of[key]]
        view = self._memory.data(slot.index, shape)
        rows = view.view(-1, shape[-1])
        return _Place(slot, -(-rows.shape[0] // slot.tile_rows), rows, view)

    def _statistics(self, place: _Place) -> Tensor:
        return torch.empty(place.rows.shape[0], 1, dtype=torch.float32, device=self.spec.device)

    def _check(self) -> None:
        """LinkError when a kernel of this end has reported."""
        who, _, slot, tile, want, got, _ = self._words[1:].tolist()
        if who != 0:
            raise self._reported(who, slot, tile, want % 2**32, got % 2**32)

    def _reported(self, who: int, slot: int, tile: int, want: int, got: int) -> LinkError:
        # A sender waits for the credit of the use before, its own is the next.
        use = (want + 1) % 2**32 if who == hand_off.SENDER else want
        key = self._key_of.get((slot, use))
        if self._door.closed:
            return closed_error(self.spec, key)
        if who == hand_off.HOLDER:
            return self._overwritten(key, slot)
        what = "the first exchange" if key is None else f"stage {key[0]}, {name(key)}"
        trouble = self._watch.trouble or Trouble.LATE
        return LinkError(
            f"{self.spec}: rank {self._peer} {trouble.value}: waited in vain for {what} (slot {slot}, tile {tile}, "
            f"wanted epoch {want}, saw {got}, generation {self._memory.layout.generation}).",
            peer=self._peer,
            trouble=trouble,
        )

    def _overwritten(self, key: Key | None, slot: int) -> LinkError:
        what = "its slice" if key is None else name(key)
        return LinkError(
            f"{self.spec}: slot {slot} no longer holds {what}: it was released or written over before its backward "
            f"had run, so the gradients of this step are wrong."
        )


def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _rows(x: Tensor) -> Tensor:
    return readable(x).contiguous().view(-1, x.shape[-1])
