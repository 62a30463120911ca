"""One token through every layer before the first step: a layer that does not fit is named where it was given, and what
ids the model takes is learned from its ends.

Each rank tries its own stages, as evaluation would run them: without gradients, modules in eval mode, random generators
put back. A stage but the first gets zeros [micro_size, 1, hidden_size] in the pipeline's dtype.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from terapipe.engine.batch import KnownIds
from terapipe.engine.failure import words
from terapipe.engine.loss import cross_entropy_sum
from terapipe.engine.stage import Stage, one_tensor, write_count
from tpkernels import Mask


@torch.no_grad()
def try_out(stage: Stage, *, hidden_size: int) -> KnownIds:
    """What ids this stage takes, as far as it can be told. ValueError names the layer that cannot run, or that hands on
    something else than the next stage is told to expect."""
    shape = (stage.micro_size, 1, hidden_size)
    given: dict[str, Any] = {"dtype": stage.dtype, "device": stage.device}
    ids = torch.zeros(shape[:2], dtype=torch.int64, device=stage.device)
    x = ids if stage.first else torch.zeros(shape, **given)
    name, first = "", x
    with _undisturbed(stage.layers.values(), stage.device), _lookups(next(iter(stage.layers.values())), ids) as rows:
        for (name, layer), cache in zip(stage.layers.items(), stage.make_caches(1), strict=True):
            if stage.recompute and cache is not None and not hasattr(cache, "recomputing"):
                raise ValueError(
                    f"layer {name!r} has a cache of type {type(cache).__name__} without recomputing(start), which "
                    "recompute=True needs (see PrefixCache.recomputing); add it, or leave recompute out."
                )
            what = f"{_described(x)} (hidden_size is {hidden_size}, dtype {stage.dtype})"
            given_x, version = x, write_count(x)
            try:
                x = layer(x, cache, Mask(), torch.zeros_like(ids))
            except Exception as error:
                raise ValueError(f"layer {name!r} cannot run on {what}: {words(error)}") from error
            one_tensor(x, name)
            if given_x is first and write_count(given_x) != version:
                raise ValueError(
                    f"layer {name!r} writes to its input in place, and begins a stage, whose input must stay as it was "
                    "handed over; leave inplace=True out of it, or cut the stages elsewhere."
                )
    if not stage.last and (x.shape, x.dtype) != (shape, stage.dtype):
        raise ValueError(
            f"layer {name!r} ends a stage with {_described(x)} for one token, but the next stage expects "
            f"{stage.dtype} {list(shape)}: [micro_size, tokens, hidden_size]. Give Pipeline the hidden_size and dtype "
            "of its layers, or cut the stages elsewhere."
        )
    if stage.last and stage.loss is cross_entropy_sum and (x.dim() != 3 or x.shape[:2] != shape[:2]):
        raise ValueError(
            f"the last layer, {name!r}, returned {_described(x)} for one token; the loss needs logits "
            f"[{shape[0]}, 1, vocabulary]. Add a head, or give a loss of your own."
        )
    classes = x.shape[-1] if stage.last and stage.loss is cross_entropy_sum else None
    return KnownIds(tokens=min(rows, default=None), targets=classes)


def joined(parts: Iterable[KnownIds]) -> KnownIds:
    """Of a whole model from its stages."""
    known = list(parts)
    tokens = [part.tokens for part in known if part.tokens is not None]
    targets = [part.targets for part in known if part.targets is not None]
    return KnownIds(min(tokens, default=None), min(targets, default=None))


@contextlib.contextmanager
def _lookups(layer: nn.Module, ids: Tensor) -> Iterator[list[int]]:
    """Fills a list with the size of every table in `layer` that `ids` themselves are looked up in."""
    rows: list[int] = []

    def note(table: nn.Module, given: tuple[Any, ...]) -> None:
        assert isinstance(table, nn.Embedding)
        if isinstance(given[0], Tensor) and given[0].data_ptr() == ids.data_ptr():
            rows.append(table.num_embeddings)

    tables = [module for module in layer.modules() if isinstance(module, nn.Embedding)]
    handles = [table.register_forward_pre_hook(note) for table in tables]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _undisturbed(layers: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Modules in eval mode, and eager even where compiled; generators and modes are as before afterwards."""
    modes = [(module, module.training) for layer in layers for module in layer.modules()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def _described(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}"
