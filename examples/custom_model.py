"""Bring your own layers: a small decoder written from scratch, trained as a pipeline of token slices.

    python examples/custom_model.py            # two stages, four slices, one process; under half a minute on a CPU

A layer is any nn.Module with `forward(hidden, cache, mask, positions) -> hidden`:

    hidden     token ids int64 [batch, tokens] for the first layer, [batch, tokens, width] for the others
    cache      what the layer's own `make_cache` returned for this micro, or None for a layer without one
    mask       tpkernels.Mask of the whole micro: causal, and which tokens share a document
    positions  int64 [batch, tokens], counted from the start of each document

The trap: a layer sees one slice at a time. What looks at earlier tokens must go through its cache, as attention does
here; a convolution over tokens without a cache would see each slice's first tokens as if nothing came before them.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terapipe.engine import Batch, Pipeline
from terapipe.schedule import make_plan
from tpkernels import Mask, PrefixCache, prefix_attention

VOCAB, WIDTH, HEADS, TOKENS = 16, 64, 4, 128


class Embed(nn.Module):
    """Token ids to hidden states, with sinusoids for positions: no parameters for them, any length."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)

    def forward(self, hidden: Tensor, cache: None, mask: Mask, positions: Tensor) -> Tensor:
        frequencies = 100.0 ** (-torch.arange(0, WIDTH, 2, device=positions.device) / WIDTH)
        angles = positions[..., None] * frequencies
        return self.tokens(hidden) + torch.cat((angles.sin(), angles.cos()), -1)


class ParallelBlock(nn.Module):
    """Attention and MLP side by side, as in GPT-J: h + attention(norm(h)) + mlp(norm(h))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def make_cache(self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> PrefixCache:
        """K and V of one micro; the engine makes one for each micro in flight and uses it again."""
        return PrefixCache(batch, capacity, HEADS, WIDTH // HEADS, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, cache: PrefixCache | None, mask: Mask, positions: Tensor) -> Tensor:
        normed = self.norm(hidden)
        q, k, v = (linear(normed).unflatten(-1, (HEADS, -1)) for linear in (self.query, self.key, self.value))
        attended = prefix_attention(q, k, v, cache, mask=mask).flatten(2)
        return hidden + self.output(attended) + self.down(F.relu(self.up(normed)).square())


class Head(nn.Module):
    """Hidden states to logits; a layer without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, hidden: Tensor, cache: None, mask: Mask, positions: Tensor) -> Tensor:
        return self.output(self.norm(hidden))


def make_layers() -> dict[str, nn.Module]:
    """Names are yours. They become global parameter names, so they must not depend on the cut into stages."""
    return {"embed": Embed(), "block.0": ParallelBlock(), "block.1": ParallelBlock(), "head": Head()}


def repeats(step: int) -> Batch:
    """Four random tokens, over and over: predictable once attention finds the token of four positions ago."""
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (8, 4), generator=random).repeat(1, TOKENS // 4 + 1)[:, : TOKENS + 1]
    return Batch(tokens=ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous())


def gradients(pipeline: Pipeline) -> dict[str, Tensor]:
    """By global parameter name."""
    return {name: value.grad for name, value in pipeline.named_parameters().items() if value.grad is not None}


def main(*, steps: int = 200) -> float:
    """Check sliced gradients against the unsliced model, then train; returns the last loss."""
    torch.manual_seed(0)
    layers = make_layers()
    sliced = make_plan(layers=len(layers), ranks=2, slices=[32, 48, 40, 8], tokens=TOKENS, micros=2, micro_size=4)
    whole = make_plan(layers=len(layers), ranks=1, slices=1, tokens=TOKENS, micros=2, micro_size=4)

    with (
        Pipeline(copy.deepcopy(layers), whole, hidden_size=WIDTH, links="local") as reference,
        Pipeline(layers, sliced, hidden_size=WIDTH, links="local") as pipeline,
    ):
        reference.step(repeats(0))
        pipeline.step(repeats(0))
        expected, actual = gradients(reference), gradients(pipeline)
        # The key bias shifts all scores of a row alike, so its gradient is nothing but rounding.
        names = [name for name in expected if not name.endswith("key.bias")]
        worst = max(float((actual[name] - expected[name]).norm() / expected[name].norm()) for name in names)
        print(f"gradients of 2 stages x 4 slices differ from the whole model's by at most {worst:.1e} of their norm")

        optimizer = torch.optim.AdamW(pipeline.named_parameters().values(), lr=3e-3)
        loss = float("nan")
        for step in range(steps):
            loss = pipeline.step(repeats(step)).loss  # .grad now holds the gradient of the mean loss
            optimizer.step()
            if step % 25 == 0 or step == steps - 1:
                print(f"step {step:4d}  loss {loss:.3f} nats a token")
    return loss


if __name__ == "__main__":
    main()
