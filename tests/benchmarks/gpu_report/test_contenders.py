"""The peers: that each is given the same problem, and that one that is missing says so."""

from __future__ import annotations

import pytest
import torch
from gpu_report_cases import judged

from benchmarks.gpu_report import contenders
from benchmarks.gpu_report.contenders import Refused


def plain(q, k, v, scale):
    """Attention of a peer, heads first, from torch's formula alone."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * scale
    sees = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v.repeat_interleave(group, 1)


def test_a_peer_is_right_and_its_gradient_cache_adds_up(problem):
    jobs = contenders._peer(problem, lambda q, k, v: plain(q, k, v, problem.scale), heads_first=True)
    jobs.forward()
    assert judged(jobs, problem).ok and jobs.results().dk is None
    jobs.backward()
    verdict = judged(jobs, problem)
    assert verdict.ok, verdict.text
    once = jobs.results().dv.clone()
    jobs.backward()
    torch.testing.assert_close(jobs.results().dv, 2 * once)
    assert jobs.results().dv.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_given_the_right_mask(problem):
    with torch.no_grad():
        jobs = contenders.PEERS["FlexAttention"](problem)
        jobs.forward()
    assert judged(jobs, problem).ok


def test_what_is_missing_is_refused(problem):
    for name in ("flash-attn 2", "flash-attn 3"):
        with pytest.raises(Refused, match="cannot be imported"):
            contenders.PEERS[name](problem)
