"""What several tests of the GPU report stand on: a small problem, a cell, answers judged, what a file's rows say."""

from __future__ import annotations

import torch

from benchmarks.gpu_report import answers, parts, shapes
from benchmarks.gpu_report.contenders import Jobs

SHAPE = shapes.Shape(2, 7, 12, 6, 2, 8)
SLICE = str(shapes.tiny_grid()[1])


def judged(jobs: Jobs, problem):
    answer = [answers.answer(problem, dtype) for dtype in (torch.float64, torch.bfloat16)]
    return answers.judge(jobs.results(), *answer, SHAPE.group, torch.bfloat16)


def statuses(file):
    return {r["contender"]: r["status"] for r in parts.read_rows(file) if r["status"] not in ("begun", "machine")}
