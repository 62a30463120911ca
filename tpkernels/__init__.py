"""tpkernels: attention over a prefix cache, whose backward works through the cache. Never imports terapipe."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from tpkernels.attention import invariance_unit, prefix_attention
from tpkernels.mask import Mask
from tpkernels.prefix_cache import GradientAccumulator, PrefixCache

try:
    __version__ = version("terapipe")
except PackageNotFoundError:  # a checkout on PYTHONPATH that was never installed
    __version__ = "0+unknown"

__all__ = ["GradientAccumulator", "Mask", "PrefixCache", "__version__", "invariance_unit", "prefix_attention"]
