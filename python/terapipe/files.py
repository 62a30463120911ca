"""Whether results can be written where the user wants them, found out before any work, and which file it was that
could not be written after all. No torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def check_folder(path: Path, option: str) -> None:
    """ValueError unless `path`, which `option` names, is a folder that can be written, or can become one."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise ValueError(f"{existing} is a file, but a folder is needed at {path}; choose another {option}.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{existing} cannot be written, but a folder is needed at {path}; choose another {option}.")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """A full disk is an OSError without a name, unless it is raised inside this."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_file(path: Path, option: str) -> None:
    """ValueError unless a file can be written at `path`, which `option` names. Tries it, and leaves nothing behind."""
    made = [parent for parent in path.absolute().parents if not parent.exists()]
    new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}; name another file.") from error
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # not made after all, or another process has put something into it
                folder.rmdir()
