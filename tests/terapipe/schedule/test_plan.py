from __future__ import annotations

import dataclasses
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe.schedule import GENERATORS, Plan, equal_slices, make_plan, one_f_one_b, seq_1f1b, split_layers


def plan(**changes):
    arguments = {"layers": 6, "ranks": 3, "slices": [100, 3, 154], "tokens": 257, "micros": 2, "schedule": "seq_1f1b"}
    return make_plan(**{**arguments, **changes})


def test_a_plan_says_everything():
    made = plan(warmup_per_hop=2, micro_size=4)
    assert (made.ranks, made.tokens, made.layers, made.micros, made.micro_size) == (3, 257, 6, 2, 4)
    assert [made.slice_start(index) for index in range(3)] == [0, 100, 103]
    assert made.stages == ((0, 2), (2, 4), (4, 6))
    assert made.schedule == seq_1f1b(3, 2, 3, warmup_per_hop=2)
    assert set(made.slots.order) == set(made.slots.counts)
    assert pickle.loads(pickle.dumps(made)) == made and hash(made) == hash(plan(warmup_per_hop=2, micro_size=4))


@given(st.sampled_from(sorted(GENERATORS)), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_json_brings_it_back(name, ranks, micros, slices, micro_size):
    slices = slices if GENERATORS[name].takes_slices else 1
    made = make_plan(
        layers=2 * ranks, ranks=ranks, slices=slices, tokens=11, micros=micros, micro_size=micro_size, schedule=name
    )
    assert Plan.from_json(made.to_json()) == made
    assert Plan.from_json(json.dumps(json.loads(made.to_json()))) == made


@given(st.integers(1, 300), st.integers(1, 300))
def test_equal_slices_are_equal(tokens, count):
    if count > tokens:
        with pytest.raises(ValueError, match=f"{tokens} tokens cannot be cut into {count} slices; ask for at most"):
            equal_slices(tokens, count)
        return
    lengths = equal_slices(tokens, count)
    assert len(lengths) == count and sum(lengths) == tokens and max(lengths) - min(lengths) <= 1
    ranges = split_layers(tokens, count)
    assert [last - first for first, last in ranges] == list(lengths)
    assert ranges[0][0] == 0 and ranges[-1][1] == tokens


def test_stages_can_be_given():
    assert plan(stages=[(0, 1), (1, 2), (2, 6)]).stages == ((0, 1), (1, 2), (2, 6))


BAD = {
    "slices too short": ({"slices": [100, 3]}, r"\[100, 3\] sum to 103 but a sequence has 257 tokens.*\+154"),
    "slices too long": ({"slices": [100, 200]}, r"sum to 300 but .* 257 .*-43"),
    "zero slice": ({"slices": [100, 0, 157]}, r"length of slice 1 must be at least 1, got 0 in \[100, 0, 157\]"),
    "negative slice": ({"slices": [300, -43]}, "length of slice 1 must be at least 1, got -43"),
    "borders in place of lengths": ({"slices": [(0, 100), (100, 257)]}, r"slice 0 is \(0, 100\); give .* lengths"),
    "fraction": ({"slices": [100.5, 156.5]}, "length of slice 0 must be a whole number, got 100.5"),
    "no slice": ({"slices": []}, "at least one slice, got none"),
    "more slices than tokens": ({"slices": 300}, "257 tokens cannot be cut into 300 slices; ask for at most 257"),
    "a word": ({"slices": "4"}, "number of slices must be a whole number, got '4'"),
    "more stages than layers": ({"layers": 2}, "3 stages need at least 3 layers, the model has 2, embedding and head"),
    "near name": ({"schedule": "seq1f1b"}, r"unknown schedule 'seq1f1b'; did you mean 'seq_1f1b'\?"),
    "far name": ({"schedule": "zzz"}, "unknown schedule 'zzz'; known: gpipe"),
    "no micro": ({"micros": 0}, "micros must be at least 1, got 0"),
    "no sequence": ({"micro_size": 0}, "micro_size must be at least 1, got 0"),
    "true": ({"ranks": True}, "ranks must be at least 1, got True"),
    "warm-up": ({"warmup_per_hop": 0}, "warmup_per_hop must be at least 1, got 0"),
    "slices for gpipe": ({"schedule": "gpipe"}, "'gpipe' does not slice but 3 slices were asked for; use 'terapipe'"),
    "warm-up for terapipe": ({"schedule": "terapipe", "warmup_per_hop": 2}, r"has no warmup_per_hop \(got 2\)"),
    "stages for other ranks": ({"stages": [(0, 6)]}, "1 stages were given for 3 ranks"),
    "gap between stages": ({"stages": [(0, 1), (2, 3), (3, 6)]}, r"stage 1 begins at layer 2, expected 1: the stages"),
    "stage without layer": ({"stages": [(0, 3), (3, 3), (3, 6)]}, r"stage 1 has no layer: \[3, 3\)"),
    "stages of another model": ({"stages": [(0, 1), (1, 2), (2, 5)]}, "cover 5 layers but the model has 6"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_with_its_values(name):
    changes, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        plan(**changes)


def edited(**changes):
    fields = json.loads(plan().to_json())
    fields.update(changes)
    return json.dumps({name: value for name, value in fields.items() if value is not None})


BAD_FILES = {
    "not JSON": ("{", "is not JSON"),
    "not a plan": ("[]", "is not a plan"),
    "other format": (edited(format="x"), "is not a plan"),
    "other version": (edited(version=7), "has version 7, this program reads version 1; make the plan again"),
    "missing key": (edited(micros=None), "lacks 'micros'"),
    "unknown key": (edited(micro=3), r"unknown key 'micro'; did you mean 'micros'\?"),
    "wrong type": (edited(slices=3), "wrong type"),
    "other micros": (edited(micros=3), "the plan has 3 micros but its schedule has 2"),
    "broken schedule": (edited(schedule=["0: 0F0.0"]), "the plan has 3 stages but its schedule has 1"),
    "unrunnable schedule": (
        edited(slices=[257], stages=[[0, 6]], micros=1, schedule=["0: 0B0.0 0F0.0"]),
        r"0B0\.0 runs before 0F0\.0",
    ),
    "bad action": (edited(schedule=["0: 0F0.0 what"]), "'what' is not an action"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_plan_files_are_refused(name):
    text, words = BAD_FILES[name]
    with pytest.raises(ValueError, match=words):
        Plan.from_json(text)


def test_a_plan_made_by_hand_is_checked_too():
    made = Plan([np.int64(1), 2], 2, 1, [[0, 1], [1, 2]], seq_1f1b(2, 2, 2))
    assert (made.slices, made.stages) == ((1, 2), ((0, 1), (1, 2))) and type(made.slices[0]) is int
    assert made.to_json().count('"schedule"') == 1 and '\n    "1: 1F0.0' in made.to_json()  # one rank a line
    for changes, words in (
        ({"slices": (3, 0)}, "length of slice 1 must be at least 1, got 0"),
        ({"micros": 2.0}, r"micros must be a whole number, got 2\.0"),
        ({"micro_size": 0}, "micro_size must be at least 1, got 0"),
        ({"stages": ((0, 1), (2, 3))}, "stage 1 begins at layer 2, expected 1"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(made, **changes)
    with pytest.raises(ValueError, match="the plan has 2 slices but its schedule has 1; make them agree"):
        Plan((1, 2), 2, 1, ((0, 1), (1, 2)), one_f_one_b(2, 2))
