"""The published experiments of Li et al. 2021 (arXiv 2102.07988v2) as data: the ten settings of table 1 with their step
times (figure 5), the step times over the number of equal slices (figure 6), and one layer on one GPU (figure 3).

All ran 2048-token sequences on p3.16xlarge nodes (eight V100 each, 25 Gbit/s between nodes). "Without slices" cuts a
step into micros of one sequence. The trap: not every number is confirmed; `provenance` says where it was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from terapipe.models.config import ModelConfig
from terapipe.models.presets import PRESETS

TOKENS = 2048
GPUS_PER_NODE = 8

# "unconfirmed": the mean was quoted from memory of the paper's appendix and agrees with the bars of figure 5, but was
# not read in a source that could be checked.
Provenance = Literal["paper", "repository", "unconfirmed"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model on a cluster. `batch` sequences a step in all; `pipe` stages of `tensor` GPUs each, `data` times."""

    model: ModelConfig
    name: str
    batch: int
    data: int
    pipe: int
    tensor: int
    tokens: int = TOKENS

    def __post_init__(self) -> None:
        for key in ("batch", "data", "pipe", "tensor", "tokens"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}; it must be at least 1.")
        if self.model.layers % self.pipe:
            raise ValueError(
                f"{self.name} has {self.model.layers} layers, which {self.pipe} stages do not divide; the cluster ran "
                "equal stages only, so give a divisor."
            )
        if self.batch % self.data:
            raise ValueError(f"a batch of {self.batch} does not divide over {self.data} replicas; change one of them.")
        if GPUS_PER_NODE % self.tensor or self.model.heads % self.tensor:
            raise ValueError(
                f"tensor is {self.tensor}; it must divide the {GPUS_PER_NODE} GPUs of a node and the "
                f"{self.model.heads} heads of {self.name}."
            )

    @property
    def micros(self) -> int:
        """Sequences of one replica, each a micro."""
        return self.batch // self.data

    @property
    def layers_per_stage(self) -> int:
        return self.model.layers // self.pipe

    @property
    def gpus(self) -> int:
        return self.data * self.pipe * self.tensor


@dataclass(frozen=True)
class Published:
    """Mean step seconds, and the token slices of each sequence that the authors' planner chose (setting 2 and 3: no
    gain, so none)."""

    without_s: float
    with_s: float
    provenance: Provenance
    slices: tuple[int, ...]


def _setting(preset: str, batch: int, data: int, pipe: int, tensor: int) -> Setting:
    return Setting(model=PRESETS[preset](), name=preset, batch=batch, data=data, pipe=pipe, tensor=tensor)


SETTINGS: dict[int, Setting] = {
    1: _setting("gpt3_1b", 128, 8, 24, 1),
    2: _setting("gpt3_1b", 72, 2, 12, 8),
    3: _setting("gpt3_1b", 72, 1, 24, 8),
    4: _setting("gpt3_13b", 32, 2, 20, 8),
    5: _setting("gpt3_13b", 32, 1, 40, 8),
    6: _setting("gpt3_44b", 8, 4, 96, 1),
    7: _setting("gpt3_44b", 8, 2, 24, 8),
    8: _setting("gpt3_44b", 8, 1, 48, 8),
    9: _setting("gpt3_175b", 2, 1, 96, 4),
    10: _setting("gpt3_175b", 2, 1, 48, 8),
}

PUBLISHED: dict[int, Published] = {
    1: Published(1.517, 1.254, "paper", (776, 640, 632)),
    2: Published(1.018, 1.018, "unconfirmed", (2048,)),
    3: Published(0.913, 0.913, "repository", (2048,)),
    4: Published(2.637, 1.891, "unconfirmed", (1024, 1024)),
    5: Published(1.863, 1.328, "paper", (704, 688, 656)),
    6: Published(13.319, 7.103, "paper", (*[64] * 26, *[56] * 6, 48)),
    7: Published(4.311, 2.771, "unconfirmed", (368, 384, 384, 368, 256, 288)),
    8: Published(2.662, 1.111, "paper", (384, 384, 368, 320, 296, 296)),
    9: Published(9.990, 1.481, "paper", (*[120] * 4, *[112] * 6, *[104] * 8, 64)),
    10: Published(5.822, 1.160, "repository", (128,) * 16),
}

UNIFORM: dict[int, dict[int, float]] = {
    8: {1: 2.662, 4: 1.241, 8: 1.255, 16: 1.241},
    9: {1: 9.990, 4: 2.902, 8: 1.892, 16: 1.547, 32: 1.593, 64: 2.227, 128: 3.252},
}
"""Setting -> number of equal slices -> step seconds (figure 6)."""

SINGLE_LAYER: dict[int, float] = {64: 1.45e-3, 256: 1.45e-3, 1024: 2.7e-3}
"""Tokens -> seconds of the forward of one GPT3-1B layer on one V100, read off figure 3 (flat up to 256 tokens)."""
