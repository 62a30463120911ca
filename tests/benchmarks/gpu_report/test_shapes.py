"""The shapes that are measured: their operations, and that the grids hold those of the goals."""

from __future__ import annotations

from gpu_report_cases import SHAPE

from benchmarks.gpu_report import parts, shapes


def test_operations_are_counted_pair_by_pair():
    pairs = sum(1 for query in range(7) for key in range(19) if key <= 12 + query)
    assert SHAPE.flops("forward") == 4 * 2 * 6 * 8 * pairs and SHAPE.flops("backward") == 2.5 * SHAPE.flops("forward")


def test_the_grids_are_those_of_the_goals():
    standard, slices = shapes.standard_grid(), shapes.slice_grid()
    assert {s.head_dim for s in standard} == {64, 128, 256} and {s.tokens for s in standard} >= {512, 1024, 16384}
    assert all(s.batch * s.tokens == 16384 and s.prefix == 0 for s in standard)
    assert {(s.query_heads, s.kv_heads) for s in slices} == {(32, 8), (64, 8)}
    assert {s.tokens for s in slices} >= {256, 4096} and {s.prefix for s in slices} >= {0, 131072}
    assert len(set(standard)) == len(standard) and len(set(slices)) == len(slices)
    for part in parts.PARTS:
        listed = parts.cells(part, "cuda")
        assert len(set(listed)) == len(listed) > 0
