"""Model configs: sizes that do not fit are refused with the values; shapes and counts need no torch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from terapipe.models import ModelConfig, tied_parameters

SMALL = ModelConfig(vocab=11, hidden=24, layers=3, heads=6, kv_heads=2, ffn_hidden=40)


def test_sizes_left_out_are_derived() -> None:
    config = ModelConfig(vocab=11, hidden=24, layers=3, heads=6)
    assert (config.kv_heads, config.head_dim, config.ffn_hidden) == (6, 4, 96)
    assert ModelConfig(**dataclasses.asdict(config)) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 5, "head_dim": 0}, ["hidden 24", "heads 5"]),
        ({"kv_heads": 4}, ["heads 6", "kv_heads 4"]),
        ({"heads": 5, "head_dim": 0, "kv_heads": 3}, ["hidden 24 is not a multiple of heads 5", "of kv_heads 3"]),
        ({"head_dim": 8, "kv_heads": 4}, ["6 x head_dim 8 is 48", "heads 6 is not a multiple of kv_heads 4"]),
        ({"head_dim": 8}, ["6 x head_dim 8 is 48", "hidden is 24"]),
        ({"heads": 8, "head_dim": 3}, ["head_dim 3 is odd"]),
        ({"layers": 0}, ["layers is 0", "at least 1"]),
        ({"layers": 100_001}, ["layers is 100001", "at most 100000"]),
        ({"vocab": -1}, ["vocab is -1"]),
        ({"kv_heads": -2}, ["kv_heads is -2"]),
        ({"norm": "batchnorm"}, ["'batchnorm'", "layernorm, rmsnorm"]),
        ({"norm_eps": 0.0}, ["norm_eps is 0.0"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_their_values(change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError, match="model config") as caught:
        dataclasses.replace(SMALL, **change)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_odd_head_dim_is_fine_without_rotary_positions() -> None:
    assert dataclasses.replace(SMALL, heads=8, head_dim=3, position="learned").head_dim == 3


def test_layer_names_are_global_and_an_unknown_one_is_named() -> None:
    assert SMALL.layer_names() == ("embedding", "blocks.0", "blocks.1", "blocks.2", "head")
    with pytest.raises(ValueError, match=r"'blocks.3'.*blocks.0 to blocks.2"):
        SMALL.parameter_shapes("blocks.3")


def test_ties_are_declared_only_when_asked_for() -> None:
    assert tied_parameters(SMALL) == []
    tied = dataclasses.replace(SMALL, tied_embeddings=True)
    assert tied_parameters(tied) == [("embedding.tokens.weight", "head.output.weight")]
    assert SMALL.parameters() - tied.parameters() == 11 * 24


def test_configs_and_presets_import_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from terapipe.models import PRESETS; print(len(PRESETS))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 8
