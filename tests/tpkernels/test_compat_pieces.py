"""Pieces against the dense mask they stand for: nothing here computes attention."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tpkernels import reference
from tpkernels.compat_pieces import Sequences, Window, mask_intervals, pieces_of, sequence_intervals


def dense(pieces, batch, tokens, keys):
    """What a backend makes of the pieces; no query is in two of them."""
    visible = torch.zeros(batch, tokens, keys, dtype=torch.bool)
    taken = torch.zeros(batch, tokens, dtype=torch.int)
    for piece in pieces:
        mask = piece.mask(torch.device("cpu"))
        assert mask.document_starts is None or (mask.document_starts.diff(dim=1) >= 0).all()
        size = {"start": piece.start, "tokens": piece.q_end - piece.q_begin, "keys": piece.k_end - piece.k_begin}
        rows = slice(piece.row_begin, piece.row_end)
        visible[rows, piece.q_begin : piece.q_end, piece.k_begin : piece.k_end] = reference.dense_mask(mask, **size)
        taken[rows, piece.q_begin : piece.q_end] += 1
    assert (taken <= 1).all()
    return visible


def positions(tokens, keys):
    return torch.arange(tokens)[None, :, None], torch.arange(keys)[None, None, :]


ROWS = torch.arange(3)[:, None, None]
I, J = positions(37, 41)
MASKS = {  # mask [batch, 37, 41], pieces it takes
    "full": (J >= 0, 1),
    "causal from the top left": (J <= I, 1),
    "causal from the bottom right": (J <= I + 4, 1),
    "rows before the first key": (J <= I - 9, 1),
    "window": ((J <= I) & (J > I - 6), 1),
    "band": ((I - J).abs() <= 5, 2),  # its hi stands still at the last keys
    "left padding": ((J <= I) & (J >= 7 * ROWS), 1),
    "right padding": ((J <= I) & (J < 40 - 9 * ROWS), 5),  # the first row has no query behind its 40 keys
    "padding alone": (J < 41 - 9 * ROWS, 3),
    "packed documents": ((J <= I) & (I // 9 == J // 9), 1),
    "documents that see themselves whole": (I // 9 == J // 9, 5),
    "chunks behind left padding": ((J <= I) & (I // 8 == J // 8) & (J >= 5), 1),
    "a prefix that all see": ((J <= I) | (J < 7), 2),
    "queries that see nothing at the end": ((J <= I) & (I < 20), 1),
    "nothing": ((J < 0) & (I >= 0), 0),
}


@pytest.mark.parametrize("name", MASKS)
def test_common_masks_are_few_pieces(name):
    mask, expected = MASKS[name]
    mask = mask.expand(-1, 37, 41)
    pieces = pieces_of(mask_intervals(mask), batch=3, keys=41)
    assert torch.equal(dense(pieces, 3, 37, 41), mask.expand(3, -1, -1))
    assert len(pieces) == expected


@hypothesis.given(
    st.data(), st.integers(1, 3), st.integers(1, 7), st.integers(1, 6), st.sampled_from(["any", "monotone", "shared"])
)
def test_any_intervals_come_back_as_they_were(data, batch, tokens, keys, kind):
    ends = st.lists(st.integers(0, keys), min_size=tokens, max_size=tokens)
    rows = [(data.draw(ends), data.draw(ends)) for _ in range(1 if kind == "shared" else batch)]
    if kind == "monotone":
        rows = [(sorted(lo), sorted(hi)) for lo, hi in rows]
    intervals = torch.tensor(rows, dtype=torch.int32).transpose(1, 2)
    j = torch.arange(keys)
    mask = (j >= intervals[..., :1]) & (j < intervals[..., 1:])
    for given in (intervals, mask_intervals(mask)):
        assert torch.equal(
            dense(pieces_of(given, batch=batch, keys=keys), batch, tokens, keys), mask.expand(batch, -1, -1)
        )


@hypothesis.given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_a_row_with_a_hole_is_refused_and_no_other(rows):
    mask = torch.tensor(rows)[None]
    seen = ["".join("01"[x] for x in row).strip("0") for row in rows]
    holes = [number for number, row in enumerate(seen) if "0" in row]
    intervals = mask_intervals(mask)
    if not holes:
        pieces_of(intervals, batch=1, keys=5)
        return
    with pytest.raises(ValueError, match=f"query {holes[0]} of batch row 0 sees are not one interval"):
        pieces_of(intervals, batch=1, keys=5)


def test_intervals_outside_the_keys_are_refused():
    with pytest.raises(ValueError, match=r"query 1 of batch row 0 sees keys \[2, 6\), but there are 5 keys"):
        pieces_of(torch.tensor([[[0, 5], [2, 6]]], dtype=torch.int32), batch=1, keys=5)


@pytest.mark.parametrize(("window", "expected"), [(Window(causal=True), 1), (Window(), 3), (Window(True, 3), 1)])
def test_sequences_of_the_same_lengths_are_one_causal_piece(window, expected):
    cu = torch.tensor([0, 5, 5, 9, 20], dtype=torch.int32)
    intervals = sequence_intervals(Sequences(cu, cu, 11, 11), 23, window)
    assert len(pieces_of(intervals, batch=1, keys=20)) == expected and (intervals[0, 20:] == 0).all()
