"""One stage: its layers, their prefix caches, and what forward leaves behind for backward.

A stage knows nothing of ranks, links or schedules.  `forward` takes the hidden states of one slice of one micro and
returns the next ones; `backward` takes the gradient of that output and returns the gradient of that input.  Slices
of a micro go forward first to last and backward last to first; a micro's caches go back to the pool with its last
action, so a step leaves nothing behind (`assert_drained`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tpkernels
from terapipe.engine.batch import Batch
from terapipe.models.half_blocks import Entry, Norm, Out
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


class Stage:
    """`layers` global name -> module, in order.  `slice_starts`, `slice_lengths` in tokens.  Layers with `make_cache`
    get a prefix cache per micro. A last layer that `adds_out` takes `out=`, which may add its two summands; a first one
    with an `entry_norm` takes `entry=` (half_blocks.py)."""

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
    ) -> None:
        self.index = index
        self.layers = dict(layers)
        self.first, self.last = first, last
        self.slice_lengths = slice_lengths
        self.slice_starts = tuple(sum(slice_lengths[:i]) for i in range(len(slice_lengths)))
        self.micro_size, self.device, self.dtype = micro_size, device, dtype
        self.loss = loss
        self._live: dict[tuple[int, int], _Live] = {}
        self._losses: dict[tuple[int, int], Tensor] = {}
        self._caches: dict[int, list[Any]] = {}  # micro -> one cache (or None) per layer
        self._free: list[list[Any]] = []
        self._accumulators: list[Any] = [None] * len(
            self.layers
        )  # one per layer, shared by all micros: their backwards never interleave
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
        start, length = self.slice_starts[piece], self.slice_lengths[piece]
        tokens = slice(start, start + length)
        leaf = None
        if self.first:
            x = batch.tokens[:, tokens]
        else:
            assert hidden is not None
            x = leaf = hidden.requires_grad_(not self._evaluating)
        mask = self._mask(micro, batch)
        positions = mask.positions(start, length).to(self.device).expand(self.micro_size, length)
        entry = None if self.entry_norm is None else Entry(normed)
        with torch.set_grad_enabled(not self._evaluating):
            for layer, cache in zip(self.layers.values(), self._caches_of(micro), strict=True):
                told: dict[str, Any] = {}
                if entry is not None and layer is self._entered:
                    told["entry"] = entry
                if out is not None and layer is self._adds_out and not self.last:
                    told["out"] = out
                x = layer(x, cache, mask, positions, **told)
            if self.last:
                x = self.loss(x, batch.targets[:, tokens])
                self._losses[micro, piece] = x.detach()
        if self._evaluating:
            if piece == len(self.slice_lengths) - 1:
                self._finish(micro)
        else:
            self._live[micro, piece] = _Live(leaf, x, entry)
        return None if self.last else x.detach()

    def backward(
        self, micro: int, piece: int, gradient: Tensor, *, reserve: Callable[[], Tensor] | None = None
    ) -> Tensor | None:
        """Adds to the parameters' `.grad` and returns the gradient of this slice's input (None on the first stage).

        `gradient` is that of the output; on the last stage the scalar that scales the loss sum (one over the number
        of targets). reserve: gives memory which the returned gradient may be computed into."""
        live = self._live.pop((micro, piece))
        if live.entry is not None:
            live.entry.gradient = reserve
        if live.root.requires_grad:  # a stage of frozen layers behind frozen layers has nothing to do
            torch.autograd.backward(live.root, gradient.to(live.root.dtype))
        if piece == 0:
            self._finish(micro)
        if live.leaf is None:
            return None
        return torch.zeros_like(live.leaf) if live.leaf.grad is None else live.leaf.grad

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
