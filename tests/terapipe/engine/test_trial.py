"""Trial: layers that do not fit are named before the first step, and trying leaves no trace in those that do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import Case
from torch import Tensor, nn

from terapipe.engine import Batch, Pipeline, PipelineError
from terapipe.engine.batch import KnownIds
from terapipe.engine.trial import joined
from terapipe.models import layers
from terapipe.schedule import make_plan

WIDTH = 4


class Embed(nn.Module):
    """Two tables: only the first is looked up by token."""

    def __init__(self, vocabulary: int = 7, width: int = WIDTH) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(5, width)

    def forward(self, hidden: Tensor, cache: None, mask: object, positions: Tensor) -> Tensor:
        return self.words(hidden) + self.places(positions)


class Project(nn.Module):
    """Width to width; counts the calls and dropped channels of each mode."""

    def __init__(self, given: int = WIDTH, returned: int = WIDTH) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(given, returned), nn.Dropout(0.5)
        self.calls: list[bool] = []

    def forward(self, hidden: Tensor, cache: None, mask: object, positions: Tensor) -> Tensor:
        self.calls.append(self.training)
        return self.linear(self.dropout(hidden))


class Wrong(nn.Module):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, hidden: Tensor, *_: Any) -> Any:
        return self.result(hidden)


def _make(*modules: nn.Module, **options: Any) -> Pipeline:
    plan = make_plan(layers=len(modules), ranks=len(modules), slices=[2, 3], tokens=5)
    return Pipeline(modules, plan, **{"hidden_size": WIDTH, **options})


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: _make(Embed(), Project(), Project(WIDTH, 7), hidden_size=6),
            r"layer '0' ends a stage with torch.float32 \[1, 1, 4\].*expects torch.float32 \[1, 1, 6\].*hidden_size a",
        ),
        (
            lambda: _make(Embed(), Project(6), Project()),
            r"layer '1' cannot run on torch.float32 \[1, 1, 4\] \(hidden_size",
        ),
        (
            lambda: _make(Embed(), Project(WIDTH, 6), Project()),
            r"layer '1' ends a stage with torch.float32 \[1, 1, 6\]",
        ),
        (lambda: _make(Embed(), Project(), dtype=torch.bfloat16), r"float32 \[1, 1, 4\].*expects torch.bfloat16"),
        (lambda: _make(Embed(), Wrong(lambda x: (x, x))), "layer '1' returned a tuple; a layer returns one tensor"),
        (
            lambda: _make(Embed(), Wrong(lambda x: x.sum(-1))),
            r"the last layer, '1', returned .*\[1, 1\] for one token; the",
        ),
        (
            lambda: _make(Embed(), Wrong(lambda x: x.mul_(2)), Project()),
            "layer '1' writes to its input in place, and begins a stage.*leave inplace=True out",
        ),
        (
            lambda: _make(Embed(), Wrong(lambda x: 1 / 0)),
            r"'1' cannot run on torch.float32 \[1, 1, 4\].*ZeroDivisionError",
        ),
        (
            lambda: _make(Embed(), nn.Linear(WIDTH, 7)),
            r"layer '1' cannot run .*takes 2 positional arguments but 5 were",
        ),
    ],
)
def test_a_layer_that_does_not_fit_is_named_before_any_step(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_a_layer_that_returns_no_tensor_for_more_than_one_token_is_named_in_the_step() -> None:
    pipeline = _make(Embed(), Wrong(lambda x: x if x.shape[1] == 1 else None))
    with pytest.raises(PipelineError, match=r"in 1F0.0: ValueError: layer '1' returned a NoneType; a layer"):
        pipeline.step(Batch(torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int64)))


def test_an_input_may_be_written_to_within_a_stage_and_under_inference_mode() -> None:
    layers = [Embed(), Wrong(lambda x: x.mul_(2)), Project()]
    plan = make_plan(layers=3, ranks=1, slices=[2, 3], tokens=5)
    Pipeline(layers, plan, hidden_size=WIDTH)
    with torch.inference_mode():
        Pipeline(layers, plan, hidden_size=WIDTH)


def test_trying_leaves_no_trace() -> None:
    project, noise = Project(), Wrong(lambda x: x + torch.rand_like(x))
    project.dropout.eval()
    torch.manual_seed(3)
    expected = torch.rand(4)
    embed, head = Embed(), Project(WIDTH, 7)
    torch.manual_seed(3)
    with _make(embed, project, noise, head):
        assert torch.equal(torch.rand(4), expected)
    assert project.calls == [False]  # tried once, in eval mode
    assert project.training and project.linear.training and not project.dropout.training
    assert not embed.words._forward_pre_hooks and project.linear.weight.grad is None


def test_ids_are_known_from_tables_and_logits() -> None:
    with _make(Embed(), Project(), Project(WIDTH, 9)) as pipeline:
        assert pipeline._ids == KnownIds(7, 9)
        tokens = torch.arange(5)[None]
        pipeline.step(Batch(tokens, tokens + 4))
        with pytest.raises(ValueError, match=r"target id 9 .*9 target ids"):
            pipeline.step(Batch(tokens, tokens + 5))
    with _make(Embed(), Project(), loss=lambda output, targets: (output.sum(-1) - targets).sum()) as pipeline:
        assert pipeline._ids == KnownIds(7, None)
    with _make(Wrong(lambda x: x[..., None] * torch.ones(WIDTH)), Project()) as pipeline:
        assert pipeline._ids == KnownIds(None, WIDTH)
    assert joined([KnownIds(), KnownIds(3), KnownIds(None, 5)]) == KnownIds(3, 5)


def test_compiled_layers_are_tried_without_compiling_them() -> None:
    compiled: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    project = torch.compile(Project(), backend=count)
    with _make(Embed(), project, Project(WIDTH, 7)) as pipeline:
        assert not compiled
        pipeline.evaluate(Batch(torch.ones(1, 5, dtype=torch.int64), torch.ones(1, 5, dtype=torch.int64)))
        assert compiled


def test_a_presets_layers_know_their_vocabulary() -> None:
    case = Case("llama", 1, (8,))
    with Pipeline(layers(case.config), case.plan, hidden_size=24) as pipeline:
        assert pipeline._ids == KnownIds(61, 61)
