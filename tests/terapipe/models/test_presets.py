"""Presets have the sizes of the models they are named for."""

from __future__ import annotations

import pytest

from terapipe.models import PRESETS


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3_1b", 1.3157),
        ("gpt3_13b", 12.853),
        ("gpt3_44b", 43.816),
        ("gpt3_175b", 174.604),
        ("llama3_8b", 8.0303),
        ("llama3_70b", 70.5537),
    ],
)
def test_parameter_counts_match_the_published_models(name: str, billions: float) -> None:
    assert PRESETS[name]().parameters() / 1e9 == pytest.approx(billions, rel=1e-4)


def test_llama3_counts_are_those_of_the_released_weights() -> None:
    assert PRESETS["llama3_8b"]().parameters() == 8_030_261_248
    assert PRESETS["llama3_70b"]().parameters() == 70_553_706_496


def test_the_44b_model_has_the_papers_shape() -> None:
    model = PRESETS["gpt3_44b"]()
    assert (model.layers, model.hidden, model.heads, model.head_dim) == (96, 6144, 48, 128)


def test_every_preset_names_itself() -> None:
    assert all(function.__name__ == name for name, function in PRESETS.items())
