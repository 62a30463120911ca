"""The decoder against plain dense implementations written here, in fp64: logits, every gradient, sliced and packed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from terapipe.models import ModelConfig, layers
from tpkernels import Mask

LLAMA = ModelConfig(vocab=31, hidden=24, layers=2, heads=6, kv_heads=2, ffn_hidden=20, max_tokens=64, rope_theta=50.0)
GPT = ModelConfig(
    vocab=31, hidden=20, layers=2, heads=4, max_tokens=40, position="learned", norm="layernorm", mlp="gelu", bias=True
)
TOKENS = 37
DOCUMENTS = [[5, 1, 20, 11], [37]]
FAMILIES = pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])


def build(config: ModelConfig, *, seed: int = 3) -> dict[str, nn.Module]:
    """All layers in fp64, moved off their special initial values (norms 1, biases 0, small spread)."""
    built = {name: make() for name, make in layers(config, seed=seed, dtype=torch.float64).items()}
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in built.values():
            for parameter in module.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
    return built


def parameters_of(built: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    return {f"{layer}.{name}": value for layer, module in built.items() for name, value in module.named_parameters()}


def dense_logits(weights: Mapping[str, Tensor], config: ModelConfig, ids: Sequence[int]) -> Tensor:
    """One document, head by head: no cache, no batch, nothing shared with the code under test."""
    count, dim, group = len(ids), config.head_dim, config.heads // config.kv_heads

    def norm(x: Tensor, name: str) -> Tensor:
        if config.norm == "rmsnorm":
            return x / (x.square().mean(1, keepdim=True) + config.norm_eps).sqrt() * weights[f"{name}.weight"]
        centred = x - x.mean(1, keepdim=True)
        spread = (centred.square().mean(1, keepdim=True) + config.norm_eps).sqrt()
        return centred / spread * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        product = x @ weights[f"{name}.weight"].T
        return product + weights[f"{name}.bias"] if f"{name}.bias" in weights else product

    def turn(x: Tensor) -> Tensor:
        """x [tokens, dim]: even and odd channels are the two coordinates of each pair."""
        angle = torch.outer(
            torch.arange(count).double(), config.rope_theta ** (-torch.arange(0, dim, 2).double() / dim)
        )
        even, odd = x[:, 0::2], x[:, 1::2]
        turned = torch.stack((even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()), dim=2)
        return turned.reshape(count, dim)

    x = weights["embedding.tokens.weight"][list(ids)]
    if config.position == "learned":
        x = x + weights["embedding.positions.weight"][:count]
    future = torch.triu(torch.ones(count, count, dtype=torch.bool), diagonal=1)
    for block in (f"blocks.{index}" for index in range(config.layers)):
        normed, mixed = norm(x, f"{block}.attention_norm"), []
        for head in range(config.heads):
            query = linear(normed, f"{block}.query")[:, head * dim : (head + 1) * dim]
            key, value = (
                linear(normed, f"{block}.{name}")[:, head // group * dim : (head // group + 1) * dim]
                for name in ("key", "value")
            )
            if config.position == "rope":
                query, key = turn(query), turn(key)
            scores = (query @ key.T / dim**0.5).masked_fill(future, float("-inf"))
            mixed.append(scores.softmax(1) @ value)
        x = x + linear(torch.cat(mixed, 1), f"{block}.output")
        normed = norm(x, f"{block}.mlp_norm")
        up = linear(normed, f"{block}.up")
        if config.mlp == "swiglu":
            gate = linear(normed, f"{block}.gate")
            inner = gate * gate.sigmoid() * up
        else:
            inner = 0.5 * up * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (up + 0.044715 * up**3)))
        x = x + linear(inner, f"{block}.down")
    return linear(norm(x, "head.norm"), "head.output")


def run_slices(
    built: Mapping[str, nn.Module], ids: Tensor, mask: Mask, slices: Sequence[int], upstream: Tensor
) -> Tensor:
    """Forward slice by slice, backward last to first with `upstream` as the logits' gradient; returns the logits."""
    caches = [
        module.make_cache(ids.shape[0], ids.shape[1], torch.float64, "cpu") if hasattr(module, "make_cache") else None
        for module in built.values()
    ]
    outputs, start = [], 0
    for length in slices:
        positions = mask.positions(start, length)
        hidden = ids[:, start : start + length]
        for module, cache in zip(built.values(), caches, strict=True):
            hidden = module(hidden, cache, mask, positions)
        outputs.append(hidden)
        start += length
    for output in reversed(outputs):
        start -= output.shape[1]
        (output * upstream[:, start : start + output.shape[1]]).sum().backward()
    return torch.cat([output.detach() for output in outputs], 1)


def random_case(config: ModelConfig, batch: int = 2) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(7)
    ids = torch.randint(0, config.vocab, (batch, TOKENS), generator=random)
    return ids, torch.randn(batch, TOKENS, config.vocab, generator=random, dtype=torch.float64)


