"""What the report measures: the standard grid and the slice grid, and how many operations a shape stands for.

Standard grid: causal, 16k tokens in all, hidden size 2048 (head_dim 64, 128, 256) as flash-attn's own benchmark has
it, and 64 query heads over 8 KV heads of head_dim 128. Slice grid: a slice behind a prefix, head_dim 128, 32 and 64
query heads over 8 KV heads. No torch: the supervisor imports it.
"""

from __future__ import annotations

from dataclasses import dataclass

TOKENS_IN_ALL = 16384
HIDDEN = 2048


@dataclass(frozen=True)
class Shape:
    """`batch` sequences, each a slice of `tokens` behind `prefix`."""

    batch: int
    tokens: int
    prefix: int
    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def keys(self) -> int:
        """Prefix and slice."""
        return self.prefix + self.tokens

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.query_heads // self.kv_heads

    @property
    def forward_flops(self) -> float:
        """Two products over the pairs that the mask leaves: exact for causal attention."""
        pairs = self.tokens * self.prefix + self.tokens * (self.tokens + 1) / 2
        return 4.0 * self.batch * self.query_heads * self.head_dim * pairs

    def flops(self, direction: str) -> float:
        """Backward counts five products for the forward's two, whatever a kernel computes twice."""
        return self.forward_flops * (2.5 if direction == "backward" else 1.0)

    def __str__(self) -> str:
        return f"b{self.batch} h{self.query_heads}:{self.kv_heads} d{self.head_dim} t{self.tokens}+p{self.prefix}"


EIGHT_THOUSAND = Shape(2, 8192, 0, 64, 8, 128)
BEHIND_30K = Shape(1, 2048, 30720, 64, 8, 128)
SHORT_BEHIND_32K = Shape(1, 64, 32768, 64, 8, 128)


def standard_grid() -> list[Shape]:
    """The longest sequences first: they say most, and time may run out."""
    shapes = [EIGHT_THOUSAND]
    for tokens in (16384, 8192, 4096, 2048, 1024, 512):
        for head_dim in (128, 64, 256):
            heads = HIDDEN // head_dim
            shapes.append(Shape(TOKENS_IN_ALL // tokens, tokens, 0, heads, heads, head_dim))
    return shapes


def slice_grid() -> list[Shape]:
    """Those with a goal first, then from short prefixes to long ones."""
    shapes = [BEHIND_30K, SHORT_BEHIND_32K]
    for prefix in (8192, 32768, 0, 131072):
        for tokens in (256, 1024, 4096, 512, 2048):
            shapes += [Shape(1, tokens, prefix, heads, 8, 128) for heads in (64, 32)]
    return shapes


def tiny_grid() -> list[Shape]:
    """For --device cpu: a sequence, and a slice behind a prefix, of odd lengths."""
    return [Shape(2, 33, 0, 4, 2, 16), Shape(1, 5, 60, 4, 2, 16)]
