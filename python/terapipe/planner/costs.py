"""What layers, stages and links cost, as data: seconds of a slice by (micro size, slice length, prefix length), bytes.

A `CostModel` holds the costs of one model on one kind of device: for each kind of layer (embedding, block, head with
the loss) the forward, the input gradient and the weight gradient, the bytes it keeps, and for each kind of link a
latency and a bandwidth. Where they came from (`source`) is measured, analytic or a table; the form is the same, so
stages of any layers, the search and the simulator treat them alike. Lengths and starts are in tokens here.

The trap: a full backward is the input gradient plus the weight gradient, never a fourth curve.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from terapipe.models.config import EMBEDDING, HEAD, ModelConfig
from terapipe.planner.pass_costs import CurveCost, PassCost, between, bracket, require_time
from terapipe.planner.slicing import SliceCosts

if TYPE_CHECKING:
    import numpy as np

    from terapipe.planner.slicing import Costs

BLOCK = "block"
LAYER_KINDS = (EMBEDDING, BLOCK, HEAD)
PASSES = ("forward", "input_grad", "weight_grad")
SOURCES = ("measured", "analytic", "table")
BLOCK_ROWS = 64
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class LayerCosts:
    """One kind of layer, by micro size for the passes. Bytes are of one sequence's tokens.

    saved_bytes_per_token: what one token's forward keeps for its backward. cache_bytes_per_token: its K and V.
    accumulator_bytes_per_token: fp32 sums of their gradients, one pair a layer.
    """

    parameters: int
    saved_bytes_per_token: float
    cache_bytes_per_token: float
    accumulator_bytes_per_token: float
    forward: Mapping[int, PassCost]
    input_grad: Mapping[int, PassCost]
    weight_grad: Mapping[int, PassCost]

    def __post_init__(self) -> None:
        for name in ("parameters", "saved_bytes_per_token", "cache_bytes_per_token", "accumulator_bytes_per_token"):
            require_time(name, getattr(self, name))
        sizes = {name: sorted(getattr(self, name)) for name in PASSES}
        if not sizes["forward"] or any(found != sizes["forward"] for found in sizes.values()):
            raise ValueError(f"every pass of a layer needs the same micro sizes, at least one; got {sizes}.")


@dataclass(frozen=True)
class LinkModel:
    """A transfer of `n` bytes arrives after `latency_s + n / bytes_per_s` and keeps its link busy for the latter."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        require_time("latency_s of a link", self.latency_s)
        if not 1 <= self.bytes_per_s < math.inf:
            raise ValueError(f"bytes_per_s of a link must be finite and at least 1, got {self.bytes_per_s!r}.")


FREE_LINK = LinkModel(0.0, 1e15)
"""The hand-off between stages of one process, which passes a reference on."""


@dataclass(frozen=True)
class Overheads:
    """Seconds that neither layers nor links take.

    action_s: per action (the interpreter). step_s: per step. The others per parameter of a rank: norm_s of
    the gradient's norm, update_s of the optimizer's update; first_forward_s and first_backward_s of a stage's first
    forward and backward of a step (it has waited, its weights left the cache, its gradients are made, not added to).

    asleep: where stages sleep instead of working, what takes the place of action_s, as (seconds since the rank last did
    anything, seconds of the action): the longer a process sleeps, the less of it is left in the caches.
    """

    action_s: float = 0.0
    step_s: float = 0.0
    norm_s: float = 0.0
    update_s: float = 0.0
    first_forward_s: float = 0.0
    first_backward_s: float = 0.0
    asleep: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "asleep":
                require_time(f"overhead {name}", value)
        for pair in self.asleep:
            if len(pair) != 2:
                raise ValueError(f"overhead asleep needs pairs of seconds slept and seconds of an action, got {pair}.")
            require_time("the sleep of overhead asleep", pair[0])
            require_time(f"overhead asleep behind {pair[0]} s", pair[1])
        if any(a[0] >= b[0] for a, b in itertools.pairwise(self.asleep)):
            raise ValueError(f"the sleeps of overhead asleep must ascend, got {[pair[0] for pair in self.asleep]}.")

    def woken_action_s(self, slept_s: float) -> float:
        """Seconds of an action whose rank did nothing for so long: straight between what is known, constant beyond."""
        slept, seconds = zip(*self.asleep, strict=True)
        return between(slept, seconds, *bracket(slept, slept_s), min(max(slept_s, slept[0]), slept[-1]))


