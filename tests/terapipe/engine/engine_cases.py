"""What the engine's tests share, in the test process and in the workers they start: cases, models, data, the oracle.

The oracle knows neither engine nor tpkernels: each document of each sequence runs alone, from position 0, through all
layers in fp64, with torch's own attention in place of prefix_attention, and plain autograd does the rest. So slices,
micros, stages, packing, caches and the division of the loss are all on the engine's side of the comparison.
"""

from __future__ import annotations

import contextlib
import math
import unittest.mock
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terapipe.models.half_blocks as half_blocks
import terapipe.models.transformer as transformer
import terapipe.models.whole_block as whole_block
from terapipe.engine import NO_TARGET, Batch, Pipeline
from terapipe.models import ModelConfig, layers, tied_parameters
from terapipe.schedule import Plan, make_plan
from tpkernels import Mask

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}


@dataclass(frozen=True)
class Case:
    """One layout of one model.  `targets`: "all", "some" (a third masked, one whole slice and the last micro among
    them)."""

    family: str = "llama"
    ranks: int = 2
    slices: tuple[int, ...] = (100, 3, 154)
    micros: int = 1
    micro_size: int = 1
    schedule: str = "terapipe"
    warmup_per_hop: int = 1
    documents: bool = False
    targets: str = "all"
    dtype: str = "fp64"
    blocks: int = 3

    def __str__(self) -> str:
        hop = f"-hop{self.warmup_per_hop}" if self.schedule == "seq_1f1b" else ""
        packed = "-packed" * self.documents
        return (
            f"{self.family}-{self.dtype}-r{self.ranks}-{'+'.join(map(str, self.slices))}-m{self.micros}x"
            f"{self.micro_size}-{self.schedule}{hop}{packed}-{self.targets}"
        )

    @property
    def tokens(self) -> int:
        return sum(self.slices)

    @property
    def config(self) -> ModelConfig:
        shape: dict[str, Any] = {"vocab": 61, "hidden": 24, "layers": self.blocks, "heads": 4, "initial_std": 0.15}
        if self.family == "gpt":
            return ModelConfig(
                **shape,
                max_tokens=self.tokens,
                position="learned",
                norm="layernorm",
                mlp="gelu",
                bias=True,
                tied_embeddings=True,
            )
        return ModelConfig(**shape, kv_heads=2, ffn_hidden=40, max_tokens=self.tokens)

    @property
    def plan(self) -> Plan:
        return make_plan(
            layers=self.blocks + 2,
            ranks=self.ranks,
            slices=self.slices,
            tokens=self.tokens,
            micros=self.micros,
            micro_size=self.micro_size,
            schedule=self.schedule,
            warmup_per_hop=self.warmup_per_hop,
        )

    def factories(self) -> dict[str, Callable[[], nn.Module]]:
        """The model's layers with every parameter moved off its initial value, so that no gradient is trivially
        zero. Tied copies start apart: making them equal is the engine's work."""
        made = layers(self.config, seed=3, dtype=DTYPES[self.dtype])
        return {name: partial(_moved, factory, name) for name, factory in made.items()}

    def batch(self, seed: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(1000 + seed)
        shape = (self.micros * self.micro_size, self.tokens)
        tokens = torch.randint(61, shape, generator=generator)
        targets = torch.randint(61, shape, generator=generator)
        if self.targets == "some":
            targets[torch.rand(shape, generator=generator) < 0.3] = NO_TARGET
            if len(self.slices) > 1:
                targets[0, self.tokens - self.slices[-1] :] = NO_TARGET
            if self.micros > 1:
                targets[-self.micro_size :] = NO_TARGET
        starts = document_starts(shape, self.slices) if self.documents else None
        return Batch(tokens, targets, starts)

    def pipeline(self, **options: Any) -> Pipeline:
        options = {"hidden_size": 24, "dtype": DTYPES[self.dtype], "ties": tied_parameters(self.config), **options}
        return Pipeline(self.factories(), self.plan, **options)


def document_starts(shape: tuple[int, int], slices: Sequence[int]) -> Tensor:
    """Documents that cross the slice borders, one that ends on a border, one of a single token; each row its own."""
    starts = torch.zeros(shape, dtype=torch.int32)
    for row in range(shape[0]):
        borders = sorted({1, 7 + 5 * row, slices[0], shape[1] // 2 + row, shape[1] - 9, shape[1] - 1})
        for border in borders:
            if 0 < border < shape[1]:
                starts[row, border:] = border
    return starts


@dataclass(frozen=True)
class Oracle:
    """Mean loss over the targets, and the gradient of each parameter by global name (tied ones under both)."""

    loss: float
    gradients: Mapping[str, Tensor]

    @property
    def norm(self) -> float:
        """Over distinct parameters."""
        distinct = {id(gradient): gradient for gradient in self.gradients.values()}
        return math.sqrt(math.fsum(float(gradient.square().sum()) for gradient in distinct.values()))


def oracle(case: Case, batch: Batch | None = None) -> Oracle:
    """The whole model in fp64, document by document."""
    return run_unsliced(
        {name: factory().double() for name, factory in case.factories().items()},
        batch or case.batch(),
        tied_parameters(case.config),
    )


def run_unsliced(model: Mapping[str, nn.Module], batch: Batch, ties: Sequence[tuple[str, str]] = ()) -> Oracle:
    """`model`, layer after layer without caches, under torch's attention and a loss written out."""
    parameters = {
        f"{layer}.{name}": parameter for layer, module in model.items() for name, parameter in module.named_parameters()
    }
    for original, copy in ties:
        owner, _, name = copy.rpartition(".")
        layer, _, rest = owner.partition(".")
        setattr(model[layer].get_submodule(rest), name, parameters[original])
        parameters[copy] = parameters[original]
    total = torch.zeros((), dtype=torch.float64)  # nats
    with unittest.mock.patch.object(transformer, "prefix_attention", _torch_attention), plain_ops():
        for row in range(batch.tokens.shape[0]):
            for first, last in _documents(batch, row):
                hidden: Tensor = batch.tokens[row : row + 1, first:last]
                positions = torch.arange(last - first)[None]
                for layer in model.values():
                    hidden = layer(hidden, None, Mask(), positions)
                log_probability = hidden[0].log_softmax(-1)
                for position, target in enumerate(batch.targets[row, first:last].tolist()):
                    if target != NO_TARGET:
                        total = total - log_probability[position, target]
    count = int((batch.targets != NO_TARGET).sum())
    (total / count).backward()
    return Oracle(float(total.detach()) / count, {name: p.grad for name, p in parameters.items() if p.grad is not None})


@contextlib.contextmanager
def plain_ops() -> Iterator[None]:
    """Blocks are torch's ops around attention within it, as on GPUs: no backwards written by hand."""
    with (
        unittest.mock.patch.object(half_blocks, "parameters_of", lambda *_: None),
        unittest.mock.patch.object(whole_block, "parameters_of", lambda *_: None),
    ):
        yield


def worst_error(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Largest relative error over all parameters: to the exact gradient's norm; biases of query, key and value to the
    largest norm among the three (the key's is zero by mathematics)."""
    assert gradients.keys() == exact.keys(), gradients.keys() ^ exact.keys()
    errors = {}
    for name, value in exact.items():
        scale = max(float(exact[other].norm()) for other in _comparable(name))
        assert scale > 0, f"the oracle's gradient of {name} is zero, which tests nothing"
        errors[name] = float((gradients[name].double() - value).norm()) / scale
    assert all(math.isfinite(error) for error in errors.values()), errors
    return max(errors.values())


def gradients_of(pipeline: Pipeline) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in pipeline.named_parameters().items() if p.grad is not None}


def _comparable(name: str) -> list[str]:
    for part in ("query", "key", "value"):
        if name.endswith(f".{part}.bias"):
            return [name.replace(f".{part}.bias", f".{other}.bias") for other in ("query", "key", "value")]
    return [name]


def _moved(factory: Callable[[], nn.Module], name: str) -> nn.Module:
    layer = factory()
    with torch.no_grad():
        for local_name, parameter in layer.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{local_name}".encode()))
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return layer


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, cache: None, *, mask: Mask) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _documents(batch: Batch, row: int) -> list[tuple[int, int]]:
    length = batch.tokens.shape[1]
    starts = [0] if batch.document_starts is None else sorted(set(batch.document_starts[row].tolist()))
    return list(zip(starts, [*starts[1:], length], strict=True))
