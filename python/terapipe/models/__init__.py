"""Decoder-only transformers. Importing this package needs no torch; the layers do, and are loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terapipe.models.config import ModelConfig, tied_parameters
from terapipe.models.presets import PRESETS

if TYPE_CHECKING:
    from terapipe.models.transformer import layers

__all__ = ["PRESETS", "ModelConfig", "layers", "tied_parameters"]


def __getattr__(name: str) -> Any:
    if name == "layers":
        from terapipe.models import transformer

        return transformer.layers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
