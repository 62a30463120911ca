"""What connects the ranks of a plan: a link per edge, a group for sums over all ranks, a group per set of ranks with
copies of a tied parameter.

Two kinds with one interface: everything in this process, or one process a rank; then each link goes through shared
memory (`shm`) where both ranks compute on CPUs of one host, by request through each other's memory (`peer`) where they
compute on two of its GPUs that reach each other, else over torch.distributed (`dist`).  Every link and group is made
and warmed here, in one global order on every rank, because creating or first using a communicator later, in the order
of some rank's actions, is how pipelines hang.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from terapipe.engine.failure import FailureBoard
from terapipe.engine.opening import Opening, Process, break_groups
from terapipe.schedule import Link as PlannedLink
from terapipe.schedule import Schedule, SlotAssignment
from tpkernels.links import Link, LinkError, LinkSpec, LocalLink, Transfers, open_link, peer_missing, shm_missing
from tpkernels.links.base import closed_error
from tpkernels.links.dist import reason, trouble_of
from tpkernels.links.door import Door, inside
from tpkernels.links.shm import SPIN_S

logger = logging.getLogger("terapipe")

TOGETHER = "what all ranks do together"
_SEEN_S = 0.3  # a process's connections close before its end can be seen

Expected = Mapping[PlannedLink, Transfers]
"""Per link the keys and shapes of a step's transfers, in the sender's order."""


class Wiring(Protocol):
    """The connections of this process."""

    links: dict[PlannedLink, Link]
    one_clock: bool
    """Whether times of all ranks can be compared."""

    def expect(self, transfers: Expected) -> None:
        """A step begins: what each link will carry."""

    def finish(self) -> None:
        """A step ended: wait for what is on its way."""

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Elementwise fp64 sums, the same on every rank."""

    def gather(self, own: list[Any]) -> list[list[Any]]:
        """Every rank's list, on every rank."""

    def share(self, name: str, value: Tensor | None, *, like: Tensor | None) -> Tensor | None:
        """The value of the tied parameter `name` on every rank that holds one of its copies; None on any other."""

    def lost(self, tick_s: float) -> LinkError | None:
        """That a neighbour is gone or stands still, once that is known; asked from a thread of its own, every
        `tick_s`."""

    def give_up(self) -> None:
        """End waits for links and for sums soon; from any thread."""

    def close(self) -> None:
        """Let go of every connection; peers that wait get an error."""


def link_specs(
    schedule: Schedule, slots: SlotAssignment, dtype: torch.dtype, device: torch.device, slot_shape: tuple[int, ...]
) -> dict[PlannedLink, LinkSpec]:
    """What the ends of each link must know.  slot_shape: of the largest slice, [b, t, hidden]."""
    specs = {}
    for link, transfers in slots.order.items():
        slot_of = {(transfer.stage, transfer.micro, transfer.slice): slots.slot(transfer) for transfer in transfers}
        specs[link] = LinkSpec(*link, dtype, device, slots.slots(link), slot_of, slot_shape, slots.resident)
    return specs


def open_local_wiring(specs: Mapping[PlannedLink, LinkSpec]) -> Wiring:
    """All ranks in this process."""
    return _LocalWiring({link: LocalLink(spec) for link, spec in specs.items()})


def open_process_wiring(
    specs: Mapping[PlannedLink, LinkSpec],
    rank: int,
    *,
    links: str,
    families: Sequence[tuple[str, ...]],
    owner: Mapping[str, int],
    processes: Sequence[Process],
    board: FailureBoard,
    timeout: timedelta = timedelta(minutes=30),
) -> Wiring:
    """This process is `rank`; a collective call: every rank makes it with the same arguments.

    processes: of all ranks. links: "auto", "shm", "peer" or "dist".  LinkError on every rank when "shm" or "peer"
    cannot be had for every link. When a rank fails at it, all leave, that one with its own error and the others with a
    PipelineError."""
    opening, threads = Opening(rank, processes, board, timeout), torch.get_num_threads()

    def open_all() -> Wiring:
        everyone = opening.group(backend="gloo")
        assert everyone is not None
        device = next((spec.device for spec in specs.values()), torch.device("cpu"))
        places: list[_Place] = _exchange(_Place.here(device, links, threads), everyone)
        refused = _open_shared(specs, rank, places, everyone, opening, links=links)
        for planned, spec in specs.items():
            here = rank in (spec.source, spec.destination)
            if planned in refused:
                group = opening.group([spec.source, spec.destination])
                if here:
                    opening.links[planned] = open_link("dist", spec, group=group)
            if here:
                _log(opening.links[planned], refused.get(planned, ""))
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        tied: dict[str, tuple[int, dist.ProcessGroup | None]] = {}
        for family in families:
            ranks = tuple(sorted({owner[name] for name in family}))
            if len(ranks) > 1 and ranks not in groups:
                groups[ranks] = opening.group(ranks)
            tied |= {name: (owner[name], groups.get(ranks)) for name in family}
        _exchange(None, everyone)  # all are here, or none is
        one_clock = len({place.boot for place in places}) == 1
        return _ProcessWiring(dict(opening.links), everyone, tied, one_clock)

    return opening.run(open_all)


