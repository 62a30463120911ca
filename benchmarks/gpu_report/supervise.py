"""Runs the cells of a part in worker processes that may crash or hang, and loses no row.

A worker appends to a file of rows: `begun`, then the outcome. When it dies or a cell takes too long, the supervisor
writes down what happened to the cell that was open and starts another worker, which skips what has a row. Cells that
the part's time did not reach, or that were open when it was up, are written down as `not run`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_report.parts import BROKEN, Cell, append, key, read_rows

POLL_SECONDS = 0.2
TICK_SECONDS = 20.0


def supervise(
    command: Callable[[Path], list[str]],
    cells: Sequence[Cell],
    *,
    file: Path,
    deadline: float,
    cell_seconds: float,
    environment: dict[str, str] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """`command(file)` is a worker for these cells. deadline: of time.monotonic(); `stop` ends it earlier."""
    log = file.with_suffix(".log")
    fruitless = 0

    def over() -> str | None:
        if stop is not None and stop.is_set():
            return "the run was stopped"
        return "the part's time was up" if time.monotonic() >= deadline else None

    answered = answers(file)
    while over() is None and fruitless < 2 and not all(key(cell) in answered for cell in cells):
        before = len(answered)
        with log.open("ab") as stream:
            # A group of its own, to end it with all it started; no session, so that what ends ours ends it too.
            worker = subprocess.Popen(
                command(file), stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, process_group=0, env=environment
            )
            end = _wait(worker, file, over, cell_seconds)
        answered = answers(file)
        for row in read_rows(file):
            if row["status"] == "begun" and key(row) not in answered:
                status = "crashed" if end != over() else "not run"
                append(file, {**_cell(row), "status": status, "text": f"{end}: {_last_line(log)}"})
        answered = answers(file)
        fruitless = 0 if len(answered) > before else fruitless + 1
    for cell in cells:
        if key(cell) not in answered:
            reason = over() or f"no worker started: {_last_line(log)}"
            append(file, {**cell._asdict(), "status": "not run", "text": reason})


def answers(file: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The outcome of each cell that has one."""
    return {key(row): row for row in read_rows(file) if row["status"] not in ("begun", "machine")}


def _cell(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in Cell._fields}


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it said nothing")


def _wait(worker: subprocess.Popen[bytes], file: Path, over: Callable[[], str | None], cell_seconds: float) -> str:
    """How the worker ended, in words. It is stopped when a cell takes too long or all is over."""
    size, since = -1, time.monotonic()
    while worker.poll() is None:
        now = time.monotonic()
        current = file.stat().st_size if file.exists() else 0
        if current != size:
            size, since = current, now
        reason = over() or (f"no answer within {cell_seconds:g} s" if now - since > cell_seconds else None)
        if reason is not None:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            return reason
        time.sleep(POLL_SECONDS)
    status = worker.returncode
    if status == BROKEN:
        return "the device did not answer any more"
    return f"killed by signal {-status}" if status < 0 else f"the worker ended with status {status}"


def side_by_side(
    jobs: Sequence[Callable[[], None]], *, tick: Callable[[], None] | None = None, stop: threading.Event | None = None
) -> None:
    """Run supervisors in threads, with a tick now and then; the first error is raised when all have ended. What
    interrupts the caller (Ctrl-C, a signal) sets `stop` and waits for them."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    try:
        ticked = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            time.sleep(POLL_SECONDS)
            if tick is not None and time.monotonic() - ticked >= TICK_SECONDS:
                ticked = time.monotonic()
                tick()
    except BaseException:
        if stop is not None:
            stop.set()
        raise
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
