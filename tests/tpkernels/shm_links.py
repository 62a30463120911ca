"""What tests of shared-memory links have in common."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tpkernels.links import Key, LinkSpec, ShmLink

CPU = torch.device("cpu")
NEAR_WRAP = 2**32 - 3
OPTIONS: dict[str, Any] = {"spin_s": 1e-4, "silence_s": 1.0, "timeout_s": 2.0, "poison": True}
Pair = tuple[ShmLink, ShmLink]


def make_spec(slots: int = 2, dtype: torch.dtype = torch.float32, resident: bool = True) -> LinkSpec:
    slot_of = {(1, 0, piece): piece % slots for piece in range(8)}
    return LinkSpec(0, 1, "F", dtype, CPU, slots, slot_of, (2, 70, 3), resident)


def link_mappings() -> int:
    """Links' segments that are mapped into this process."""
    return Path("/proc/self/maps").read_text().count("memfd:terapipe-link")


def expect_slices(pair: Pair, count: int = 8) -> list[Key]:
    spec = pair[0].spec
    keys = list(spec.slot_of)[:count]
    for link in pair:
        link.expect([(key, spec.slot_shape) for key in keys])
    return keys


@contextlib.contextmanager
def meeting() -> Iterator[Callable[..., Pair]]:
    """Opens pairs of ends, which poison what they release and whose epochs begin just before they wrap."""
    opened: list[ShmLink] = []

    def make(spec: LinkSpec, **options: Any) -> Pair:
        pair = meet_ends(spec, **options)
        opened.extend(pair)
        return pair

    try:
        yield make
    finally:
        for link in opened:
            link.close()


def meet_ends(spec: LinkSpec, *, first_epoch: int = NEAR_WRAP, **options: Any) -> Pair:
    from tpkernels.links.segment import call, fetch
    from tpkernels.links.shm import offer_segment

    offer = offer_segment(spec, 7, first_epoch)
    accepted: list[Any] = []
    thread = threading.Thread(target=lambda: accepted.append(offer.accept(10)))
    thread.start()
    met = fetch(call(offer.address), 10)
    thread.join()
    chosen = OPTIONS | options
    return ShmLink(spec, met, 7, sender=True, **chosen), ShmLink(spec, accepted[0], 7, sender=False, **chosen)
