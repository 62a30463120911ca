"""metrics.jsonl and progress lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from terapipe.train.metrics import MetricsFile, Progress, StepMetrics, ValidationMetrics, read_lines

KEYS = ["step", "loss", "grad_norm", "lr", "tokens_per_s", "step_s", "bubble_share", "memory_bytes", "hidden_share"]


def step(number: int, loss: float = 2.5) -> StepMetrics:
    return StepMetrics(number, loss, 1.0, 1e-3, 1000.0, 0.5, 0.25, 1 << 20)


def test_every_record_is_on_disk_at_once_with_the_fixed_keys(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "new" / "metrics.jsonl")
    file.write(ValidationMetrics(0, 5.5, 64))
    file.write(step(1))
    lines = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()  # before close
    assert list(json.loads(lines[0])) == ["step", "validation_loss", "targets"]
    assert list(json.loads(lines[1])) == KEYS
    file.close()


def test_a_number_that_is_none_is_still_json(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(step(1, loss=float("nan")))
    file.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda name: 1 / 0)["loss"] is None


def test_resuming_drops_what_will_be_repeated_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for number in range(1, 6):
        file.write(step(number))
    file.close()
    with path.open("a") as stream:
        stream.write('{"step": 6, "lo')
    file = MetricsFile(path, first_step=3)
    file.write(step(4, loss=9.0))
    file.close()
    assert [(line["step"], line["loss"]) for line in read_lines(path)] == [(1, 2.5), (2, 2.5), (3, 2.5), (4, 9.0)]


def test_lines_that_are_none_cost_no_other_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    noise = ["12", '{"st', "", '{"loss": 1}', '{"step": null}', "\ud8ff"]
    with path.open("w", errors="replace") as stream:
        for number, text in enumerate(noise):
            stream.write(f"{text}\n{json.dumps(step(number).__dict__)}\n")
    path.write_bytes(b"\xff\0\n" + path.read_bytes())
    MetricsFile(path, first_step=4).close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3, 4]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="fills a disk by /dev/full (Linux)")
def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics.jsonl'"):
        file.write(step(1))
    file.close()


def test_a_new_run_keeps_the_lines_of_earlier_ones(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        file = MetricsFile(tmp_path / "metrics.jsonl")
        assert read_lines(tmp_path / "metrics.jsonl") == []
        file.write(step(number))
        file.close()
    kept = {path.name: read_lines(path)[0]["step"] for path in tmp_path.iterdir()}
    assert kept == {"metrics.1.jsonl": 1, "metrics.2.jsonl": 2, "metrics.jsonl": 3}


def test_without_a_terminal_a_plain_line_comes_now_and_then() -> None:
    lines: list[str] = []
    with Progress(7, every=3, print_line=lines.append, bar=False) as progress:
        progress.validation(ValidationMetrics(0, 5.5, 64))
        for number in range(1, 8):
            progress.step(step(number))
    assert [line.split("  ")[0] for line in lines[1:]] == ["step 3/7", "step 6/7", "step 7/7"]
    assert "5.5000 nats a token" in lines[0]
    for word in ("loss 2.5000", "1,000 tokens/s", "500 ms", "bubble 25%", "1 MiB"):
        assert word in lines[1]


def test_a_terminal_gets_a_bar_with_the_same_figures(capsys) -> None:
    with Progress(2, every=1, bar=True) as progress:
        progress.step(step(1))
        progress.step(step(2))
    assert "2/2" in capsys.readouterr().out
