"""The emulator's watch over order among launches: two kernels that run at once on two devices hand rows on soundly, and
every planted mistake is found, whichever of them comes first.

Kernels are those of csrc/emulator/order_kernels.cpp.
"""

from __future__ import annotations

import time

import pytest
import torch

USES, THREADS = 3, 64
NEAR_WRAP = 2**32 - 2  # epochs wrap within the test


def run(emulator, producer="hand_on", consumer="take_over", *, seed=0, uses=USES, devices=(0, 1), streams=(0, 1)):
    """The report, and what the consumer copied out."""
    emulator.clear()
    slot = torch.full((THREADS,), -1, dtype=torch.int32)
    words = torch.full((2, 32), NEAR_WRAP - 2**32, dtype=torch.int32)
    out = torch.full((uses, THREADS), -1, dtype=torch.int32)
    emulator.module.configure(1, seed % 2 == 1, seed)
    emulator.register(writable=True, shared=True, fresh=True, slot=slot)
    emulator.register(writable=True, shared=True, words=words)
    emulator.register(writable=True, out=out)
    addresses = [slot.data_ptr(), words.data_ptr(), out.data_ptr(), 0]
    with emulator.at_once():
        for name, device, stream in zip((producer, consumer), devices, streams, strict=True):
            emulator.module.run_test_kernel(name, 1, THREADS, 0, addresses, [uses, NEAR_WRAP, 0, 0], device, stream)
    return emulator.report(), out


@pytest.mark.parametrize("seed", range(6))
def test_a_sound_hand_off_runs_at_once_and_nothing_is_found(emulator, seed):
    report, out = run(emulator, seed=seed)
    assert report.kinds == [], report
    expected = 100 * torch.arange(USES)[:, None] + (torch.arange(THREADS) ^ 1)
    assert torch.equal(out, expected.int())
    assert report.blocks == {"hand_on": 1, "take_over": 1}


ALWAYS_FOUND = (
    "hand_on_no_barrier",
    "hand_on_relaxed_post",
    "hand_on_early_post",
    "hand_on_near_post",
    "take_over_no_fence",
    "take_over_near_wait",
    "take_over_no_barrier_after",
    "take_over_early_credit",
)
# A wrong epoch and a credit not waited for order nothing wrongly where the other end happens to be fast or slow enough.
FOUND_IN_SOME_ORDER = ("hand_on_post_of_the_next", "hand_on_no_credit", "take_over_wait_for_the_last")


@pytest.mark.parametrize("name", [*ALWAYS_FOUND, *FOUND_IN_SOME_ORDER])
def test_a_planted_mistake_is_found_whoever_comes_first(emulator, name):
    pair = {"producer": name} if name.startswith("hand_on") else {"consumer": name}
    reports = [run(emulator, seed=seed, **pair)[0] for seed in range(6)]
    found = [report for report in reports if "race between launches" in report.kinds]
    assert len(found) == 6 if name in ALWAYS_FOUND else found, reports
    for text in map(str, found):
        assert "csrc/emulator/order_kernels.cpp:" in text and "unknown line" not in text, text
        assert "nothing that orders the two" in text and "one thread posts with release" in text, text


def test_within_one_device_its_own_scope_is_enough(emulator):
    for pair in ({"producer": "hand_on_near_post"}, {"consumer": "take_over_near_wait"}):
        report, _ = run(emulator, devices=(0, 0), **pair)
        assert report.kinds == [], report


@pytest.mark.parametrize("first", ["hand_on", "take_over"])
def test_two_kernels_of_one_stream_that_wait_for_each_other_are_reported(emulator, first):
    """The sender waits for the credit of its second use, or the receiver for a slice; the other never begins."""
    emulator.module.set_patience(0.05)
    began = time.process_time()
    try:
        pair = ("hand_on", "take_over") if first == "hand_on" else ("take_over", "hand_on")
        report, _ = run(emulator, *pair, devices=(0, 0), streams=(7, 7))
    finally:
        emulator.module.set_patience(5)
    assert time.process_time() - began < 5
    assert report.kinds == ["standstill"], report
    word = "words[1, 0]" if first == "hand_on" else "words[0, 0]"
    text = str(report)
    assert f"{first}, block 0" in text and f"waits for {word}, which stays {NEAR_WRAP}" in text, text
    assert f"behind it in its stream, not begun: {pair[1]}" in text and "order_kernels.cpp:" in text, text


def test_two_streams_that_wait_for_each_other_are_reported_with_both_words(emulator):
    """Two receivers, and nobody sends."""
    emulator.module.set_patience(0.05)
    try:
        report, _ = run(emulator, producer="take_over", consumer="take_over_no_fence")
    finally:
        emulator.module.set_patience(5)
    assert report.kinds == ["standstill"], report
    assert [finding["kernel"] for finding in report.findings] == ["take_over", "take_over_no_fence"], report
    assert all("waits for words[0, 0], which stays" in finding["text"] for finding in report.findings), report
