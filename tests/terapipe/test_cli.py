"""The command line: verbs, help without torch, messages without tracebacks, exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from terapipe import __version__, benchmarking, cli
from terapipe.train import config_file
from terapipe.train.config import TrainConfig


def test_help_of_everything_needs_no_torch() -> None:
    program = (
        "import sys; from terapipe.cli import main\n"
        "for arguments in ([], ['--help'], ['--version'], ['train', '--help'], ['env', '--help'], ['bench', '--help'],"
        " ['train', '--print-config', '--steps', '3']):\n"
        "    assert main(arguments) == 0, arguments\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for words in ("usage: terapipe VERB", f"terapipe {__version__}", "--parallel.slices INT", "--local-ranks"):
        assert words in done.stdout


def test_print_config_round_trips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    options = ["--steps", "7", "--model.hidden", "96", "--model.heads", "6", "--parallel.slice-tokens", "100", "412"]
    assert cli.main(["train", *options, "--print-config"]) == 0
    file.write_text(capsys.readouterr().out)
    assert cli.main(["train", "--config", str(file), "--print-config"]) == 0
    assert capsys.readouterr().out == file.read_text()
    config = config_file.load(file, TrainConfig())
    assert (config.steps, config.model.head_dim, config.parallel.slice_tokens) == (7, 16, (100, 412))


def test_later_wins_preset_file_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 5\ntokens = 1024\n[data]\nsource = 'synthetic'\n")
    assert cli.main(["train", "--preset", "gpt3_1b", "--config", str(file), "--tokens", "64", "--print-config"]) == 0
    out = capsys.readouterr().out
    for line in ("steps = 5", "tokens = 64", 'dtype = "bf16"', "hidden = 2048"):
        assert line in out.splitlines()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["unknown verb 'trian'", "did you mean 'train'"]),
        (["train", "--steaps", "3"], ["--steaps", "--steps"]),
        (["train", "--model.layer", "3"], ["--model.layer", "--model.layers"]),
        (["train", "--steps", "many"], ["--steps", "many"]),
        (["train", "--dtype", "fp8"], ["fp8", "bf16"]),
        (["train", "--preset", "debgu"], ["unknown preset 'debgu'", "did you mean 'debug'"]),
        (["train", "--config", "no/such.toml"], ["cannot read", "no/such.toml"]),
        (["train", "--data.source", "text", "--data.train", "no/such"], ["data path no/such does not exist"]),
        (["train", "--parallel.slice-tokens", "100", "100"], ["200", "512"]),
        (["train", "--model.heads", "5"], ["hidden 64", "heads 5"]),
        (["bench", "pipelin"], ["unknown benchmark 'pipelin'", "did you mean 'pipeline'"]),
    ],
)
def test_bad_input_is_one_message_and_status_2(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TPK_LOG", raising=False)
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    for word in words:
        assert word in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_failed_work_is_status_1_and_debug_shows_where(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: list[str]) -> int:
        raise RuntimeError("rank 1 failed in 1B0.3: out of memory")

    monkeypatch.setitem(cli.VERBS, "env", fail)
    monkeypatch.delenv("TPK_LOG", raising=False)
    assert cli.main(["env"]) == 1
    assert capsys.readouterr().err == "terapipe: rank 1 failed in 1B0.3: out of memory\n"
    monkeypatch.setenv("TPK_LOG", "debug")
    with pytest.raises(RuntimeError):
        cli.main(["env"])


def test_a_package_that_an_install_left_out_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TPK_LOG", raising=False)
    monkeypatch.setitem(cli.VERBS, "env", lambda arguments: __import__(arguments[0]))
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.main(["env", "tyro"]) == 1
    assert capsys.readouterr().err == "terapipe: tyro is not installed, and `env` needs it: pip install tyro\n"
    with pytest.raises(ModuleNotFoundError):  # a mistake of ours
        cli.main(["env", "terapipe.no_such_module"])


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    for arguments in (["--help"], ["env", "--json", str(tmp_path / "env.json")]):
        command = [sys.executable, "-m", "terapipe", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == ""
            assert process.wait(timeout=60) == 141
    assert json.loads((tmp_path / "env.json").read_text())["versions"]["torch"]


def test_local_ranks_inside_another_launch_must_agree(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert cli.main(["train", "--local-ranks", "2"]) == 2
    assert "--local-ranks 2 inside a launch of 3 processes" in capsys.readouterr().err


def test_bench_runs_a_module_of_the_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "bench_nothing.py").write_text(
        "def run():\n    return [{'name': 'a', 'time_ms': 1.23456}, {'name': 'b', 'time_ms': None}]\n"
    )
    modules = {"nothing": tmp_path / "benchmarks" / "bench_nothing.py"}
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "benchmarks", raising=False)
    benchmarking.run(modules, "nothing", json_file=tmp_path / "out" / "rows.json", plot_file=None)
    assert capsys.readouterr().out.splitlines() == ["name  time_ms", "   a    1.235", "   b        -"]
    report = json.loads((tmp_path / "out" / "rows.json").read_text())
    assert report["rows"][0]["time_ms"] == 1.23456
    assert report["environment"]["versions"]["torch"]
    with pytest.raises(ValueError, match="draws no plot"):
        benchmarking.run(modules, "nothing", json_file=None, plot_file=tmp_path / "rows.png")
    sys.modules.pop("benchmarks", None)


@pytest.mark.parametrize("options", [["--local-ranks", "-1"], ["--local-ranks", "2", "--threads-per-rank", "0"]])
def test_numbers_of_workers_and_threads_that_make_no_sense(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *options]) == 2
    assert "--local-ranks is" in capsys.readouterr().err
