"""Slices and backwards that come out of order are refused, and what is refused changes nothing."""

from __future__ import annotations

import pytest
import torch
from cached_slices import backward, forward

from tpkernels import PrefixCache


@pytest.fixture(autouse=True)
def _oracle(monkeypatch):
    monkeypatch.setenv("TPK_BACKEND", "reference")


def snapshot(cache):
    tensors = (cache.k, cache.v, cache.position, cache.progress)
    return [tensor.clone() for tensor in tensors]


def unchanged(cache, before):
    return all(torch.equal(a, b) for a, b in zip(snapshot(cache), before, strict=True))


@pytest.mark.parametrize(
    ("start", "length", "message"),
    [
        (512, 1, "slice starts at 512 but the cache holds 8 tokens; run the slices of a sequence in order"),
        (6, 3, r"slice \[6, 9\) is only partly in the cache, which holds 8 tokens; start at 8"),
        (None, 5, r"slice \[8, 13\) needs 13 tokens but the cache's capacity is 12"),
        (-1, 1, "slice starts at -1"),
    ],
)
def test_a_slice_out_of_place_is_refused_and_changes_nothing(start, length, message):
    cache = PrefixCache(1, 12, 2, 4)
    cache.k.zero_()
    cache.v.zero_()
    forward(cache, [3, 5])
    before = snapshot(cache)
    with pytest.raises(ValueError, match=message):
        forward(cache, [length], start)
    assert unchanged(cache, before)
    forward(cache, [4])
    assert cache.length == 12


def test_a_backward_out_of_order_names_both_slices_and_changes_nothing():
    cache = PrefixCache(1, 12, 2, 4)
    outs = forward(cache, [3, 5, 4])
    with pytest.raises(
        ValueError, match=r"backward of slice \[3, 8\) out of order: the next is that of slice \[8, 12\)"
    ):
        outs[1].backward(torch.ones_like(outs[1]), retain_graph=True)
    outs[2].backward(torch.ones_like(outs[2]), retain_graph=True)
    with pytest.raises(ValueError, match=r"slice \[0, 3\) out of order: the next is that of slice \[3, 8\)"):
        outs[0].backward(torch.ones_like(outs[0]), retain_graph=True)
    with pytest.raises(ValueError, match=r"slice \[8, 12\) out of order: the next is that of slice \[3, 8\)"):
        backward(outs[2])
    assert cache.backward_end == 8
    backward(outs[1])
    backward(outs[0])
    assert cache.backward_end == 0


def test_a_forward_into_a_cache_with_an_unfinished_backward_is_refused():
    cache = PrefixCache(1, 12, 2, 4)
    outs = forward(cache, [3, 5])
    backward(outs[1])
    with pytest.raises(ValueError, match=r"slice \[8, 9\) would be appended.*backward has reached 3 of 8 tokens"):
        forward(cache, [1])
    backward(outs[0])
    with pytest.raises(ValueError, match=r"backward has reached 0 of 8 tokens.*reset"):
        forward(cache, [1])
    cache.reset()
    assert cache.length == 0
    forward(cache, [2])


def test_the_backward_of_a_slice_from_before_a_reset_is_refused():
    cache = PrefixCache(1, 12, 2, 4)
    stale = forward(cache, [3])[0]
    cache.reset()
    forward(cache, [3])
    with pytest.raises(ValueError, match=r"backward of slice \[0, 3\), whose cache was reset\(\) after its forward"):
        backward(stale)
