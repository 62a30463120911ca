"""The predicted step against sums written out by hand: times, links, tied gradients, replicas, memory."""

from __future__ import annotations

import dataclasses

import pytest

from terapipe.models.presets import gpt, llama
from terapipe.planner.analytic import analytic_costs, model_flops
from terapipe.planner.costs import LinkModel, Overheads
from terapipe.planner.hardware import HARDWARE
from terapipe.planner.prediction import Layout, predict
from terapipe.schedule import make_plan

MODEL = llama(hidden=128, layers=4, heads=4, kv_heads=2, ffn_hidden=256, vocab=300, max_tokens=512)
OVERHEADS = Overheads(
    action_s=1e-4, step_s=2e-3, norm_s=1e-9, update_s=4e-9, first_forward_s=2e-9, first_backward_s=3e-9
)
FIRST = 5e-9  # of both


def costs(model=MODEL, **changes):
    made = analytic_costs(model, HARDWARE["cpu-2core"], max_tokens=512, micro_sizes=(1, 2))
    link = LinkModel(1e-3, 1e8)
    changed = {"links": {"dist": link}, "devices_per_node": None, "overheads": OVERHEADS} | changes
    return dataclasses.replace(made, **changed)


def test_one_rank_takes_the_sum_of_everything():
    model, plan = costs(), make_plan(layers=6, ranks=1, slices=[100, 412], tokens=512, micros=3, micro_size=2)
    stage = model.stage(0, 6)
    slices = [(100, 0), (412, 100)]
    once = sum(stage.forward(2, *s) + stage.backward(2, *s) + 2 * OVERHEADS.action_s for s in slices)
    found = predict(plan, model)
    assert found.makespan_s == pytest.approx(3 * once + stage.parameters * FIRST)
    beside = OVERHEADS.step_s + stage.parameters * (OVERHEADS.norm_s + OVERHEADS.update_s)
    assert found.step_s == pytest.approx(found.makespan_s + beside)
    assert found.update_s == pytest.approx(stage.parameters * OVERHEADS.update_s)
    assert found.bubble_share == pytest.approx(0.0, abs=1e-12)


def test_two_ranks_without_slices_work_one_after_the_other():
    model, plan = costs(), make_plan(layers=6, ranks=2, slices=1, tokens=512)
    first, last = (model.stage(*stage) for stage in plan.stages)
    work = sum(s.forward(1, 512, 0) + s.backward(1, 512, 0) + 2 * OVERHEADS.action_s for s in (first, last))
    work += (first.parameters + last.parameters) * FIRST
    hops = 2 * (1e-3 + 512 * 128 * 4 / 1e8)
    assert predict(plan, model).makespan_s == pytest.approx(work + hops)


def test_stages_that_sleep_wake_up_the_later_the_longer_they_slept():
    asleep = ((1e-3, 1e-4), (1.001, 0.1001))  # a tenth of what was slept
    sleepy = Overheads(action_s=1e-4, asleep=asleep)
    model, plan = costs(overheads=sleepy), make_plan(layers=6, ranks=2, slices=1, tokens=512)
    first, last = (model.stage(*stage) for stage in plan.stages)
    hop = 1e-3 + 512 * 128 * 4 / 1e8
    there = 1.1 * first.forward(1, 512, 0)
    turned = there + hop + last.forward(1, 512, 0) + 0.1 * (there + hop + last.forward(1, 512, 0))
    turned += 1.1 * last.backward(1, 512, 0)
    back = turned + hop + first.backward(1, 512, 0) + 0.1 * (turned + hop - there + first.backward(1, 512, 0))
    assert predict(plan, model).makespan_s == pytest.approx(back, rel=1e-4)
    for slept, seconds in ((0.0, 1e-4), (0.501, 0.0501), (9.0, 0.1001)):
        assert sleepy.woken_action_s(slept) == pytest.approx(seconds)


def test_recomputation_runs_every_forward_twice_and_keeps_inputs_alone():
    model, plan = costs(), make_plan(layers=6, ranks=1, slices=4, tokens=512)
    plain, again = predict(plan, model), predict(plan, model, Layout(recompute=True))
    forward = sum(model.stage(0, 6).forward(1, 128, start) for start in (0, 128, 256, 384))
    assert again.makespan_s - plain.makespan_s == pytest.approx(forward)
    stage = model.stage(0, 6)
    kept = [
        predicted.memory_bytes[0] - stage.fixed_bytes(1, 512) - stage.cache_bytes(1, 512)
        for predicted in (plain, again)
    ]
    inputs, slice_bytes = stage.saved_bytes(1, 512, recompute=True), stage.saved_bytes(1, 128)
    assert kept == [pytest.approx(4 * slice_bytes), pytest.approx(inputs + slice_bytes)]


