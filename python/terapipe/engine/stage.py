"""One stage: its layers, their prefix caches, and what forward leaves behind for backward.

A stage knows nothing of ranks, links or schedules.  `forward` takes the hidden states of one slice of one micro and
returns the next ones; `backward` takes the gradient of that output and returns the gradient of that input.  Slices
of a micro go forward first to last and backward last to first; a micro's caches go back to the pool with its last
action, so a step leaves nothing behind (`assert_drained`).

With `recompute` a forward keeps its input alone, and the backward runs the slice through the layers once more, from the
same random numbers and the same prefix in the caches. Losses and gradients are bitwise those of a run without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tpkernels
from terapipe.engine.batch import Batch
from terapipe.layer import Entry, Norm, Out
from tpkernels.fused_reference import NormValues

Loss = Callable[[Tensor, Tensor], Tensor]
"""(output of the last layer, targets int64 [b, t]) -> scalar: the sum over tokens that have a target."""


@dataclass
class _Live:
    """What one slice's forward keeps for its backward: a leaf (None on the first stage), the root of its graph, and
    what the first layer was told."""

    leaf: Tensor | None
    root: Tensor
    entry: Entry | None


@dataclass
class _Input:
    """What it keeps with `recompute`: hidden states (None on the first stage), the micro's rows, random generators."""

    hidden: Tensor | None
    batch: Batch
    random: list[Tensor]


