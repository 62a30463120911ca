"""Whether results can be written where the user wants them, found out before any work; writing them whole or not at
all; and which file it was that could not be written after all. No torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path


def check_folder(path: Path, option: str) -> None:
    """ValueError unless `path`, which `option` names, is a folder that can be written, or can become one. Tries it
    under a name of its own, since other ranks try too."""
    existing = next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise ValueError(f"{existing} is no folder, but one is needed at {path}; choose another {option}.")
    try:
        with contextlib.suppress(FileNotFoundError):
            path.stat()  # a name may be too long
        os.rmdir(tempfile.mkdtemp(prefix=".", dir=existing))
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}; choose another folder.") from error


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """A full disk is an OSError without a name, unless it is raised inside this."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """The place to write what becomes `path`, in a folder made if need be: behind a full disk, an error or Ctrl-C there
    is what was there before. Pipes and devices are written as they are. OSError names `path`."""
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_device(path) or not os.access(path.parent, os.W_OK):
            yield path
            return
        target = path.resolve()
        begun = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
        try:
            yield begun
            if target.exists():
                shutil.copymode(target, begun)
            os.replace(begun, target)
        finally:
            begun.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """`text` as the whole of `path`."""
    with whole(path) as begun:
        begun.write_text(text, encoding="utf-8")


def check_distinct(places: Mapping[str, Path | None]) -> None:
    """ValueError where two options name one file."""
    options: dict[Path, str] = {}
    for option, path in places.items():
        if path is not None and not _is_device(path):
            other = options.setdefault(path.resolve(), option)
            if other != option:
                raise ValueError(f"{other} and {option} are one file, {path}; name another one.")


def _is_device(path: Path) -> bool:
    """Or a pipe; /dev/stdout may be a file behind it, which the shell goes on writing to."""
    return (os.path.exists(path) and not os.path.isfile(path)) or path.absolute().parts[1:2] in (("dev",), ("proc",))


def check_file(path: Path, option: str) -> None:
    """ValueError unless a file can be written at `path`, which `option` names. Tries it, and leaves nothing behind."""
    made = [parent for parent in path.absolute().parents if not os.path.exists(parent)]
    new = not os.path.exists(path)  # unlike Path.exists: no error for one in a folder that is closed to us
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
