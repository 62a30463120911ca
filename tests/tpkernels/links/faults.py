"""Two processes over one link, one of which fails: `python faults.py TIMES`.

For each fault and victim prints "fault | victim | seconds until the survivor had left | its error". The processes are
forked from this one before it has opened any link, so starting costs nothing; it also watches that no descriptor stays.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import Any

import torch

from tpkernels.links import Key, LinkError, LinkSpec, ShmLink

SHAPE = (1, 200, 4)
SPEC = LinkSpec(
    0, 1, "F", torch.float32, torch.device("cpu"), 2, {(1, 0, piece): piece % 2 for piece in range(50)}, SHAPE
)
OPTIONS: dict[str, Any] = {"silence_s": 0.6, "timeout_s": 1.0, "poison": True}


def open_end(sender: bool, letters: tuple[int, int]) -> ShmLink:
    """The receiver tells the sender its address through a pipe."""
    from tpkernels.links.segment import connect
    from tpkernels.links.shm import offer_segment

    if sender:
        return ShmLink(SPEC, connect(os.read(letters[0], 100).decode(), 10), 7, sender=True, **OPTIONS)
    offer = offer_segment(SPEC, 7, 2**32 - 5)
    os.write(letters[1], offer.address.encode())
    return ShmLink(SPEC, offer.accept(10), 7, sender=False, **OPTIONS)


def run(link: ShmLink, sender: bool, fault: str, at: int) -> None:
    """Transfers 0, 1, ...; at the `at`th this end does what `fault` says ("" for the survivor)."""
    link.expect([(key, SHAPE) for key in SPEC.slot_of])
    for number, key in enumerate(SPEC.slot_of):
        if fault and number == at:
            _fail(link, key, sender, fault)
        elif sender:
            link.put(key, torch.full(SHAPE, float(number)))
        else:
            x = link.take(key)
            assert x.eq(number).all()
            link.release(key)


def _fail(link: ShmLink, key: Key, sender: bool, fault: str) -> None:
    if fault == "raise":
        raise ArithmeticError("broken on purpose")
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    if not sender:  # never releases: the other waits for the credit
        link.take(key)
    time.sleep(60)  # forgot to post, and lives on


def process(sender: bool, letters: tuple[int, int], report: int, fault: str, at: int) -> None:
    status = 1
    try:
        link = open_end(sender, letters)
        try:
            run(link, sender, fault, at)
        finally:
            link.close()
    except LinkError as error:
        os.write(report, f"{time.monotonic()} {error}".encode())
        status = 0
    except ArithmeticError:
        status = 3
    finally:
        os._exit(status)


def once(fault: str, victim: int, at: int) -> None:
    letters, report = os.pipe(), os.pipe()
    children = []
    began = time.monotonic()
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            process(rank == 0, letters, report[1], fault if rank == victim else "", at)
        children.append(child)
    os.waitpid(children[1 - victim], 0)
    os.kill(children[victim], signal.SIGKILL)  # stopped, or asleep after its fault
    os.waitpid(children[victim], 0)
    os.close(report[1])
    said = os.read(report[0], 2000).decode().partition(" ")
    for descriptor in (*letters, report[0]):
        os.close(descriptor)
    print(
        fault, ("sender", "receiver")[victim], f"{float(said[0] or 'inf') - began:.2f}", said[2], sep=" | ", flush=True
    )


def main() -> None:
    torch.set_num_threads(1)
    chance = random.Random(1)
    before = len(os.listdir("/proc/self/fd"))
    for fault in ("kill", "stop", "drop", "raise"):
        for victim in (0, 1):
            for _ in range(int(sys.argv[1])):
                once(fault, victim, chance.randrange(1, 40))
    after = len(os.listdir("/proc/self/fd"))
    assert before == after, f"{after - before} descriptors were left open"


if __name__ == "__main__":
    main()
