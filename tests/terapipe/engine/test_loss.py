"""The loss: a sum over the tokens that have a target, in fp32 at least, the same over any cut into slices."""

from __future__ import annotations

import pytest
import torch

from terapipe.engine import cross_entropy_sum


def test_it_is_the_sum_of_negative_log_probabilities() -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 6, -100, 3, 3], [-100, -100, 1, 2, 0]])
    expected = -sum(
        float(logits[row, token].log_softmax(-1)[target])
        for row in range(2)
        for token, target in enumerate(targets[row].tolist())
        if target != -100
    )
    assert float(cross_entropy_sum(logits, targets)) == pytest.approx(expected, rel=1e-14)
    halves = [cross_entropy_sum(logits[:, part], targets[:, part]) for part in (slice(0, 2), slice(2, 5))]
    assert float(sum(halves)) == pytest.approx(expected, rel=1e-14)


def test_a_slice_without_targets_adds_nothing_but_has_a_graph() -> None:
    logits = torch.randn(1, 3, 7, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((1, 3), -100))
    loss.backward()
    assert float(loss.detach()) == 0.0 and logits.grad is not None and not logits.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_are_widened(dtype: torch.dtype) -> None:
    logits = torch.randn(1, 300, 50).to(dtype)
    targets = torch.randint(50, (1, 300))
    loss = cross_entropy_sum(logits, targets)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(cross_entropy_sum(logits.double(), targets)), rel=1e-5)
