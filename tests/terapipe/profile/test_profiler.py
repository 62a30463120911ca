"""The profiler: a small grid on a small model, what it says of it, and that the times are those of real slices."""

from __future__ import annotations

from collections import defaultdict

import pytest

from terapipe.models.presets import gpt, llama
from terapipe.planner import cost_file
from terapipe.planner.fit import Point
from terapipe.profile.profiler import Grid, Profiler, held_out_error

MODEL = llama(hidden=64, layers=3, heads=4, kv_heads=2, ffn_hidden=128, vocab=50, max_tokens=384)


def test_a_round_measures_every_pass_of_every_layer(tmp_path, monkeypatch):
    profiler = Profiler(MODEL, tokens=384, micro_sizes=(1, 2), grid=Grid((48, 192, 384), (0,)))
    for _ in range(4):  # others may disturb a round
        profiler.run_round()
        costs = profiler.costs()
        block = costs.layers["block"]
        if block.forward[1](48, 0) < block.forward[1](384, 0) < block.forward[2](384, 0):
            break
    else:
        pytest.fail(f"more tokens take less time: {block.forward}")
    assert costs.source == "measured" and costs.micro_sizes == (1, 2) and costs.max_tokens == 384
    for kind, layer in costs.layers.items():
        for size in (1, 2):
            assert layer.forward[size](192, 0) > 0 and layer.weight_grad[size](192, 0) >= 0
        assert (layer.input_grad[1](192, 0) > 0) == (kind != "embedding")
    assert block.parameters == sum(p.numel() for p in profiler._bench.layers["blocks.0"].parameters())
    assert costs.overheads.action_s > 0 and costs.overheads.update_s > 0
    path = tmp_path / "costs.json"
    path.write_text(cost_file.to_json(costs))
    assert cost_file.load(path) == costs
    assert "block input_grad" in str(costs)
    monkeypatch.setattr("terapipe.profile.profiler.foreign_cores", lambda before, after: 99.0)
    assert "\nmeasurement: disturbed: others kept 99.00 of" in str(profiler.costs())
    monkeypatch.setattr("terapipe.profile.profiler.foreign_cores", lambda before, after: 0.0)
    assert "disturbed" not in str(profiler.costs())


def test_slices_run_behind_the_prefix_that_is_pretended():
    """Attention reads as many keys as the point says: those that the cache holds and the slice's own."""
    bench = Profiler(MODEL, tokens=384)._bench
    for length, start in ((48, 0), (48, 96), (48, 336)):
        found: list[tuple[int, int]] = []
        block = bench.layers["blocks.0"]
        forward = block.forward

        def spy(hidden, cache, *rest, found=found, forward=forward, **options):
            found.append((cache.length, hidden.shape[1]))
            return forward(hidden, cache, *rest, **options)

        block.forward = spy
        samples = defaultdict(list)
        bench.measure(length, start, tokens=384, micro_size=1, samples=samples)
        block.forward = forward
        slices = {(start, length)} | ({(start + length, length)} if start + 2 * length <= 384 else set())
        assert set(found) == slices
        behind = {place for kind, name, _, place in samples if kind == "block" and name == "forward"}
        assert behind == {place for place, _ in slices}
        assert {place for kind, name, _, place in samples if name == "input_grad"} == {start}


def test_a_grid_leaves_out_what_does_not_fit():
    grid = Grid.up_to(300)
    assert grid.lengths == (32, 48, 64, 96, 128, 192, 256, 300) and grid.starts == (0, 75, 150)
    assert all(point.start + point.length <= 300 for point in grid.points(300))
    assert Grid.up_to(5).lengths == (5,)


def test_sequences_beyond_learned_positions_are_refused():
    with pytest.raises(ValueError, match="tokens is 256, but the model has learned positions for 128"):
        Profiler(gpt(hidden=32, layers=1, heads=2, vocab=50, max_tokens=128), tokens=256)


def test_held_out_points_are_predicted_by_the_others():
    points = [
        Point(n, s, 1e-3 + 1e-6 * n + 1e-9 * n * (s + n / 2)) for n in (16, 32, 64, 128, 256) for s in (0, 100, 900)
    ]
    error = held_out_error(points)
    assert error.points == 2 and error.largest < 0.01
    assert held_out_error(points[:2]).points == 0
