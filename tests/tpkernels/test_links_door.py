"""Closing an end of a link while a call of another thread is inside it: that call ends with one clear error, or as it
would have, the close waits for it, and nothing is left. Every entry point, shm and peer within this process, dist in
two of its own.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tpkernels.links import DistLink, Key, LinkError, LinkSpec, ShmLink, door, shm, shm_missing

CPU = torch.device("cpu")
KEYS: list[Key] = [(1, 0, piece) for piece in range(6)]
SHAPE = (1, 200, 8)
SOON_S = 5.0  # the machine may be busy; an idle one takes milliseconds

needs_shm = pytest.mark.skipif(bool(shm_missing()), reason=f"shared-memory links: {shm_missing()}")


def _spec(resident: bool = True) -> LinkSpec:
    return LinkSpec(0, 1, "F", torch.float32, CPU, 1, dict.fromkeys(KEYS, 0), SHAPE, resident)


def _pair(spec: LinkSpec) -> tuple[ShmLink, ShmLink]:
    from tpkernels.links import segment
    from tpkernels.links.shm import offer_segment

    offer, accepted = offer_segment(spec, 7), []
    thread = threading.Thread(target=lambda: accepted.append(offer.accept(10)))
    thread.start()
    met = segment.fetch(segment.call(offer.address), 10)
    thread.join()
    ends = ShmLink(spec, met, 7, sender=True), ShmLink(spec, accepted[0], 7, sender=False)
    for end in ends:
        end.expect([(key, SHAPE) for key in KEYS])
    return ends


def _close(*links: ShmLink) -> None:
    for link in links:
        link.close()


class _Call(threading.Thread):
    """Runs something in a thread and keeps what it raised."""

    def __init__(self, body: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._body = body
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._body()
        except BaseException as error:
            self.error = error


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The test adds no descriptors, threads or mappings of links' memory to this process; others may end meanwhile."""

    def count() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps.count("memfd:terapipe-link")

    def added() -> list[int]:
        return [max(0, now - then) for now, then in zip(count(), before, strict=True)]

    before = count()
    yield
    if any(added()):
        gc.collect()  # takes longer than most of these tests
    assert added() == [0, 0, 0]


ONES = torch.ones(SHAPE)
CALLS: dict[str, Callable[[Any, Key], Any]] = {
    "put": lambda link, key: link.put(key, ONES),
    "put strided": lambda link, key: link.put(key, ONES.mT.contiguous().mT),
    "reserve": lambda link, key: link.reserve(key),
    "put reserved": lambda link, key: link.put(key, link.reserve(key)),
    "put_sum": lambda link, key: link.put_sum(key, ONES, ONES),
    "put_sum unfused": lambda link, key: link.put(key, ONES.mT.contiguous().mT, ONES),
    "take": lambda link, key: link.take(key),
    "take_norm": lambda link, key: link.take_norm(key, ONES[0, 0], eps=1e-5, rms=True),
}
SENDING = [name for name in CALLS if not name.startswith("take")]


@needs_shm
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("asleep", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_a_wait_ends_when_another_thread_closes(call: str, asleep: bool) -> None:
    sender, receiver = _pair(_spec())
    end = sender if call in SENDING else receiver
    due = 0
    if call in SENDING:
        sender.put(KEYS[0], ONES)  # nobody takes it: the one slot is full
        due = 1
    waiting = _Call(lambda: CALLS[call](end, KEYS[due]))
    time.sleep(0.05 if asleep else 0.0)
    began = time.monotonic()
    end.close()
    assert time.monotonic() - began < SOON_S
    waiting.join(SOON_S)
    assert not waiting.is_alive()
    assert isinstance(waiting.error, LinkError)
    assert str(waiting.error) == (
        f"link 0->1 (activations): this end was closed, micro 0, slice {due} cannot go over it."
    )
    for again in CALLS:
        with pytest.raises(LinkError, match="this end was closed"):
            CALLS[again](end, KEYS[due])
    for other in (end.finish, lambda: end.expect([]), lambda: end.verify(KEYS[0]), lambda: end.release(KEYS[0])):
        with pytest.raises(LinkError, match="this end was closed"):
            other()
    _close(sender, receiver)


ACTIONS = {
    "put": ("reserve", "claim", "write", "post"),
    "put_sum": ("reserve", "claim", "write", "post"),
    "take": ("take", "wait", "read", "taken"),
    "take_norm": ("take", "wait", "read", "taken"),
    "release": ("verify", "release", "released"),
}


@needs_shm
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("call", "action"), [(call, action) for call in ACTIONS for action in ACTIONS[call]])
def test_a_close_waits_for_a_call_that_does_not_wait_and_frees_nothing_beneath_it(call: str, action: str) -> None:
    sender, receiver = _pair(_spec())
    end = sender if call.startswith("put") else receiver
    if end is receiver:
        sender.put(KEYS[0], ONES)
    if call == "release":
        receiver.take(KEYS[0])
    there, go_on = threading.Event(), threading.Event()

    def stand_still(at: str, tile: int) -> bool:
        if at == action:
            there.set()
            assert go_on.wait(SOON_S)
        return False

    end._ring.watch(stand_still)
    body = CALLS.get(call, lambda link, key: link.release(key))
    inside = _Call(lambda: body(end, KEYS[0]))
    assert there.wait(SOON_S)
    with pytest.raises((RuntimeError, LinkError), match="one thread at a time"):
        end.expect([])
    closing = _Call(end.close)
    time.sleep(0.02)
    assert closing.is_alive() and inside.is_alive()
    assert end._segment is not None  # the call that is inside may still ask whether the peer lives
    go_on.set()
    inside.join(SOON_S)
    closing.join(SOON_S)
    # Nothing had to be waited for, so it ended as it would have; the plan is over for whatever comes after it.
    assert inside.error is None or "this end was closed" in str(inside.error)
    assert not closing.is_alive() and closing.error is None and end._segment is None
    _close(sender, receiver)


