"""Which files are text, and which of them are held out for validation: paths -> sorted files -> a split. No torch.

A file with a zero byte among its first 8000 is not text (git's rule): pictures, archives, token ids, UTF-16. One that
the user named is refused, one that a folder or glob brought is left out and reported.

The trap: the split must not depend on the machine, or two hosts would train on each other's validation text. It hashes
each file's path below the files' common folder.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TEXT_SUFFIXES = (".txt", ".md", ".py")
LOOKED_AT_BYTES = 8000
NOT_LIBRARY_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "_bundled", "__pycache__"}


def stdlib_text() -> Path:
    """Folder of this Python's standard library: text that every machine has. `find_files` leaves its tests out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise ValueError(f"data: no standard library at {root} (a frozen or zipped Python?); name other text files.")
    return root


@dataclass(frozen=True)
class TextFiles:
    """Sorted; `left_out` are those that are not text."""

    files: list[Path]
    left_out: list[Path]


def find_files(paths: Sequence[str | Path] | str | Path, suffixes: Sequence[str] = TEXT_SUFFIXES) -> TextFiles:
    """Files that `paths` name: a file itself, files below a folder that end in a suffix, or a glob's matches.

    Empty files are left out, and so are the tests and installed packages of `stdlib_text()`. ValueError if a path does
    not exist, holds no text, or names a file that is not text.
    """
    found: set[Path] = set()
    left_out: set[Path] = set()
    for entry in [paths] if isinstance(paths, str | Path) else paths:
        path = Path(entry)
        if os.path.exists(path) and not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
            raise ValueError(f"data: {path} cannot be read; change its permissions, or name other text.")
        if os.path.isfile(path):
            below = [path]
        elif path.is_dir():
            below = [file for file in path.rglob("*") if file.suffix in suffixes and file.is_file()]
            if path == Path(sysconfig.get_paths()["stdlib"]):
                below = [file for file in below if not NOT_LIBRARY_SOURCE & set(file.relative_to(path).parts)]
        else:
            anchor = Path(path.anchor)
            pattern = str(path.relative_to(anchor)) if path.anchor else str(path)
            below = [file for file in anchor.glob(pattern) if file.is_file()] if "*" in str(path) else []
            if not below and path.exists():
                raise ValueError(f"data: {path} is neither a file nor a folder; copy what it holds into a file.")
            if not below:
                raise ValueError(
                    f"data: {path} does not exist (working directory {Path.cwd()}); give a file, folder or glob."
                )
        filled = [file for file in below if file.stat().st_size > 0]
        if not filled:
            what = f"no file that ends in {', '.join(suffixes)} and is not empty" if path.is_dir() else "no bytes"
            raise ValueError(f"data: {path} holds {what}; name files with text.")
        binary = {file for file in filled if not is_text(file)}
        if len(binary) == len(filled):
            which = "is" if path.is_file() else f"holds only {named(sorted(binary))},"
            raise ValueError(
                f"data: {path} {which} not text (a zero byte among the first {LOOKED_AT_BYTES}); name text files, as "
                "UTF-8, or read token ids with --data.source bin."
            )
        found.update(filled)
        left_out |= binary
    if not found:
        raise ValueError("data: no text was named; give files or folders.")
    return TextFiles(sorted(found - left_out), sorted(left_out))


def is_text(file: Path) -> bool:
    """No zero byte among the first."""
    with file.open("rb") as stream:
        return b"\0" not in stream.read(LOOKED_AT_BYTES)


def named(files: Sequence[Path]) -> str:
    """Their number and some of their names."""
    some = ", ".join(file.name for file in files[:4]) + (", ..." if len(files) > 4 else "")
    return f"{len(files)} file{'s' * (len(files) != 1)} ({some})"


@dataclass(frozen=True)
class Split:
    """Files for training and for validation."""

    training: list[Path]
    validation: list[Path]


def split_files(files: Sequence[Path], validation_share: float) -> Split:
    """Hold out files whose hash lies below `validation_share`: at least one, and not all. Needs two files or more."""
    root = common_folder(files)
    hashes = {file: _hash(file.relative_to(root).as_posix()) for file in files}
    by_hash = sorted(files, key=hashes.__getitem__)
    cut = sum(value < validation_share for value in hashes.values())
    cut = min(max(1, cut), len(files) - 1)
    return Split(training=sorted(by_hash[cut:]), validation=sorted(by_hash[:cut]))


def common_folder(files: Sequence[Path]) -> Path:
    """The deepest folder that holds all files."""
    folder = files[0].parent
    while not all(file.is_relative_to(folder) for file in files):
        folder = folder.parent
    return folder


def _hash(name: str) -> float:
    """In [0, 1), uniform over names."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big") / (1 << 56)