@dataclass(frozen=True)
class _Place:
    """Where a rank runs. kind: of a link through memory; missing: why it cannot have one; `host` is alike for ranks
    that can, `boot` for ranks with one clock; gpu: its index (-1: none), reached: those whose memory it can use."""

    kind: str
    missing: str
    boot: str
    host: tuple[str, str, int]
    cores: int
    threads: int
    gpu: int = -1
    reached: tuple[int, ...] = ()

    @staticmethod
    def here(device: torch.device, links: str, threads: int) -> _Place:
        kind = "peer" if links == "peer" else "shm"  # peer is by request until it has run on GPUs
        if kind == "peer":
            missing = peer_missing(device)
        else:
            missing = "its ranks compute on GPUs" if device.type != "cpu" else shm_missing()
        if sys.platform != "linux":
            return _Place(kind, missing, socket.gethostname(), ("", "", 0), 1, 1)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")  # the two ends meet at a socket whose name is valid in one
        cores = len(os.sched_getaffinity(0))
        gpu = -1
        reached: tuple[int, ...] = ()
        if kind == "peer" and device.type == "cuda" and not missing:
            gpu = torch.cuda.current_device() if device.index is None else device.index
            others = [index for index in range(torch.cuda.device_count()) if index != gpu]
            reached = tuple(index for index in others if torch.cuda.can_device_access_peer(gpu, index))
        host = (boot, network, os.getuid())
        return _Place(kind, missing, boot, host, cores, threads, gpu, reached)


def _open_shared(
    specs: Mapping[PlannedLink, LinkSpec],
    rank: int,
    places: Sequence[_Place],
    everyone: dist.ProcessGroup,
    opening: Opening,
    *,
    links: str,
) -> dict[PlannedLink, str]:
    """Opens this rank's links through shared or peer memory; returns of all links that have none the reason."""
    if links == "dist":
        return dict.fromkeys(specs, "not asked for")
    neighbours = [place for place in places if place.host == places[rank].host]
    spins = sum(place.threads for place in neighbours) <= places[rank].cores
    refused = {planned: why for planned, spec in specs.items() if (why := _apart(places, spec))}
    mine: dict[PlannedLink, str] = {}
    for planned, spec in specs.items():
        if planned in refused or rank not in (spec.source, spec.destination):
            continue
        kind, options = places[rank].kind, {"timeout_s": opening.timeout.total_seconds()}
        if kind == "shm":
            options["spin_s"] = SPIN_S if spins else 0.0
        try:
            opening.links[planned] = open_link(kind, spec, group=everyone, **options)
        except LinkError as error:  # of both ends, which go on in step
            mine[planned] = str(error).removeprefix(f"{spec}: ")
    for failures in _exchange(mine, everyone):  # either end's
        refused |= failures
    for planned in refused.keys() & opening.links.keys():
        opening.links.pop(planned).close()
    if refused and links != "auto":
        reasons = "\n".join(f"  {specs[planned]}: {why}" for planned, why in refused.items())
        opening.agreed = LinkError(
            f"links {links!r} were asked for, but cannot be had (links 'auto' uses what can):\n{reasons}"
        )
        raise opening.agreed
    return refused


def _apart(places: Sequence[_Place], spec: LinkSpec) -> str:
    """Why the two ranks of a link cannot share memory."""
    source, destination = places[spec.source], places[spec.destination]
    if source.missing or destination.missing:
        return source.missing or destination.missing
    if source.host != destination.host:
        return "its ranks are on two hosts, or in two network namespaces"
    if source.kind != destination.kind:
        return "one of its ranks computes on a CPU, the other on a GPU"
    if source.gpu >= 0 and (destination.gpu not in source.reached or source.gpu not in destination.reached):
        return f"GPUs {source.gpu} and {destination.gpu} do not reach each other's memory"
    return ""


