"""Losses: a sum over tokens.  The engine divides once, by the number of targets in the whole batch, so every slicing
gives the same number."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from terapipe.engine.batch import NO_TARGET


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross entropies in nats: logits [b, t, vocabulary] (16-bit ones are widened), targets int64 [b, t],
    -100 counts nothing."""
    logits = logits if logits.dtype.itemsize > 2 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
