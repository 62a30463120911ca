"""Links within one process that steps all ranks of a plan: slots are plain references.

`ready` and `free` let one thread step several ranks without ever blocking.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.links.base import Key, Link, LinkError, LinkSpec, Speed, Transfers, check_put, name


class LocalLink(Link):
    """Both ends at once."""

    kind = "local"

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

    def expect(self, transfers: Transfers) -> None:
        self._shapes = dict(transfers)

    def reserve(self, key: Key) -> Tensor:
        self._check_free(key)
        return torch.empty(self._shapes[key], dtype=self.spec.dtype, device=self.spec.device)

    def put(self, key: Key, x: Tensor, residual: Tensor | None = None) -> None:
        check_put(self.spec, self._shapes, key, x)
        self._check_free(key)
        self._occupant[self.spec.slot_of[key]] = key
        self._arrived[key] = x if residual is None else x + residual

    def take(self, key: Key) -> Tensor:
        if key not in self._arrived:
            raise LinkError(f"{self.spec}: asked for {name(key)} before it was put, or a second time.")
        if not self.spec.resident:
            del self._occupant[self.spec.slot_of[key]]
        return self._arrived.pop(key)

    def verify(self, key: Key) -> None:
        slot = self.spec.slot_of[key]
        if self.spec.resident and self._occupant.get(slot) != key:
            raise LinkError(f"{self.spec}: slot {slot} is not held by {name(key)} but by {self._occupant.get(slot)}.")

    def release(self, key: Key) -> None:
        self.verify(key)
        if self.spec.resident:
            del self._occupant[self.spec.slot_of[key]]

    def finish(self) -> None:
        if self._occupant:
            raise LinkError(f"{self.spec}: slots still held at the end of the step: {self._occupant}.")

    def measure(self) -> Speed | None:
        return None

    def lost(self, tick_s: float) -> LinkError | None:
        return None

    def give_up(self) -> None:
        pass  # never waits

    def close(self) -> None:
        self._occupant.clear()
        self._arrived.clear()

    def _check_free(self, key: Key) -> None:
        slot = self.spec.slot_of[key]
        if slot in self._occupant:
            raise LinkError(f"{self.spec}: slot {slot} of {name(key)} still holds {name(self._occupant[slot])}.")
