"""Index maths of csrc/cuda/swizzle.cuh, exhaustively: every chunk of a tile, every lane's address, products of tiles in
every layout that the kernels use, and exchanges between lanes, all with distinct values.

The layouts are written here from the PTX manual and from the words of swizzle.cuh, independently of its formulas.
"""

from __future__ import annotations

import pytest
import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROWS = 64


@pytest.mark.parametrize("row_bytes", [64, 128, 256])
def test_addresses_of_a_tile(row_bytes, emulator):
    chunks = torch.zeros(ROWS, row_bytes // 16, dtype=torch.int32)
    lanes = torch.zeros(2, ROWS // 8, row_bytes // 32, 32, dtype=torch.int32)
    outputs = {"chunks": chunks, "lanes": lanes}
    report = emulator.run(f"addresses_{row_bytes}", outputs=outputs, sizes=(ROWS,))
    assert report.kinds == [], report
    # Each chunk has its own 16 bytes, in the row it belongs to.
    assert torch.equal(chunks.reshape(-1).sort().values, torch.arange(ROWS * row_bytes // 16, dtype=torch.int32) * 16)
    assert torch.equal(chunks // row_bytes, torch.arange(ROWS, dtype=torch.int32)[:, None].expand_as(chunks))
    # Eight neighbouring rows of one chunk, and eight neighbouring chunks of a row, lie in eight groups of banks.
    groups = chunks // 16 % 8
    eight = torch.arange(8, dtype=torch.int32)
    for first in range(0, ROWS, 8):
        assert (groups[first : first + 8].sort(0).values == eight[:, None]).all()
    for first in range(0, row_bytes // 16 - 7, 8):
        assert (groups[:, first : first + 8].sort(1).values == eight).all()
    # Four matrices of eight rows: lane 8i + r has row r of matrix i.
    matrix, row = torch.arange(32) // 8, torch.arange(32) % 8
    for kind, (down, right) in enumerate(((matrix % 2, matrix // 2), (matrix // 2, matrix % 2))):
        for i in range(ROWS // 8 - 1):
            for j in range(row_bytes // 32):
                expected = chunks[8 * i + 8 * down + row, 2 * j + right]
                assert torch.equal(lanes[kind, i, j], expected), (kind, i, j)


@pytest.mark.parametrize("transposed", ["", "_a", "_b", "_ab"])
@pytest.mark.parametrize("name", DTYPES)
def test_products_of_tiles(name, transposed, emulator):
    """Sums of distinct small integers, exact in fp32."""
    a, b = torch.randperm(1024).reshape(16, 64) % 253 - 126, torch.randperm(1024).reshape(16, 64) % 255 - 127
    stored = []
    for matrix, letter in ((a, "a"), (b, "b")):
        if letter in transposed:
            tile = torch.full((64, 64), float("nan"), dtype=DTYPES[name])  # columns from 16 on count for nothing
            tile[:, :16] = matrix.T
            stored.append(tile)
        else:
            stored.append(matrix.to(DTYPES[name]))
    out = torch.zeros(16, 16)
    inputs = {"a": stored[0], "b": stored[1]}
    report = emulator.run(f"product_{name}{transposed}", inputs=inputs, outputs={"out": out}, shared_bytes=2 * 64 * 128)
    assert report.kinds == [] and report.conflicts() == {}, (report, report.conflicts())
    assert torch.equal(out, (a @ b.T).float())


@pytest.mark.parametrize("name", DTYPES)
def test_exchanges_between_lanes(name, emulator):
    matrix = torch.arange(256.0).reshape(16, 16)
    by_rows, back = torch.zeros(16, 16), torch.zeros(16, 16)
    a = torch.zeros(32, 4, dtype=torch.int32)
    outputs = {"by_rows": by_rows, "back": back, "a": a}
    report = emulator.run(f"exchanges_{name}", inputs={"in": matrix}, outputs=outputs)
    assert report.kinds == [], report
    assert torch.equal(by_rows, matrix) and torch.equal(back, matrix)
    lane = torch.arange(32)
    for i, (down, right) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
        pairs = a[:, i : i + 1].contiguous().view(DTYPES[name]).float()
        for half in range(2):
            assert torch.equal(pairs[:, half], matrix[lane // 4 + down, lane % 4 * 2 + half + right])
