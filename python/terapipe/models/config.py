"""The shape of a decoder-only transformer: one frozen aggregate that covers the GPT-2/3 and the Llama family. No torch.

The engine and the planner read it too: layer names are global ("embedding", "blocks.0", ..., "head") and never
depend on how the layers are cut into stages. Parameter counts follow from the shapes alone: a 175B model can be
planned on a laptop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

EMBEDDING = "embedding"
HEAD = "head"
MOST_LAYERS = 100_000  # lists of layers and the search for stages take 2 s with so many


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder: embedding, `layers` blocks, head. Sizes left at 0 are derived (`kv_heads`, `head_dim`, `ffn_hidden`).

    Raises ValueError for sizes that do not fit together. Parameter names and shapes: `parameter_shapes`.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int = 0  # 0: as many as `heads` (no grouping)
    head_dim: int = 0  # 0: hidden / heads
    ffn_hidden: int = 0  # 0: 4 * hidden
    max_tokens: int = 2048  # longest sequence; the size of the table when positions are learned
    position: Literal["learned", "rope"] = "rope"
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    mlp: Literal["gelu", "swiglu"] = "swiglu"
    bias: bool = False  # in every linear but the head's, and in LayerNorm
    tied_embeddings: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    initial_std: float = 0.02

    def __post_init__(self) -> None:
        for field in ("vocab", "hidden", "layers", "heads", "max_tokens"):
            _require(getattr(self, field) >= 1, f"{field} is {getattr(self, field)}; it must be at least 1")
        _require(self.layers <= MOST_LAYERS, f"layers is {self.layers}; it must be at most {MOST_LAYERS}")
        for field in ("kv_heads", "head_dim", "ffn_hidden"):
            _require(
                getattr(self, field) >= 0, f"{field} is {getattr(self, field)}; give a positive size, or 0 to derive it"
            )
        for field, legal in _CHOICES.items():
            _require(
                getattr(self, field) in legal, f"{field} is {getattr(self, field)!r}; choose one of {', '.join(legal)}"
            )
        problems = []
        if self.head_dim == 0 and self.hidden % self.heads:
            problems.append(f"hidden {self.hidden} is not a multiple of heads {self.heads}; change one of them")
        if self.head_dim and self.heads * self.head_dim != self.hidden:
            problems.append(
                f"heads {self.heads} x head_dim {self.head_dim} is {self.heads * self.head_dim}, but hidden is "
                f"{self.hidden}; make them equal, or set head_dim to 0 to derive it"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            problems.append(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}; each KV head must serve the same "
                "number of query heads"
            )
        _require(
            not problems, ". And ".join(problems)
        )  # all that heads are part of: mending one must not show the next
        derived = {"kv_heads": self.heads, "head_dim": self.hidden // self.heads, "ffn_hidden": 4 * self.hidden}
        for field, value in derived.items():
            object.__setattr__(self, field, getattr(self, field) or value)
        _require(
            self.position != "rope" or self.head_dim % 2 == 0,
            f"head_dim {self.head_dim} is odd; rotary positions turn pairs of channels, so make it even",
        )
        _require(self.norm_eps > 0, f"norm_eps is {self.norm_eps}; it must be positive")
        _require(self.initial_std > 0, f"initial_std is {self.initial_std}; it must be positive")
        _require(self.rope_theta > 0, f"rope_theta is {self.rope_theta}; it must be positive")

    def layer_names(self) -> tuple[str, ...]:
        """Global names of the layers, first to last: "embedding", "blocks.0", ..., "head"."""
        return (EMBEDDING, *(f"blocks.{block}" for block in range(self.layers)), HEAD)

    def parameter_shapes(self, layer: str) -> dict[str, tuple[int, ...]]:
        """Name (without the layer's) -> shape of each parameter of the layer with this global name."""
        if layer == EMBEDDING:
            shapes: dict[str, tuple[int, ...]] = {"tokens.weight": (self.vocab, self.hidden)}
            if self.position == "learned":
                shapes["positions.weight"] = (self.max_tokens, self.hidden)
            return shapes
        if layer == HEAD:
            return {**self._norm_shapes("norm"), "output.weight": (self.vocab, self.hidden)}
        if layer not in self.layer_names():
            raise ValueError(
                f"no layer is called {layer!r}; choose {EMBEDDING}, blocks.0 to blocks.{self.layers - 1}, or {HEAD}"
            )
        query, keys, ffn = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.ffn_hidden
        linears = {
            "query": (query, self.hidden),
            "key": (keys, self.hidden),
            "value": (keys, self.hidden),
            "output": (self.hidden, query),
        }
        if self.mlp == "swiglu":
            linears["gate"] = (ffn, self.hidden)
        linears |= {"up": (ffn, self.hidden), "down": (self.hidden, ffn)}
        shapes = {**self._norm_shapes("attention_norm"), **self._norm_shapes("mlp_norm")}
        for name, shape in linears.items():
            shapes[f"{name}.weight"] = shape
            if self.bias:
                shapes[f"{name}.bias"] = (shape[0],)
        return shapes

    def parameters(self) -> int:
        """Number of distinct parameters of the whole model; tied embeddings count once."""
        block = _count(self.parameter_shapes("blocks.0"))
        ends = _count(self.parameter_shapes(EMBEDDING)) + _count(self.parameter_shapes(HEAD))
        return self.layers * block + ends - (self.vocab * self.hidden if self.tied_embeddings else 0)

    def _norm_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (self.hidden,)}
        if self.norm == "layernorm" and self.bias:
            shapes[f"{name}.bias"] = (self.hidden,)
        return shapes


_CHOICES = {"position": ("learned", "rope"), "norm": ("layernorm", "rmsnorm"), "mlp": ("gelu", "swiglu")}


def tied_parameters(config: ModelConfig) -> list[tuple[str, str]]:
    """Pairs of global names of what is one parameter: ("embedding.tokens.weight", "head.output.weight"), or none."""
    return [(f"{EMBEDDING}.tokens.weight", f"{HEAD}.output.weight")] if config.tied_embeddings else []


def _count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(f"model config: {problem}.")