def test_tied_gradients_and_replicas_cost_time():
    tied = gpt(hidden=128, layers=4, heads=4, vocab=300, max_tokens=512)
    plan = make_plan(layers=6, ranks=2, slices=2, tokens=512)
    loose = dataclasses.replace(tied, tied_embeddings=False)
    extra = predict(plan, costs(tied)).step_s - predict(plan, costs(loose)).step_s
    assert extra == pytest.approx(2 * (1e-3 + 300 * 128 * 4 / 1e8))
    one, three = (predict(plan, costs(), Layout(data=n)) for n in (1, 3))
    parameters = max(costs().stage(*stage).parameters for stage in plan.stages)
    assert three.step_s - one.step_s == pytest.approx(4 * (1e-3 + parameters * 4 / 3 / 1e8))


def test_replicas_on_other_nodes_share_what_their_node_has():
    """Each of the `tensor` devices of a stage reduces its own part, over its part of the node's link."""
    model, plan = costs(), make_plan(layers=6, ranks=2, slices=2, tokens=512)
    links = {"intra": LinkModel(1e-5, 1e10), "inter": LinkModel(1e-3, 1e8)}
    for nodes, link in ((12, LinkModel(1e-5, 1e10)), (4, LinkModel(1e-3, 1e8 / 2))):
        there = dataclasses.replace(model, links=links, tensor=2, devices_per_node=nodes)
        one, three = (predict(plan, there, Layout(data=n, tensor=2)) for n in (1, 3))
        parameters = max(there.stage(*stage).parameters for stage in plan.stages)
        reduction = 4 * (link.latency_s + parameters * 4 / 3 / link.bytes_per_s)
        assert three.step_s - one.step_s == pytest.approx(reduction)


def test_what_recomputation_makes_again_is_one_slice_of_one_stage():
    model = costs()
    plan = make_plan(layers=6, ranks=2, slices=[100, 412], tokens=512, schedule="seq_interleaved")
    for rank, memory in enumerate(predict(plan, model, Layout(recompute=True)).memory_bytes):
        own = [model.stage(*plan.stages[index]) for index in (rank, 2 + rank)]  # all are alive before any backward
        held = sum(s.fixed_bytes(1, 512) + s.saved_bytes(1, 512, recompute=True) + s.cache_bytes(1, 512) for s in own)
        assert memory == pytest.approx(held + max(stage.saved_bytes(1, 412) for stage in own))


def test_memory_counts_what_is_alive():
    model, plan = costs(), make_plan(layers=6, ranks=2, slices=4, tokens=512, micros=3)
    for rank, memory in enumerate(predict(plan, model).memory_bytes):  # all micros and slices are alive at once
        stage = model.stage(*plan.stages[rank])
        held = 3 * (stage.saved_bytes(1, 512) + stage.cache_bytes(1, 512))
        assert memory == pytest.approx(stage.fixed_bytes(1, 512) + held)
    late = make_plan(layers=6, ranks=2, slices=4, tokens=512, micros=3, schedule="seq_1f1b")
    stage = model.stage(*plan.stages[0])
    held = 5 * stage.saved_bytes(1, 128) + 2 * stage.cache_bytes(1, 512)
    assert predict(late, model).memory_bytes[0] == pytest.approx(stage.fixed_bytes(1, 512) + held)


def test_every_schedule_can_be_predicted():
    model = costs()
    for name, options in (("interleaved", {}), ("seq_interleaved", {"slices": 3}), ("seq_zero_bubble", {"slices": 3})):
        plan = make_plan(layers=6, ranks=2, tokens=512, micros=2, schedule=name, **{"slices": 1, **options})
        found = predict(plan, model)
        assert found.step_s > 0 and len(found.memory_bytes) == 2 and 0 <= found.bubble_share < 1


def test_links_are_told_apart_by_node():
    model = analytic_costs(MODEL, HARDWARE["v100-p3.16xlarge"], max_tokens=512, tensor=2)
    assert [model.link_kind(rank, rank + 1) for rank in range(4)] == ["intra", "intra", "intra", "inter"]
    found = predict(make_plan(layers=6, ranks=6, slices=4, tokens=512), model)
    assert found.mfu == pytest.approx(
        model_flops(MODEL, tokens=512, sequences=1) / (found.step_s * 6 * float(HARDWARE[model.hardware].peak_flops))
    )


def test_another_model_is_refused():
    with pytest.raises(ValueError, match=r"cover 7 layers, but the costs are of a model with 6 \(embedding and head"):
        predict(make_plan(layers=7, ranks=1, slices=1, tokens=64), costs())
