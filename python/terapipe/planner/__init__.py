"""The planner: what slices cost, which slices are best. Nothing here imports torch."""

from terapipe.planner.slicing import (
    MicroSlices,
    SliceCosts,
    Slicing,
    cost_table,
    equal_cost_slices,
    slice_batch,
    slice_sequence,
)

__all__ = [
    "MicroSlices",
    "SliceCosts",
    "Slicing",
    "cost_table",
    "equal_cost_slices",
    "slice_batch",
    "slice_sequence",
]
