"""What others use of the machine: own work is none of it, a busy child is, and a run says so."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from terapipe.timing import foreign_load
from terapipe.timing.foreign_load import Sample, disturbance, foreign_cores, sample
from terapipe.train.config import ParallelSettings, TrainConfig
from terapipe.train.trainer import Trainer
from terapipe.world import ALONE

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="what others use is read from /proc/stat")


@needs_proc
def test_own_work_is_no_foreign_load():
    before, began = sample(), time.perf_counter()
    x = torch.randn(200, 200)
    while time.perf_counter() - began < 0.3:
        x = torch.tanh(x @ x)
    after = sample()
    assert after.own_s - before.own_s > 0.05
    assert 0 <= foreign_cores(before, after) <= 64


@needs_proc
def test_another_process_is_foreign_load():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        before = sample()
        for _ in range(5):  # until it had its share of the cores
            time.sleep(0.5)
            if foreign_cores(before, sample()) > 0.2:
                return
    finally:
        busy.kill()
        busy.wait()
    pytest.fail(f"a process that never rests used {foreign_cores(before, sample())} cores")


def test_the_sum_is_the_machines_less_our_own():
    assert foreign_cores(Sample(10.0, 1.0, 0.0), Sample(16.0, 4.0, 2.0)) == pytest.approx(1.5)
    assert foreign_cores(Sample(10.0, 1.0, 0.0), Sample(11.0, 4.0, 2.0)) == 0.0


def test_load_on_free_cores_disturbs_nobody(monkeypatch):
    monkeypatch.setattr(foreign_load.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(foreign_load.torch, "get_num_threads", lambda: 1)
    assert disturbance(1.9, local_ranks=2) == "" and disturbance(0.04, local_ranks=4) == ""
    assert disturbance(2.5, local_ranks=2).startswith("disturbed: others kept 2.50 of 4 cores busy meanwhile")


def test_a_disturbed_run_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("terapipe.train.trainer.foreign_cores", lambda before, after: 99.0)
    monkeypatch.setattr("terapipe.train.trainer.LEAST_S", 0.0)
    plain = TrainConfig(parallel=ParallelSettings(ranks=2), tokens=96, steps=5, run_dir=tmp_path, device="cpu")
    lines = list[str]()
    with Trainer(plain, world=ALONE) as trainer:
        result = trainer.fit(print_line=lines.append, bar=False)
    assert result.foreign_cores == 99.0 and "; disturbed: others kept 99.00 of" in lines[-1]