def assert_same_gradients(
    actual: Mapping[str, nn.Parameter], expected: Mapping[str, Tensor], bound: float = 1e-12
) -> None:
    """Relative to each gradient's norm; biases of q, k, v to the largest of the three, since a key bias has none."""
    norms = {name: grad.norm() for name, grad in expected.items()}
    for name, grad in expected.items():
        scale = norms[name]
        if name.endswith(("query.bias", "key.bias", "value.bias")):
            block = name.rsplit(".", 2)[0]
            scale = torch.stack([norms[f"{block}.{part}.bias"] for part in ("query", "key", "value")]).max()
        got = actual[name].grad
        assert got is not None, name
        assert (got - grad).norm() <= bound * scale, f"{name}: {(got - grad).norm() / scale:.1e}"


def dense_reference(
    built: Mapping[str, nn.Module], config: ModelConfig, ids: Tensor, upstream: Tensor, documents: list[list[int]]
) -> tuple[Tensor, dict[str, Tensor]]:
    weights = {name: value.detach().clone().requires_grad_() for name, value in parameters_of(built).items()}
    rows = [
        torch.cat([dense_logits(weights, config, piece.tolist()) for piece in row.split(lengths)])
        for row, lengths in zip(ids, documents, strict=True)
    ]
    logits = torch.stack(rows)
    (logits * upstream).sum().backward()
    return logits.detach(), {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


@FAMILIES
@pytest.mark.parametrize("slices", [[37], [1, 36], [12, 3, 21, 1]], ids=str)
@pytest.mark.parametrize("documents", [[[37], [37]], DOCUMENTS], ids=["whole", "packed"])
def test_logits_and_gradients_equal_the_dense_model(
    config: ModelConfig, slices: list[int], documents: list[list[int]]
) -> None:
    """Packed: each document equals a run of that document alone, wherever the slices are cut."""
    built = build(config)
    ids, upstream = random_case(config)
    expected, gradients = dense_reference(built, config, ids, upstream, documents)
    mask = Mask() if documents == [[37], [37]] else Mask.from_documents(documents)
    logits = run_slices(built, ids, mask, slices, upstream)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-11)
    assert set(gradients) == set(parameters_of(built))
    assert_same_gradients(parameters_of(built), gradients)


@FAMILIES
def test_without_a_cache_a_layer_computes_the_whole_sequence(config: ModelConfig) -> None:
    built = build(config)
    ids, upstream = random_case(config)
    hidden, mask = ids, Mask.from_documents(DOCUMENTS)
    for module in built.values():
        hidden = module(hidden, None, mask, mask.positions(0, TOKENS))
    (hidden * upstream).sum().backward()
    expected, gradients = dense_reference(built, config, ids, upstream, DOCUMENTS)
    torch.testing.assert_close(hidden.detach(), expected, rtol=0, atol=1e-11)
    assert_same_gradients(parameters_of(built), gradients)


@FAMILIES
def test_modules_have_the_shapes_the_config_counts(config: ModelConfig) -> None:
    built = {name: make() for name, make in layers(config, device="meta").items()}
    assert list(built) == list(config.layer_names())
    for name, module in built.items():
        assert {key: tuple(value.shape) for key, value in module.named_parameters()} == config.parameter_shapes(name)
    assert sum(parameter.numel() for parameter in parameters_of(built).values()) == config.parameters()


def test_first_values_depend_on_seed_and_global_name_alone() -> None:
    whole = parameters_of({name: make() for name, make in layers(LLAMA, seed=5).items()})
    torch.manual_seed(123)
    alone = layers(LLAMA, seed=5)["blocks.1"]()
    for name, value in alone.named_parameters():
        assert torch.equal(value, whole[f"blocks.1.{name}"])
    assert not torch.equal(whole["blocks.0.query.weight"], whole["blocks.1.query.weight"])
    other = layers(LLAMA, seed=6)["blocks.1"]()
    assert not torch.equal(other.query.weight, alone.query.weight)
    halved = layers(LLAMA, seed=5, dtype=torch.bfloat16)["blocks.1"]()
    assert torch.equal(halved.query.weight, alone.query.weight.bfloat16())


def test_first_values_spread_as_configured_and_less_into_the_residual() -> None:
    wide = dataclasses.replace(LLAMA, hidden=240, head_dim=40, ffn_hidden=400, layers=8, initial_std=0.05)
    block = layers(wide)["blocks.3"]()
    assert block.query.weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert block.down.weight.std().item() == pytest.approx(0.05 / 4, rel=0.05)
    assert torch.equal(block.mlp_norm.weight, torch.ones(240))


def test_tied_embeddings_start_equal() -> None:
    built = layers(dataclasses.replace(GPT, tied_embeddings=True))
    assert torch.equal(built["embedding"]().tokens.weight, built["head"]().output.weight)
    untied = layers(GPT)
    assert not torch.equal(untied["embedding"]().tokens.weight, untied["head"]().output.weight)


def test_bf16_follows_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPK_BACKEND", "reference")
    ids, _ = random_case(LLAMA)
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        hidden = ids
        for make in layers(LLAMA, dtype=dtype).values():
            hidden = make()(hidden, None, Mask(), Mask().positions(0, TOKENS))
        assert hidden.dtype == dtype
        logits.append(hidden.detach().float())
    assert (logits[0] - logits[1]).abs().max() < 0.02 * logits[0].abs().max()
