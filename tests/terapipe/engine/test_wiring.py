"""The same plan over processes (`shm`, `dist`) and in one process (`local`): the same numbers to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import TOLERANCE, Case, gradients_of, oracle, worst_error
from worker import LAYOUTS, LINKS, PEER_BLOCKS, PEER_CASE, mixed_ties, run_layout

from terapipe.engine.wiring import link_specs, open_local_wiring
from terapipe.schedule import assign_slots, link_transfers, seq_1f1b


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_give_the_numbers_of_one_process(ranks: int, run_scenario: Callable[..., Any]) -> None:
    processes = run_scenario("layouts", ranks)
    assert processes.status == 0
    results = processes.results
    for case in LAYOUTS[ranks]:
        with case.pipeline(links="local") as pipeline:
            local = run_layout(pipeline, case)
        reports = [result[str(case), links] for links in LINKS[ranks] for result in results]
        for report in reports:
            assert report["losses"] == local["losses"]
            assert report["grad_norm"] == local["grad_norm"]
            assert report["repeated"] and local["repeated"]
            assert report["timeline"] == local["timeline"]
            assert 0.0 <= report["bubble_share"] < 1.0
            _check_hand_offs(report, case)
        for links in LINKS[ranks]:
            owned = [result[str(case), links]["gradients"] for result in results]
            gradients = {name: gradient for own in owned for name, gradient in own.items()}
            assert sum(len(own) for own in owned) == len(gradients)
            assert gradients.keys() == local["gradients"].keys()
            for name, gradient in gradients.items():
                assert torch.equal(gradient, local["gradients"][name]), (str(case), links, name)
        if case.dtype in TOLERANCE:
            exact = oracle(case)
            assert worst_error(gradients, exact.gradients) <= TOLERANCE[case.dtype]
            assert local["grad_norm"] == pytest.approx(exact.norm, rel=TOLERANCE[case.dtype])
    if ranks == 2:
        expected = {"kinds": {"0->1F": "dist", "1->0B": "shm"}, "loss": results[0]["one without memory"]["loss"]}
        assert [result["one without memory"] for result in results] == [expected] * 2
    assert all(same for result in results for same in result["recomputed"])
    for tied in zip(*(result["tied"] for result in results), strict=True):
        copies = [value for copies in tied for value in copies.values()]
        assert len(copies) == 2 and torch.equal(copies[0], copies[1])
    everything = {name: gradient for result in results for name, gradient in result["mixed ties"].items()}
    for name, gradient in mixed_ties(ranks, links="local").items():
        assert torch.equal(everything[name], gradient), name
    assert torch.equal(everything["0.weight"], everything["3.weight"])
    assert not torch.equal(everything["0.weight"], everything["2.weight"])


@pytest.mark.timeout(120)
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU triton compiles, and CPU tensors have no kernels")
def test_links_between_gpus_give_the_numbers_of_one_process(run_scenario: Callable[..., Any]) -> None:
    """Their kernels in Triton's interpreter, on CPU tensors."""
    pytest.importorskip("triton", reason="triton is not installed")
    processes = run_scenario("peer", 2)
    assert processes.status == 0
    assert [result["kinds"] for result in processes.results] == [{"peer"}] * 2
    for blocks, within in PEER_BLOCKS.items():
        with within(), PEER_CASE.pipeline(links="local") as pipeline:
            loss, expected = pipeline.step(PEER_CASE.batch(0)).loss, gradients_of(pipeline)
        results = [result["results"][blocks] for result in processes.results]
        gradients = {name: gradient for result in results for name, gradient in result["gradients"].items()}
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[name], expected[name]) for name in expected), blocks
        assert [result["loss"] for result in results] == [loss] * 2
        # The last block's residual is added by the kernel that hands the sum on.
        assert [result["sums"] for result in results] == [[(1, m, s) for m in (0, 1) for s in (0, 1)], []], blocks


def _check_hand_offs(report: dict[str, Any], case: Case) -> None:
    """A row for each transfer of the plan, and their sum in the summary."""
    planned = [transfer for order in case.plan.slots.order.values() for transfer in order]
    rows, summary = report["on their way"], report["hand_offs"]
    assert [row.label for row in rows] == [f"{move.link} {move.micro}.{move.slice}" for move in planned]
    assert [row.rank for row in rows] == [move.link.destination_rank for move in planned]
    assert all(0 < row.duration_s < 10 for row in rows)
    assert summary.count == len(planned)
    assert summary.seconds == pytest.approx(sum(row.duration_s for row in rows), abs=1e-6)
    assert 0 <= summary.exposed_s < 10 and 0 <= summary.hidden_share <= 1  # a busy machine may expose any of it
    assert summary.seconds == pytest.approx(sum(row.duration_s for row in rows), rel=1e-6)


def test_every_link_has_the_plans_slots() -> None:
    schedule = seq_1f1b(3, 2, 3)
    slots = assign_slots(schedule)
    wiring = open_local_wiring(link_specs(schedule, slots, torch.bfloat16, torch.device("cpu"), (1, 3, 8)))
    assert list(wiring.links) == list(link_transfers(schedule))
    for planned, link in wiring.links.items():
        assert (link.spec.source, link.spec.destination, link.spec.direction) == planned
        assert (link.spec.slots, link.spec.dtype) == (slots.slots(planned), torch.bfloat16)
        assert len(link.spec.slot_of) == 6 and set(link.spec.slot_of.values()) == set(range(link.spec.slots))
    assert wiring.sum_over_ranks([1.5, 2.0]) == [1.5, 2.0] and wiring.gather(["a"]) == [["a"]]
