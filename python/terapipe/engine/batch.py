"""One step's data: token ids, targets and document borders of every sequence, known in full to every rank.

A rank that holds only middle layers still needs the documents (masks, positions) and the target count (the loss
divisor), so the whole batch's metadata goes everywhere and nothing is sliced into per-stage messages.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

NO_TARGET = -100  # the ignore_index of torch's cross entropy


@dataclass(frozen=True)
class KnownIds:
    """How many token and target ids a model knows, each from 0 up; None where nobody can tell: a first layer that looks
    ids up in its own way, or a loss of one's own."""

    tokens: int | None = None
    targets: int | None = None


@dataclass(frozen=True)
class Batch:
    """`tokens` int64 [sequences, tokens]; `targets` the same shape, -100 where a token has no target;
    `document_starts` int32 [sequences, tokens] gives for each token the position at which its document starts, or
    None when every sequence is one document."""

    tokens: Tensor
    targets: Tensor
    document_starts: Tensor | None = None

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2 or self.tokens.dtype != torch.int64:
            raise ValueError(
                f"Batch: tokens must be int64 [sequences, tokens], got {self.tokens.dtype} {list(self.tokens.shape)}."
            )
        if self.targets.shape != self.tokens.shape or self.targets.dtype != torch.int64:
            raise ValueError(
                f"Batch: targets must be int64 {list(self.tokens.shape)} like tokens, got {self.targets.dtype} "
                f"{list(self.targets.shape)}; use {NO_TARGET} for a token without a target."
            )
        starts = self.document_starts
        if starts is not None and (starts.shape != self.tokens.shape or starts.dtype != torch.int32):
            raise ValueError(
                f"Batch: document_starts must be int32 {list(self.tokens.shape)} like tokens, got {starts.dtype} "
                f"{list(starts.shape)}."
            )

    @property
    def num_targets(self) -> int:
        """How many tokens have a target: the divisor of the loss."""
        return int((self.targets != NO_TARGET).sum())

    def check_ids(self, known: KnownIds) -> None:
        """ValueError for the first token or target that the model does not know: inside it, the same is a crash."""
        _check_range(
            self.tokens, "token", known.tokens, "use the tokeniser the model was made for, or a larger vocabulary"
        )
        remedy = f"{NO_TARGET} marks a token without a target"
        _check_range(self.targets, "target", known.targets, remedy, besides=NO_TARGET)

    def digest(self) -> int:
        """20 bits of the contents, by which ranks notice that they were given different batches."""
        parts = [self.tokens, self.targets] + ([] if self.document_starts is None else [self.document_starts])
        value = 0
        for part in parts:
            value = zlib.crc32(part.detach().cpu().contiguous().numpy().data, value)
        return value & 0xFFFFF

    def micro(self, index: int, size: int) -> Batch:
        """Sequences `[index * size, (index + 1) * size)`, which move through the stages together."""
        rows = slice(index * size, (index + 1) * size)
        starts = None if self.document_starts is None else self.document_starts[rows]
        return Batch(self.tokens[rows], self.targets[rows], starts)

    def to(self, device: torch.device) -> Batch:
        starts = None if self.document_starts is None else self.document_starts.to(device, non_blocking=True)
        return Batch(self.tokens.to(device, non_blocking=True), self.targets.to(device, non_blocking=True), starts)


def _check_range(ids: Tensor, what: str, known: int | None, remedy: str, *, besides: int | None = None) -> None:
    if known is None or not ids.numel():
        return
    low, high = (int(extreme) for extreme in torch.aminmax(ids))
    if high < known and (low >= 0 or (besides is not None and bool(((ids >= 0) | (ids == besides)).all()))):
        return
    wrong = ((ids < 0) & (ids != besides) if besides is not None else ids < 0) | (ids >= known)
    row, position = wrong.nonzero()[0].tolist()
    raise ValueError(
        f"{what} id {int(ids[row, position])} (sequence {row}, position {position}) is outside the model's {known} "
        f"{what} ids; {remedy}."
    )
