"""Named models: functions that return a ModelConfig. No torch.

GPT-3 sizes: Brown et al. 2020, table 2.1 (13B with hidden 5120, as Li et al. 2021 ran it); 44B: Li et al. 2021,
table 1.
"""

from __future__ import annotations

from collections.abc import Callable

from terapipe.models.config import ModelConfig

BYTE_VOCAB = 257  # every byte, and one token that ends a document

GPT_VOCAB = 50257

# The usual 0.02 suits models a thousand wide. At 128, validation loss after 200 steps of 2048 bytes: 2.51 nats with
# 0.05, 2.64 with 0.02 (standard library text, learning rate 3e-3).
NARROW_STD = 0.05


def gpt(*, hidden: int, layers: int, heads: int, vocab: int = GPT_VOCAB, max_tokens: int = 2048) -> ModelConfig:
    """The GPT-2/3 family: learned positions, LayerNorm, GELU, biases, tied embeddings."""
    return ModelConfig(
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        max_tokens=max_tokens,
        position="learned",
        norm="layernorm",
        mlp="gelu",
        bias=True,
        tied_embeddings=True,
    )


def llama(
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn_hidden: int,
    vocab: int,
    max_tokens: int,
    rope_theta: float = 10000.0,
    initial_std: float = 0.02,
) -> ModelConfig:
    """The Llama family: rotary positions, RMSNorm, SwiGLU, grouped KV heads, no bias, untied embeddings."""
    return ModelConfig(
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=ffn_hidden,
        max_tokens=max_tokens,
        rope_theta=rope_theta,
        initial_std=initial_std,
    )


def debug() -> ModelConfig:
    """Four blocks, 64 wide: trains in seconds, for tests and first steps."""
    return llama(
        hidden=64,
        layers=4,
        heads=4,
        kv_heads=2,
        ffn_hidden=192,
        vocab=BYTE_VOCAB,
        max_tokens=1024,
        initial_std=NARROW_STD,
    )


def quickstart() -> ModelConfig:
    """The byte-level model of scripts/quickstart.sh: learns Python source text in minutes on two CPU cores.

    Small enough for that, and wide enough that a slice's work outweighs the fixed cost of its calls.
    """
    return llama(
        hidden=256,
        layers=4,
        heads=4,
        kv_heads=2,
        ffn_hidden=1024,
        vocab=BYTE_VOCAB,
        max_tokens=2048,
        initial_std=0.03,
    )


def gpt3_1b() -> ModelConfig:
    return gpt(hidden=2048, layers=24, heads=16)


def gpt3_13b() -> ModelConfig:
    return gpt(hidden=5120, layers=40, heads=40)


def gpt3_44b() -> ModelConfig:
    """Made by the TeraPipe authors for their paper; not one of Brown et al."""
    return gpt(hidden=6144, layers=96, heads=48)


def gpt3_175b() -> ModelConfig:
    return gpt(hidden=12288, layers=96, heads=96)


def llama3_8b() -> ModelConfig:
    return llama(
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        ffn_hidden=14336,
        vocab=128256,
        max_tokens=8192,
        rope_theta=500000.0,
    )


def llama3_70b() -> ModelConfig:
    return llama(
        hidden=8192,
        layers=80,
        heads=64,
        kv_heads=8,
        ffn_hidden=28672,
        vocab=128256,
        max_tokens=8192,
        rope_theta=500000.0,
    )


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    preset.__name__: preset
    for preset in (debug, quickstart, gpt3_1b, gpt3_13b, gpt3_44b, gpt3_175b, llama3_8b, llama3_70b)
}
