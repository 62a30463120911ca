"""One unit of work of one rank: a forward or a backward of one slice of one micro on one stage.

An action prints as `2F0.3` (stage 2, forward, micro 0, slice 3) and parses back, so a schedule is plain text.
Kinds: F forward, B full backward, I input gradient, W weight gradient (B = I + W). The trap: an `Action` is a tuple,
so comparing two of them with `<` orders by stage first, which is not the order in which anything runs.
"""

from __future__ import annotations

import re
from typing import NamedTuple

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = "F", "B", "I", "W"
KINDS = (FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD)
KIND_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}

_PATTERN = re.compile(r"(\d+)([A-Z])(\d+)\.(\d+)", re.ASCII)


class Action(NamedTuple):
    """What one rank does in one step of its list. All indices count from 0 and are global, never per rank."""

    stage: int
    kind: str
    micro: int
    slice: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}.{self.slice}"

    def __repr__(self) -> str:
        return str(self)

    @staticmethod
    def parse(text: str) -> Action:
        """The action that prints as `text`; ValueError when there is none."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None or match[2] not in KINDS:
            raise ValueError(
                f"{text!r} is not an action; write stage, kind ({', '.join(KINDS)}), micro, a dot and slice, like 2F0.3"
            )
        return Action(int(match[1]), match[2], int(match[3]), int(match[4]))

    @property
    def is_forward(self) -> bool:
        return self.kind == FORWARD

    @property
    def is_gradient(self) -> bool:
        """Whether it computes the gradient of the stage's input (B or I), which the previous stage waits for."""
        return self.kind in (BACKWARD, INPUT_GRAD)


def F(stage: int, micro: int, slice: int = 0) -> Action:
    """Forward of a slice; all three count from 0."""
    return Action(stage, FORWARD, micro, slice)


def B(stage: int, micro: int, slice: int = 0) -> Action:
    """Whole backward of a slice: gradients of its input and of the weights."""
    return Action(stage, BACKWARD, micro, slice)


def I(stage: int, micro: int, slice: int = 0) -> Action:  # noqa: E743  (the field's letter for the input gradient)
    """Backward of a slice up to its input; its W follows."""
    return Action(stage, INPUT_GRAD, micro, slice)


def W(stage: int, micro: int, slice: int = 0) -> Action:
    """Gradients of the weights of a slice, after its I."""
    return Action(stage, WEIGHT_GRAD, micro, slice)
