"""What tests of shared-memory links have in common."""

from __future__ import annotations

from pathlib import Path

import torch

from tpkernels.links import Key, LinkSpec, ShmLink

CPU = torch.device("cpu")
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
