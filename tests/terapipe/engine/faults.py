"""A pipeline of two ranks over shared memory, one of which fails at some moment of a step: `python faults.py --raise 1
--kill 10` and so on, options below.

Moments are counted on the rank that fails (the victim), in its second step: every layer's forward and backward, and
everything its ends of the links do (`Ring.watch`: of a sender reserve, claim, write, post, of a receiver take, wait,
read, taken, verify, release, released). There it raises, is killed, is stopped, or leaves a post or release out. For
each case prints a line of JSON, `Outcome`. The processes are forked from this one, which has imported everything, but
started nothing.
"""

from __future__ import annotations

import argparse
import collections
import copy
import gc
import itertools
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_cases import Case

from terapipe.engine import Pipeline, PipelineError
from tpkernels.links import ShmLink

LAYOUT = Case("llama", 2, (5, 4), 1, 1, "seq_1f1b", dtype="fp32", blocks=2)
SILENCE_S, LATE_S = 1.0, 2.0
FAULTS = ("raise", "kill", "stop", "drop")
LEFT_OUT = ("post", "release")
PER_START = 20  # exceptions in the same two processes, one after the other


@dataclass
class Outcome:
    """One case. seconds: from the fault to the last report of a rank that was not ended; heard, cause: by rank, the
    error of the step and what it came from; left: descriptors, mappings and threads of links that a rank still has."""

    fault: str
    victim: int
    number: int
    moment: str
    seconds: float = -1.0
    heard: dict[str, str] = field(default_factory=dict)
    cause: dict[str, str] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)
    moments: dict[str, list[str]] = field(default_factory=dict)  # of a rank whose step ended well

    @property
    def place(self) -> list[Any]:
        return [self.fault, self.victim, self.number]

    def learn(self, said: list[dict[str, Any]]) -> None:
        """What the two ranks said of this case."""
        failed_at = [each["failed_at"] for each in said if "failed_at" in each]
        reported = [each["reported_at"] for each in said if "reported_at" in each]
        if failed_at and reported:
            self.seconds = round(max(reported) - failed_at[0], 3)
        for each in said:
            self.moment = each.get("moment", self.moment)
            for kind in ("heard", "cause", "left", "moments"):
                if kind in each:
                    getattr(self, kind)[str(each["rank"])] = each[kind]


class Moments:
    """Counts a rank's moments of a step and names them; at number `at` calls `fail`; true leaves a post or release
    out."""

    def __init__(self, pipeline: Pipeline, at: int, fail: Callable[[str], bool]) -> None:
        self.names: list[str] = []
        self._at, self._fail = at, fail
        for name, layer in pipeline.layers().items():
            layer.register_forward_pre_hook(lambda *_, name=name: self._pass(f"forward {name}"))
            layer.register_forward_hook(lambda _, __, output, name=name: self._backward(output, name))
        for planned, link in pipeline._wiring.links.items():
            ring: Any = link._ring  # type: ignore[attr-defined]
            ring.watch(lambda action, tile, way=planned.direction: self._next(f"{way} {action} {tile}"))

    def _backward(self, output: torch.Tensor, name: str) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self._pass(f"backward {name}"))

    def _pass(self, name: str) -> None:
        self._next(name)

    def _next(self, name: str) -> bool:
        self.names.append(name)
        return len(self.names) - 1 == self._at and self._fail(name)


def of_links() -> list[str]:
    """What this process holds for links."""
    unix = {line.split()[6] for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]}
    found = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:terapipe" in line]
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # the listing's own
            continue
        if "pidfd" in target or "memfd" in target or (target.startswith("socket:[") and target[8:-1] in unix):
            found.append(target.split(":")[0])
    return found + [thread.name for thread in threading.enumerate() if "terapipe" in thread.name]


def one_case(outcome: Outcome, rank: int, say: Callable[[dict[str, Any]], None]) -> None:
    """One case on one rank."""
    said: dict[str, Any] = {"rank": rank, "case": outcome.place}
    late = LATE_S if outcome.fault == "drop" else 60
    pipeline = LAYOUT.pipeline(links="shm", link_timeout=timedelta(seconds=late))
    pipeline.step(LAYOUT.batch(0))

    def fail(moment: str) -> bool:
        said["moment"], said["failed_at"] = moment, time.monotonic()
        if outcome.fault == "raise":
            raise ArithmeticError("broken on purpose")
        if outcome.fault != "drop":
            say(said)
            os.kill(os.getpid(), signal.SIGKILL if outcome.fault == "kill" else signal.SIGSTOP)
        return outcome.fault == "drop"

    moments = Moments(pipeline, outcome.number if rank == outcome.victim else -1, fail)
    try:
        pipeline.step(LAYOUT.batch(1))
        said["moments"] = moments.names
    except PipelineError as error:
        said["heard"], said["cause"], said["reported_at"] = str(error), str(error.__cause__), time.monotonic()
    pipeline.close()
    del pipeline, moments, fail
    gc.collect()
    said["left"] = of_links()
    say(said)