class Stage:
    """`layers` global name -> module, in order.  `slice_starts`, `slice_lengths` in tokens.  Layers with `make_cache`
    get a prefix cache per micro. A last layer that `adds_out` takes `out=`, which may add its two summands; a first one
    with an `entry_norm` takes `entry=` (layer.py)."""

    def __init__(
        self,
        index: int,
        layers: Mapping[str, nn.Module],
        *,
        slice_lengths: tuple[int, ...],
        micro_size: int,
        first: bool,
        last: bool,
        loss: Loss,
        device: torch.device,
        dtype: torch.dtype,
        recompute: bool = False,
    ) -> None:
        self.index, self.recompute = index, recompute
        self.layers = dict(layers)
        self.first, self.last = first, last
        self.slice_lengths = slice_lengths
        self.slice_starts = tuple(sum(slice_lengths[:i]) for i in range(len(slice_lengths)))
        self.micro_size, self.device, self.dtype = micro_size, device, dtype
        self.loss = loss
        self._live: dict[tuple[int, int], _Live | _Input] = {}
        self._losses: dict[tuple[int, int], Tensor] = {}
        self._caches: dict[int, list[Any]] = {}  # micro -> one cache (or None) per layer
        self._free: list[list[Any]] = []
        # One per layer, shared by all micros: their backwards never interleave.
        self._accumulators: list[Any] = [None] * len(self.layers)
        self._masks: dict[int, tpkernels.Mask] = {}
        self._evaluating = False
        final = next(reversed(self.layers.values()))
        self._adds_out = final if getattr(final, "adds_out", False) else None
        self._entered = next(iter(self.layers.values()))
        norm = None if first else getattr(self._entered, "entry_norm", None)
        self.entry_norm: Norm | None = norm if type(norm) is Norm else None  # None: the first layer takes no `entry`

    def begin(self, *, evaluating: bool) -> None:
        """Start of a step: `evaluating` keeps no graph and frees a micro's caches with its last forward."""
        self._evaluating = evaluating
        self._losses.clear()

    def forward(
        self,
        micro: int,
        piece: int,
        hidden: Tensor | None,
        batch: Batch,
        *,
        normed: NormValues | None = None,
        out: Out | None = None,
    ) -> Tensor | None:
        """Hidden states of one slice, from the previous stage's (`None` on the first stage, which reads the tokens
        of `batch`, the micro's rows).

        normed: the first layer's norm of `hidden`, for one with an `entry_norm`. out: may add the last layer's two
        summands.
        Returns what the next stage needs; None on the last stage, which keeps the slice's loss sum."""
        keeps_graph = not self._evaluating and not self.recompute
        if hidden is not None:
            hidden.requires_grad_(keeps_graph)
        entry = None if self.entry_norm is None else Entry(normed)
        random = _random_state(self.device) if self.recompute and not self._evaluating else []
        with torch.set_grad_enabled(keeps_graph):
            x = self._through_layers(micro, piece, hidden, batch, entry=entry, out=out)
        if self.last:
            self._losses[micro, piece] = x.detach()
        if keeps_graph:
            self._live[micro, piece] = _Live(hidden, x, entry)
        elif not self._evaluating:
            self._live[micro, piece] = _Input(hidden, batch, random)
        elif piece == len(self.slice_lengths) - 1:
            self._finish(micro)
        return None if self.last else x.detach()

    def _through_layers(
        self, micro: int, piece: int, hidden: Tensor | None, batch: Batch, *, entry: Entry | None, out: Out | None
    ) -> Tensor:
        """Hidden states behind the last layer; on the last stage the loss sum."""
        start, length = self.slice_starts[piece], self.slice_lengths[piece]
        tokens = slice(start, start + length)
        x = batch.tokens[:, tokens] if self.first else hidden
        assert x is not None
        mask = self._mask(micro, batch)
        positions = mask.positions(start, length).to(self.device).expand(self.micro_size, length)
        for (name, layer), cache in zip(self.layers.items(), self._caches_of(micro), strict=True):
            told: dict[str, Any] = {}
            if entry is not None and layer is self._entered:
                told["entry"] = entry
            # A hook may put something else in the place of the sum, which is on its way by then.
            if out is not None and layer is self._adds_out and not self.last and not _hooked(layer):
                told["out"] = out
            x = one_tensor(layer(x, cache, mask, positions, **told), name)
        return self.loss(x, batch.targets[:, tokens]) if self.last else x

    def backward(
        self, micro: int, piece: int, gradient: Tensor, *, reserve: Callable[[], Tensor] | None = None
    ) -> Tensor | None:
        """Adds to the parameters' `.grad` and returns the gradient of this slice's input (None on the first stage).

        `gradient` is that of the output; on the last stage the scalar that scales the loss sum (one over the number
        of targets). reserve: gives memory which the returned gradient may be computed into."""
        live = self._live.pop((micro, piece))
        if isinstance(live, _Input):
            live = self._again(micro, piece, live)
        if live.entry is not None:
            live.entry.gradient = reserve
        if live.root.requires_grad:  # a stage of frozen layers behind frozen layers has nothing to do
            torch.autograd.backward(live.root, gradient.to(live.root.dtype))
        if piece == 0:
            self._finish(micro)
        if live.leaf is None:
            return None
        return torch.zeros_like(live.leaf) if live.leaf.grad is None else live.leaf.grad

    def _again(self, micro: int, piece: int, kept: _Input) -> _Live:
        """The slice's forward once more, with a graph."""
        leaf = None if kept.hidden is None else kept.hidden.detach().requires_grad_()
        entry = None if self.entry_norm is None else Entry()
        with contextlib.ExitStack() as stack:
            for cache in self._caches_of(micro):
                if cache is not None:
                    stack.enter_context(cache.recomputing(self.slice_starts[piece]))
            stack.enter_context(_random_from(kept.random, self.device))
            stack.enter_context(torch.enable_grad())
            return _Live(leaf, self._through_layers(micro, piece, leaf, kept.batch, entry=entry, out=None), entry)

    def losses(self) -> dict[tuple[int, int], float]:
        """(micro, slice) -> loss sum of the step, on the last stage; empty elsewhere."""
        if not self._losses:
            return {}
        values = torch.stack(list(self._losses.values())).double().tolist()
        return dict(zip(self._losses, values, strict=True))

    def assert_drained(self) -> None:
        """A step must leave no activation, no cache in use and no mask behind; what stays is reported."""
        left = [*self._live, *self._caches, *self._masks]
        if left:
            raise RuntimeError(f"stage {self.index} is not empty after the step; left over: {left}")

    def discard(self) -> None:
        """Drop everything after a failure."""
        for held in (self._live, self._losses, self._caches, self._masks):
            held.clear()
        self._free.clear()

    def make_caches(self, tokens: int) -> list[Any]:
        """A cache of `tokens` for each layer, None for one that has none."""
        size = (self.micro_size, tokens, self.dtype, self.device)
        makers = [getattr(layer, "make_cache", None) for layer in self.layers.values()]
        return [None if make is None else make(*size) for make in makers]

    def cache_bytes(self) -> int:
        """Bytes of all prefix caches, accumulators not counted."""
        return sum(getattr(cache, "nbytes", 0) for caches in [*self._caches.values(), *self._free] for cache in caches)

    def accumulator_bytes(self) -> int:
        """Bytes of the gradient accumulators: one pair per layer."""
        return sum(getattr(accumulator, "nbytes", 0) for accumulator in self._accumulators)

    def _mask(self, micro: int, batch: Batch) -> tpkernels.Mask:
        if micro not in self._masks:
            self._masks[micro] = tpkernels.Mask(causal=True, document_starts=batch.document_starts)
        return self._masks[micro]

    def _caches_of(self, micro: int) -> list[Any]:
        if micro not in self._caches:
            caches = self._free.pop() if self._free else self.make_caches(sum(self.slice_lengths))
            if not self._evaluating:
                self._share_accumulators(caches)
            self._caches[micro] = caches
        return self._caches[micro]

    def _share_accumulators(self, caches: list[Any]) -> None:
        """One pair per layer serves every micro; made with the first training step, so evaluation alone never pays
        for it."""
        for position, cache in enumerate(caches):
            if not hasattr(cache, "require_accumulator"):
                continue
            if self._accumulators[position] is None:
                self._accumulators[position] = cache.require_accumulator()
            cache.accumulator = self._accumulators[position]

    def _finish(self, micro: int) -> None:
        caches = self._caches.pop(micro)
        for cache in caches:
            if cache is not None:
                cache.reset()
        self._free.append(caches)
        self._masks.pop(micro, None)


def _hooked(layer: nn.Module) -> bool:
    """Whether a forward hook sees, and may replace, what the layer returns."""
    return bool(layer._forward_hooks or nn.modules.module._global_forward_hooks)


def write_count(x: Tensor) -> int:
    """How often `x` was written to, as far as it counts."""
    return 0 if x.is_inference() else x._version


def one_tensor(x: object, name: str) -> Tensor:
    """`x`, which the layer `name` returned."""
    if not isinstance(x, Tensor):
        raise ValueError(f"layer {name!r} returned a {type(x).__name__}; a layer returns one tensor.")
    return x


def _random_state(device: torch.device) -> list[Tensor]:
    """Of the CPU's generator and, for a GPU, of its own."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


@contextlib.contextmanager
def _random_from(state: list[Tensor], device: torch.device) -> Iterator[None]:
    """Generators start from `state` within, and are as before afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(state[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(state[1], device)
        yield
