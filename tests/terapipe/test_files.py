"""Files: what cannot be written is known before any work, and finding out leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from terapipe import cli, files, viz
from terapipe.schedule.trace import TraceEvent


def _everything(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize("name", ["new.json", "a/b/new.json", "there.json"])
def test_a_place_that_can_be_written_stays_as_it_was(tmp_path: Path, name: str) -> None:
    (tmp_path / "there.json").write_text("kept")
    before = _everything(tmp_path)
    files.check_file(tmp_path / name, "--json")
    assert _everything(tmp_path) == before
    assert (tmp_path / "there.json").read_text() == "kept"


def test_impossible_places_are_named_with_their_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    before = _everything(tmp_path)
    for name, why in (("folder", "Is a directory"), ("file/x.json", "File exists|Not a directory")):
        with pytest.raises(ValueError, match=rf"--out .*{name} cannot be written: ({why}); name another file"):
            files.check_file(tmp_path / name, "--out")
    for name in ("file/below", "nowhere", "nowhere/below"):
        with pytest.raises(ValueError, match=r"is no folder, but one is needed at .*; choose another --run-dir"):
            files.check_folder(tmp_path / name, "--run-dir")
    places = [
        (tmp_path / ("x" * 300), "name too long"),
        (Path("/proc/x"), "No such file"),
        (Path("/proc"), "No such file"),
    ]
    for place, why in places:
        with pytest.raises(ValueError, match=rf"--run-dir {place} cannot be written: .*{why}.*; choose another folder"):
            files.check_folder(place, "--run-dir")
    files.check_folder(tmp_path / "folder" / "new", "--run-dir")
    assert _everything(tmp_path) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--json", "{}"],
        ["train", "--json={}"],
        ["env", "--json", "{}"],
        ["bench", "attention", "--json", "{}"],
        ["bench", "attention", "--plot", "{}"],
        ["plan", "--ranks", "2", "--json", "{}"],
        ["plan", "--out", "{}"],
        ["profile", "--out", "{}"],
        ["reproduce", "--json", "{}"],
        *(["simulate", "plan.json", option, "{}"] for option in ("--html", "--png", "--perfetto", "--json")),
    ],
    ids=" ".join,
)
def test_every_verb_refuses_an_impossible_place_before_it_begins(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def began(arguments: list[str]) -> int:
        raise AssertionError("the verb began")

    monkeypatch.delenv("TPK_LOG", raising=False)
    monkeypatch.setitem(cli.VERBS, arguments[0], began)
    (tmp_path / "file").touch()
    assert cli.main([argument.format(tmp_path / "file" / "x.json") for argument in arguments]) == 2
    assert "x.json cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["plan", "profile"])
def test_the_default_place_is_tried_too(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TPK_LOG", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("plan.json", "costs.json"):
        (tmp_path / name).mkdir()
    assert cli.main([verb]) == 2
    assert "--out" in capsys.readouterr().err


def test_a_file_is_whole_or_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends the writing: nothing new is left, what was there stays, and an OSError names the file."""
    old, new, link = tmp_path / "old.json", tmp_path / "a" / "new.json", tmp_path / "link.json"
    old.write_text("kept")
    link.symlink_to(old)
    for error, words in ((OSError(28, "No space left on device"), "new.json"), (KeyboardInterrupt(), None)):
        for path in (new, old, link):
            with pytest.raises(type(error), match=words and path.name), files.whole(path) as begun:
                begun.write_text("half")
                raise error
    assert _everything(tmp_path) == {old, link, new.parent} and old.read_text() == "kept"
    for path in (new, link):
        files.write_text(path, "whole")
    assert link.is_symlink() and old.read_text() == new.read_text() == "whole"
    assert _everything(tmp_path) == {old, link, new.parent, new}


@pytest.mark.parametrize("write", [viz.write_html, viz.write_perfetto, viz.write_png], ids=lambda write: write.__name__)
def test_a_timeline_is_whole_or_what_it_was(
    write: Callable[[Path, Sequence[TraceEvent]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(begun: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "old").write_text("kept")
    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match=r"No space left on device: .*old"):
        write(tmp_path / "old", [])
    assert (tmp_path / "old").read_text() == "kept" and _everything(tmp_path) == {tmp_path / "old"}


def test_a_device_and_a_file_in_a_closed_folder_are_written_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        files.write_text(Path("/dev/full"), "text")
    files.write_text(Path("/dev/null"), "text")
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)  # root may write everywhere
    with files.whole(tmp_path / "there.json") as begun:
        assert begun == tmp_path / "there.json"


def test_what_is_written_again_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "x.json").touch()
    (tmp_path / "x.json").chmod(0o640)
    files.write_text(tmp_path / "x.json", "new")
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o640 and (tmp_path / "x.json").read_text() == "new"


def test_a_folder_that_is_closed_to_us_is_named_with_the_option(tmp_path: Path) -> None:
    """In a process without root's right to pass every door."""
    command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if command and (not shutil.which("setpriv") or subprocess.run([*command, "true"], check=False).returncode):
        pytest.skip("root passes every door here: there is no setpriv (util-linux) that can give that right up")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    script = """
import sys
from pathlib import Path
from terapipe import files
from terapipe.train.text_files import find_files
closed = Path(sys.argv[1])
places = {"--hardware": closed / "x.json", "--out": closed / "y.json"}
files.check_distinct(places)
for check in (
    lambda: files.check_file(closed / "a" / "x.json", "--out"),
    lambda: files.check_folder(closed / "runs", "--run-dir"),
    lambda: find_files(closed),
):
    try:
        check()
    except ValueError as error:
        print(error)
"""
    done = subprocess.run(
        [*command, sys.executable, "-c", script, str(closed)], capture_output=True, text=True, check=False
    )
    closed.chmod(0o700)
    said = done.stdout.splitlines()
    assert len(said) == 3, done.stderr
    assert said[0].startswith("--out ") and "Permission denied" in said[0]
    assert (
        "--run-dir" in said[1]
        and "Permission denied" in said[1]
        and "cannot be read; change its permissions" in said[2]
    )


def test_one_file_is_not_named_twice(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "x.json")
    twice = {"--out": tmp_path / "x.json", "--html": None, "--json": tmp_path / "a" / ".." / "link.json"}
    with pytest.raises(ValueError, match=r"--out and --json are one file, .*link.json; name another one"):
        files.check_distinct(twice)
    files.check_distinct({"--out": Path("/dev/stdout"), "--json": Path("/dev/stdout"), "--html": None, "--png": None})


def test_a_result_without_a_number_is_still_written(tmp_path: Path) -> None:
    cli._write_json(tmp_path / "a" / "result.json", {"loss": float("nan"), "steps": 3, "run_dir": tmp_path})
    assert '"loss": null' in (tmp_path / "a" / "result.json").read_text()
