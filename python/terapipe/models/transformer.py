"""One decoder as a list of layers, GPT-2/3 or Llama by config; attention reaches earlier slices in its cache.

Every layer is `forward(hidden, cache, mask, positions) -> hidden`: hidden is token ids int64 [batch, tokens] for
the first layer and [batch, tokens, hidden] after it; cache is what the layer's `make_cache` returned, or None; mask
is the tpkernels.Mask of the whole micro; positions int64 [batch or 1, tokens] are document-relative. The head
returns logits [batch, tokens, vocab].

The trap: a weight's first value depends on (seed, its global name) and nothing else, so that any cut into stages
starts from the same model. Never draw two parameters from one generator.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from terapipe.layer import Entry, Norm, Out
from terapipe.models.config import EMBEDDING, HEAD, ModelConfig, tied_parameters
from terapipe.models.half_blocks import add_linear, mlp, norm_linears
from terapipe.models.linear import Linear, Table
from terapipe.models.rotary import RotaryAngles
from terapipe.models.whole_block import whole_block
from tpkernels import Mask, PrefixCache, prefix_attention
from tpkernels.block import BlockShape

__all__ = ["Block", "Embedding", "Head", "layers", "tied_parameters"]

DeviceLike = torch.device | str | None


def make_norm(config: ModelConfig, *, dtype: torch.dtype, device: DeviceLike) -> Norm:
    rms = config.norm == "rmsnorm"
    bias = config.bias and not rms
    return Norm(config.hidden, rms=rms, bias=bias, eps=config.norm_eps, dtype=dtype, device=device)


class Embedding(nn.Module):
    """Token ids [batch, tokens] -> hidden [batch, tokens, hidden], plus learned positions if the config has them."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: DeviceLike) -> None:
        super().__init__()
        self.tokens = Table(config.vocab, config.hidden, dtype=dtype, device=device)
        learned = config.position == "learned"
        self.positions = Table(config.max_tokens, config.hidden, dtype=dtype, device=device) if learned else None

    def forward(self, hidden: Tensor, cache: None, mask: Mask, positions: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(hidden)
        return embedded if self.positions is None else embedded + self.positions(positions)


class Block(nn.Module):
    """Pre-norm transformer block: attention over prefix and slice, then the MLP, each added to the residual."""

    adds_out = True  # takes out=

    def __init__(
        self, config: ModelConfig, angles: RotaryAngles | None, *, dtype: torch.dtype, device: DeviceLike
    ) -> None:
        super().__init__()
        linear = partial(Linear, bias=config.bias, dtype=dtype, device=device)
        hidden, query, keys = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.shape = BlockShape(
            config.hidden,
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.ffn_hidden,
            rms=config.norm == "rmsnorm",
            gated=config.mlp == "swiglu",
            eps=config.norm_eps,
        )
        self.angles = angles
        self.attention_norm = make_norm(config, dtype=dtype, device=device)
        self.query = linear(hidden, query)
        self.key = linear(hidden, keys)
        self.value = linear(hidden, keys)
        self.output = linear(query, hidden)
        self.mlp_norm = make_norm(config, dtype=dtype, device=device)
        self.gate = linear(hidden, config.ffn_hidden) if config.mlp == "swiglu" else None
        self.up = linear(hidden, config.ffn_hidden)
        self.down = linear(config.ffn_hidden, hidden)

    @property
    def entry_norm(self) -> Norm:
        """What forward begins with; it takes entry=."""
        return self.attention_norm

    def make_cache(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        accumulator: Any = None,
    ) -> PrefixCache:
        """The prefix cache of one micro: `capacity` tokens of `batch` sequences. Micros may share the accumulator."""
        return PrefixCache(
            batch,
            capacity,
            self.shape.kv_heads,
            self.shape.head_dim,
            dtype=dtype,
            device=device,
            accumulator=accumulator,
        )

    def forward(
        self,
        hidden: Tensor,
        cache: PrefixCache | None,
        mask: Mask,
        positions: Tensor,
        *,
        entry: Entry | None = None,
        out: Out | None = None,
    ) -> Tensor:
        """entry, out: the first and last op are a link's, where the layer begins or ends a stage."""
        turns = None if self.angles is None else self.angles(positions, dtype=hidden.dtype)
        whole = whole_block(self, hidden, cache, mask, turns, entry=entry, out=out)
        if whole is not None:
            return whole
        linears = (self.query, self.key, self.value)
        hidden, q, k, v = norm_linears(
            hidden, self.attention_norm, linears, head_dim=self.shape.head_dim, turns=turns, entry=entry
        )
        hidden = add_linear(hidden, prefix_attention(q, k, v, cache, mask=mask), self.output)
        return mlp(hidden, self.mlp_norm, self.gate, self.up, self.down, out=out)


class Head(nn.Module):
    """Final norm and output projection: hidden [batch, tokens, hidden] -> logits [batch, tokens, vocab]."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: DeviceLike) -> None:
        super().__init__()
        self.norm = make_norm(config, dtype=dtype, device=device)
        self.output = Linear(config.hidden, config.vocab, bias=False, dtype=dtype, device=device)

    @property
    def entry_norm(self) -> Norm:
        return self.norm

    def forward(
        self, hidden: Tensor, cache: None, mask: Mask, positions: Tensor, *, entry: Entry | None = None
    ) -> Tensor:
        _, logits = norm_linears(hidden, self.norm, (self.output,), entry=entry)
        return logits


def layers(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: DeviceLike = "cpu",
) -> dict[str, Callable[[], nn.Module]]:
    """Global layer name -> factory of the layer, first to last. Nothing is allocated before a factory is called.

    Weights are drawn in fp32 on the CPU and then rounded to `dtype`, so every device and dtype starts from the same
    model; on the "meta" device they stay without values.
    """
    angles = RotaryAngles(config.head_dim, config.rope_theta) if config.position == "rope" else None

    def build(name: str) -> nn.Module:
        layer: nn.Module
        if name == EMBEDDING:
            layer = Embedding(config, dtype=dtype, device=device)
        elif name == HEAD:
            layer = Head(config, dtype=dtype, device=device)
        else:
            layer = Block(config, angles, dtype=dtype, device=device)
        initialise(layer, name, config, seed=seed)
        return layer

    return {name: partial(build, name) for name in config.layer_names()}


@torch.no_grad()
def initialise(layer: nn.Module, name: str, config: ModelConfig, *, seed: int) -> None:
    """Normal weights, spread less by sqrt(2 * layers) where a block adds to the residual (GPT-2); norms 1, biases 0."""
    ties = {copy: original for original, copy in tied_parameters(config)}
    for local_name, parameter in layer.named_parameters():
        if parameter.is_meta:
            continue
        if local_name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() < 2:
            parameter.fill_(1.0)
        else:
            global_name = f"{name}.{local_name}"
            adds_to_residual = name.startswith("blocks.") and local_name in ("output.weight", "down.weight")
            spread = config.initial_std / (math.sqrt(2 * config.layers) if adds_to_residual else 1.0)
            generator = torch.Generator("cpu").manual_seed(_derived_seed(seed, ties.get(global_name, global_name)))
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            parameter.copy_(drawn.normal_(0.0, spread, generator=generator))


def _derived_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
