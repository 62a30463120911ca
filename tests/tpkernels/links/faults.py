"""Two processes over one link, one of which fails at some action of its own: `python faults.py TIMES`.

Actions are those that `Ring.watch` sees: of the sender reserve, claim, and write and post of every tile, of the
receiver take, wait, read, taken, verify, release, released. At each of them the victim is killed, stopped or raises; a
post or a release is also left out, while its end goes on. For each such case, TIMES times, prints "fault | victim |
action | tile | seconds until the survivor had left | its error". The processes are forked from this one before it has
opened any link, so starting costs nothing, a few cases at a time, since most of them sleep; it also watches that no
descriptor and no process stays.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tpkernels.links import LinkError, LinkSpec, ShmLink

TRANSFERS, TILES, TOGETHER = 50, 4, 12
SHAPE = (1, 64 * (TILES - 1) + 8, 4)
SPEC = LinkSpec(
    0, 1, "F", torch.float32, torch.device("cpu"), 2, {(1, 0, piece): piece % 2 for piece in range(TRANSFERS)}, SHAPE
)
MEET_S = 200  # not what is tested
# A beat may still come while the survivor waits, so that silence begins later than the wait.
OPTIONS: dict[str, Any] = {"silence_s": 0.6, "timeout_s": 1.5, "poison": True}
Place = tuple[str, int]
"""An action and its tile."""

TILED = [(action, tile) for tile in range(TILES) for action in ("write", "post")]
PLACES: tuple[list[Place], list[Place]] = (
    [("reserve", 0), ("claim", 0), *TILED],
    [(action, 0) for action in ("take", "wait", "read", "taken", "verify", "release", "released")],
)
LEFT_OUT = ("post", "release")


@dataclass
class Case:
    """One run: what happens to whom, at which place of which transfer."""

    fault: str
    victim: int
    place: Place
    transfer: int
    children: list[int] = field(default_factory=list)
    report: int = -1
    began: float = 0.0


def open_end(sender: bool, letters: tuple[int, int]) -> ShmLink:
    """The receiver tells the sender its address through a pipe."""
    from tpkernels.links.segment import call, fetch
    from tpkernels.links.shm import offer_segment

    if sender:
        return ShmLink(SPEC, fetch(call(os.read(letters[0], 100).decode()), MEET_S), 7, sender=True, **OPTIONS)
    offer = offer_segment(SPEC, 7, 2**32 - 5)
    os.write(letters[1], offer.address.encode())
    return ShmLink(SPEC, offer.accept(MEET_S), 7, sender=False, **OPTIONS)


def run(link: ShmLink, sender: bool) -> None:
    """All transfers, with the fused ops."""
    link.expect([(key, SHAPE) for key in SPEC.slot_of])
    weight = torch.ones(SHAPE[-1])
    for number, key in enumerate(SPEC.slot_of):
        if sender:
            link.put_sum(key, torch.full(SHAPE, float(number)), torch.ones(SHAPE))
        else:
            values = link.take_norm(key, weight, eps=1e-5, rms=True)
            assert values.total.eq(number + 1).all() and (values.out - 1).abs().max() < 1e-3
            link.verify(key)
            link.release(key)


def breaker(case: Case) -> Callable[[str, int], bool]:
    """What the victim's ring calls before each action."""
    transfer = -1

    def at(action: str, tile: int) -> bool:
        nonlocal transfer
        transfer += action in ("reserve", "take")
        if transfer != case.transfer or (action, tile) != case.place:
            return False
        if case.fault == "raise":
            raise ArithmeticError("broken on purpose")
        if case.fault == "drop":
            return True
        os.kill(os.getpid(), signal.SIGKILL if case.fault == "kill" else signal.SIGSTOP)
        return False

    return at


def process(case: Case, rank: int, letters: tuple[int, int], report: int) -> None:
    status = 1
    try:
        link = open_end(rank == 0, letters)
        if rank == case.victim:
            link._ring.watch(breaker(case))
        try:
            run(link, rank == 0)
        finally:
            link.close()
    except LinkError as error:
        if rank != case.victim:
            os.write(report, f"{time.monotonic()} {error}".encode())
        status = 0
    except ArithmeticError:
        status = 3
    except Exception as error:
        os.write(report, f"{time.monotonic()} {error!r}".encode())
    finally:
        os._exit(status)


def start(case: Case) -> None:
    letters, report = os.pipe(), os.pipe()
    case.began, case.report = time.monotonic(), report[0]
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            process(case, rank, letters, report[1])
        case.children.append(child)
    for descriptor in (*letters, report[1]):
        os.close(descriptor)
    os.set_blocking(report[0], False)


def finished(case: Case) -> bool:
    """Whether the survivor has left; then the victim is ended, and the case reported."""
    if os.waitpid(case.children[1 - case.victim], os.WNOHANG)[0] == 0:
        return False
    os.kill(case.children[case.victim], signal.SIGKILL)
    os.waitpid(case.children[case.victim], 0)
    try:
        said = (os.read(case.report, 2000).decode() or "inf").partition(" ")
    except BlockingIOError:
        said = ("inf", "", "")
    os.close(case.report)
    victim, (action, tile) = ("sender", "receiver")[case.victim], case.place
    print(case.fault, victim, action, tile, f"{float(said[0]) - case.began:.2f}", said[2], sep=" | ", flush=True)
    return True


def main() -> None:
    torch.set_num_threads(1)
    chance = random.Random(1)
    before = len(os.listdir("/proc/self/fd"))
    waiting = [
        Case(fault, victim, place, chance.randrange(1, TRANSFERS - 5))
        for fault in ("kill", "stop", "raise", "drop")
        for victim in (0, 1)
        for place in PLACES[victim]
        for _ in range(int(sys.argv[1]))
        if fault != "drop" or place[0] in LEFT_OUT
    ]
    running: list[Case] = []
    while waiting or running:
        while waiting and len(running) < TOGETHER:
            running.append(waiting.pop(0))
            start(running[-1])
        running = [case for case in running if not finished(case)]
        time.sleep(0.002)
    after = len(os.listdir("/proc/self/fd"))
    assert before == after, f"{after - before} descriptors were left open"
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return
    raise AssertionError("a process was left behind")


if __name__ == "__main__":
    main()
