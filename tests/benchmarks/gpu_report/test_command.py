"""The command (`__main__.py`) on the CPU: its parts, going on after a kill, what it builds and what it refuses."""

from __future__ import annotations

import json
import shutil

import torch
from gpu_report_cases import SLICE

from benchmarks.gpu_report import __main__ as command
from benchmarks.gpu_report import parts, supervise
from benchmarks.gpu_report.parts import Cell


def test_the_whole_command_on_the_cpu(tmp_path, capsys):
    """One part, then with --resume that part and another: what was found stays, what failed is tried again."""
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--seconds", "100", "--only", "slice-forward"]
    assert command.main(arguments) == 0
    rows = json.loads((tmp_path / "gpu_report.json").read_text())["rows"]
    found = {r["contender"]: r for r in rows if r["subject"] == SLICE}
    assert found["cpu"]["status"] == "ok" and found["SDPA flash"]["status"] == "error"
    assert command.main([*arguments, "ceilings", "--resume"]) == 0
    report = json.loads((tmp_path / "gpu_report.json").read_text())
    assert [r["status"] for r in report["rows"] if r["part"] == "ceilings"] == ["ok"] * 4
    assert found["cpu"] in report["rows"] and len(report["rows"]) == len(rows) + 4
    assert report["machines"]["ceilings"]["torch"] == torch.__version__
    text = (tmp_path / "gpu_report.md").read_text()
    assert "| forward, 8k tokens | not run |" in text and str(command.ROOT) not in text
    assert "ceilings: 4 ok" in capsys.readouterr().out


def test_a_killed_call_goes_on_from_the_workers_rows(tmp_path, monkeypatch, capsys):
    """A call that was killed left rows in its workers' files alone; older sources' rows are worth nothing."""
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--only", "slice-forward"]
    file = tmp_path / "slice-forward-0.jsonl"

    def milliseconds():
        rows = json.loads((tmp_path / "gpu_report.json").read_text())["rows"]
        return [row["ms"] for row in rows if row["subject"] == SLICE and row["contender"] == "cpu"]

    monkeypatch.setenv("PATH", "/nowhere")  # no git
    assert command.main([*arguments, "--in-all", "1"]) == 0 and not file.exists()
    monkeypatch.undo()
    assert "commit: unknown (sources " in (tmp_path / "gpu_report.md").read_text()
    said = capsys.readouterr().out
    assert "no time was left" in said and "20 cells are left" in said and milliseconds() == []
    row = Cell("slice-forward", SLICE, "cpu")._asdict()
    figures = {"ms": 123.0, "low_ms": 123.0, "high_ms": 123.0, "tflops": 1.0, "within_tolerance": True}
    parts.append(file, {**row, "status": "begun"})
    parts.append(file, {**row, "status": "ok", "text": "", **figures})
    assert command.main([*arguments, "--resume"]) == 0 and milliseconds() == [123.0]
    said = capsys.readouterr().out
    assert "slice-forward: 12 refused, 4 ok, 4 error" in said and "no cell is left" in said
    monkeypatch.setattr(command, "_sources", lambda *folders: "others")
    assert command.main([*arguments, "--resume"]) == 0 and milliseconds() != [123.0]
    assert "the sources have changed" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(tmp_path, capsys, monkeypatch):
    if torch.cuda.is_available():
        monkeypatch.setattr(command, "_no_gpu", lambda: "")
    assert command.main(["--out", str(tmp_path)]) == 2 and "--device cpu" in capsys.readouterr().err
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')")
    assert command.main(["--out", str(tmp_path)]) == 2 and "libcudart.so.13" in capsys.readouterr().err


def test_a_folder_that_cannot_be_is_named_before_work(tmp_path, capsys):
    (tmp_path / "file").touch()
    for place, why in ((tmp_path / "file" / "below", "Not a directory"), (tmp_path / "file", "File exists")):
        assert command.main(["--device", "cpu", "--out", str(place)]) == 2
        assert f"--out {place} cannot be written: {why}; name another folder" in capsys.readouterr().err


def test_a_part_that_fails_costs_no_other_its_rows(tmp_path, capsys, monkeypatch):
    def supervisor(worker, cells, **settings):
        if cells[0].part == "ceilings":
            raise OSError("no more processes")
        for cell in cells:
            parts.append(settings["file"], {**cell._asdict(), "status": "refused", "text": ""})

    monkeypatch.setattr(supervise, "supervise", supervisor)
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--only", "ceilings", "flex-forward", "--no-build"]
    assert command.main(arguments) == 1
    rows = json.loads((tmp_path / "gpu_report.json").read_text())["rows"]
    assert {row["part"] for row in rows} == {"flex-forward"} and "no more processes" in capsys.readouterr().err


def test_another_version_that_is_installed_is_not_measured(tmp_path):
    """Nothing, something old, and the sources without what is built from them."""
    environment = {**command.os.environ, "PYTHONPATH": str(tmp_path)}
    package = tmp_path / "tpkernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert "another version is installed" in command._missing(environment, "cpu")
    shutil.rmtree(package)
    shutil.copytree(command.ROOT / "tpkernels", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    assert command._missing(environment, "cpu") == "tpkernels._core"


def test_a_build_that_fails_leaves_the_kernels_that_need_none(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_missing", lambda environment, device: "the package")
    monkeypatch.setattr(command.sys, "executable", "/bin/false")
    environment, said = command._installed(tmp_path, "cpu", build=True, seconds=60)
    assert environment["PYTHONPATH"].startswith(str(command.ROOT)) and "pip ended with 1" in said["build"]


def test_what_was_built_from_these_sources_is_not_built_again(tmp_path, monkeypatch):
    """No CUDA kernels where there is an nvcc: its folder is used all the same, and not built twice in vain."""
    monkeypatch.setattr(command, "_missing", lambda environment, device: command.CUDA_KERNELS)
    monkeypatch.setattr(command.sys, "executable", "/bin/false")
    stamp = tmp_path / "site" / "sources"
    stamp.parent.mkdir()
    stamp.write_text(command._sources("tpkernels", "csrc"))
    settings = {"device": "cuda", "build": True, "seconds": 60}
    environment, said = command._installed(tmp_path, **settings)
    assert said == {"build": "missing: tpkernels._cuda"}
    stamp.write_text("older sources")
    assert "pip ended with 1" in command._installed(tmp_path, **settings)[1]["build"] and not stamp.exists()
    environment, said = command._installed(tmp_path, "cuda", build=False, seconds=60)
    assert environment == dict(command.os.environ) and said == {"build": "missing: tpkernels._cuda"}
