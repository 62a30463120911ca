"""Pipeline: steps and evaluations in any order, layers of any kind, nothing left behind, and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_cases import Case, gradients_of, oracle, worst_error
from torch import Tensor, nn

from terapipe.engine import Batch, Pipeline, PipelineError
from terapipe.models import layers, tied_parameters
from terapipe.schedule import Plan, Schedule, make_plan
from tpkernels import Mask

CASE = Case("gpt", 3, (9, 1, 14), 3, 2, "seq_1f1b", 2, documents=True, targets="some")


def _left_over(pipeline: Pipeline) -> list[Any]:
    """Everything that a step could leave in the engine, by looking into its parts."""
    left: list[Any] = []
    for program in pipeline._programs:
        left += [*program._staying.values()] + ([] if program.finished else ["actions"])
        for stage in program.stages.values():
            left += [*stage._live.values(), *stage._caches, *stage._masks]
            left += [cache for caches in stage._free for cache in caches if cache is not None and cache.length]
        for link in program.links.values():
            left += [*link._arrived.values(), *link._occupant.values()]
    return left


def test_steps_and_evaluations_in_any_order_give_bitwise_the_same() -> None:
    first, second = CASE.batch(0), CASE.batch(1)
    with CASE.pipeline() as pipeline:
        before = pipeline.evaluate(first)
        assert not gradients_of(pipeline)
        assert _left_over(pipeline) == []
        one = pipeline.step(first)
        gradients = gradients_of(pipeline)
        assert _left_over(pipeline) == []
        pipeline.evaluate(second)
        assert gradients_of(pipeline).keys() == gradients.keys()
        other = pipeline.step(second)
        assert pipeline.evaluate(first) == before
        again = pipeline.step(first)
        assert _left_over(pipeline) == []
        assert (again.loss, again.grad_norm) == (one.loss, one.grad_norm) != (other.loss, other.grad_norm)
        assert before.loss == one.loss
        for name, gradient in gradients_of(pipeline).items():
            assert torch.equal(gradient, gradients[name]), name
        pipeline.zero_grad()
        assert not gradients_of(pipeline)


def test_a_step_runs_under_no_grad_and_evaluation_keeps_no_graph() -> None:
    exact = oracle(CASE)
    with CASE.pipeline() as pipeline:
        with torch.no_grad():
            pipeline.step(CASE.batch())
        assert worst_error(gradients_of(pipeline), exact.gradients) < 1e-12
        seen: list[bool] = []
        for layer in pipeline.layers().values():
            layer.register_forward_hook(lambda module, given, out: seen.append(out.requires_grad))
        pipeline.evaluate(CASE.batch())
        assert len(seen) == 5 * 9 and not any(seen)


def test_loss_and_norm_are_the_same_in_every_layout() -> None:
    results = []
    for ranks, slices, order in [(1, (24,), "terapipe"), (2, (9, 1, 14), "seq_1f1b"), (5, (1,) * 24, "terapipe")]:
        case = replace(CASE, ranks=ranks, slices=slices, schedule=order, warmup_per_hop=1)
        with case.pipeline() as pipeline:
            results.append(pipeline.step(CASE.batch()))
    for result in results:
        assert result.loss == pytest.approx(results[0].loss, rel=1e-13)
        assert result.grad_norm == pytest.approx(results[0].grad_norm, rel=1e-13)
        assert (result.tokens, result.bubble_share) == (6 * 24, 0.0)


def test_the_grad_norm_is_that_of_the_gradients() -> None:
    with CASE.pipeline() as pipeline:
        result = pipeline.step(CASE.batch())
        distinct = {name: g for name, g in gradients_of(pipeline).items() if name != "head.output.weight"}
        norm = torch.stack([gradient.norm() for gradient in distinct.values()]).norm()
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-13)


def test_tied_copies_start_and_stay_bit_equal() -> None:
    with CASE.pipeline() as pipeline:
        parameters = pipeline.named_parameters()
        original, copy = (parameters[name] for name in tied_parameters(CASE.config)[0])
        assert original is not copy and torch.equal(original, copy)
        optimizer = torch.optim.AdamW(parameters.values(), lr=0.01)
        for seed in range(3):
            pipeline.step(CASE.batch(seed))
            assert original.grad is not None and copy.grad is not None
            assert torch.equal(original.grad, copy.grad) and original.grad is not copy.grad
            optimizer.step()
            assert torch.equal(original, copy)


# ---- layers of any kind ----------------------------------------------------------------------------------------------


class Mix(nn.Module):
    """No cache: works on each token alone.  Counts its calls; may hold a parameter that nothing reads."""

    def __init__(self, width: int, *, seed: int, idle: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.linear.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / width**0.5
        if idle:
            self.idle = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, hidden: Tensor, cache: None, mask: Mask, positions: Tensor) -> Tensor:
        assert cache is None
        return hidden + torch.tanh(self.linear(hidden)) * (1 + positions[..., None])


class Lookup(Mix):
    """Reads token ids."""

    def forward(self, hidden: Tensor, cache: None, mask: Mask, positions: Tensor) -> Tensor:
        return super().forward(
            torch.sin(hidden[..., None] + torch.arange(4.0, dtype=torch.float64)), cache, mask, positions
        )


def _squares(output: Tensor, targets: Tensor) -> Tensor:
    return ((output.sum(-1) - targets).square() * (targets != -100)).sum()


def _mixes(*, idle: bool = False) -> list[nn.Module]:
    return [Lookup(4, seed=0), Mix(4, seed=1, idle=idle), Mix(4, seed=2), Mix(4, seed=3)]


def _mix_plan(ranks: int, slices: tuple[int, ...] = (3, 4), micros: int = 2) -> Plan:
    return make_plan(layers=4, ranks=ranks, slices=slices, tokens=sum(slices), micros=micros, schedule="seq_1f1b")


def _mix_batch(micros: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(5)
    targets = torch.randint(9, (micros, 7), generator=generator)
    targets[0, 2] = -100
    return Batch(torch.randint(9, (micros, 7), generator=generator), targets)


def _mix_gradients(modules: list[nn.Module], batch: Batch) -> dict[str, Tensor]:
    hidden = batch.tokens
    for module in modules:
        hidden = module(hidden, None, Mask(), torch.arange(7)[None])
    (_squares(hidden, batch.targets) / batch.num_targets).backward()
    return {
        f"{index}.{name}": parameter.grad
        for index, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_plain_list_of_layers_without_caches_and_a_loss_of_ones_own(ranks: int) -> None:
    exact = _mix_gradients(_mixes(idle=True), _mix_batch())
    with Pipeline(_mixes(idle=True), _mix_plan(ranks), hidden_size=4, loss=_squares, dtype=torch.float64) as pipeline:
        result = pipeline.step(_mix_batch())
        assert list(pipeline.layers()) == ["0", "1", "2", "3"]
        assert worst_error(gradients_of(pipeline), exact) < 1e-14
        assert pipeline.named_parameters()["1.idle"].grad is None  # no slice reached it, and the norm knows
        assert result.grad_norm == pytest.approx(float(torch.stack([g.norm() for g in exact.values()]).norm()))
        assert pipeline.memory().cache_bytes == 0 and pipeline.memory().accumulator_bytes == 0


@pytest.mark.parametrize("frozen", [{0}, {0, 1}, {1}, {3}, {0, 1, 2}, {1, 2, 3}, {0, 1, 2, 3}], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_frozen_layers(frozen: set[int], ranks: int) -> None:
    exact = _mix_gradients(_mixes(), _mix_batch())
    modules = _mixes()
    for index in frozen:
        modules[index].requires_grad_(False)
    with Pipeline(modules, _mix_plan(ranks), hidden_size=4, loss=_squares, dtype=torch.float64) as pipeline:
        result = pipeline.step(_mix_batch())
        wanted = {name: gradient for name, gradient in exact.items() if int(name[0]) not in frozen}
        gradients = gradients_of(pipeline)
        assert gradients.keys() == wanted.keys()
        if wanted:
            assert worst_error(gradients, wanted) < 1e-14
        else:
            assert result.grad_norm == 0.0
        assert _left_over(pipeline) == []


def test_frozen_blocks_with_caches() -> None:
    exact = oracle(CASE)
    with CASE.pipeline() as pipeline:
        for name in ("embedding", "blocks.0", "blocks.2"):
            pipeline.layers()[name].requires_grad_(False)
        pipeline.named_parameters()["blocks.1.value.weight"].requires_grad_(False)
        pipeline.named_parameters()["head.output.weight"].requires_grad_(False)
        for _ in range(2):
            pipeline.step(CASE.batch())
        trained = {name: g for name, g in gradients_of(pipeline).items() if name.startswith(("blocks.1", "head.norm"))}
        assert len(trained) == 17
        for name, gradient in trained.items():
            if not name.endswith("key.bias"):
                assert float((gradient - exact.gradients[name]).norm() / exact.gradients[name].norm()) < 1e-12, name
        assert not [name for name in gradients_of(pipeline) if name.startswith(("blocks.0", "blocks.2", "embed"))]
        assert "head.output.weight" not in gradients_of(pipeline)


def test_nan_is_reported_as_nan_and_the_next_step_is_clean() -> None:
    exact = oracle(CASE)
    with CASE.pipeline() as pipeline:
        parameter = pipeline.named_parameters()["blocks.1.query.weight"]
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter[0, 0] = float("nan")
        result = pipeline.step(CASE.batch())
        assert result.loss != result.loss and result.grad_norm != result.grad_norm
        with torch.no_grad():
            parameter.copy_(kept)
        pipeline.step(CASE.batch())
        assert worst_error(gradients_of(pipeline), exact.gradients) < 1e-12


# ---- refusals --------------------------------------------------------------------------------------------------------


def _refused(match: str, make: Callable[..., Any], *given: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match=match):
        make(*given, **options)


def _make(modules: Any, plan: Plan | None = None, **options: Any) -> Pipeline:
    options = {"hidden_size": 4, "loss": _squares, "dtype": torch.float64, **options}
    return Pipeline(modules, plan or _mix_plan(2), **options)


@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_a_batch_that_does_not_fit_is_refused_and_the_pipeline_lives(method: str) -> None:
    good = CASE.batch()
    zeros = torch.zeros(6, 24, dtype=torch.int64)
    falling = torch.zeros(6, 24, dtype=torch.int32)
    falling[0, 3] = 2
    narrow, short = Batch(good.tokens[:5], good.targets[:5]), Batch(good.tokens[:, :23], good.targets[:, :23])
    with CASE.pipeline() as pipeline:
        run = getattr(pipeline, method)
        _refused(r"\[5, 24\].*3 micros of 2 sequences, 24 tokens.*give \[6, 24\]", run, narrow)
        _refused(r"\[6, 23\].*give \[6, 24\]", run, short)
        _refused("no target: all 144 are -100", run, Batch(zeros, zeros - 100))
        _refused(r"document_starts\[0\] falls from 2 to 0", run, Batch(zeros, zeros, falling))
        for wrong in (61, -1):
            ids = good.tokens.clone()
            ids[4, 7] = wrong
            _refused(rf"token id {wrong} \(sequence 4, position 7\) is outside.*61 token ids", run, Batch(ids, zeros))
            _refused(
                rf"target id {wrong} \(sequence 4, position 7\).*-100 marks a token without", run, Batch(zeros, ids)
            )
        run(good)


def test_layers_that_do_not_fit_are_refused() -> None:
    a, b, c, d = _mixes()
    _refused("3 layers were given but the plan's stages cover 4", _make, [a, b, c])
    _refused("layer '1' is a int; it must be an nn.Module", _make, [a, 7, c, d])
    _refused("layer 'B' is a str; it must be an nn.Module", _make, {"A": a, "B": lambda: "no layer", "C": c, "D": d})
    _refused(r"1\.linear\.weight and 3\.linear\.weight are one tensor.*ties=", _make, [a, b, c, b])
    _refused(r"1\.linear\.weight and 3\.linear\.weight are one tensor.*ties=", _make, [a, lambda: b, c, lambda: b])
    c.linear.bias = b.linear.bias
    _refused(r"1\.linear\.bias and 2\.linear\.bias are one tensor", _make, [a, b, c, d])


def test_links_that_do_not_fit_are_refused() -> None:
    _refused("unknown links 'tcp'; choose 'auto', 'local', 'shm', 'peer' or 'dist'", _make, _mixes(), links="tcp")
    remedy = r"the plan has 2 ranks but no process group was started; start 2 \(torchrun --nproc-per-node 2"
    _refused(remedy, _make, _mixes(), links="dist")


@pytest.mark.parametrize(
    ("ties", "match"),
    [
        ([("0.linear.wheel", "1.linear.weight")], r"no layer has a parameter '0.linear.wheel'; the names are 0\.lin"),
        ([("0.linear.weight", "1.linear.bias")], r"shapes differ, \[4, 4\] and \[4\]"),
        ([("0.linear.bias", "1.linear.bias"), ("2.linear.bias", "1.linear.bias")], "each copy has one original"),
        ([("0.linear.bias", "1.linear.bias"), ("1.linear.bias", "2.linear.bias")], "an original is not itself a copy"),
    ],
)
def test_ties_that_do_not_fit_are_refused(ties: list[tuple[str, str]], match: str) -> None:
    _refused(match, _make, _mixes(), ties=ties)


def test_a_tie_within_a_stage_and_one_copied_twice() -> None:
    ties = [("1.linear.bias", "2.linear.bias"), ("1.linear.bias", "3.linear.bias")]
    modules = _mixes()
    for index in (2, 3):
        modules[index].linear.bias = modules[1].linear.bias
    exact = _mix_gradients(modules, _mix_batch())
    for ranks in (1, 2, 4):
        with _make(_mixes(), _mix_plan(ranks), ties=ties) as pipeline:
            pipeline.step(_mix_batch())
            got = gradients_of(pipeline)
            for name in ("1.linear.bias", "2.linear.bias", "3.linear.bias"):
                assert torch.allclose(got[name], exact["1.linear.bias"], rtol=1e-13), (ranks, name)


def test_split_backwards_are_refused_by_name() -> None:
    plan = Plan((7,), 1, 1, ((0, 4),), Schedule.from_text("0: 0F0.0 0I0.0 0W0.0\n"))
    match = r"forward \(F\) and full backward \(B\) actions; the schedule also has 0I0\.0"
    _refused(match, _make, _mixes(), plan)


def test_a_closed_pipeline_leaves_layers_that_anybody_can_train() -> None:
    """torch.autograd.grad returns the gradients, as if no pipeline had been there, and `.grad` stays as it was."""
    case = replace(CASE, dtype="fp32")
    with case.pipeline() as pipeline:
        pipeline.step(case.batch(0))
        block = pipeline.layers()["blocks.0"]
    parameters = list(block.parameters())
    before = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    out = block(torch.randn(1, 5, 24), None, Mask(), torch.arange(5))
    wanted = torch.autograd.grad(out.square().sum(), parameters)
    assert all(gradient.any() for gradient in wanted)
    for parameter, gradient in zip(parameters, before, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)


def test_a_failed_pipeline_and_a_closed_one_refuse_further_use() -> None:
    modules = _mixes()
    with _make(modules) as pipeline:
        pipeline.step(_mix_batch())
        handle = modules[2].register_full_backward_pre_hook(_raise)
        with pytest.raises(PipelineError, match=r"rank 1 failed in 1B0\.1: ArithmeticError: broken on pu") as caught:
            pipeline.step(_mix_batch())
        assert (caught.value.failure.rank, caught.value.failure.action) == (1, "1B0.1")
        assert isinstance(caught.value.__cause__, ArithmeticError)
        assert not gradients_of(pipeline)
        assert set(map(str, _left_over(pipeline))) == {"actions"}
        handle.remove()
        for run in (pipeline.step, pipeline.evaluate):
            with pytest.raises(PipelineError, match=r"failed before and cannot be used again; make a new.*broken on"):
                run(_mix_batch())
    with _make(_mixes()) as pipeline:
        pass
    for run in (pipeline.step, pipeline.evaluate):
        with pytest.raises(RuntimeError, match="this pipeline was closed"):
            run(_mix_batch())
    pipeline.close()


def _raise(*_: object) -> None:
    raise ArithmeticError("broken on purpose")


@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_a_step_that_ctrl_c_ended_is_not_gone_on_from(method: str) -> None:
    case = Case(ranks=2, slices=(3, 4), micros=2)
    pipeline = case.pipeline()
    calls = itertools.count()

    def interrupt(*_: Any) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt

    list(pipeline.layers().values())[-1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        getattr(pipeline, method)(case.batch())
    with pytest.raises(PipelineError, match=r"cannot be used again; make a new one.*in a step: KeyboardInterrupt"):
        pipeline.step(case.batch())


def test_timeline_has_every_action_once_and_no_overlap_on_a_rank() -> None:
    with CASE.pipeline() as pipeline:
        pipeline.step(CASE.batch())
        rows = [row for row in pipeline.timeline() if row.category == "compute"]
        for rank in range(3):
            mine = [row for row in rows if row.rank == rank]
            assert [row.label for row in mine] == [str(action) for action in CASE.plan.schedule[rank]]
            assert all(row.start_s <= row.end_s for row in mine)
            assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(mine))
        assert min(row.start_s for row in rows) >= 0


def test_a_presets_layers_run_as_they_are() -> None:
    config = replace(CASE.config, layers=1)
    plan = make_plan(layers=3, ranks=3, slices=2, tokens=24)
    tokens = torch.randint(61, (1, 24))
    with Pipeline(layers(config), plan, hidden_size=24) as pipeline:
        assert pipeline.step(Batch(tokens, tokens)).loss > 0
