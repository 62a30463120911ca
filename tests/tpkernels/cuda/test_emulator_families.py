"""Each family of instructions in the emulator against a plain computation, with distinct values in every element.

The lane layouts below are written from the PTX manual (mma.m16n8k16, ldmatrix, stmatrix), independently of the
emulator's: g = lane // 4, t = lane % 4.
"""

from __future__ import annotations

import pytest
import torch

DTYPES = [torch.bfloat16, torch.float16]
NAMES = {torch.bfloat16: "mma_bf16", torch.float16: "mma_fp16"}


def pairs(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Two 16-bit elements as one register, the first in the low half."""
    both = torch.stack([low, high], -1).contiguous()
    return both.view(torch.int32).reshape(low.shape)


LANE = torch.arange(32)
G, T = LANE // 4, LANE % 4


def fragment_a(a):
    """[16, 16] -> [32, 4]"""
    places = [(G, 2 * T), (G + 8, 2 * T), (G, 2 * T + 8), (G + 8, 2 * T + 8)]
    return torch.stack([pairs(a[row, column], a[row, column + 1]) for row, column in places], 1).contiguous()


def fragment_b(b):
    """[16 (k), 8 (n)] -> [32, 2]"""
    return torch.stack([pairs(b[row, G], b[row + 1, G]) for row in (2 * T, 2 * T + 8)], 1).contiguous()


def fragment_d(d):
    """[16, 8] -> [32, 4]"""
    return torch.stack([d[G, 2 * T], d[G, 2 * T + 1], d[G + 8, 2 * T], d[G + 8, 2 * T + 1]], 1).contiguous()


# ---- mma -------------------------------------------------------------------------------------------------------------


def run_mma(emulator, dtype, a, b, c):
    inputs = {"a": fragment_a(a.to(dtype)), "b": fragment_b(b.to(dtype)), "c": fragment_d(c)}
    out = torch.full((32, 4), float("nan"))
    report = emulator.run(NAMES[dtype], inputs=inputs, outputs={"out": out})
    assert report.kinds == [] and report.operations == {"mma_m16n8k16": 1}, report
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mma_is_the_matrix_product(emulator, dtype):
    """Random values, and each element of a and b alone: any two places exchanged would change the result."""
    a, b, c = torch.randn(16, 16), torch.randn(16, 8), torch.randn(16, 8)
    exact = a.to(dtype).double() @ b.to(dtype).double() + c.double()
    torch.testing.assert_close(run_mma(emulator, dtype, a, b, c).double(), fragment_d(exact), rtol=1e-6, atol=1e-5)
    # Distinct exact integers; sums below 2^24 are exact in any order.
    a = torch.arange(256.0).reshape(16, 16)
    b = (torch.arange(128.0).reshape(16, 8) * 37) % 128
    c = -torch.arange(128.0).reshape(16, 8)
    assert torch.equal(run_mma(emulator, dtype, a, b, c), fragment_d(a @ b + c))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mma_takes_special_values_as_ieee_does(emulator, dtype):
    a, b, c = torch.zeros(16, 16), torch.zeros(16, 8), torch.zeros(16, 8)
    a[0, 0], a[1, 1], a[2, 2], a[3, 3] = float("inf"), float("nan"), -float("inf"), 2.0**-24
    b[:] = 1.0
    b[:, 7] = 0.0
    expected = a.double() @ b.double()
    out = run_mma(emulator, dtype, a, b, c)
    assert torch.equal(out.double().nan_to_num(123.0), fragment_d(expected).nan_to_num(123.0))
    assert torch.equal(out.isnan(), fragment_d(expected).isnan())


# ---- ldmatrix, stmatrix ----------------------------------------------------------------------------------------------


def matrices_of(registers, matrices, transposed):
    """[32, 4] registers -> [matrices, 8, 8] elements."""
    halves = registers[:, :matrices].contiguous().view(torch.int16).reshape(32, matrices, 2)
    result = torch.zeros(matrices, 8, 8, dtype=torch.int16)
    for half in range(2):
        rows, columns = (2 * T + half, G) if transposed else (G, 2 * T + half)
        for i in range(matrices):
            result[i, rows, columns] = halves[:, i, half]
    return result


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_ldmatrix_and_stmatrix(emulator, matrices, transposed):
    """Rows lie anywhere, at multiples of 16 bytes; the addresses of lanes that are not asked for are nonsense."""
    rows = torch.randperm(48)[:32]
    addresses = (rows * 16).to(torch.int32)
    addresses[8 * matrices :] = 12345677
    elements = torch.randperm(48 * 8).to(torch.int16).reshape(48, 8)
    expected = elements[rows[: 8 * matrices]].reshape(matrices, 8, 8)

    registers = torch.zeros(32, 4, dtype=torch.int32)
    sizes = (elements.numel(), matrices, int(transposed))
    inputs = {"in": elements, "addresses": addresses}
    report = emulator.run("ldmatrix", inputs=inputs, outputs={"out": registers}, sizes=sizes, shared_bytes=768)
    assert report.kinds == [] and report.operations["ldmatrix"] == 1, report
    assert torch.equal(matrices_of(registers, matrices, transposed), expected)

    addresses[: 8 * matrices] = (torch.randperm(8 * matrices) * 16).to(torch.int32)
    out = torch.zeros(8 * matrices, 8, dtype=torch.int16)
    inputs = {"in": registers, "addresses": addresses}
    sizes = (out.numel(), matrices, int(transposed))
    report = emulator.run("stmatrix", inputs=inputs, outputs={"out": out}, sizes=sizes, shared_bytes=768)
    assert report.kinds == [] and report.operations["stmatrix"] == 1, report
    assert torch.equal(out[addresses[: 8 * matrices] // 16].reshape(matrices, 8, 8), expected)


@pytest.mark.parametrize(
    ("row", "kind", "words"),
    [
        (8, "misaligned", "no multiple of 16"),
        (760, "out of bounds", "the block has 768"),
        (752, "unwritten", "nothing has"),
    ],
)
def test_ldmatrix_checks_each_lanes_row(emulator, row, kind, words):
    addresses = torch.arange(32, dtype=torch.int32) * 16
    addresses[13] = row
    inputs = {"in": torch.zeros(32, 8, dtype=torch.int16), "addresses": addresses}
    outputs = {"out": torch.zeros(32, 4, dtype=torch.int32)}
    report = emulator.run("ldmatrix", inputs=inputs, outputs=outputs, sizes=(256, 4, 0), shared_bytes=768)
    assert report.kinds == [kind] and words in str(report) and "thread 13 " in str(report), report


# ---- shuffles and votes ----------------------------------------------------------------------------------------------


def test_shuffles_and_votes(emulator):
    values = torch.randperm(64).to(torch.int32)
    out = torch.zeros(64, 7, dtype=torch.int32)
    report = emulator.run("shuffles", inputs={"in": values}, outputs={"out": out}, threads=64)
    assert report.kinds == [] and report.operations == {"shuffle": 8, "vote": 6}, report
    lane = torch.arange(32)
    for warp in range(2):
        own = values[warp * 32 :][:32]
        sources = [
            (lane + 5) % 32,
            lane ^ 3,
            torch.where(lane < 2, lane, lane - 2),
            torch.where(lane > 27, lane, lane + 4),
        ]
        expected = [own[source] for source in sources]
        expected += [torch.full_like(own, -0x55555556), torch.ones_like(own), torch.zeros_like(own)]
        assert torch.equal(out[warp * 32 :][:32], torch.stack(expected, 1))


def test_halves_of_a_warp_shuffle_on_their_own(emulator):
    values = torch.randperm(32).to(torch.int32)
    out = torch.zeros(32, dtype=torch.int32)
    report = emulator.run("half_warps", inputs={"in": values}, outputs={"out": out})
    pair = values.reshape(16, 2).sum(1, keepdim=True).expand(16, 2).reshape(32)
    assert report.kinds == [] and torch.equal(out, pair * torch.where(torch.arange(32) < 16, 2, 8)), report


# ---- asynchronous copies ---------------------------------------------------------------------------------------------


def run_async_copy(emulator, name="async_copy", *, valid=64, threads=64):
    source = torch.randperm(2 * threads * 4).to(torch.int32).reshape(2, threads, 4)
    out = torch.zeros_like(source)
    sizes = {"sizes": (valid,), "threads": threads, "shared_bytes": 2 * threads * 16}
    report = emulator.run(name, inputs={"source": source}, outputs={"out": out}, **sizes)
    expected = source.clone()
    expected[:, valid:] = 0
    return report, torch.equal(out, expected.roll(-1, 1))


@pytest.mark.parametrize("valid", [0, 1, 37, 64])
def test_asynchronous_copies_arrive_and_fill_with_zeros(emulator, valid):
    report, right = run_async_copy(emulator, valid=valid)
    assert right and report.kinds == [] and report.operations["cp.async"] == 128, report


def test_a_copy_that_nobody_waits_for_is_found(emulator):
    """It goes to a slot that all have read: nothing else is wrong."""
    report, right = run_async_copy(emulator, "async_copy_never_waited_for")
    assert right and report.kinds == ["copy pending"] and "ends while 1 of its copies" in str(report), report


@pytest.mark.parametrize(
    ("mistake", "kind", "words"),
    [
        ("no_wait", "copy pending", "into which a cp.async of thread"),
        ("waits_for_too_few", "copy pending", "let the thread that copies wait"),
        ("no_barrier", "copy pending", "then pass a barrier"),
        ("overwritten", "copy pending", "writes 16 bytes at shared offset"),
        ("refilled_while_read", "race", "read before"),
    ],
)
def test_a_mistake_with_an_asynchronous_copy_is_found(emulator, mistake, kind, words):
    report, _ = run_async_copy(emulator, f"async_copy_{mistake}")
    text = next((finding["text"] for finding in report.findings if finding["kind"] == kind), "")
    assert words in text and "csrc/emulator/test_kernels.cpp:" in text, report


def test_a_copy_is_the_waiting_threads_write_and_nobody_elses(emulator):
    """In the reverse order each thread reads what its neighbour has waited for, but has not handed on by a barrier."""
    emulator.configure(backwards=True)
    report, _ = run_async_copy(emulator, "async_copy_no_barrier")
    assert "race" in report.kinds and "race in a warp" in report.kinds, report


# ---- rounding --------------------------------------------------------------------------------------------------------


def test_rounding_to_16_bits_and_back_is_torchs(emulator):
    """Random bit patterns of all magnitudes, ties, the edges of fp16, and every 16-bit value back."""
    bits = torch.randint(-(2**31), 2**31, (40_000,), dtype=torch.int64).to(torch.int32)
    edges = torch.tensor(
        [0.0, -0.0, 65504, 65519.99, 65520, -65536, 2.0**-14, 2.0**-24, 2.0**-25, 3 * 2.0**-25, float("inf")]
    )
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    exact = torch.cat([halves.view(dtype).float() for dtype in DTYPES])
    ties = torch.cat([(exact[1:].double() + exact[:-1].double()) / 2]).float()
    values = torch.cat([bits.view(torch.float32), edges, exact, ties])
    values = torch.cat([values, torch.zeros(-len(values) % 64)])
    rounded = [torch.zeros(len(values), dtype=torch.int16) for _ in DTYPES]
    back = torch.zeros(len(values) // 2, 4)
    outputs = {"bf16": rounded[0], "fp16": rounded[1], "back": back}
    report = emulator.run("formats", inputs={"in": values}, outputs=outputs, grid=len(values) // 64)
    assert report.kinds == [], report
    number = ~values.isnan()
    for i, dtype in enumerate(DTYPES):
        expected = values.to(dtype)
        assert torch.equal(rounded[i][number], expected.view(torch.int16)[number])
        assert (rounded[i][~number] == 0x7FFF).all()
        returned = back[:, 2 * i : 2 * i + 2].reshape(-1)
        assert torch.equal(returned[number], expected.float()[number]) and returned[~number].isnan().all()


# ---- bank conflicts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item_bytes", "stride", "turns"),
    [
        (4, 4, 1),
        (4, 8, 2),
        (4, 128, 32),
        (4, 132, 1),
        (8, 8, 1),
        (8, 128, 16),
        (16, 16, 1),
        (16, 128, 8),
        (16, 144, 1),
        (16, 32, 2),
    ],
)
def test_bank_conflicts_are_counted_by_phase(emulator, item_bytes, stride, turns):
    out = torch.zeros(64, dtype=torch.int32)
    report = emulator.run(
        "strided", outputs={"out": out}, sizes=(item_bytes, stride), threads=64, shared_bytes=64 * stride
    )
    assert report.kinds == [] and torch.equal(out, torch.arange(64, dtype=torch.int32)), report
    phases = 2 * {4: 1, 8: 2, 16: 4}[item_bytes]
    for row in report.banks:
        assert (row["accesses"], row["phases"], row["turns"]) == (2, phases, phases * turns), row
        assert row["place"].startswith("csrc/emulator/test_kernels.cpp:")
    assert len(report.banks) == 2 and set(report.conflicts().values()) == (set() if turns == 1 else {turns})


@pytest.mark.parametrize(("stride", "turns"), [(16, 1), (128, 8), (144, 1), (64, 4), (32, 2)])
def test_bank_conflicts_of_ldmatrix(emulator, stride, turns):
    addresses = torch.arange(32, dtype=torch.int32) * stride
    inputs = {"in": torch.zeros(32 * stride // 2, dtype=torch.int16), "addresses": addresses}
    outputs = {"out": torch.zeros(32, 4, dtype=torch.int32)}
    sizes = (32 * stride // 2, 4, 0)
    report = emulator.run("ldmatrix", inputs=inputs, outputs=outputs, sizes=sizes, shared_bytes=32 * stride)
    rows = [row for row in report.banks if row["phases"] == 4 and row["accesses"] == 1]
    assert len(rows) == 1 and rows[0]["turns"] == 4 * turns, report.banks


# ---- mbarriers -------------------------------------------------------------------------------------------------------


def run_ring(emulator, name="mbarrier_ring", threads=96):
    source = torch.randperm(3 * 32 * 4).to(torch.int32).reshape(3, 32, 4)
    out = torch.zeros(3, threads - 32, 4, dtype=torch.int32)
    sizes = {"threads": threads, "shared_bytes": 16 + 32 * 16}
    report = emulator.run(name, inputs={"source": source}, outputs={"out": out}, **sizes)
    return report, torch.equal(out, source.flip(1).repeat(1, threads // 32 - 1, 1))


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("name", ["mbarrier_ring", "mbarrier_ring_tied_copies"])
def test_mbarriers_hand_a_slot_back_and_forth(emulator, name, backwards):
    emulator.configure(backwards=backwards)
    report, right = run_ring(emulator, name)
    assert right and report.kinds == [], report


@pytest.mark.parametrize(
    ("mistake", "kind", "words"),
    [
        ("one_arrives_less", "missed barrier", "threads 32-95: at an mbarrier"),
        ("no_barrier_after_init", "race", "with no barrier that orders the two"),
        ("wrong_parity", "unwritten", "nothing has written"),
        ("untied_copies", "copy pending", "is still copying"),
    ],
)
def test_a_mistake_with_an_mbarrier_is_found(emulator, mistake, kind, words):
    report, _ = run_ring(emulator, f"mbarrier_ring_{mistake}")
    text = next((finding["text"] for finding in report.findings if finding["kind"] == kind), "")
    assert words in text and "csrc/emulator/test_kernels.cpp:" in text, report
