"""The emulator's watch over memory and barriers: sound kernels run without a finding, every planted mistake is found.

Kernels are those of csrc/emulator/test_kernels.cpp. A finding names the kernel, the block, the thread, the place in
the source and a remedy.
"""

from __future__ import annotations

import pytest
import torch


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + int(torch.tensor(shape).prod()), dtype=torch.int32).reshape(shape)


def run_reverse(emulator, name="reverse", *, grid=3, threads=96, **options):
    tensors = {
        "inputs": {"in": numbers(grid * threads)},
        "outputs": {"out": torch.zeros(grid * threads, dtype=torch.int32)},
    }
    report = emulator.run(name, grid=grid, threads=threads, shared_bytes=threads * 4, **tensors, **options)
    expected = tensors["inputs"]["in"].reshape(grid, threads).flip(1).reshape(-1)
    return report, bool((tensors["outputs"]["out"] == expected).all())


@pytest.mark.parametrize("host_threads", [1, 2])
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("threads", [32, 96, 1024])
def test_a_sound_kernel(emulator, threads, backwards, host_threads):
    emulator.configure(host_threads=host_threads, backwards=backwards)
    report, right = run_reverse(emulator, threads=threads)
    assert right and report.kinds == [], report
    assert report.operations == {"__syncthreads": 3}


# What each mistake is called, in which threads, and words of the report: what happened and what to do.
MISTAKES = {
    "reverse_no_barrier": ("race", "which thread", "a barrier that both threads pass"),
    "reverse_only_warp_barrier": ("race", "wrote before, with no barrier", "a barrier that both threads pass"),
    "reverse_write_after_read": ("race", "before, with no barrier", "a barrier that both threads pass"),
    "reverse_half_arrives": ("missed barrier", "threads 48-95: ended", "take the barrier out of the branch"),
    "reverse_early_return": ("missed barrier", "threads 64-95: ended", "end no thread before it"),
    "reverse_unwritten": (
        "unwritten",
        "reads 4 bytes at shared offset 20, part of which nothing has written",
        "write it first",
    ),
    "reverse_beyond_the_end": ("out of bounds", "shared offset 384; the block has 384", "check the index"),
    "reverse_misaligned": ("misaligned", "shared offset 38, which is no multiple of 4", "align the rows"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_a_planted_mistake_is_found(emulator, name, backwards):
    kind, what, remedy = MISTAKES[name]
    emulator.configure(backwards=backwards)
    report, _ = run_reverse(emulator, name)
    assert kind in report.kinds, report
    text = next(finding["text"] for finding in report.findings if finding["kind"] == kind)
    assert f"kernel {name}, block " in text and what in text and remedy in text, text
    assert "csrc/emulator/test_kernels.cpp:" in text and "unknown line" not in text, text


def test_a_race_within_a_warp_asks_for_a_barrier_of_the_warp(emulator):
    report, _ = run_reverse(emulator, "reverse_no_barrier", grid=1, threads=32)
    assert (
        "race in a warp" in report.kinds
        and "race" not in report.kinds
        and "remedy: __syncwarp() between the two" in str(report)
    )
    report, right = run_reverse(emulator, "reverse_only_warp_barrier", grid=1, threads=32)
    assert right and report.kinds == [], report


def test_a_mistake_in_many_threads_is_a_few_findings(emulator):
    report, _ = run_reverse(emulator, "reverse_write_after_read", grid=20)
    assert len(report.findings) <= 4 and sum(finding["count"] for finding in report.findings) > 500, report


def test_named_barriers_order_their_own_threads_only(emulator):
    inputs = {"in": numbers(128)}
    out = torch.zeros(128, 3, dtype=torch.int32)
    report = emulator.run(
        "named_barriers", inputs=inputs, outputs={"out": out}, sizes=(64,), threads=128, shared_bytes=512
    )
    expected = inputs["in"].reshape(2, 2, 32).flip(1).reshape(128, 1) + torch.arange(3)
    assert report.kinds == [] and (out == expected).all(), report
    assert report.operations == {"barrier_sync": 12}
    for threads, kind, words in (
        (128, "missed barrier", "threads 64-127: at barrier_sync 2"),
        (48, "bad barrier", "multiple of 32"),
    ):
        report = emulator.run(
            "named_barriers", inputs=inputs, outputs={"out": out}, sizes=(threads,), threads=128, shared_bytes=512
        )
        assert report.kinds == [kind] and words in str(report), report
    report = emulator.run(
        "named_barriers", inputs=inputs, outputs={"out": out}, sizes=(32,), threads=128, shared_bytes=512
    )
    assert "race" in report.kinds, report  # two barriers of one warp each where two warps exchange


def test_lanes_at_two_instructions_are_named(emulator):
    report = emulator.run("diverging", outputs={"out": torch.zeros(32, dtype=torch.int32)})
    assert report.kinds == ["divergence"] and "a vote" in str(report) and "a shuffle" in str(report), report


# ---- global memory ---------------------------------------------------------------------------------------------------


def test_global_accesses_stay_within_registered_tensors(emulator):
    def copy(n, shift=0, *, source=None, name="copy", target=None):
        source = numbers(64) if source is None else source
        target = torch.zeros(64, dtype=torch.int32) if target is None else target
        return emulator.run(
            name, inputs={"source": source}, outputs={"target": target}, sizes=(n, shift), threads=64
        ), target

    report, target = copy(64)
    assert report.kinds == [] and (target == numbers(64)).all()
    for n, shift, words in ((64, 1, "0 bytes past the end of source"), (64, -1, "4 bytes before the start of source")):
        report, _ = copy(n, shift)
        assert report.kinds == ["out of bounds"] and words in str(report), report
    report, _ = copy(64, target=torch.zeros(60, dtype=torch.int32))
    assert report.kinds == ["out of bounds"] and "writes 4 bytes at 0 bytes past the end of target" in str(report), (
        report
    )
    report, _ = copy(4, 2, name="copy_16")
    assert report.kinds == ["misaligned"] and "source[2], which is no multiple of 16" in str(report), report


def test_the_gap_between_two_rows_of_a_view_is_out_of_bounds(emulator):
    store = numbers(10, 8)
    rows = store[:, :6]
    out = torch.zeros(64, dtype=torch.int32)
    report = emulator.run("copy", inputs={"rows": rows}, outputs={"out": out}, sizes=(6, 0))
    assert report.kinds == [] and (out[:6] == rows[0]).all()
    report = emulator.run("copy", inputs={"rows": rows}, outputs={"out": out}, sizes=(7, 0))
    assert report.kinds == ["out of bounds"] and "a gap between the rows of rows, 24 bytes" in str(report), report
    batch_of_heads = torch.zeros(2, 9, 4, 16, dtype=torch.int32)[:, :5].transpose(1, 2)  # [batch, head, token, dim]
    for shift, inside in ((5 * 64 - 1, True), (5 * 64, False), (9 * 64, True), (9 * 64 + 5 * 64, False)):
        report = emulator.run("copy", inputs={"view": batch_of_heads}, outputs={"out": out}, sizes=(1, shift))
        assert (report.kinds == []) == inside, (shift, report)


def test_a_tensor_that_is_only_read_may_not_be_written(emulator):
    source, target = numbers(64), torch.zeros(64, dtype=torch.int32)
    emulator.register(writable=False, source=source, target=target)
    emulator.module.run_test_kernel("copy", 2, 32, 0, [source.data_ptr(), target.data_ptr(), 0, 0], [64, 0, 0, 0])
    report = emulator.report()
    assert report.kinds == ["read-only"] and "target[0]" in str(report), report


def test_atomic_additions_of_all_threads_arrive(emulator):
    values = torch.arange(256, dtype=torch.float32)
    for host_threads in (1, 2):
        emulator.configure(host_threads=host_threads)
        out = torch.zeros(3)
        report = emulator.run("add", inputs={"in": values}, outputs={"out": out}, sizes=(3,), grid=4, threads=64)
        assert report.kinds == [] and torch.equal(out, torch.stack([values[i::3].sum() for i in range(3)]))


# ---- launches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"threads": 33}, "multiple of 32"),
        ({"threads": 2048}, "outside 1..1024"),
        ({"grid": 0}, "0 blocks, outside"),
        ({"shared_bytes": 300_000}, "bytes of shared memory, outside"),
    ],
    ids=str,
)
def test_a_launch_that_no_gpu_would_take_is_refused(emulator, launch, words):
    with pytest.raises(ValueError, match=words):
        emulator.run("copy", outputs={"out": torch.zeros(1)}, **launch)


