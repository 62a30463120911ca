"""How the two ends of a shared-memory link come to the same memory; what keeps them apart is told to both and leaves
nothing."""

from __future__ import annotations

import gc
import os
import queue
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shm_links import expect_slices, link_mappings, make_spec

from tpkernels.links import LinkError, ShmLink, agreement, shm, shm_missing

pytestmark = pytest.mark.skipif(bool(shm_missing()), reason=f"shared-memory links: {shm_missing()}")


@pytest.mark.parametrize(
    ("rank", "function", "what"),
    [
        (0, "shm.call", "reach the slots of its peer"),
        (0, "shm.fetch", "map the slots of its peer"),
        (1, "shm.offer_segment", "share its slots"),
        (1, "segment.Offer.accept", "hand over its slots"),
    ],
)
def test_whatever_keeps_two_ends_apart_is_told_to_both_and_nothing_stays(
    rank: int, function: str, what: str, monkeypatch: pytest.MonkeyPatch, letters: Callable[..., Any]
) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("no room")

    gc.collect()  # ends of earlier tests
    before = len(os.listdir("/proc/self/fd")), link_mappings()
    monkeypatch.setattr(f"tpkernels.links.{function}", fail)
    ends = letters(lambda: ShmLink.open(make_spec(), None))  # type: ignore[arg-type]
    assert [str(end) for end in ends] == [
        f"{make_spec()}: the two ends did not come together: rank {rank} cannot {what}: no room"
    ] * 2
    assert all(isinstance(end, LinkError) for end in ends)
    del ends
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), link_mappings()) == before


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Runs something as rank 0 and as rank 1 at once, who may send each other letters; what each returned or raised."""
    me = threading.local()
    boxes: list[queue.Queue[str]] = [queue.Queue(), queue.Queue()]  # by who gets them
    for module in (shm, agreement):
        monkeypatch.setattr(
            module, "dist", SimpleNamespace(get_rank=lambda: me.rank, get_backend=lambda group: "gloo"), raising=True
        )
        monkeypatch.setattr(module, "tell", lambda text, to, group, **_: boxes[to].put(text))
        monkeypatch.setattr(module, "hear", lambda source, group, **_: boxes[me.rank].get(timeout=10))

    def run(body: Callable[[], Any]) -> list[Any]:
        found: list[Any] = [None, None]

        def end(rank: int) -> None:
            me.rank = rank
            try:
                found[rank] = body()
            except Exception as error:
                found[rank] = error.with_traceback(None)
                error.__cause__ = error.__context__ = None

        threads = [threading.Thread(target=end, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
        assert boxes[0].empty() and boxes[1].empty()
        return found

    return run


def test_two_ends_meet_by_letters(letters: Callable[..., list[Any]]) -> None:
    ends = letters(lambda: ShmLink.open(make_spec(), None))  # type: ignore[arg-type]
    keys = expect_slices((ends[0], ends[1]), 1)
    ends[0].put(keys[0], torch.ones(2, 70, 3))
    assert bool((ends[1].take(keys[0]) == 1).all())
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    ("limit", "room", "said"),
    [
        (resource.RLIMIT_FSIZE, 2**20, r"File too large while making 67108864 bytes \(64\.0 MiB\) of shared memory"),
        (
            resource.RLIMIT_AS,
            2**24,
            r"Cannot allocate memory while making 67108864 bytes \(64\.0 MiB\) of shared memory",
        ),
    ],
    ids=["fsize", "as"],
)
def test_memory_that_cannot_be_had_is_told_with_its_bytes_and_a_remedy(limit: int, room: int, said: str) -> None:
    from tpkernels.links import segment

    gc.collect()  # ends of earlier tests
    before, limits = (len(os.listdir("/proc/self/fd")), link_mappings()), resource.getrlimit(limit)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with pytest.raises(
        OSError, match=said + r"; raise what limits .* \(ulimit -v and -f.*shorter slices, or fewer slots"
    ):
        try:
            resource.setrlimit(limit, (room + (used if limit == resource.RLIMIT_AS else 0), limits[1]))
            segment.Offer(2**26)
        finally:
            resource.setrlimit(limit, limits)
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), link_mappings()) == before
