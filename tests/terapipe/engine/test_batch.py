"""Batch: what it refuses, how it is cut into micros, and the digest by which ranks compare."""

from __future__ import annotations

import pytest
import torch

from terapipe.engine import Batch
from terapipe.engine.batch import KnownIds

TOKENS = torch.arange(12).view(3, 4)
TARGETS = TOKENS.where(TOKENS % 5 != 0, -100)
STARTS = torch.tensor([[0, 0, 2, 2]] * 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ((TOKENS.int(), TARGETS), r"tokens must be int64 \[sequences, tokens\], got torch.int32 \[3, 4\]"),
        ((TOKENS[0], TARGETS[0]), r"tokens must be int64 \[sequences, tokens\], got torch.int64 \[4\]"),
        ((TOKENS, TARGETS[:2]), r"targets must be int64 \[3, 4\] like tokens, got torch.int64 \[2, 4\]; use -100"),
        ((TOKENS, TARGETS.float()), r"targets must be int64 \[3, 4\] like tokens, got torch.float32"),
        ((TOKENS, TARGETS, STARTS.long()), r"document_starts must be int32 \[3, 4\] like tokens, got torch.int64"),
        ((TOKENS, TARGETS, STARTS[:1]), r"document_starts must be int32 \[3, 4\] like tokens, got torch.int32 \[1, 4"),
    ],
)
def test_wrong_tensors_are_refused_with_their_shape(given: tuple[torch.Tensor, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Batch(*given)


def test_a_micro_has_its_own_rows_of_everything() -> None:
    batch = Batch(torch.arange(24).view(6, 4), torch.arange(24).view(6, 4) + 1, STARTS.repeat(2, 1))
    for index in range(3):
        micro = batch.micro(index, 2)
        assert micro.tokens.tolist() == [[8 * index + i for i in range(4)], [8 * index + 4 + i for i in range(4)]]
        assert torch.equal(micro.targets, micro.tokens + 1)
        assert micro.document_starts is not None and micro.document_starts.shape == (2, 4)
    assert Batch(TOKENS, TARGETS).micro(2, 1).document_starts is None


def test_targets_are_counted_and_the_digest_sees_every_part() -> None:
    batch = Batch(TOKENS, TARGETS, STARTS)
    assert batch.num_targets == 9
    changed = [TOKENS + (TOKENS == 7), TARGETS.where(TOKENS != 7, -100), STARTS.where(STARTS != 2, 3)]
    others = [Batch(changed[0], TARGETS, STARTS), Batch(TOKENS, changed[1], STARTS), Batch(TOKENS, TARGETS)]
    digests = [other.digest() for other in [batch, *others, Batch(TOKENS, TARGETS, changed[2].int())]]
    assert len(set(digests)) == len(digests) and all(0 <= digest < 2**20 for digest in digests)
    assert Batch(TOKENS.T.contiguous().T, TARGETS.clone(), STARTS).digest() == batch.digest()


@pytest.mark.parametrize(
    ("known", "match"),
    [
        (
            KnownIds(tokens=11),
            r"token id 11 \(sequence 2, position 3\) is outside the model's 11 token ids; use the tok",
        ),
        (
            KnownIds(targets=9),
            r"target id 9 \(sequence 2, position 1\) is outside the model's 9 target ids; -100 marks",
        ),
        (KnownIds(tokens=12, targets=12), None),
        (KnownIds(), None),
    ],
    ids=str,
)
def test_the_first_id_that_the_model_does_not_know_is_named(known: KnownIds, match: str | None) -> None:
    if match is None:
        Batch(TOKENS, TARGETS).check_ids(known)
    else:
        with pytest.raises(ValueError, match=match):
            Batch(TOKENS, TARGETS).check_ids(known)


@pytest.mark.parametrize("wrong", [-1, -101, -(2**40), 2**40])
def test_only_one_negative_target_means_none(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"target id {wrong} "):
        Batch(TOKENS, TARGETS.where(TOKENS != 6, wrong)).check_ids(KnownIds(12, 12))
    with pytest.raises(ValueError, match=f"token id {wrong} "):
        Batch(TOKENS.where(TOKENS != 6, wrong), TARGETS).check_ids(KnownIds(12, 12))


def test_the_id_that_is_named_is_the_first_wrong_one_not_a_good_one_before_it() -> None:
    tokens, targets = torch.tensor([[0, 10], [-3, 11]]), torch.tensor([[-100, 0], [-1, 11]])
    with pytest.raises(ValueError, match=r"token id -3 \(sequence 1, position 0\)"):
        Batch(tokens, targets).check_ids(KnownIds(tokens=11))
    with pytest.raises(ValueError, match=r"target id -1 \(sequence 1, position 0\)"):
        Batch(tokens, targets).check_ids(KnownIds(targets=11))
