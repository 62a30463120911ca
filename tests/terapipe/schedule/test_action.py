from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe.schedule import KINDS, Action, B, F, I, W

index = st.integers(0, 10_000)


@given(st.builds(Action, index, st.sampled_from(KINDS), index, index))
def test_prints_and_parses_back(action):
    assert Action.parse(str(action)) == action


def test_text_form():
    assert [str(action) for action in (F(2, 0, 3), B(0, 1), I(10, 11, 12), W(1, 2, 3))] == [
        "2F0.3",
        "0B1.0",
        "10I11.12",
        "1W2.3",
    ]


@pytest.mark.parametrize(("make", "kind"), [(F, "F"), (B, "B"), (I, "I"), (W, "W")])
def test_what_an_action_is(make, kind):
    action = make(3, 4)
    assert action == Action(3, kind, 4, 0) and repr([action]) == f"[3{kind}4.0]"
    assert (action.is_forward, action.is_gradient) == (kind == "F", kind in "BI")


@pytest.mark.parametrize(
    "text", ["", "F", "2F0", "2F0.", "-1F0.0", "2X0.0", "2F0.0 2F0.1", "2f0.0", "2F0.0.0", "٢F0.0"]
)
def test_refuses_what_is_not_an_action(text):
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(text)
