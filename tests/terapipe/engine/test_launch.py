"""Launch: what workers are given, what the launcher returns, and that no process is left however either side ends."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from terapipe.engine import launch

# Writes its pid and then does as told. No torch: these are about processes.
WORKER = """
import os, pathlib, signal, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"pid{rank}.part").write_text(str(os.getpid()))
(folder / f"pid{rank}.part").rename(folder / f"pid{rank}")
"""
LAUNCHER = (
    "import sys; from terapipe.engine import launch; sys.exit(launch.run_workers(sys.argv[2:], int(sys.argv[1])))"
)


def _command(folder: Path, body: str, *words: str) -> list[str]:
    return [sys.executable, "-c", WORKER + body, str(folder), *words]


def _pids(folder: Path, ranks: int) -> list[int]:
    deadline = time.monotonic() + 20
    while len(list(folder.glob("pid?"))) < ranks:
        assert time.monotonic() < deadline, "the workers did not start"
        time.sleep(0.02)
    return [int((folder / f"pid{rank}").read_text()) for rank in range(ranks)]


def _all_gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() and not _zombie(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _zombie(pid: int) -> bool:
    """Dead, but its new parent has not asked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_workers_know_their_place_and_their_threads(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "MKL_NUM_THREADS"]
print(" ".join(os.environ[name] for name in names), int(os.environ["MASTER_PORT"]) > 0)
print("to stderr", file=sys.stderr)
"""
    assert launch.run_workers(_command(tmp_path, body), 3, threads=2) == 0
    captured = capfd.readouterr()
    assert captured.out == "0 0 3 3 127.0.0.1 2 2 True\n"
    for rank in (1, 2):
        assert f"[rank {rank}] {rank} {rank} 3 3 127.0.0.1 2 2 True\n" in captured.err
        assert f"[rank {rank}] to stderr\n" in captured.err
    assert "to stderr\n" in captured.err and "[rank 0]" not in captured.err
    assert _all_gone(_pids(tmp_path, 3), 0)


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ("sys.exit(3 if rank == 1 else 0)", 3, "terapipe: rank 1 ended with status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else None", 137, "rank 0 was ended by signal SIGKILL"),
        ("raise SystemError(rank) if rank == 1 else SystemExit(0)", 1, "SystemError: 1"),
    ],
)
def test_the_status_is_the_failed_ranks(
    body: str, status: int, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch.run_workers(_command(tmp_path, body), 2) == status
    assert told in capfd.readouterr().err


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("words", [(), ("deaf",)], ids=["willing", "deaf"])
def test_ranks_that_hang_after_a_failure_are_ended(
    failing: int, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.4)
    monkeypatch.setattr(launch, "TERMINATE_SECONDS", 0.4)
    body = f"time.sleep(0.2 if rank == {failing} else 60)\nsys.exit(5)"
    began = time.monotonic()
    assert launch.run_workers(_command(tmp_path, body, *words), 3) == 5
    assert time.monotonic() - began < 5
    assert _all_gone(_pids(tmp_path, 3), 0)


def test_the_grace_after_a_failure_lets_the_others_speak(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.GRACE_SECONDS + launch.TERMINATE_SECONDS < 10  # what the design allows in all
    body = "time.sleep(0.1 + 0.6 * rank); print('last words', rank); sys.exit(7 + rank)"
    assert launch.run_workers(_command(tmp_path, body), 2) == 7
    assert "[rank 1] last words 1" in capfd.readouterr().err


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """A launcher process of its own, with two workers that sleep."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", LAUNCHER, "2", *_command(tmp_path, "time.sleep(60)", *words)]
        # A test run in the background has SIGINT ignored, and would hand that on.
        interruptible = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=interruptible))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc, and workers die with their parent on Linux only")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_no_worker_outlives_its_launcher(
    how: signal.Signals, launcher: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = launcher("deaf")
    pids = _pids(tmp_path, 2)
    process.send_signal(how)
    assert process.wait(timeout=10) != 0
    assert _all_gone(pids, 2)


def test_a_worker_that_cannot_be_started_leaves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = launch._start

    def second_fails(command: list[str], rank: int, *rest: int) -> subprocess.Popen[bytes]:
        if rank == 1:
            _pids(tmp_path, 1)
            raise OSError("no more processes")
        return start(command, rank, *rest)

    monkeypatch.setattr(launch, "_start", second_fails)
    with pytest.raises(OSError, match="no more processes"):
        launch.run_workers(_command(tmp_path, "time.sleep(60)"), 2)
    assert _all_gone(_pids(tmp_path, 1), 0)


def test_sigterm_is_the_callers_again_afterwards(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    launch.run_workers(_command(tmp_path, ""), 1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_run_local_starts_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "told.py").write_text("import os, sys; print(sys.argv[1:], os.environ['WORLD_SIZE'])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert launch.run_local(2, ["--steps", "3"], module="told") == 0
    assert capfd.readouterr().out == "['--steps', '3'] 2\n"


def test_alone_without_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launch.initialize() == launch.World()
    launch.shutdown()


def test_a_rendezvous_that_fails_shows_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RuntimeError, match=r"joining the process group failed with .*'RANK': '1'.*'MASTER_ADDR': None"):
        launch.initialize()
    assert os.environ["RANK"] == "1"
