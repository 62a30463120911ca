"""What connects the ranks of a plan: a link per edge, a group for sums over all ranks, a group per set of ranks with
copies of a tied parameter.

Two kinds with one interface: everything in this process (`local`), or one process a rank over torch.distributed
(`dist`).  Every group is made and warmed here, in one global order on every rank, because creating or first using a
communicator later, in the order of some rank's actions, is how pipelines hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from terapipe.schedule import Link as PlannedLink
from terapipe.schedule import Schedule, SlotAssignment
from tpkernels.links import DistLink, Key, Link, LinkSpec, LocalLink

Expected = Mapping[PlannedLink, Sequence[tuple[Key, tuple[int, ...]]]]
"""Per link the keys and shapes of a step's transfers, in the sender's order."""


class Wiring(Protocol):
    """The connections of this process."""

    links: dict[PlannedLink, Link]

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

    def close(self) -> None:
        """Let go of every connection; peers that wait get an error."""


def open_local_wiring(schedule: Schedule, slots: SlotAssignment, dtype: torch.dtype, device: torch.device) -> Wiring:
    """All ranks in this process."""
    return _LocalWiring({link: LocalLink(spec) for link, spec in _specs(schedule, slots, dtype, device).items()})


def open_dist_wiring(
    schedule: Schedule,
    slots: SlotAssignment,
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
    *,
    families: Sequence[tuple[str, ...]],
    owner: Mapping[str, int],
    timeout: timedelta = timedelta(minutes=30),
) -> Wiring:
    """This process is `rank`; a collective call: every rank makes it with the same arguments."""
    links: dict[PlannedLink, Link] = {}
    for link, spec in _specs(schedule, slots, dtype, device).items():
        group = dist.new_group([spec.source, spec.destination], timeout=timeout)
        if rank in (spec.source, spec.destination):
            links[link] = DistLink(spec, group)
            _warm(spec, group, rank)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    tied: dict[str, tuple[int, dist.ProcessGroup | None]] = {}
    for family in families:
        ranks = tuple(sorted({owner[name] for name in family}))
        if len(ranks) > 1 and ranks not in groups:
            groups[ranks] = dist.new_group(list(ranks), timeout=timeout)
        tied |= {name: (owner[name], groups.get(ranks)) for name in family}
    everyone = dist.new_group(backend="gloo", timeout=timeout)
    return _DistWiring(links, everyone, tied, dist.get_world_size())


def _specs(
    schedule: Schedule, slots: SlotAssignment, dtype: torch.dtype, device: torch.device
) -> dict[PlannedLink, LinkSpec]:
    specs = {}
    for link, transfers in slots.order.items():
        slot_of = {(transfer.stage, transfer.micro, transfer.slice): slots.slot(transfer) for transfer in transfers}
        specs[link] = LinkSpec(
            link.source_rank, link.destination_rank, link.direction, dtype, device, slots.slots(link), slot_of
        )
    return specs


def _warm(spec: LinkSpec, group: dist.ProcessGroup, rank: int) -> None:
    x = torch.zeros(1, device=spec.device)
    if rank == spec.source:
        dist.send(x, spec.destination, group=group)
    else:
        dist.recv(x, spec.source, group=group)


class _LocalWiring:
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

    def close(self) -> None:
        for link in self.links.values():
            link.close()


class _DistWiring:
    def __init__(
        self,
        links: dict[PlannedLink, Link],
        everyone: dist.ProcessGroup,
        tied: Mapping[str, tuple[int, dist.ProcessGroup | None]],
        ranks: int,
    ) -> None:
        self.links = links
        self._everyone: dist.ProcessGroup | None = everyone
        self._tied = dict(tied)
        self._ranks = ranks

    def expect(self, transfers: Expected) -> None:
        for planned, link in self.links.items():
            link.expect(transfers[planned])

    def finish(self) -> None:
        for link in self.links.values():
            link.finish()

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        table = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(table, group=self._everyone)
        return table.tolist()

    def gather(self, own: list[Any]) -> list[list[Any]]:
        reports: list[Any] = [None] * self._ranks
        dist.all_gather_object(reports, own, group=self._everyone)
        return reports

    def share(self, name: str, value: Tensor | None, *, like: Tensor | None) -> Tensor | None:
        source, group = self._tied[name]
        if group is None or (value is None and like is None):
            return value
        if value is not None:
            buffer = value.detach().contiguous()
        else:
            assert like is not None
            buffer = torch.empty_like(like)
        dist.broadcast(buffer, source, group=group)
        return buffer

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        groups = {group for _, group in self._tied.values() if group is not None}
        self._tied.clear()
        if self._everyone is not None:
            groups.add(self._everyone)
            self._everyone = None
        for group in groups:
            dist.destroy_process_group(group)
