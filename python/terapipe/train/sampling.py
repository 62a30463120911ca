"""Continue a prompt with a trained model whose layers all live in this process: token ids in, token ids out.

The prompt runs as one slice and every new token as a slice of one, each attention layer with its prefix cache: the
same path that training takes. A model trained over several ranks is read back from a checkpoint:
`checkpoint.load_layers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from terapipe.train.data import END_OF_DOCUMENT
from tpkernels import Mask


def generate(
    layers: Mapping[str, nn.Module] | Sequence[nn.Module],
    prompt: Sequence[int],
    *,
    tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
    stop: int | None = None,
) -> list[int]:
    """Up to `tokens` new ids, ending before `stop`. temperature 0 takes the likeliest id each time.

    layers: first to last; the first takes ids, the last returns logits. ValueError for an empty prompt, ids outside
    the vocabulary, or more tokens than learned positions.
    """
    if temperature < 0 or tokens < 0:
        raise ValueError(f"generate: temperature {temperature} and tokens {tokens} must not be negative.")
    if not prompt:
        raise ValueError("generate: the prompt is empty; give at least one token id, such as a document's end.")
    modules = list(layers.values()) if isinstance(layers, Mapping) else list(layers)
    _check(modules[0], prompt, tokens)
    return list(islice(_stream(modules, prompt, tokens, temperature, seed, stop), tokens))


def generate_text(
    layers: Mapping[str, nn.Module] | Sequence[nn.Module],
    prompt: str,
    *,
    tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """The same for byte-level models: the new text, up to the end of the document; broken UTF-8 shows as U+FFFD."""
    ids = generate(
        layers,
        list(prompt.encode()) or [END_OF_DOCUMENT],
        tokens=tokens,
        temperature=temperature,
        seed=seed,
        stop=END_OF_DOCUMENT,
    )
    return bytes(token for token in ids if token < 256).decode(errors="replace")


@torch.no_grad()
def _next_logits(modules: Sequence[nn.Module], caches: Sequence[object], ids: Tensor, start: int) -> Tensor:
    mask = Mask()
    positions = mask.positions(start, ids.shape[1], device=ids.device)
    hidden = ids
    for module, cache in zip(modules[:-1], caches[:-1], strict=True):
        hidden = module(hidden, cache, mask, positions)
    return modules[-1](hidden[:, -1:], caches[-1], mask, positions[:, -1:])[0, -1].float().cpu()


def _stream(
    modules: Sequence[nn.Module],
    prompt: Sequence[int],
    tokens: int,
    temperature: float,
    seed: int,
    stop: int | None,
) -> Iterator[int]:
    weight = next(parameter for module in modules for parameter in module.parameters())
    capacity = len(prompt) + tokens
    caches = [
        make_cache(1, capacity, weight.dtype, weight.device) if make_cache is not None else None
        for make_cache in (getattr(module, "make_cache", None) for module in modules)
    ]
    random = torch.Generator().manual_seed(seed)
    ids, start = torch.tensor([list(prompt)], device=weight.device), 0
    for _ in range(tokens):
        logits = _next_logits(modules, caches, ids, start)
        token = int(logits.argmax()) if temperature == 0 else _draw(logits / temperature, random)
        if token == stop:
            return
        yield token
        start += ids.shape[1]
        ids = torch.tensor([[token]], device=weight.device)


def _draw(logits: Tensor, random: torch.Generator) -> int:
    return int(torch.multinomial(logits.softmax(-1), 1, generator=random))


def _check(first: nn.Module, prompt: Sequence[int], tokens: int) -> None:
    table = getattr(first, "tokens", None)
    if isinstance(table, nn.Embedding) and not all(0 <= token < table.num_embeddings for token in prompt):
        outside = next(token for token in prompt if not 0 <= token < table.num_embeddings)
        raise ValueError(f"generate: prompt id {outside} is outside the vocabulary of {table.num_embeddings}.")
    places = getattr(first, "positions", None)
    if isinstance(places, nn.Embedding) and len(prompt) + tokens > places.num_embeddings:
        raise ValueError(
            f"generate: a prompt of {len(prompt)} and {tokens} new tokens exceed the model's {places.num_embeddings} "
            "learned positions; ask for fewer."
        )
