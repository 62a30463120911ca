"""ShmLink when one end is late, closes, is interrupted, sleeps or dies: in this process, then in two.

Released slots are poisoned and epochs begin just before they wrap, as in test_links_shm.py.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from shm_links import Pair, expect_slices, make_spec, meeting

from tpkernels.links import LinkError, ShmLink, Trouble, shm_missing

pytestmark = pytest.mark.skipif(bool(shm_missing()), reason=f"shared-memory links: {shm_missing()}")


@pytest.fixture
def meet() -> Iterator[Callable[..., Pair]]:
    with meeting() as make:
        yield make


def test_a_late_peer_is_reported_with_all_there_is_to_know(meet: Callable[..., Pair]) -> None:
    pair = _, receiver = meet(make_spec(), timeout_s=0.2)
    key = expect_slices(pair)[0]
    with pytest.raises(LinkError) as caught:
        receiver.take(key)
    assert str(caught.value) == (
        "link 0->1 (activations): rank 0 is alive but did not come: waited 0.2 s for stage 1, micro 0, slice 0 "
        "(slot 0, tile 0, wanted epoch 4294967294, saw 4294967293)."
    )
    assert caught.value.lost_peer is None and caught.value.trouble is Trouble.LATE


@pytest.mark.parametrize("asleep", [False, True])
def test_a_peer_that_closes_is_noticed_at_once_but_what_came_is_good(meet: Callable[..., Pair], asleep: bool) -> None:
    pair = sender, receiver = meet(make_spec(), timeout_s=30)
    first, second = expect_slices(pair, 2)
    sender.put(first, torch.ones(2, 70, 3))
    timer = threading.Timer(0.3 if asleep else 0.0, sender.close)
    timer.start()
    if not asleep:
        timer.join()
    assert torch.equal(receiver.take(first), torch.ones(2, 70, 3))
    began = time.monotonic()
    with pytest.raises(LinkError, match="rank 0 has closed the link") as caught:
        receiver.take(second)
    assert caught.value.lost_peer == 0 and time.monotonic() - began < 1.0
    assert caught.value.trouble is Trouble.CLOSED
    timer.join()
    with pytest.raises(LinkError, match="this end was closed"):
        sender.put(second, torch.ones(2, 70, 3))


def test_ctrl_c_ends_a_wait(meet: Callable[..., Pair]) -> None:
    import _thread

    pair = _, receiver = meet(make_spec(), timeout_s=30)
    key = expect_slices(pair)[0]
    timer = threading.Timer(0.2, _thread.interrupt_main)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has it ignored
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            receiver.take(key)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("holds_interpreter", [False, True])
def test_a_peer_that_takes_long_is_not_called_dead_even_forked_beside_open_links(
    holds_interpreter: bool, meet: Callable[..., Pair]
) -> None:
    from tpkernels.links.segment import call, fetch
    from tpkernels.links.shm import offer_segment

    meet(make_spec())  # this process has a heartbeat, whose thread the child lacks
    spec, offer = make_spec(), offer_segment(make_spec(), 7)
    key, *_ = spec.slot_of
    child = os.fork()
    if child == 0:
        link = ShmLink(spec, fetch(call(offer.address), 10), 7, sender=True)
        link.expect([(key, spec.slot_shape)])
        sleep = ctypes.PyDLL(None).usleep if holds_interpreter else ctypes.CDLL(None).usleep
        sleep(1_500_000)
        link.put(key, torch.full(spec.slot_shape, 3.0))
        time.sleep(60)
    try:
        link = ShmLink(spec, offer.accept(60), 7, sender=False, silence_s=0.5, timeout_s=60.0)
        link.expect([(key, spec.slot_shape)])
        assert bool((link.take(key) == 3).all())
        link.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


CLOSED = "has closed the link"
# Who left something out may be the first whose time is up, and then it closes.
STATE = {"kill": "is gone", "stop": "stands still", "drop": f"(is alive but did not come|{CLOSED})", "raise": CLOSED}


@pytest.mark.timeout(150)
def test_whatever_ends_one_process_at_whichever_action_the_other_leaves_and_nothing_stays() -> None:
    """Three times per fault, side and action; `links/faults.py` reports what the survivor saw."""
    faults = Path(__file__).parent / "links" / "faults.py"
    before = _left_behind()
    done = subprocess.run([sys.executable, str(faults), "3"], capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * (3 * (10 + 7) + 4 + 1), done.stdout
    for line in lines:
        fault, victim, _, tile, seconds, message = line.split(" | ")
        missing = tile if victim == "sender" else "0"  # tiles before it came; a credit is one for all tiles
        assert re.search(
            rf"rank {('sender', 'receiver').index(victim)} {STATE[fault]}.*: waited .* for stage 1, micro 0, slice \d+ "
            rf"\(slot \d, tile {missing}, wanted epoch \d+, saw \d+\)",
            message,
        ), line
        assert float(seconds) < 10.0, line
    assert _left_behind() == before


def _left_behind() -> set[str]:
    """Files in shared memory; sockets have names in no file system, and the memory itself has none at all."""
    return {name for name in os.listdir("/dev/shm") if "terapipe" in name}
