"""Stage: what a layer is given, what is kept between forward and backward, and what a step leaves behind."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from terapipe.engine import Batch
from terapipe.engine.stage import Stage
from terapipe.models import layers
from terapipe.models.config import ModelConfig
from tpkernels import Mask, fused_rows
from tpkernels.block import served

CPU = torch.device("cpu")
SLICES = (2, 1, 3)
BATCH = Batch(
    torch.arange(12).view(2, 6),
    torch.arange(12).view(2, 6),
    torch.tensor([[0, 0, 0, 0, 4, 4], [0, 1, 1, 1, 1, 5]], dtype=torch.int32),
)


class Call(NamedTuple):
    hidden: Tensor
    cache: Any
    mask: Mask
    positions: Tensor


class Cache:
    """Counts its resets; shares an accumulator when it is given one."""

    made: list[tuple[Any, ...]]

    def __init__(self) -> None:
        self.resets, self.accumulator, self.nbytes = 0, None, 10

    def reset(self) -> None:
        self.resets += 1

    def require_accumulator(self) -> Any:
        return self.accumulator or type("Accumulator", (), {"nbytes": 100})()


class Recorder(nn.Module):
    """Scales its input (as a float) and keeps what it was given."""

    def __init__(self, caches: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.calls: list[Call] = []
        self.made: list[tuple[Any, ...]] = []
        if caches:
            self.make_cache = self._make_cache

    def _make_cache(self, *given: Any) -> Cache:
        self.made.append(given)
        return Cache()

    def forward(self, hidden: Tensor, cache: Any, mask: Mask, positions: Tensor) -> Tensor:
        self.calls.append(Call(hidden, cache, mask, positions))
        hidden = hidden[..., None].expand(*hidden.shape, 4).float() if hidden.dim() == 2 else hidden
        return hidden * self.weight


def _stage(*, first: bool = True, last: bool = False) -> Stage:
    return Stage(
        1,
        {"cached": Recorder(True), "plain": Recorder(False)},
        slice_lengths=SLICES,
        micro_size=2,
        first=first,
        last=last,
        loss=lambda output, targets: (output.mean(-1) * targets).sum(),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def _calls(stage: Stage, name: str = "cached") -> list[Call]:
    layer = stage.layers[name]
    assert isinstance(layer, Recorder)
    return layer.calls


def test_a_layer_gets_its_slice_its_cache_the_micros_mask_and_relative_positions() -> None:
    stage = _stage()
    stage.begin(evaluating=False)
    outputs = [stage.forward(7, piece, None, BATCH) for piece in range(3)]
    calls = _calls(stage)
    assert torch.equal(torch.cat([call.hidden for call in calls], 1), BATCH.tokens)
    assert torch.cat([call.positions for call in calls], 1).tolist() == [[0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 0]]
    assert len({id(call.cache) for call in calls}) == 1 and len({id(call.mask) for call in calls}) == 1
    assert calls[0].mask.causal and torch.equal(calls[0].mask.document_starts, BATCH.document_starts)
    assert all(call.cache is None for call in _calls(stage, "plain"))
    assert stage.layers["cached"].made == [(2, 6, torch.float32, torch.device("cpu"))]
    assert all(output is not None and not output.requires_grad for output in outputs)


def test_backward_gives_the_gradient_of_the_input_and_drains() -> None:
    stage = _stage(first=False)
    stage.begin(evaluating=False)
    inputs = [torch.randn(2, length, 4) for length in SLICES]
    for micro in (0, 1):
        for piece in range(3):
            stage.forward(micro, piece, inputs[piece].clone(), BATCH)
    with pytest.raises(RuntimeError, match="stage 1 is not empty after the step; left over"):
        stage.assert_drained()
    for micro in (1, 0):
        for piece in (2, 1, 0):
            assert len(stage._live) == 3 * micro + piece + 1
            gradient = stage.backward(micro, piece, torch.full((2, SLICES[piece], 4), 3.0))
            assert gradient is not None and torch.equal(gradient, torch.full_like(inputs[piece], 12.0))
    stage.assert_drained()
    expected = 2 * sum(float(x.sum()) for x in inputs) * 3.0 * 2.0
    assert stage.layers["plain"].weight.grad is not None
    assert float(stage.layers["plain"].weight.grad) == pytest.approx(expected, abs=1e-3)


def test_caches_return_to_a_pool_and_micros_share_one_accumulator_per_layer() -> None:
    stage = _stage()
    for step in range(3):
        stage.begin(evaluating=False)
        for micro in (0, 1):
            for piece in range(3):
                stage.forward(micro, piece, None, BATCH)
        caches = {id(call.cache): call.cache for call in _calls(stage)}
        assert len(caches) == 2  # two micros in flight, however many steps
        assert len({id(cache.accumulator) for cache in caches.values()}) == 1
        assert (stage.cache_bytes(), stage.accumulator_bytes()) == (20, 100)
        for micro in (0, 1):
            for piece in (2, 1, 0):
                stage.backward(micro, piece, torch.ones(2, SLICES[piece], 4))
        assert [cache.resets for cache in caches.values()] == [step + 1] * 2
        stage.assert_drained()


def test_evaluation_keeps_nothing_and_never_makes_an_accumulator() -> None:
    stage = _stage(last=True)
    stage.begin(evaluating=True)
    for micro in range(4):
        for piece in range(3):
            assert stage.forward(micro, piece, None, BATCH) is None
            assert len(stage._caches) == (piece < 2)
    stage.assert_drained()
    assert len(stage.losses()) == 12
    assert (stage.cache_bytes(), stage.accumulator_bytes()) == (10, 0)
    assert not any(call.hidden.requires_grad for call in _calls(stage, "plain"))


def test_the_last_stage_keeps_a_loss_sum_per_slice_until_the_next_step() -> None:
    stage = _stage(last=True)
    stage.begin(evaluating=False)
    for piece in range(3):
        stage.forward(0, piece, None, BATCH)
    start = 0
    for (micro, piece), loss in stage.losses().items():
        tokens = BATCH.tokens[:, start : start + SLICES[piece]]
        start += SLICES[piece]
        assert micro == 0 and loss == float((tokens * tokens).sum() * 4)
    for piece in (2, 1, 0):
        assert stage.backward(0, piece, torch.tensor(0.5, dtype=torch.float64)) is None
    assert len(stage.losses()) == 3
    assert float(stage.layers["cached"].weight.grad) == float((BATCH.tokens**2).sum())
    stage.begin(evaluating=True)
    assert stage.losses() == {}


def test_discard_forgets_everything() -> None:
    stage = _stage(last=True)
    stage.begin(evaluating=False)
    stage.forward(0, 0, None, BATCH)
    stage.discard()
    stage.assert_drained()
    assert stage.losses() == {} and stage.cache_bytes() == 0


def test_an_input_that_nothing_differentiates_gets_a_zero_gradient() -> None:
    stage = _stage(first=False)
    stage.layers["cached"].forward = lambda hidden, *_: torch.ones_like(hidden)  # type: ignore[method-assign]
    stage.begin(evaluating=False)
    stage.forward(0, 0, torch.randn(2, 2, 4), BATCH)
    gradient = stage.backward(0, 0, torch.ones(2, 2, 4))
    assert gradient is not None and torch.equal(gradient, torch.zeros(2, 2, 4))
    assert float(stage.layers["plain"].weight.grad) == 16.0


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_last_layer_with_a_hook_on_what_it_returns_hands_on_what_the_hook_makes_of_it(everywhere: bool) -> None:
    config = ModelConfig(vocab=9, hidden=8, layers=1, heads=2, max_tokens=6)
    block = layers(config)["blocks.0"]()
    settings = {"first": False, "last": False, "loss": None, "device": CPU, "dtype": torch.float32}
    stage = Stage(1, {"block": block}, slice_lengths=(3, 3), micro_size=2, **settings)  # type: ignore[arg-type]
    stage.begin(evaluating=True)
    sums: list[Tensor] = []

    def out(x: Tensor, residual: Tensor) -> Tensor:
        sums.append(x + residual)
        return sums[-1]

    stage.forward(0, 0, torch.ones(2, 3, 8), BATCH, out=out)
    stage.discard()
    register = nn.modules.module.register_module_forward_hook if everywhere else block.register_forward_hook
    handle = register(lambda module, _, given: 2 * given if module is block else None)
    try:
        output = stage.forward(0, 0, torch.ones(2, 3, 8), BATCH, out=out)
    finally:
        handle.remove()
    assert output is not None and len(sums) == 1 and torch.equal(output, 2 * sums[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_block_of_plain_ops_has_its_sum_made_by_a_link_too(dtype: torch.dtype) -> None:
    """As on GPUs: the same numbers, the sum in the link's memory."""
    config = ModelConfig(vocab=9, hidden=8, layers=1, heads=2, max_tokens=6)
    results = []
    for linked in (False, True):
        block = layers(config, seed=1, dtype=dtype)["blocks.0"]()
        block.down.register_forward_hook(lambda *_: None)  # makes the pieces plain
        settings = {"first": False, "last": False, "loss": None, "device": CPU, "dtype": dtype}
        stage = Stage(1, {"block": block}, slice_lengths=(6,), micro_size=2, **settings)  # type: ignore[arg-type]
        stage.begin(evaluating=False)
        hidden = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
        memory = torch.full_like(hidden, torch.nan)
        output = stage.forward(0, 0, hidden, BATCH, out=partial(torch.add, out=memory) if linked else None)
        assert output is not None and (output.data_ptr() == memory.data_ptr()) == linked
        results.append([output, stage.backward(0, 0, torch.ones_like(output).cumsum(-1))])
        results[-1] += [parameter.grad for parameter in block.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_a_link_computes_for_a_stage_changes_no_number(mlp: Any, training: bool, dtype: torch.dtype) -> None:
    """The first norm, and memory for the sum behind the last layer and for the gradient of the input."""
    norm: Any = "layernorm" if mlp == "gelu" else "rmsnorm"
    config = ModelConfig(vocab=9, hidden=8, layers=1, heads=2, max_tokens=6, mlp=mlp, norm=norm, bias=mlp == "gelu")
    results = []
    for fused_ops in (False, True):
        block = layers(config, seed=1, dtype=dtype)["blocks.0"]()
        settings = {"first": False, "last": False, "loss": None, "device": CPU, "dtype": dtype}
        stage = Stage(1, {"block": block}, slice_lengths=(3, 3), micro_size=2, **settings)  # type: ignore[arg-type]
        stage.begin(evaluating=not training)
        hidden = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
        memory, normed = torch.full((2, 2, 3, 8), torch.nan, dtype=dtype), None
        if fused_ops:
            first = stage.entry_norm
            assert first is block.attention_norm
            rows = fused_rows.norm_forward(hidden.view(6, 8), first.weight, first.bias, eps=first.eps, rms=first.rms)
            normed = rows._replace(total=hidden, out=rows.out.view(2, 3, 8))
            if not served(block.shape, dtype, Mask()):  # a whole block must be as it was made
                block.attention_norm.eps = float("nan")  # whoever computes the norm again is found out
        out = partial(torch.add, out=memory[0]) if fused_ops else torch.add
        output = stage.forward(0, 0, hidden, BATCH, normed=normed, out=out)
        assert output is not None and not output.requires_grad
        results.append([output])
        if training:
            gradient = stage.backward(
                0, 0, torch.ones_like(output), reserve=partial(memory.select, 0, 1) if fused_ops else None
            )
            assert gradient is not None
            results[-1] += [gradient, *(parameter.grad for parameter in block.parameters())]
        if fused_ops:
            assert [x.data_ptr() for x in results[-1][:2]] == [x.data_ptr() for x in memory][: 1 + training]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
