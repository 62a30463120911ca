"""What is refused before a process is started or a file written."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from terapipe.train.config import DataSettings, ModelSettings, ParallelSettings, TrainConfig
from terapipe.train.start import check_start, pick_device
from terapipe.world import World

TINY = TrainConfig(
    model=ModelSettings(vocab=32, hidden=16, layers=2, heads=2, kv_heads=1),
    parallel=ParallelSettings(slice_tokens=(5, 11, 1)),
    tokens=17,
    device="cpu",
)


@pytest.mark.parametrize(
    ("changes", "processes", "words"),
    [
        ({"parallel": ParallelSettings(ranks=3)}, 2, "parallel.ranks is 3, but 2 processes"),
        ({"parallel": ParallelSettings(links="local")}, 2, "'local'.*2 processes"),
        ({"parallel": ParallelSettings(ranks=7)}, 1, "7 stages need at least 7 layers"),
        ({"tokens": 18}, 1, "17.*18"),
        ({"data": DataSettings(source="bin", train=(Path("/no/such.bin"),))}, 1, "/no/such.bin does not exist"),
        ({"device": "cuda"}, 1, "torch sees no GPU here; use --device cpu"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(
    changes: dict, processes: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = dataclasses.replace(TINY, run_dir=tmp_path / "run", **changes)
    with pytest.raises(ValueError, match=words):
        check_start(config, world=World(size=processes, local_size=processes), resume=False)
    assert not (tmp_path / "run").exists()


def test_a_run_folder_below_a_file_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = dataclasses.replace(TINY, run_dir=tmp_path / "file" / "runs" / "x")
    with pytest.raises(ValueError, match="file is no folder, but one is needed at"):
        check_start(config, world=World(), resume=False)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert pick_device("auto", World()) == "cpu"
    with pytest.raises(ValueError, match="torch sees no GPU"):
        pick_device("cuda", World())


def test_fewer_gpus_than_local_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for name in ("auto", "cuda"):
        assert pick_device(name, World(size=4, local_size=2)) == "cuda"
        with pytest.raises(ValueError, match=r"3 local ranks need a GPU each, but torch sees 2; start 2"):
            pick_device(name, World(size=3, local_size=3))
    assert pick_device("cpu", World(size=3, local_size=3)) == "cpu"
