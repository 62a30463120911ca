"""Recomputation: the same bits as without, graphs of one slice at a time, and what layers must bring for it."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_cases import Case, gradients_of, oracle, worst_error
from torch import Tensor, nn

from terapipe.engine import Batch, Pipeline
from terapipe.schedule import make_plan
from tpkernels import Mask

CASES = [
    Case(dtype="fp32"),
    Case("gpt", 3, (9, 1, 14), 3, 2, "seq_1f1b", 2, documents=True, targets="some"),
    Case("llama", 1, (5, 20), 2, dtype="bf16"),
    Case("llama", 4, (31,), 4, 2, "one_f_one_b", targets="some", dtype="fp32"),
    Case("gpt", 2, (40,), 3, 1, "gpipe", dtype="fp32"),
    Case("llama", 2, (7, 6, 5, 4), 2, 1, "seq_interleaved", dtype="fp32", blocks=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_are_those_of_a_run_that_keeps_its_activations(case: Case) -> None:
    results = []
    for recompute in (False, True):
        with case.pipeline(recompute=recompute) as pipeline:
            steps = [pipeline.step(case.batch(seed)) for seed in (0, 1)]
            results.append(([(step.loss, step.grad_norm) for step in steps], gradients_of(pipeline)))
            assert pipeline.evaluate(case.batch(0)).loss == steps[0].loss
    (losses, gradients), (losses_again, gradients_again) = results
    assert losses_again == losses
    for name, gradient in gradients.items():
        assert torch.equal(gradients_again[name], gradient), name


def test_gradients_are_those_of_the_oracle() -> None:
    case = replace(CASES[1], ranks=2)
    exact = oracle(case)
    with case.pipeline(recompute=True) as pipeline:
        pipeline.step(case.batch())
        assert worst_error(gradients_of(pipeline), exact.gradients) < 1e-12


class _Saved:
    """Bytes that autograd keeps for backwards."""

    def __init__(self) -> None:
        self.bytes = self.most = 0

    def pack(self, x: Tensor) -> Tensor:
        kept = x.detach().clone()  # an object of its own, whose end can be seen
        self.bytes += kept.nbytes
        self.most = max(self.most, self.bytes)
        weakref.finalize(kept, self._gone, kept.nbytes)
        return kept

    def _gone(self, size: int) -> None:
        self.bytes -= size


def test_graphs_live_for_one_slice_at_a_time() -> None:
    case = Case("llama", 1, (16,) * 8, dtype="fp32")
    most = {}
    for recompute in (False, True):
        saved = _Saved()
        with (
            case.pipeline(recompute=recompute) as pipeline,
            torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x),
        ):
            pipeline.step(case.batch())
        assert saved.bytes == 0
        most[recompute] = saved.most
    weights = sum(parameter.nbytes for parameter in pipeline._parameters.values())  # saved with every slice's graph
    assert 0 < most[True] < most[False] / 6
    assert most[True] < 3 * weights


class _Noisy(nn.Module):
    """Dropout in front of a linear, and on stage borders."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8) if first else None
        self.drop, self.linear = nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, hidden: Tensor, cache: Any, mask: Mask, positions: Tensor) -> Tensor:
        x = hidden if self.table is None else self.table(hidden)
        return x + self.linear(self.drop(x))


def test_random_numbers_of_the_forward_come_again() -> None:
    plan = make_plan(layers=4, ranks=2, slices=(3, 9), tokens=12, micros=2, schedule="terapipe")
    batch = Batch(torch.arange(24).view(2, 12) % 11, torch.arange(24).view(2, 12) % 8)
    found = []
    for recompute in (False, True):
        torch.manual_seed(7)
        layers = [_Noisy(first=index == 0) for index in range(4)]
        with Pipeline(layers, plan, hidden_size=8, recompute=recompute) as pipeline:
            torch.manual_seed(8)
            loss = pipeline.step(batch).loss
            found.append((loss, torch.rand(1).item(), gradients_of(pipeline)))
    assert found[0][:2] == found[1][:2]  # neither the loss nor the numbers after the step
    assert all(torch.equal(gradient, found[1][2][name]) for name, gradient in found[0][2].items())


class _OwnCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def make_cache(self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return {}

    def forward(self, hidden: Tensor, cache: Any, mask: Mask, positions: Tensor) -> Tensor:
        return hidden * self.weight


def test_a_cache_that_cannot_go_back_is_refused_by_name() -> None:
    plan = make_plan(layers=2, ranks=1, slices=2, tokens=4)
    layers = [_Noisy(first=True), _OwnCache()]
    with pytest.raises(ValueError, match=r"layer '1' has a cache of type dict without recomputing\(start\)"):
        Pipeline(layers, plan, hidden_size=8, recompute=True)
