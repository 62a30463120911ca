"""Runs the cells of a part in worker processes that may crash or hang, and loses no row.

A worker appends to a file of rows: `begun`, then the outcome. When it dies or a cell takes too long, the supervisor
writes down what happened to the cell that was open and starts another worker, which skips what has a row. Cells that
the part's time did not reach are written down as `not run`.
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


def supervise(
    command: Callable[[Path], list[str]],
    cells: Sequence[Cell],
    *,
    file: Path,
    deadline: float,
    cell_seconds: float,
    environment: dict[str, str] | None = None,
) -> None:
    """`command(file)` is a worker for these cells. deadline: of time.monotonic()."""
    log = file.with_suffix(".log")
    fruitless = 0
    while time.monotonic() < deadline and fruitless < 2:
        before = len(_answered(file))
        with log.open("ab") as stream:
            worker = subprocess.Popen(
                command(file), stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, start_new_session=True,
                env=environment,
            )  # fmt: skip
            end = _wait(worker, file, deadline, cell_seconds)
        answered = _answered(file)
        for row in read_rows(file):
            if row["status"] == "begun" and key(row) not in answered:
                append(file, {**_cell(row), "status": "crashed", "text": f"{end}: {_last_line(log)}"})
        answered = _answered(file)
        fruitless = 0 if len(answered) > before else fruitless + 1
        if all(key(cell) in answered for cell in cells):
            return
    reason = "the part's time was up" if time.monotonic() >= deadline else f"no worker started: {_last_line(log)}"
    answered = _answered(file)
    for cell in cells:
        if key(cell) not in answered:
            append(file, {**cell._asdict(), "status": "not run", "text": reason})


def _answered(file: Path) -> set[tuple[str, str, str]]:
    """Cells that have an outcome."""
    return {key(row) for row in read_rows(file) if row["status"] not in ("begun", "machine")}


def _cell(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in Cell._fields}


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it said nothing")


def _wait(worker: subprocess.Popen[bytes], file: Path, deadline: float, cell_seconds: float) -> str:
    """How the worker ended, in words. It is stopped when a cell takes too long or the part's time is up."""
    size, since = -1, time.monotonic()
    while worker.poll() is None:
        now = time.monotonic()
        current = file.stat().st_size if file.exists() else 0
        if current != size:
            size, since = current, now
        if now >= deadline or now - since > cell_seconds:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            return "the part's time was up" if now >= deadline else f"no answer within {cell_seconds:g} s"
        time.sleep(POLL_SECONDS)
    status = worker.returncode
    if status == BROKEN:
        return "the device did not answer any more"
    return f"killed by signal {-status}" if status < 0 else f"the worker ended with status {status}"


def side_by_side(jobs: Sequence[Callable[[], None]]) -> None:
    """Run supervisors in threads; the first error is raised when all have ended."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