# ---- blocks ----------------------------------------------------------------------------------------------------------


def run_in_place(emulator, kernel, first, second, *, fresh=False, grid=2, sizes=(64, 0)):
    """A kernel whose two tensors may be one and the same."""
    tensors = {"both": first} if first is second else {"first": first, "second": second}
    emulator.register(writable=True, fresh=fresh, **tensors)
    addresses = [first.data_ptr(), second.data_ptr(), 0, 0]
    emulator.module.run_test_kernel(kernel, grid, 32, 0, addresses, [*sizes, 0, 0])
    return emulator.report()


@pytest.mark.parametrize("host_threads", [1, 2])
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_what_one_block_writes_no_other_may_touch(emulator, backwards, host_threads):
    """Blocks run one after another here, so only the watch can tell."""
    emulator.configure(backwards=backwards, host_threads=host_threads)
    report = run_in_place(
        emulator, "copy", *[numbers(80)] * 2, sizes=(64, 1)
    )  # x[i] = x[i + 1]: one block's last, other's first
    assert report.kinds == ["race between blocks"] and "both[32]" in str(report), report
    emulator.clear()
    emulator.configure(backwards=backwards, host_threads=host_threads)
    report = run_in_place(emulator, "copy", *[numbers(80)] * 2, sizes=(64, 0))  # each its own
    assert report.kinds == [], report
    emulator.clear()
    values = torch.ones(64)
    report = run_in_place(
        emulator, "add", values, values, sizes=(1, 0)
    )  # all add into [0], which one thread also reads
    assert "race between blocks" in report.kinds and "both[0]" in str(report), report


def test_memory_that_nothing_has_written_may_not_be_read(emulator):
    report = run_in_place(emulator, "copy", numbers(64), numbers(64), fresh=True)
    assert report.kinds == ["unwritten"] and "first[0], where nothing has been written yet" in str(report), report
    emulator.clear()
    out = numbers(64)
    source = numbers(64)
    emulator.register(writable=False, source=source)
    emulator.register(writable=True, fresh=True, out=out.reshape(8, 8))
    emulator.module.run_test_kernel("copy", 2, 32, 0, [source.data_ptr(), out.data_ptr(), 0, 0], [51, 0, 0, 0])
    assert emulator.module.first_unwritten("out") == "[6, 3]"
    assert emulator.report().kinds == []
    emulator.module.run_test_kernel("add", 2, 32, 0, [source.data_ptr(), out.data_ptr(), 0, 0], [64, 0, 0, 0])
    assert emulator.report().kinds == ["unwritten"]
