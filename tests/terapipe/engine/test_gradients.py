"""Loss and every parameter's gradient equal those of the unsliced model run by plain autograd, for every layout.

The oracle (engine_cases.py) uses neither the engine nor the attention op nor packing nor slices.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_cases import DTYPES, TOLERANCE, Case, gradients_of, oracle, run_unsliced, worst_error

from terapipe.engine import NO_TARGET, Batch
from terapipe.models import tied_parameters
from tpkernels import Mask

LEVELS: dict[str, list[Any]] = {
    "family": ["gpt", "llama"],
    "ranks": [2, 4, 1],
    "slices": [(100, 3, 154), (1, 256), (257,), (33,) * 7 + (26,), (256, 1)],
    "micros": [3, 1, 4, 2],
    "micro_size": [2, 1],
    "order": [("seq_1f1b", 1), ("terapipe", 1), ("seq_1f1b", 2)],
    "documents": [True, False],
    "targets": ["some", "all"],
    "dtype": ["fp64", "fp32"],
}


def pairwise(levels: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Rows in which every value of every factor meets every value of every other factor (greedy)."""
    names = list(levels)
    open_pairs = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in levels[a] for y in levels[b]}
    rows = []
    while open_pairs:
        row: dict[str, Any] = {}
        seed = min(open_pairs, key=repr)
        row[seed[0]], row[seed[2]] = seed[1], seed[3]
        for name in (name for name in names if name not in row):
            row[name] = max(levels[name], key=lambda value: len(_covered({**row, name: value}, open_pairs, names)))
        rows.append(row)
        open_pairs -= _covered(row, open_pairs, names)
    return rows


def _covered(row: dict[str, Any], pairs: set[Any], names: list[str]) -> set[Any]:
    present = [name for name in names if name in row]
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(present, 2)} & pairs


def _case(row: dict[str, Any]) -> Case:
    schedule, warmup_per_hop = row.pop("order")
    return Case(**row, schedule=schedule, warmup_per_hop=warmup_per_hop)


CASES = [_case(row) for row in pairwise(LEVELS)]


def test_the_cases_cover_every_pair() -> None:
    names = list(LEVELS)
    rows = pairwise(LEVELS)
    for a, b in itertools.combinations(names, 2):
        assert {(repr(row[a]), repr(row[b])) for row in rows} == {
            (repr(x), repr(y)) for x in LEVELS[a] for y in LEVELS[b]
        }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_those_of_the_unsliced_model(case: Case) -> None:
    exact = oracle(case)
    with case.pipeline(links="local") as pipeline:
        result = pipeline.step(case.batch())
        assert worst_error(gradients_of(pipeline), exact.gradients) <= TOLERANCE[case.dtype]
        assert result.loss == pytest.approx(exact.loss, rel=TOLERANCE[case.dtype])
        assert result.grad_norm == pytest.approx(exact.norm, rel=TOLERANCE[case.dtype])
        assert result.tokens == case.batch().tokens.numel()
        evaluation = pipeline.evaluate(case.batch())
        assert evaluation.loss == result.loss
        assert evaluation.targets == int((case.batch().targets != NO_TARGET).sum())


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_2048_tokens(dtype: str) -> None:
    case = Case("llama", 4, (511, 513, 1, 640, 383), 1, 1, "seq_1f1b", 2, documents=False, dtype=dtype)
    exact = oracle(case)
    with case.pipeline() as pipeline:
        result = pipeline.step(case.batch())
        assert worst_error(gradients_of(pipeline), exact.gradients) <= TOLERANCE[dtype]
        assert result.loss == pytest.approx(exact.loss, rel=TOLERANCE[dtype])


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_the_model_without_caches_and_engine_agrees_too(family: str) -> None:
    """The layers by hand with cache=None, plain autograd: the same attention op, so this is close to bitwise."""
    case = Case(family, 3, (100, 3, 154), 2, 1, "seq_1f1b", documents=True, targets="some")
    batch = case.batch()
    model = {name: factory() for name, factory in case.factories().items()}
    parameters = {f"{layer}.{name}": p for layer, module in model.items() for name, p in module.named_parameters()}
    for original, copy in tied_parameters(case.config):
        parameters[copy].data.copy_(parameters[original].data)
    mask = Mask(document_starts=batch.document_starts)
    hidden = batch.tokens
    for layer in model.values():
        hidden = layer(hidden, None, mask, mask.positions(0, case.tokens))
    total = torch.nn.functional.cross_entropy(hidden.transpose(1, 2), batch.targets, reduction="sum")
    (total / batch.num_targets).backward()
    gradients = {name: p.grad for name, p in parameters.items()}
    for original, copy in tied_parameters(case.config):
        gradients[original] = gradients[copy] = gradients[original] + gradients[copy]
    with case.pipeline() as pipeline:
        pipeline.step(batch)
        assert worst_error(gradients_of(pipeline), gradients) <= 1e-13


@pytest.mark.parametrize("case", [Case("gpt", documents=True), Case("llama", documents=True)], ids=str)
def test_the_oracle_sees_a_wrong_document_border(case: Case) -> None:
    """A mistake of one token in one border of one row is far above every tolerance."""
    batch = case.batch()
    assert batch.document_starts is not None
    shifted = batch.document_starts.clone()
    border = case.tokens // 2
    shifted[0, border] = shifted[0, border - 1]
    shifted[0, border + 1 :] = shifted[0, border + 1 :].where(shifted[0, border + 1 :] != border, border + 1)
    exact = oracle(case)
    other = oracle(case, Batch(batch.tokens, batch.targets, shifted))
    assert worst_error(other.gradients, exact.gradients) > 1e-4


def _bf16_errors(case: Case, slices: tuple[int, ...]) -> dict[str, float]:
    sliced = replace(case, slices=slices)
    batch = case.batch()
    model = {name: factory().double() for name, factory in case.factories().items()}
    exact = run_unsliced(model, batch, tied_parameters(case.config)).gradients
    with sliced.pipeline() as pipeline:
        pipeline.step(batch)
        gradients = gradients_of(pipeline)
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
        assert {parameter.dtype for parameter in pipeline.named_parameters().values()} == {torch.bfloat16}
    return {
        name: float((gradients[name].double() - exact[name]).norm() / exact[name].norm())
        for name in exact
        if not name.endswith("key.bias")
    }


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_bf16_gradients_are_fp32_and_as_close_as_without_slices(family: str) -> None:
    case = Case(family, 2, (257,), 2, 2, dtype="bf16", documents=True, targets="some")
    whole = _bf16_errors(case, (257,))
    for slices in ((100, 3, 154), (33,) * 7 + (26,), (1,) * 17 + (240,)):
        sliced = _bf16_errors(case, slices)
        assert max(sliced.values()) <= 2 * max(whole.values())
        assert all(sliced[name] <= 2 * whole[name] for name in whole), slices
    assert DTYPES[case.dtype] == torch.bfloat16 and max(whole.values()) < 0.1
