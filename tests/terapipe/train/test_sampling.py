"""Sampling: token by token through the caches equals running everything again each time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from terapipe.models import ModelConfig, layers
from terapipe.train.sampling import generate, generate_text
from tpkernels import Mask

CONFIG = ModelConfig(vocab=257, hidden=16, layers=2, heads=4, kv_heads=2, ffn_hidden=24, initial_std=0.5)
LEARNED = ModelConfig(vocab=9, hidden=8, layers=1, heads=2, max_tokens=12, position="learned")


def model(config: ModelConfig = CONFIG) -> dict[str, nn.Module]:
    return {name: make() for name, make in layers(config, dtype=torch.float64).items()}


def test_the_likeliest_ids_equal_those_of_full_recomputation() -> None:
    built, prompt = model(), [5, 100, 7]
    expected = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            hidden = torch.tensor([expected])
            for module in built.values():
                hidden = module(hidden, None, Mask(), Mask().positions(0, len(expected)))
            expected.append(int(hidden[0, -1].argmax()))
    assert generate(built, prompt, tokens=12, temperature=0) == expected[3:]
    assert generate(list(built.values()), prompt, tokens=12, temperature=0) == expected[3:]
    stop = expected[8]
    assert generate(built, prompt, tokens=12, temperature=0, stop=stop) == expected[3 : expected.index(stop, 3)]


def test_draws_follow_the_seed_and_the_distribution() -> None:
    built = model()
    assert generate(built, [1], tokens=20, seed=3) == generate(built, [1], tokens=20, seed=3)
    assert generate(built, [1], tokens=20, seed=3) != generate(built, [1], tokens=20, seed=4)
    with torch.no_grad():
        hidden = torch.tensor([[1]])
        for module in built.values():
            hidden = module(hidden, None, Mask(), Mask().positions(0, 1))
    likeliest, probability = int(hidden.argmax()), float((hidden[0, 0] / 0.5).softmax(-1).max())
    hits = sum(generate(built, [1], tokens=1, temperature=0.5, seed=seed) == [likeliest] for seed in range(150))
    assert abs(hits / 150 - probability) < 0.15


def test_text_is_bytes_and_broken_utf8_is_shown() -> None:
    text = generate_text(model(), "def ", tokens=30)
    assert isinstance(text, str) and len(text) > 0
    assert generate_text(model(), "", tokens=3) is not None


def test_bad_requests_are_named() -> None:
    built = model(LEARNED)
    assert len(generate(built, [1, 2], tokens=10)) == 10
    cases = [
        (lambda: generate(built, [1, 2], tokens=11), "2 and 11 new tokens exceed the model's 12"),
        (lambda: generate(built, [], tokens=2), "prompt is empty"),
        (lambda: generate(built, [9], tokens=2), "id 9 is outside the vocabulary of 9"),
        (lambda: generate(built, [1], tokens=2, temperature=-1.0), "temperature -1.0"),
    ]
    for call, words in cases:
        with pytest.raises(ValueError, match="generate") as caught:
            call()
        assert words in str(caught.value)