@needs_shm
@pytest.mark.usefixtures("nothing_left")
def test_a_call_that_outstays_the_close_frees_the_link_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shm, "CLOSE_S", 0.1)
    sender, receiver = _pair(_spec())
    go_on = threading.Event()
    sender._ring.watch(lambda action, tile: action == "write" and not go_on.wait(SOON_S))
    inside = _Call(lambda: sender.put(KEYS[0], ONES))
    time.sleep(0.05)
    with caplog.at_level(logging.WARNING, "tpkernels"):
        sender.close()
    assert "link 0->1 (activations): closed, but a call of another thread is still inside" in caplog.text
    with pytest.raises(LinkError, match="rank 0 has closed the link"):  # the peer need not wait for that thread
        receiver.take(KEYS[0])
    assert sender._segment is not None
    go_on.set()
    inside.join(SOON_S)
    assert sender._segment is None
    receiver.close()


@needs_shm
@pytest.mark.usefixtures("nothing_left")
def test_a_signals_handler_may_close_the_link_that_its_thread_waits_in() -> None:
    sender, receiver = _pair(_spec())
    found = signal.signal(signal.SIGUSR1, lambda *_: receiver.close())
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(LinkError, match="this end was closed, micro 0, slice 0 cannot go over it"):
            receiver.take(KEYS[0])
    finally:
        signal.signal(signal.SIGUSR1, found)
    assert receiver._segment is None
    timer.join()
    sender.close()


@needs_shm
@pytest.mark.usefixtures("nothing_left")
def test_a_close_at_any_moment_ends_both_threads() -> None:
    """Two threads hand slices on, fused and not, as fast as they can, and a third closes either end."""
    chance = random.Random(1)
    for round_ in range(60):
        sender, receiver = _pair(_spec(resident=round_ % 3 > 0))

        def send(link: ShmLink = sender) -> None:
            while True:
                link.expect([(key, SHAPE) for key in KEYS])
                for number, key in enumerate(KEYS):
                    CALLS[SENDING[number % len(SENDING)]](link, key)
                    if SENDING[number % len(SENDING)] == "reserve":
                        link.put(key, link.reserve(key))

        def receive(link: ShmLink = receiver) -> None:
            while True:
                link.expect([(key, SHAPE) for key in KEYS])
                for number, key in enumerate(KEYS):
                    CALLS["take" if number % 2 else "take_norm"](link, key)
                    link.release(key)

        threads = _Call(send), _Call(receive)
        time.sleep(chance.random() * 0.01)
        (sender, receiver)[round_ % 2].close()
        for thread in threads:
            thread.join(SOON_S)
            assert not thread.is_alive()
            assert isinstance(thread.error, LinkError), thread.error
            assert "this end was closed" in str(thread.error) or "has closed the link" in str(thread.error)
        _close(sender, receiver)


# ---- dist ------------------------------------------------------------------------------------------------------------

DIST_CALLS = ("take", "put", "finish")