class Running:
    """Two processes that run cases; more than one if both live on after each."""

    numbers = itertools.count()

    def __init__(self, outcomes: list[Outcome], folder: str) -> None:
        self.outcomes, self._meeting = outcomes, f"{folder}/{next(self.numbers)}"
        self.waiting: dict[int, int] = {}
        self._pipe, write = os.pipe()
        for rank in (0, 1):
            child = os.fork()
            if child == 0:
                self._child(rank, write)
            self.waiting[rank] = child
        os.close(write)

    def _child(self, rank: int, write: int) -> None:
        def say(what: dict[str, Any]) -> None:
            os.write(write, json.dumps(what).encode() + b"\n")  # less than a pipe takes in one piece

        status, outcome = 1, self.outcomes[0]
        try:
            torch.set_num_threads(1)
            store = dist.FileStore(self._meeting, 2)  # a TCPStore's thread might hold a lock of libc's while we fork
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            ShmLink.__init__.__kwdefaults__["silence_s"] = SILENCE_S  # type: ignore[attr-defined]
            for outcome in self.outcomes:
                one_case(outcome, rank, say)
            status = 0
        except BaseException as error:
            say({"rank": rank, "case": outcome.place, "heard": f"not as meant: {error!r}"})
        finally:
            os._exit(status)

    def finished(self) -> bool:
        """Once every rank that can end has; a stopped one is then ended."""
        for rank, child in list(self.waiting.items()):
            if os.waitpid(child, os.WNOHANG)[0]:
                del self.waiting[rank]
        last = self.outcomes[-1]
        if self.waiting and not (last.fault == "stop" and list(self.waiting) == [last.victim]):
            return False
        for child in self.waiting.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        with open(self._pipe) as lines:
            said = [json.loads(line) for line in lines]
        for outcome in self.outcomes:
            outcome.learn([each for each in said if each["case"] == outcome.place])
        return True


def run_all(cases: list[list[Outcome]], together: int, folder: str) -> None:
    waiting, running = list(cases), []
    while waiting or running:
        while waiting and len(running) < together:
            running.append(Running(waiting.pop(0), folder))
        for each in [each for each in running if each.finished()]:
            running.remove(each)
            for outcome in each.outcomes:
                if outcome.number >= 0:
                    print(json.dumps(asdict(outcome)), flush=True)
        time.sleep(0.005)


def read() -> None:
    """Of outcomes on standard input: how many of each kind, the slowest, and those that are not as they should be."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # also when who writes them is cut short
    counts: collections.Counter[tuple[str, int]] = collections.Counter()
    slowest, odd = 0.0, 0
    for line in sys.stdin:
        outcome = json.loads(line)
        counts[outcome["fault"], outcome["victim"]] += 1
        slowest = max(slowest, outcome["seconds"])
        ranks = {0, 1} - ({outcome["victim"]} if outcome["fault"] in ("kill", "stop") else set())
        told = {int(rank) for rank, message in outcome["heard"].items() if " failed " in message}
        if outcome["seconds"] < 0 or told != ranks or any(outcome["left"].values()):
            odd += 1
            print(line, end="")
    for (fault, victim), count in sorted(counts.items()):
        print(f"{count:6} {fault} of rank {victim}")
    print(
        f"slowest: {slowest:.2f} s; without its error on every rank that lives, or with something left: {odd}",
        flush=True,
    )
    sys.exit(odd > 0 or not counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--together", type=int, default=len(os.sched_getaffinity(0)))
    for fault in FAULTS:
        parser.add_argument(f"--{fault}", type=int, default=0, help="at every n-th moment; 0: at none")
    parser.add_argument("--read", action="store_true", help="sum up outcomes from standard input instead")
    chosen = vars(parser.parse_args())
    if chosen["read"]:
        return read()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        inject(chosen, folder)


def inject(chosen: dict[str, Any], folder: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sound = Outcome("none", 0, -1, "")
    run_all([[sound]], 1, folder)
    assert not sound.heard, sound.heard
    cases = []
    for fault in FAULTS if chosen["times"] else ():
        places = [(victim, number, name) for victim in (0, 1) for number, name in enumerate(sound.moments[str(victim)])]
        if fault == "drop":
            places = [place for place in places if place[2].split()[1] in LEFT_OUT]
        some = [Outcome(fault, *place) for place in places[:: chosen[fault]]] if chosen[fault] else []
        several = PER_START if fault == "raise" else 1
        for _ in range(chosen["times"]):
            cases += [copy.deepcopy(some[first : first + several]) for first in range(0, len(some), several)]
    run_all(cases, chosen["together"], folder)
    assert len(os.listdir("/proc/self/fd")) == before
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return
    raise AssertionError("a process was left behind")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