@dataclass(frozen=True)
class CostModel:
    """See the top of this file. `tensor`: over how many devices each stage is cut. `links`: by kind.

    devices_per_node: where it is given, links between two nodes are of kind "inter", within one "intra"; else all are
    of one kind. notes: what a person should know, such as the fit's error.
    """

    source: str
    hardware: str
    model: ModelConfig
    dtype: str
    max_tokens: int
    layers: Mapping[str, LayerCosts]
    links: Mapping[str, LinkModel]
    tensor: int = 1
    devices_per_node: int | None = None
    overheads: Overheads = field(default_factory=Overheads)
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"the source of costs is {self.source!r}; it must be one of {', '.join(SOURCES)}.")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"the dtype of costs is {self.dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}.")
        missing = [kind for kind in LAYER_KINDS if kind not in self.layers]
        if missing:
            raise ValueError(f"the costs lack the layer {missing[0]!r}; they need {', '.join(LAYER_KINDS)}.")
        for name in ("max_tokens", "tensor", "devices_per_node"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} of the costs is {count}; it must be at least 1.")
        if not self.micro_sizes:
            each = {kind: sorted(layer.forward) for kind, layer in self.layers.items()}
            raise ValueError(f"the layers' costs have no micro size in common, got {each}; profile them together.")
        if not self.links:
            raise ValueError("the costs name no link; give at least one kind with latency_s and bytes_per_s.")

    @cached_property
    def micro_sizes(self) -> tuple[int, ...]:
        """Those that every layer has costs for."""
        return tuple(sorted(set.intersection(*(set(layer.forward) for layer in self.layers.values()))))

    @property
    def num_layers(self) -> int:
        """Layers that stages are made of: embedding, blocks, head."""
        return self.model.layers + 2

    def stage(self, first: int, last: int) -> StageCosts:
        """What a stage of layers [first, last) costs."""
        if not 0 <= first < last <= self.num_layers:
            raise ValueError(f"no stage [{first}, {last}) in a model of {self.num_layers} layers.")
        counts = {EMBEDDING: int(first == 0), HEAD: int(last == self.num_layers)}
        counts[BLOCK] = last - first - sum(counts.values())
        return StageCosts(self, tuple((self.layers[kind], count) for kind, count in counts.items() if count))

    def hand_off_bytes(self, micro_size: int, length: int) -> int:
        """Bytes of one slice's hidden states between two stages."""
        return micro_size * length * self.model.hidden * DTYPE_BYTES[self.dtype]

    def transfer(self, kind: str, micro_size: int, length: int) -> float:
        """Seconds until one slice's hidden states have arrived over a link of that kind."""
        link = self.link(kind)
        return link.latency_s + self.hand_off_bytes(micro_size, length) / link.bytes_per_s

    def link(self, kind: str) -> LinkModel:
        if kind not in self.links:
            raise ValueError(f"the costs have no link of kind {kind!r}; they have {', '.join(self.links)}.")
        return self.links[kind]

    def link_kind(self, rank: int, other: int, chosen: str | None = None) -> str:
        """The kind of link between two pipeline ranks; `chosen` or the first kind where nodes are not told apart."""
        if chosen is not None or self.devices_per_node is None:
            return chosen or next(iter(self.links))
        first, second = (pipe * self.tensor // self.devices_per_node for pipe in (rank, other))
        return "intra" if first == second else "inter"

    def __str__(self) -> str:
        from terapipe.planner.report import describe_costs

        return describe_costs(self)


@dataclass(frozen=True)
class StageCosts:
    """The costs of a run of layers, sums over them: seconds and bytes of a slice of `length` tokens, which starts at
    token `start` of each of `micro_size` sequences. ValueError where `CostModel` has no figure for that micro size."""

    costs: CostModel
    layers: tuple[tuple[LayerCosts, int], ...]

    def forward(self, micro_size: int, length: int, start: int) -> float:
        """Seconds of the forward."""
        return self._sum("forward", micro_size, length, start)

    def input_grad(self, micro_size: int, length: int, start: int) -> float:
        """Seconds of the backward up to the stage's input."""
        return self._sum("input_grad", micro_size, length, start)

    def weight_grad(self, micro_size: int, length: int, start: int) -> float:
        """Seconds of the weights' gradients."""
        return self._sum("weight_grad", micro_size, length, start)

    def backward(self, micro_size: int, length: int, start: int) -> float:
        """Seconds of the whole backward: input gradient and weights' gradients."""
        return self.input_grad(micro_size, length, start) + self.weight_grad(micro_size, length, start)

    @property
    def parameters(self) -> int:
        """How many numbers the weights have."""
        return sum(layer.parameters * count for layer, count in self.layers)

    def saved_bytes(self, micro_size: int, length: int, *, recompute: bool = False) -> float:
        """What one slice keeps from its forward to its backward; with recomputation its input alone."""
        if recompute:
            return self.costs.hand_off_bytes(micro_size, length)
        return micro_size * length * sum(layer.saved_bytes_per_token * count for layer, count in self.layers)

    def cache_bytes(self, micro_size: int, tokens: int) -> float:
        """K and V of one micro in flight."""
        return micro_size * tokens * sum(layer.cache_bytes_per_token * count for layer, count in self.layers)

    def fixed_bytes(self, micro_size: int, tokens: int, *, replicas: int = 1) -> float:
        """Weights, gradients, optimizer state (over `replicas`), accumulators."""
        accumulators = sum(layer.accumulator_bytes_per_token * count for layer, count in self.layers)
        per_parameter = parameter_bytes(self.costs.dtype, replicas)
        return self.parameters * per_parameter + micro_size * tokens * accumulators

    def slice_costs(
        self, micro_size: int, *, unit: int, units: int, added: Sequence[float] = (), recompute: bool = False
    ) -> Costs:
        """Forward and backward of every slice of whole units, as the slicing search takes them. added: more seconds of
        a slice by its length in units (transfers, overhead)."""
        weights = {"forward": 2.0 if recompute else 1.0, "input_grad": 1.0, "weight_grad": 1.0}
        parts = [
            (getattr(layer, name)[micro_size], count * weight)
            for layer, count in self.layers
            for name, weight in weights.items()
        ]
        more = list(added) or [0.0] * units
        curves = [(cost, weight) for cost, weight in parts if isinstance(cost, CurveCost)]
        if len(curves) < len(parts):
            return self._table(parts, unit, units, more)
        base = tuple(sum(w * c.base(n * unit) for c, w in curves) + more[n - 1] for n in range(1, units + 1))
        return SliceCosts(
            base,
            constant=sum(w * c.context.constant for c, w in curves),
            per_start=unit * sum(w * c.context.per_start for c, w in curves),
            per_start_length=unit * unit * sum(w * c.context.per_start_length for c, w in curves),
        )

    def _table(
        self, parts: Sequence[tuple[PassCost, float]], unit: int, units: int, more: Sequence[float]
    ) -> np.ndarray:
        """[starts, lengths] in units; entries of slices that would end behind the sequence are not read."""
        import numpy as np

        total = np.full((units, units), math.inf)
        for first in range(0, units, BLOCK_ROWS):  # few rows at a time stay in the caches
            starts = np.arange(first, min(units, first + BLOCK_ROWS)) * unit
            lengths = np.arange(1, units - first + 1) * unit
            found = np.tile(more[: len(lengths)], (len(starts), 1))
            for cost, weight in parts:
                found += weight * cost.many(lengths, starts)
            total[first : first + BLOCK_ROWS, : len(lengths)] = found
        return total

    def _sum(self, name: str, micro_size: int, length: int, start: int) -> float:
        total = 0.0
        for layer, count in self.layers:
            by_size = getattr(layer, name)
            if micro_size not in by_size:
                raise ValueError(
                    f"the costs have no micro size {micro_size}, only {sorted(by_size)}; choose one of these, or "
                    f"profile it."
                )
            total += count * by_size[micro_size](length, start)
        return total


def parameter_bytes(dtype: str, replicas: int = 1) -> float:
    """Bytes of one parameter with its gradient and AdamW's state: fp32 4 + 4 + 8; 16 bits 2 + 4 (fp32 gradient) + 12
    (master and moments). Moments and masters are shared out over the replicas (ZeRO-1)."""
    weight = DTYPE_BYTES[dtype]
    return weight + 4 + (8 + (4 if weight < 4 else 0)) / replicas
