"""Runs slices of a model's layers inside the engine's stages and reads off when each layer was entered and left.

A slice of `length` tokens behind `start` runs in a stage whose caches pretend to hold `start` tokens, so a long prefix
costs nothing to make. Layers are timed at their borders: forward by when each one is entered, backward by when the
gradient of its input is complete. Each point is run with all gradients (F, B) and with frozen weights, whose backward
is the input gradient alone (I).

The trap: the last slice's backward also clears the accumulators, so backwards are read off the slice before it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from terapipe.engine import Batch, cross_entropy_sum
from terapipe.engine.stage import Stage
from terapipe.layer import own_gradients
from terapipe.models import layers
from terapipe.models.config import EMBEDDING, HEAD, ModelConfig
from terapipe.planner.costs import BLOCK
from terapipe.timing.step_times import barrier
from tpkernels import Mask
from tpkernels.prefix_cache import LENGTH

BLOCKS = 2  # measured at once: their weights push each other out of the cache, as in a stage
LEAST_REPEATS, MOST_REPEATS, POINT_SECONDS = 3, 12, 0.5
PAUSE_S = 0.05  # about as long as a rank waits for its first slice
ALIVE_TOKENS, MOST_MICROS = 2048, 8  # kept alive at once, in micros, so that memory is as fresh as in a step
WARM_UP_TOKENS = 512  # longer slices are warm after their first millisecond

Samples = dict[tuple[str, str, int, int], list[float]]
"""(layer kind, "forward" | "backward" | "input_grad", length, start) -> seconds of every run."""


class Bench:
    """The layers of a short model of this shape: embedding, `BLOCKS` blocks, head."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        factories = layers(model, dtype=dtype)
        names = [EMBEDDING, *(f"blocks.{i}" for i in range(min(BLOCKS, model.layers))), HEAD]
        self.model, self.dtype = model, dtype
        self.layers = {name: factories[name]() for name in names}
        self.parameters = [parameter for layer in self.layers.values() for parameter in layer.parameters()]
        own_gradients(self.parameters)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter, dtype=torch.promote_types(dtype, torch.float32))

    def measure(self, length: int, start: int, *, tokens: int, micro_size: int, samples: Samples) -> None:
        """Runs of one point, into `samples`."""
        slices = 2 if start + 2 * length <= tokens else 1
        micros = max(1, min(MOST_MICROS, min(tokens, ALIVE_TOKENS) // (slices * length * micro_size)))
        clock = Clock()
        stage = self.stage((length,) * slices, micro_size, start, clock)
        batch = self.batch(length * slices, micro_size)
        for frozen in (False, True):
            self._freeze(frozen)
            if not frozen and length <= WARM_UP_TOKENS:
                self._run(stage, batch, slices, 1, clock)
            barrier()
            began, runs = time.perf_counter(), 0
            while runs == 0 or (runs * micros < LEAST_REPEATS and time.perf_counter() - began < POINT_SECONDS):
                clock.clear()
                self._run(stage, batch, slices, micros, clock)
                runs += 1
                for micro in range(micros):
                    for piece in range(slices):
                        for kind, seconds in clock.forwards(micro * slices + piece):
                            if not frozen:
                                samples[kind, "forward", length, start + piece * length].append(seconds)
                    for kind, seconds in clock.backwards(micro * slices + slices - 1):  # of slice 0: last to first
                        samples[kind, "input_grad" if frozen else "backward", length, start].append(seconds)
            barrier()  # others may still be at work, and this rank would be too
        self._freeze(False)

    def stage(self, lengths: tuple[int, ...], micro_size: int, start: int, clock: Clock) -> Stage:
        return Stage(
            0,
            {name: Timed(layer, _kind(name), start, clock) for name, layer in self.layers.items()},
            slice_lengths=lengths,
            micro_size=micro_size,
            first=True,
            last=True,
            loss=cross_entropy_sum,
            device=torch.device("cpu"),
            dtype=self.dtype,
        )

    def batch(self, tokens: int, micro_size: int) -> Batch:
        ids = torch.randint(0, self.model.vocab, (micro_size, tokens))
        return Batch(ids, ids)

    def _run(self, stage: Stage, batch: Batch, slices: int, micros: int, clock: Clock, *, pause_s: float = 0.0) -> None:
        stage.begin(evaluating=False)
        for micro in range(micros):
            for piece in range(slices):
                clock.begin_forward()
                stage.forward(micro, piece, None, batch)
                clock.end_forward()
        scale = torch.tensor(1.0 / batch.tokens.numel(), dtype=torch.float64)
        time.sleep(pause_s)
        for micro in range(micros):
            for piece in reversed(range(slices)):
                clock.begin_backward()
                stage.backward(micro, piece, scale)
                clock.end_backward()

    def first_seconds(self) -> tuple[float, float]:
        """What the first forward and the first backward of a step take more than the same ones later, for each
        parameter: behind a pause, with no gradient made yet."""
        length, slices, micros = 64, 2, 8
        clock = Clock()
        stage, batch = self.stage((length,) * slices, 1, 0, clock), self.batch(length * slices, 1)
        more: tuple[list[float], list[float]] = ([], [])
        for number in range(MOST_REPEATS):
            for parameter in self.parameters:
                parameter.grad = None
            clock.clear()
            barrier()
            time.sleep(PAUSE_S)
            self._run(stage, batch, slices, micros, clock, pause_s=PAUSE_S)
            for seconds, read in zip(more, (clock.forwards, clock.backwards), strict=True):
                first, *later = (sum(value for _, value in read(micro * slices)) for micro in range(micros))
                if number:
                    seconds.append(first - statistics.median(later))
        count = sum(parameter.numel() for parameter in self.parameters)
        forward, backward = (max(0.0, statistics.median(seconds)) / count for seconds in more)
        return forward, backward

    def _freeze(self, frozen: bool) -> None:
        for name, layer in self.layers.items():
            if name != EMBEDDING:  # whose output must ask for a gradient, so that blocks compute theirs
                layer.requires_grad_(not frozen)


class Clock:
    """When layers were entered and when gradients of their inputs were complete, slice by slice."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._forward: list[list[tuple[str, float]]] = []
        self._backward: list[list[tuple[str, float]]] = []

    def begin_forward(self) -> None:
        self._forward.append([])

    def enter(self, kind: str) -> None:
        self._forward[-1].append((kind, time.perf_counter()))

    def end_forward(self) -> None:
        self._forward[-1].append(("", time.perf_counter()))

    def begin_backward(self) -> None:
        self._backward.append([("", time.perf_counter())])

    def leave(self, kind: str) -> None:
        self._backward[-1].append((kind, time.perf_counter()))

    def end_backward(self) -> None:
        self._backward[-1].append((EMBEDDING, time.perf_counter()))

    def forwards(self, index: int) -> Iterator[tuple[str, float]]:
        marks = self._forward[index]
        for (kind, began), (_, ended) in itertools.pairwise(marks):
            yield kind, ended - began

    def backwards(self, index: int) -> Iterator[tuple[str, float]]:
        marks = self._backward[index]
        for (_, began), (kind, ended) in itertools.pairwise(marks):
            yield kind, ended - began


class Timed(nn.Module):
    """A layer that reports to a clock and whose caches pretend to hold `start` tokens."""

    def __init__(self, layer: nn.Module, kind: str, start: int, clock: Clock) -> None:
        super().__init__()
        self.layer, self.kind, self.start, self.clock = layer, kind, start, clock

    def make_cache(self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> Any:
        make: Any = getattr(self.layer, "make_cache", None)
        if make is None:
            return None
        cache = make(batch, self.start + capacity, dtype, device)
        with torch.no_grad():
            for x in (cache.k, cache.v):
                x[:, : self.start].normal_()
        return cache

    def forward(self, hidden: Tensor, cache: Any, mask: Mask, positions: Tensor) -> Tensor:
        if cache is not None and cache.length == 0:
            cache.position[LENGTH] = self.start
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.clock.leave(self.kind))
        self.clock.enter(self.kind)
        return self.layer(hidden, cache, mask, positions)


def _kind(name: str) -> str:
    return name if name in (EMBEDDING, HEAD) else BLOCK
