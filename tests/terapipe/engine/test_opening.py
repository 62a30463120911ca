"""A rank that cannot open its links: every rank leaves at once, with an error that names it and what was wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import openings
import pytest

from tpkernels.links import shm_missing

pytestmark = pytest.mark.skipif(bool(shm_missing()), reason=f"shared-memory links: {shm_missing()}")

SOON_S = 5.0  # the machine may be busy; an idle one takes half a second
TWO_ENDS = r"the two ends did not come together: rank {} cannot {}: \[Errno \d+\] {}"
BYTES = r"\d+ bytes \(\d\.\d MiB\) of shared memory; {}"
LESS = "raise what limits the memory of this process"
DESCRIPTORS = r"raise the limit of open files \(ulimit -n\)"
AGREED = {
    "memory": (1, "share its slots", "No space left on device while making " + BYTES.format(LESS)),
    "mapping": (2, "map the slots of its peer", "Cannot allocate memory while mapping " + BYTES.format(LESS)),
    "socket": (0, "reach the slots of its peer", "Too many open files while connecting; " + DESCRIPTORS),
    "memfd": (1, "share its slots", "Too many open files while making " + BYTES.format(DESCRIPTORS)),
    "handing over": (1, "hand over its slots", "Too many open files"),
}
ALONE = {
    "place": f"OSError: [Errno 24] Too many open files; {DESCRIPTORS}",
    "thread": "RuntimeError: Resource temporarily unavailable",
    "first exchange": "RuntimeError: broken on purpose",
    "interrupted": "KeyboardInterrupt: ",
    "watchdog": "RuntimeError: can't start new thread",
}
REFUSED = {
    "option": r"^(PipelineError: .* rank 2 failed in checking its arguments: )?ValueError: link_timeout is 5; give",
    "links": r"^ValueError: rank 1 was given another links than rank 0",
    "device": r"^(PipelineError: .* rank 2 failed in checking its arguments: )?RuntimeError: Expected one of cpu, cuda",
}
"""Before anything is opened."""


@pytest.mark.timeout(120)
def test_every_rank_hears_at_once_why_one_cannot_open_its_links(run_scenario: Callable[..., Any]) -> None:
    processes = run_scenario("openings:openings", 3)
    assert processes.status == 0
    for name, (failing, what, why) in AGREED.items():
        for result in processes.results:
            seconds, heard, left = result[name]
            assert heard.startswith("LinkError: links 'shm' were asked for, but cannot be had"), (name, heard)
            assert re.search(TWO_ENDS.format(failing, what, why), heard), (name, heard)
            assert seconds < SOON_S and not left, (name, result[name])
    assert openings.AGREED.keys() == AGREED.keys()
    for name, cause in ALONE.items():
        failing = openings.ALONE[name].rank
        for rank, result in enumerate(processes.results):
            seconds, heard, left = result[name]
            origin = f"PipelineError: rank {rank} stopped because rank {failing} failed in opening its links: {cause}"
            plain = origin.replace("\\", "")
            assert heard.startswith(cause.split(";")[0] if rank == failing else plain), (name, rank, heard)
            assert seconds < SOON_S and not left, (name, result[name])
    for name, said in REFUSED.items():
        for result in processes.results:
            seconds, heard, left = result[name]
            assert re.search(said, heard), (name, heard)
            assert seconds < SOON_S and not left, (name, result[name])
    for rank, result in enumerate(processes.results):
        seconds, heard, left = result["group"]
        assert re.search(r"OSError: \[Errno 24\] Too many open files: a group of ranks needs \d+ more", heard), heard
        assert re.search(DESCRIPTORS, heard), heard
        assert rank == 1 or "stopped because rank 1 failed in opening its links: " in heard, heard
        assert seconds < SOON_S and not left, result["group"]
        assert result["afterwards"][1] == "stepped"


@pytest.mark.timeout(60)
def test_a_rank_that_is_killed_while_links_are_opened_is_named_by_the_others(run_scenario: Callable[..., Any]) -> None:
    """Both others are inside torch then, waiting for the group to come together."""
    processes = run_scenario("openings:killed", 3)
    assert processes.status == 137
    for rank in (0, 2):
        seconds, heard = processes.results[rank]["heard"]
        assert seconds < SOON_S, (rank, heard)
        assert re.search(rf"rank {rank} stopped because rank 1 failed in its start, or soon after: the process", heard)