def _exchange(own: Any, group: dist.ProcessGroup) -> list[Any]:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own, group=group)
    return everybody


def _log(link: Link, why: str) -> None:
    """Tries the link, both ends together; its sender says how fast it is."""
    speed, spec = link.measure(), link.spec
    if speed is not None:
        reason = f" (no memory in common: {why})" if why else ""
        size = f"{spec.slots} slots of {spec.slot_bytes / 2**20:.2f} MiB"
        logger.info("%s: %s, %s, %.1f us, %.1f GB/s%s", spec, link.kind, size, speed.latency_us, speed.gb_per_s, reason)


class _LocalWiring:
    one_clock = True

    def __init__(self, links: Mapping[PlannedLink, Link]) -> None:
        self.links: dict[PlannedLink, Link] = dict(links)

    def expect(self, transfers: Expected) -> None:
        for link, order in transfers.items():
            self.links[link].expect(order)

    def finish(self) -> None:
        for link in self.links.values():
            link.finish()

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return values

    def gather(self, own: list[Any]) -> list[list[Any]]:
        return [own]

    def share(self, name: str, value: Tensor | None, *, like: Tensor | None) -> Tensor | None:
        return value

    def lost(self, tick_s: float) -> LinkError | None:
        return None

    def give_up(self) -> None:
        for link in self.links.values():
            link.give_up()

    def close(self) -> None:
        for link in self.links.values():
            link.close()


class _ProcessWiring:
    def __init__(
        self,
        links: dict[PlannedLink, Link],
        everyone: dist.ProcessGroup,
        tied: Mapping[str, tuple[int, dist.ProcessGroup | None]],
        one_clock: bool,
    ) -> None:
        self.links, self.one_clock = links, one_clock
        self._everyone: dist.ProcessGroup | None = everyone
        self._tied = dict(tied)
        self._lost: LinkError | None = None
        self._door = Door(TOGETHER, self._break_groups, self._free)

    def expect(self, transfers: Expected) -> None:
        for planned, link in self.links.items():
            link.expect(transfers[planned])

    def finish(self) -> None:
        for link in self.links.values():
            link.finish()

    @inside
    def sum_over_ranks(self, values: list[float]) -> list[float]:
        table = torch.tensor(values, dtype=torch.float64)
        with self._together():
            dist.all_reduce(table, group=self._everyone)
        return table.tolist()

    @inside
    def gather(self, own: list[Any]) -> list[list[Any]]:
        assert self._everyone is not None
        with self._together():
            return _exchange(own, self._everyone)

    @inside
    def share(self, name: str, value: Tensor | None, *, like: Tensor | None) -> Tensor | None:
        source, group = self._tied[name]
        if group is None or (value is None and like is None):
            return value
        if value is not None:
            buffer = value.detach().contiguous()
        else:
            assert like is not None
            buffer = torch.empty_like(like)
        with self._together():
            dist.broadcast(buffer, source, group=group)
        return buffer

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """What all ranks do at once; LinkError says who did not, if a link can tell."""
        try:
            yield
        except RuntimeError as error:
            if self._door.closed:
                raise closed_error(TOGETHER) from error
            lost = self.lost(0.0)
            deadline = time.monotonic() + _SEEN_S
            while lost is None and time.monotonic() < deadline:
                time.sleep(0.02)
                lost = self.lost(0.0)
            if lost is not None:
                raise LinkError(str(lost), peer=lost.peer, trouble=lost.trouble) from error
            raise LinkError(f"the ranks did not come together: {reason(error)}", trouble=trouble_of(error)) from error

    def lost(self, tick_s: float) -> LinkError | None:
        for link in self.links.values():
            self._lost = self._lost or link.lost(tick_s)
        return self._lost

    def give_up(self) -> None:
        for link in self.links.values():
            link.give_up()
        self._break_groups()

    def _break_groups(self) -> None:
        break_groups(self._groups())

    def _groups(self) -> set[dist.ProcessGroup]:
        groups = {group for _, group in self._tied.values() if group is not None}
        return groups if self._everyone is None else groups | {self._everyone}

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        self._door.close()

    def _free(self) -> None:
        groups = self._groups()
        self._tied.clear()
        self._everyone = None
        for group in groups:
            dist.destroy_process_group(group)
