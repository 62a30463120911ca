"""What a run reports: one JSON line a step in metrics.jsonl, always; a progress bar on a terminal, a plain line every
few steps elsewhere. No torch.

Step lines have exactly the keys of `StepMetrics`, validation lines those of `ValidationMetrics`; a reader tells them
apart by `validation_loss`. Rank 0 alone writes; the engine has already brought loss and norm to every rank.

The trap: a resumed run must not leave the lines of steps that it repeats, so the file is cut at the checkpoint's step
first.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from terapipe import files


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. `loss` is nats a target token before the update; `bubble_share` of all ranks' time, 0 to
    1; `hidden_share` of the time slices were on their way between ranks (None where it cannot be told); memory over
    all ranks."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    step_s: float
    bubble_share: float
    memory_bytes: int
    hidden_share: float | None = None


@dataclass(frozen=True)
class ValidationMetrics:
    """After `step` optimizer steps: nats a target over the `targets` of the validation sequences."""

    step: int
    validation_loss: float
    targets: int


Metrics = StepMetrics | ValidationMetrics


class MetricsFile:
    """Appends a line per record and flushes it, so that a killed run keeps every finished step."""

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        """Lines after `first_step` completed steps are dropped; 0 starts a new file and keeps an earlier run's beside
        it, under the first free name of `metrics.1.jsonl`, `metrics.2.jsonl`, ... (`keep_earlier`)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if first_step == 0:
            keep_earlier(path)
        elif path.exists():  # put in place whole: a kill in between must not lose them
            whole = path.with_suffix(".tmp")
            kept = [line for line in read_lines(path) if line["step"] <= first_step]
            with files.naming(whole):
                whole.write_text("".join(json.dumps(line) + "\n" for line in kept))
            os.replace(whole, path)
        self._path = path
        self._stream: TextIO = path.open("a")

    def write(self, record: Metrics) -> None:
        self._write(asdict(record))

    def _write(self, line: dict[str, Any]) -> None:
        # JSON has no NaN: a diverged loss is written as null, which every reader understands.
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
        }
        with files.naming(self._path):
            self._stream.write(json.dumps(finite) + "\n")
            self._stream.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a line that could not be flushed has been told of
            self._stream.close()


def keep_earlier(path: Path, *, copy: bool = False) -> None:
    """Rename a file of an earlier run to the first free one of `name.1.suffix`, `name.2.suffix`, ..., or copy it."""
    if path.exists() and path.stat().st_size > 0:
        numbered = (path.with_suffix(f".{number}{path.suffix}") for number in itertools.count(1))
        free = next(earlier for earlier in numbered if not earlier.exists())
        shutil.copyfile(path, free) if copy else path.rename(free)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics file but those that are none: cut off by a kill, or written by others. No file is an
    empty list."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines


class Progress:
    """Shows a run to a person. A context manager: the terminal is restored on any exit."""

    def __init__(
        self,
        steps: int,
        *,
        every: int,
        first_step: int = 0,
        print_line: Callable[[str], None] = print,
        bar: bool | None = None,
    ) -> None:
        self._every, self._steps, self._first, self._print = every, steps, first_step, print_line
        self._bar = self._make_bar() if (sys.stdout.isatty() if bar is None else bar) else None

    def _make_bar(self) -> Any:
        from rich import progress  # here: a run without a terminal needs none of it

        columns = (
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=12),
            progress.TextColumn("{task.fields[figures]}"),
            progress.TimeRemainingColumn(compact=True),
        )
        return progress.Progress(*columns)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("train", total=self._steps, completed=self._first, figures="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, record: StepMetrics) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, figures=_few(record))
        elif record.step % self._every == 0 or record.step == self._steps:
            self._print(f"step {record.step:>{len(str(self._steps))}}/{self._steps}  {figures(record)}")

    def validation(self, record: ValidationMetrics) -> None:
        loss = f"{record.validation_loss:.4f} nats a token"
        line = f"validation loss after {record.step} steps: {loss} ({record.targets:,} targets)"
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            self._print(line)


def figures(record: StepMetrics) -> str:
    """Everything of a step in one line."""
    hidden = "" if record.hidden_share is None else f"{record.hidden_share:.0%} of hand-offs hidden  "
    return (
        f"loss {record.loss:.4f}  norm {record.grad_norm:.3f}  lr {record.lr:.2e}  "
        f"{record.tokens_per_s:,.0f} tokens/s  {record.step_s * 1e3:.0f} ms  bubble {record.bubble_share:.0%}  "
        f"{hidden}{record.memory_bytes / 2**20:,.0f} MiB"
    )


def _few(record: StepMetrics) -> str:
    """What fits beside a bar on 80 columns."""
    return (
        f"loss {record.loss:.3f} {record.tokens_per_s:,.0f} tok/s bubble {record.bubble_share:.0%} "
        f"{record.memory_bytes / 2**20:,.0f} MiB"
    )
