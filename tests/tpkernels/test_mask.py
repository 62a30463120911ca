"""Mask: the interval of keys of each query, documents, positions, and refusals with values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpkernels import Mask
from tpkernels.mask import RawMask
from tpkernels.reference import dense_mask

bounds = st.one_of(st.none(), st.integers(0, 9))


@given(
    start=st.integers(-5, 9),
    tokens=st.integers(1, 9),
    causal=st.booleans(),
    left=bounds,
    right=bounds,
    data=st.data(),
)
def test_a_query_sees_exactly_its_interval_of_keys(start, tokens, causal, left, right, data):
    keys = start + tokens
    if keys < 1:
        return
    positions = range(start, keys)
    documents = None
    if causal and start >= 0 and data.draw(st.booleans()):
        cuts = sorted(data.draw(st.lists(st.integers(0, keys - 1), max_size=3)))
        documents = [max([0, *(cut for cut in cuts if cut <= p)]) for p in positions]
    rows = None if documents is None else torch.tensor([documents], dtype=torch.int32)
    mask = Mask(causal=causal, window=(left, right))
    visible = dense_mask(
        RawMask(causal, mask.window_left, mask.window_right, rows), start=start, tokens=tokens, keys=keys
    )[0]
    for row, p in enumerate(positions):
        low = max(0, 0 if left is None else p - left, documents[row] if documents else 0)
        high = min([keys] + ([p + 1] if causal else []) + ([] if right is None else [p + right + 1]))
        assert [j for j in range(keys) if visible[row, j]] == list(range(low, max(low, high)))


def test_a_window_beyond_every_position_is_none():
    """Such as sys.maxsize: its sum with a position must not wrap."""
    mask = Mask(window=(2**31 - 1, 2**31))
    assert (mask.window_left, mask.window_right) == (2**31 - 1, -1)
    assert Mask(window=(2**63 - 1, 0)).window_left == -1


def test_documents_give_absolute_starts_and_relative_positions():
    mask = Mask.from_documents([[2, 0, 3], [1, 4]])
    assert mask.document_starts.tolist() == [[0, 0, 2, 2, 2], [0, 1, 1, 1, 1]]
    assert mask.document_starts.dtype == torch.int32
    assert mask.positions(1, 3).tolist() == [[1, 0, 1], [0, 1, 2]]
    assert mask.positions(1, 3).dtype == torch.int64
    assert Mask().positions(4, 2).tolist() == [[4, 5]]
    assert all(given.positions(1, 3, "meta").is_meta for given in (mask, Mask()))
    assert Mask.from_documents(cu_seqlens=torch.tensor([0, 2, 2, 5])).document_starts.tolist() == [[0, 0, 2, 2, 2]]
    assert Mask.from_documents([2, 0, 3]).document_starts.tolist() == [[0, 0, 2, 2, 2]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask(window=(-1, None)), "window left is -1; use None"),
        (lambda: Mask(window=(3, -2)), "window right is -2; use None"),
        (lambda: Mask(causal=False, document_starts=torch.zeros(1, 3, dtype=torch.int32)), "need causal=True"),
        (lambda: Mask(document_starts=torch.zeros(3, dtype=torch.int32)), r"int32 \[batch, positions\].*\[3\]"),
        (lambda: Mask(document_starts=torch.zeros(1, 3)), "float32"),
        (lambda: Mask(document_starts=torch.tensor([[0, 2, 2]], dtype=torch.int32)), r"\[0, 1\] is 2.*position 1"),
        (lambda: Mask(document_starts=torch.tensor([[0, 1, 0]], dtype=torch.int32)), "falls from 1 to 0 at position 2"),
        (lambda: Mask(document_starts=torch.tensor([[0, -1]], dtype=torch.int32)), r"\[0, 1\] is -1"),
        (lambda: Mask.from_documents([[3], [1, 1]]), r"hold \[3, 2\] tokens"),
        (lambda: Mask.from_documents([[3, -1]]), "negative length"),
        (lambda: Mask.from_documents(cu_seqlens=[1, 3]), r"starts with 0, got \[1\]"),
        (lambda: Mask.from_documents(), "either lengths or cu_seqlens"),
        (lambda: Mask.from_documents([[3]]).positions(2, 2), r"tokens \[2, 4\).*covers 3"),
    ],
)
def test_a_wrong_mask_is_refused_with_its_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()
