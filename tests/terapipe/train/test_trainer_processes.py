"""`terapipe train` over real processes: workers of its own, torchrun, resume, and what happens when a worker dies.

Every process has a time-out of its own, and every test ends by looking for processes that were left behind.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from terapipe.train.metrics import read_lines

SECONDS = 120
TINY = [
    *("--model.vocab", "32", "--model.hidden", "16", "--model.layers", "2", "--model.heads", "2"),
    *(
        "--model.kv-heads",
        "1",
        "--tokens",
        "17",
        "--parallel.slice-tokens",
        "5",
        "11",
        "1",
        "--evaluate-sequences",
        "2",
    ),
    *("--device", "cpu", "--checkpoint.every", "2", "--checkpoint.keep", "9"),
]
MARK = "TERAPIPE_TEST_RUN"


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Marks every process of a test; none may be alive after it."""
    yield {**os.environ, MARK: str(tmp_path)}
    left = marked_processes(tmp_path)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def train(*options: str) -> list[str]:
    return [sys.executable, "-m", "terapipe", "train", *TINY, *options]


def finish(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_lines(folder / "metrics.jsonl") if "loss" in line]


def test_two_workers_resume_bitwise_and_agree_with_one_process(environment: dict[str, str], tmp_path: Path) -> None:
    alone, whole, broken = (tmp_path / name for name in ("alone", "whole", "broken"))
    finish(train("--steps", "4", "--parallel.ranks", "2", "--run-dir", str(alone)), environment)
    done = finish(train("--steps", "4", "--local-ranks", "2", "--run-dir", str(whole)), environment)
    assert losses(whole) == losses(alone)
    assert "step 4/4" in done.stdout

    # Saved by two processes after two of four steps, continued by two: the state is the whole run's at that point.
    (broken / "checkpoints").mkdir(parents=True)
    (whole / "checkpoints" / "step-00000002").rename(broken / "checkpoints" / "step-00000002")
    (broken / "metrics.jsonl").write_bytes((whole / "metrics.jsonl").read_bytes())
    finish(train("--steps", "4", "--local-ranks", "2", "--run-dir", str(broken), "--resume"), environment)
    assert losses(broken) == losses(whole)
    assert read_lines(broken / "metrics.jsonl")[-1] == read_lines(whole / "metrics.jsonl")[-1]


def test_torchrun_starts_it_too(environment: dict[str, str], tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = finish([*launcher, *train("--steps", "2", "--run-dir", str(tmp_path / "run"))[2:]], environment)
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2]
    assert done.stdout.count("step 2/2") == 1


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the workers through /proc (Linux)")
@pytest.mark.parametrize("victim", ["worker", "parent"])
def test_a_killed_process_takes_all_others_along(victim: str, environment: dict[str, str], tmp_path: Path) -> None:
    command = train("--steps", "1000000", "--local-ranks", "2", "--run-dir", str(tmp_path / "run"))
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        wait_for(lambda: len(losses(tmp_path / "run")) > 3)
        ranks = {rank_of(pid): pid for pid in marked_processes(tmp_path)}
        assert set(ranks) == {None, "0", "1"}
        os.kill(ranks["1"] if victim == "worker" else parent.pid, signal.SIGKILL)
        _, errors = parent.communicate(timeout=40)
    wait_for(lambda: not marked_processes(tmp_path), seconds=10)
    assert parent.returncode != 0
    if victim == "worker":
        assert "rank 1 was ended by signal SIGKILL" in errors
        assert "Traceback" not in errors
        assert re.search(r"rank [01] failed in .*: ", errors)  # the neighbour says where it noticed


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the workers through /proc (Linux)")
def test_an_interrupt_stops_every_process(environment: dict[str, str], tmp_path: Path) -> None:
    command = train("--steps", "1000000", "--local-ranks", "2", "--run-dir", str(tmp_path / "run"))
    # A test run in the background has SIGINT ignored, and would hand that on.
    interruptible = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=interruptible,
    ) as parent:  # fmt: skip
        wait_for(lambda: len(losses(tmp_path / "run")) > 3)
        os.killpg(parent.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
        _, errors = parent.communicate(timeout=40)
    assert parent.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="fills a disk by /dev/full (Linux)")
def test_a_start_that_fails_on_one_rank_is_told_by_both(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.toml").symlink_to("/dev/full")
    command = train("--local-ranks", "2", "--run-dir", str(tmp_path))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1
    full = r"No space left on device: '.*config.toml'"
    assert re.search(rf"^terapipe: .*{full}", done.stderr, re.MULTILINE), done.stderr
    assert re.search(rf"^\[rank 1\] terapipe: rank 1 stopped because rank 0 failed .*{full}", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr


def test_bad_input_starts_no_worker(environment: dict[str, str], tmp_path: Path) -> None:
    command = train("--local-ranks", "7", "--run-dir", str(tmp_path / "run"))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    assert "7 stages need at least 7 layers" in done.stderr
    assert "rank" not in done.stderr.replace("fewer ranks", "")
    assert not (tmp_path / "run").exists()


def marked_processes(mark: Path) -> list[int]:
    """Living processes that inherited this test's environment; empty where there is no /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if f"{MARK}={mark}".encode() in read(entry / "environ").split(b"\0") and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def rank_of(pid: int) -> str | None:
    pairs = (pair.partition(b"=") for pair in read(Path(f"/proc/{pid}/environ")).split(b"\0"))
    return next((value.decode() for name, _, value in pairs if name == b"RANK"), None)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended meanwhile, or is another user's
        return b""


def wait_for(condition, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
