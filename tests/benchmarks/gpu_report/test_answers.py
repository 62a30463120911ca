"""The exact answers, and the judgement of what differs from them."""

from __future__ import annotations

import pytest
import torch
from gpu_report_cases import judged

from benchmarks.gpu_report import answers, contenders
from benchmarks.gpu_report.contenders import Results


def test_chunks_of_rows_add_up_to_the_whole(problem, monkeypatch):
    whole = answers.answer(problem, torch.float64)
    monkeypatch.setattr(answers, "SCORES_A_CHUNK", 150)  # two rows of three heads and 19 keys
    for a, b in zip(whole, answers.answer(problem, torch.float64), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["cpu", "cpu deterministic"])
def test_our_backend_is_right_and_errors_are_seen(name, problem):
    jobs = contenders.OURS[name](problem)
    jobs.forward()
    jobs.backward()
    assert judged(jobs, problem).ok
    for field in Results._fields:
        for wrong in (0.3, float("nan")):
            results = jobs.results()
            tensor = getattr(results, field)
            before = tensor[0, -1, 0, 3].item()
            tensor[0, -1, 0, 3] += wrong
            verdict = judged(jobs, problem)
            assert not verdict.ok and verdict.text.startswith(field)
            tensor[0, -1, 0, 3] = before
