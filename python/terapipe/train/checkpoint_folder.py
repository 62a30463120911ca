"""Which checkpoints a folder holds, and whether they are whole. A checkpoint is `step-00000120` with a run.json in it;
names that begin with a dot are half-written, those that end in `.abandoned` belong to a course the run has left.

`damage` looks at what is small: run.json, the index, the length of every file. The tensors' bytes are compared with
their checksums where they are read anyway, by `CheckingReader`.

The trap: torch.save puts a CRC-32 beside everything it writes, but torch.load does not look at it.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

VERSION = 1  # of the layout; a reader refuses another
INDEX_CHECKSUM = "index_crc32"  # key of run.json, for the bytes of .metadata
COMPLETE = re.compile(r"step-\d+")


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint is besides its tensors: updates done, the model's config, and what the trainer added."""

    path: Path
    step: int
    model: dict[str, Any]
    extra: dict[str, Any]


class CheckingReader(dcp.FileSystemReader):
    """Reads after having compared the checksums of all that it is asked for: ValueError names a damaged tensor."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            piece = self.storage_data[item.storage_index]
            with (Path(self.path) / piece.relative_path).open("rb") as file:
                file.seek(piece.offset)
                archive = io.BytesIO(file.read(piece.length))
            try:
                whole = zipfile.ZipFile(archive).testzip() is None
            except Exception:  # damage in the archive's own fields raises anything
                whole = False
            if not whole:
                raise ValueError(f"{item.storage_index.fqn} in {piece.relative_path} does not have its checksum")
        return super().read_data(plan, planner)


def checksum(file: Path) -> int:
    return zlib.crc32(file.read_bytes())


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def discard(checkpoint: Path) -> None:
    """Delete so that an interrupted deletion leaves nothing that looks like a checkpoint."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.old")
    checkpoint.rename(hidden)
    shutil.rmtree(hidden)


def find_all(folder: str | Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first."""
    found = [path for path in Path(folder).glob("step-*") if COMPLETE.fullmatch(path.name)]
    return sorted((path for path in found if (path / "run.json").is_file()), key=step_of)


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint in `folder`, or None."""
    found = find_all(folder)
    return found[-1] if found else None


def select(folder: str | Path, step: int | None = None) -> Path:
    """The checkpoint of `step`, without it the newest one. ValueError if it is not there or damaged: the message says
    which others are whole."""
    found = find_all(folder)
    chosen = next((path for path in reversed(found) if step in (None, step_of(path))), None)
    if not found:
        raise ValueError(f"no checkpoint at {folder}: it is neither a complete checkpoint nor a folder that holds one.")
    if chosen is None:
        steps = ", ".join(str(step_of(path)) for path in found)
        raise ValueError(f"{folder} has no checkpoint of step {step}; it has those of steps {steps}.")
    _refuse_damaged(chosen)
    return chosen


def _refuse_damaged(checkpoint: Path) -> None:
    if trouble := damage(checkpoint):
        whole = [path for path in find_all(checkpoint.parent) if path != checkpoint and not damage(path)]
        steps = [str(step_of(path)) for path in whole]
        remedy = (
            f"Whole ones there: step {', '.join(steps)}; resume with --checkpoint.load-step {steps[-1]}"
            if whole
            else "No other one there is whole"
        )
        raise ValueError(f"checkpoint {checkpoint} is damaged: {trouble}. {remedy}.")


def damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint's files, "" if they are whole: presence, length and index, not every byte."""
    try:
        run = _read_run(checkpoint)
    except (ValueError, KeyError, TypeError) as error:
        return f"run.json cannot be read ({error!r})"
    if COMPLETE.fullmatch(checkpoint.name) and run.get("step", step_of(checkpoint)) != step_of(checkpoint):
        return f"run.json is of step {run['step']}"
    needed: dict[str, int] = {}
    try:
        if run.get(INDEX_CHECKSUM) not in (None, checksum(checkpoint / ".metadata")):  # None: written before 2026-12
            return "its index .metadata does not have its checksum"
        for piece in dcp.FileSystemReader(checkpoint).read_metadata().storage_data.values():
            needed[piece.relative_path] = max(needed.get(piece.relative_path, 0), piece.offset + piece.length)
    except Exception as error:  # unpickling raises anything
        return f"its index .metadata cannot be read ({error})"
    for name, size in sorted(needed.items()):
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size < size:
            return f"{name} has {file.stat().st_size} of {size} bytes"
    return ""


def read_info(path: str | Path) -> CheckpointInfo:
    """Of a checkpoint, or of the newest one of a folder. ValueError if there is none or it is damaged."""
    path = Path(path)
    checkpoint = path if (path / "run.json").is_file() else select(path)
    _refuse_damaged(checkpoint)
    run = _read_run(checkpoint)
    if run["version"] != VERSION:
        raise ValueError(
            f"checkpoint {checkpoint} has layout version {run['version']}, this terapipe reads {VERSION}; use the "
            "version that wrote it."
        )
    return CheckpointInfo(path=checkpoint, step=run["step"], model=run["model"], extra=run["extra"])


def _read_run(checkpoint: Path) -> dict[str, Any]:
    """KeyError, TypeError or ValueError where it is not what `save` wrote, of whatever version."""
    run = json.loads((checkpoint / "run.json").read_text())
    if run["version"] == VERSION:
        _ = run["step"], run["model"], run["extra"]
    return dict(run)


def find_after(folder: Path, step: int) -> list[Path]:
    """Later checkpoints than that of `step`."""
    return [path for path in find_all(folder) if step_of(path) > step]


def set_aside_after(folder: Path, step: int) -> None:
    """Later checkpoints than that of `step` are of a course that the run has left: they no longer count."""
    for later in find_after(folder, step):
        aside = later.with_name(f"{later.name}.abandoned")
        shutil.rmtree(aside, ignore_errors=True)
        later.rename(aside)