def _one_of_two(rank: int, store: str, call: str, results: Any) -> None:
    """Rank 1 (0 for puts) waits in a call, its own other thread closes; the peer then waits and hears of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    link = DistLink(_spec(), dist.new_group([0, 1]))
    link.measure()
    closer = int(call == "take")
    large = torch.ones(SHAPE).expand(1, 200, 8).contiguous()
    transfers = [(key, SHAPE) for key in KEYS]
    dist.barrier()
    if rank != closer:
        time.sleep(0.4)  # posts no receive, or puts nothing, until the other has closed
    began = time.monotonic()
    error: BaseException | None = None
    try:
        link.expect(transfers)
        if rank == closer:
            threading.Timer(0.2, link.close).start()
        if rank == 1:
            link.take(KEYS[0])
        elif call == "put" or rank != closer:
            for key in KEYS:
                link.put(key, large)
        else:
            link.put(KEYS[0], large)
            link.finish()
    except BaseException as raised:
        error = raised
    seconds = time.monotonic() - began
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    link.close()
    results.put((rank, type(error).__name__, str(error), seconds, link._group is None, names))
    results.close()
    results.join_thread()
    os._exit(0)


@pytest.mark.timeout(60)
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("call", DIST_CALLS)
def test_a_wait_in_gloo_ends_too_and_the_peer_hears_of_it(call: str, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    ranks = [
        fork.Process(target=_one_of_two, args=(rank, str(tmp_path / "store"), call, results), daemon=True)
        for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    heard = dict((rank, rest) for rank, *rest in (results.get(timeout=50) for _ in ranks))
    for process in ranks:
        process.join(10)
        assert process.exitcode == 0
    closer = int(call == "take")
    kind, message, seconds, freed, _ = heard[closer]
    what = {"take": "micro 0, slice 0 cannot", "put": "micro 0, slice 1 cannot", "finish": "nothing can"}[call]
    assert (kind, message) == ("LinkError", f"link 0->1 (activations): this end was closed, {what} go over it.")
    assert seconds < SOON_S and freed
    kind, message, seconds, freed, _ = heard[1 - closer]
    assert kind == "LinkError" and message.startswith(f"link 0->1 (activations): rank {closer} is gone"), message
    assert seconds < SOON_S and freed


# ---- the door alone --------------------------------------------------------------------------------------------------


class _Link:
    """Waits in `call` until told to end."""

    def __init__(self) -> None:
        self.ended, self.freed = threading.Event(), 0
        self._door = door.Door(_spec(), self.ended.set, self._free)

    def _free(self) -> None:
        self.freed += 1

    @door.inside
    def call(self) -> bool:
        return self.nested()

    @door.inside
    def nested(self) -> bool:
        ended = self.ended.wait(SOON_S)
        assert not self.freed
        return ended

    @door.inside
    def close_within(self) -> int:
        self._door.close()
        return self.freed


def test_the_last_to_leave_frees_once() -> None:
    link = _Link()
    inside = _Call(link.call)
    time.sleep(0.05)
    with pytest.raises(RuntimeError, match="used by one thread at a time"):
        link.call()
    link._door.close()
    assert link.freed == 1 and link.ended.is_set()
    inside.join(SOON_S)
    assert inside.error is None
    link._door.close()
    with pytest.raises(LinkError, match="this end was closed, nothing can go over it"):
        link.call()
    assert link.freed == 1
    link = _Link()
    assert link.close_within() == 0 and link.freed == 1  # from within: at the call's end
    link = _Link()
    link._door.close()  # nobody inside: no wait to end
    assert link.freed == 1 and not link.ended.is_set()


def test_a_closed_peer_link_ends_its_kernels_waits(usable_triton: None) -> None:
    from test_links_peer import make_end, make_offer, make_spec

    if torch.cuda.is_available():
        pytest.skip("with a GPU triton compiles, and CPU tensors have no kernels")
    from tpkernels.links import segment

    spec = make_spec(1)
    offer, accepted = make_offer(spec), []
    thread = threading.Thread(target=lambda: accepted.append(offer.accept(10)))
    thread.start()
    met = segment.fetch(segment.call(offer.address), 10)
    thread.join()
    sender = make_end(spec, met, sender=True, timeout_s=1e6)
    receiver = make_end(spec, accepted[0], sender=False, timeout_s=1e6)
    x = torch.ones(spec.slot_shape)
    for link in (sender, receiver):
        link.expect([(key, spec.slot_shape) for key in KEYS])
    sender.put(KEYS[0], x)
    receiver.take(KEYS[0])
    calls: dict[Any, Callable[[], Any]] = {
        sender: lambda: sender.put(KEYS[1], x),  # the one slot is held
        receiver: lambda: receiver.take_norm(KEYS[1], x[0, 0], eps=1e-5, rms=True),  # and nothing comes
    }
    for link in calls:
        link._watch._closing.set()  # that the peer has closed is not what ends a wait here
    for link, call in calls.items():  # one after the other: the interpreter has room for one thread
        waiting = _Call(call)
        time.sleep(0.5)
        link.close()
        waiting.join(SOON_S)
        assert isinstance(waiting.error, LinkError) and "this end was closed, micro 0, slice 1" in str(waiting.error)
        assert link._memory.segment.socket.fileno() == -1
        with pytest.raises(LinkError, match="this end was closed"):
            link.take(KEYS[0])
