"""Interpreter: each action takes, runs, puts and releases as the plan says, in the list's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from terapipe.engine import Batch
from terapipe.engine.interpreter import ActionError, RankProgram, forward_actions, one_over, run_together
from terapipe.engine.wiring import link_specs, open_local_wiring
from terapipe.layer import Norm
from terapipe.schedule import Action, Schedule, assign_slots, link_transfers, seq_1f1b, terapipe
from terapipe.schedule.slots import ring_slots
from tpkernels.links import LocalLink


class Stage:
    """Adds its number to what it gets, forwards and backwards, and writes down each call."""

    entry_norm: Norm | None = None

    def __init__(self, index: int, stages: int, log: list[Any]) -> None:
        self.index, self.first, self.last, self.log = index, index == 0, index == stages - 1, log

    def begin(self, *, evaluating: bool) -> None:
        self.log.append(("begin", self.index, evaluating))

    def forward(
        self, micro: int, piece: int, hidden: Tensor | None, batch: Batch, *, normed: Any, out: Any
    ) -> Tensor | None:
        """Half of the stages have the sum made where it is to go."""
        assert (hidden is None) == self.first and int(batch.tokens[0, 0]) == micro and normed is None
        one = torch.tensor(1.0)
        if hidden is None:
            value = torch.tensor(100.0 * micro + 10 * piece)
        elif out is not None and self.index % 2:
            value = out(hidden, one)
        else:
            value = hidden + one
        self.log.append((str(Action(self.index, "F", micro, piece)), float(value)))
        return None if self.last else value

    def backward(self, micro: int, piece: int, gradient: Tensor, *, reserve: Any) -> Tensor | None:
        self.log.append((str(Action(self.index, "B", micro, piece)), float(gradient)))
        if self.first:
            return None
        return torch.mul(gradient, 2, out=reserve()) if reserve is not None and self.index % 2 else gradient * 2


def _programs(schedule: Schedule, log: list[Any], slots: Any = None, shape: tuple[int, ...] = ()) -> list[RankProgram]:
    slots = slots or assign_slots(schedule)
    wiring = open_local_wiring(link_specs(schedule, slots, torch.float32, torch.device("cpu"), ()))
    wiring.expect(
        {
            link: [((transfer.stage, transfer.micro, transfer.slice), shape) for transfer in transfers]
            for link, transfers in link_transfers(schedule).items()
        }
    )
    stages = {index: Stage(index, schedule.stages, log) for index in range(schedule.stages)}
    return [
        RankProgram(rank, schedule, {i: stages[i] for i in schedule.rank_stages(rank)}, wiring.links)  # type: ignore[misc]
        for rank in range(schedule.ranks)
    ]


def _begin(programs: list[RankProgram], schedule: Schedule, scale: Tensor | None) -> None:
    micros = [Batch(torch.full((1, 1), m), torch.zeros(1, 1, dtype=torch.int64)) for m in range(schedule.micros)]
    for program in programs:
        actions = schedule[program.rank] if scale is not None else forward_actions(schedule, program.rank)
        program.begin(micros, scale, actions=actions)


TWO_STAGES_A_RANK = Schedule.from_text(
    """
    0: 0F0.0 0F0.1 2F0.0 2F0.1 2B0.1 2B0.0 0B0.1 0B0.0
    1: 1F0.0 1F0.1 3F0.0 3F0.1 3B0.1 3B0.0 1B0.1 1B0.0
    """
)
NEIGHBOURS_ON_A_RANK = Schedule.from_text(
    "0: 0F0.0 1F0.0 0F0.1 1F0.1 1B0.1 0B0.1 1B0.0 0B0.0\n1: 2F0.0 2F0.1 2B0.1 2B0.0"
)


@pytest.mark.parametrize(
    "schedule",
    [
        terapipe(3, 2, 2),
        seq_1f1b(4, 3, 2, warmup_per_hop=2),
        terapipe(1, 2, 3),
        TWO_STAGES_A_RANK,
        NEIGHBOURS_ON_A_RANK,
    ],
    ids=["terapipe", "seq_1f1b", "one rank", "two stages a rank", "neighbours on a rank"],
)
def test_every_action_gets_the_output_of_the_one_it_needs(schedule: Schedule) -> None:
    log: list[Any] = []
    programs = _programs(schedule, log)
    for _ in range(2):
        log.clear()
        _begin(programs, schedule, torch.tensor(3.0))
        run_together(programs)
        values = {entry[0]: entry[1] for entry in log if entry[0] != "begin"}
        assert len(values) == len(list(schedule.actions()))
        for action in schedule.actions():
            ahead = schedule.stages - 1 - action.stage
            forward = 100.0 * action.micro + 10 * action.slice + action.stage
            assert values[str(action)] == (forward if action.is_forward else 3.0 * 2**ahead), action
        for program in programs:
            own = [entry[0] for entry in log if entry[0] != "begin" and int(entry[0][0]) in program.stages]
            assert own == [str(action) for action in schedule[program.rank]]
            for link in program.links.values():
                link.finish()


def test_evaluation_runs_the_forwards_and_frees_every_slot_at_once() -> None:
    schedule = terapipe(3, 2, 4)
    log: list[Any] = []
    slots = ring_slots(schedule, 1, resident=True)  # one slot a link would stall a training step
    programs = _programs(schedule, log, slots)
    _begin(programs, schedule, None)
    run_together(programs)
    assert [entry for entry in log if entry[0] == "begin"] == [("begin", rank, True) for rank in range(3)]
    assert sorted(entry[0] for entry in log if entry[0] != "begin") == sorted(
        str(action) for action in schedule.actions() if action.is_forward
    )
    for link in programs[0].links.values():
        link.finish()
    _begin(programs, schedule, torch.tensor(1.0))
    with pytest.raises(
        AssertionError, match=r"a checked plan stalled: rank 0 at 0F0\.1, rank 1 at 1F0\.1, rank 2 at 2F"
    ):
        run_together(programs)


def test_what_an_action_raises_names_rank_and_action() -> None:
    schedule = terapipe(2, 1, 2)
    positions: list[str] = []
    programs = _programs(schedule, [])
    programs[1]._at = positions.append

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("lost")

    programs[1].stages[1].backward = fail  # type: ignore[method-assign, assignment]
    _begin(programs, schedule, torch.tensor(1.0))
    with pytest.raises(ActionError, match=r"rank 1, action 1B0\.1: 'lost'") as caught:
        run_together(programs)
    assert (caught.value.rank, str(caught.value.action)) == (1, "1B0.1")
    assert isinstance(caught.value.cause, KeyError) and isinstance(caught.value.__cause__, KeyError)
    assert positions == ["1F0.0 (1 of 4)", "1F0.1 (2 of 4)", "1B0.1 (3 of 4)"]


def test_a_stage_that_returns_something_else_than_the_sum_it_handed_on_is_refused() -> None:
    schedule = terapipe(2, 1, 1)
    programs = _programs(schedule, [])
    programs[0].stages[0].forward = lambda *_, out, **__: 2 * out(torch.ones(()), torch.ones(()))  # type: ignore
    _begin(programs, schedule, torch.tensor(1.0))
    with pytest.raises(ActionError, match=r"0F0\.0: the last layer of stage 0 returned something else than the sum"):
        run_together(programs)


def test_a_stage_that_writes_to_the_sum_it_handed_on_is_refused() -> None:
    """The next stage would read it before, after or between."""
    schedule = terapipe(2, 1, 1)
    programs = _programs(schedule, [])
    programs[0].stages[0].forward = lambda *_, out, **__: out(torch.ones(()), torch.ones(())).mul_(2)  # type: ignore
    _begin(programs, schedule, torch.tensor(1.0))
    with pytest.raises(ActionError, match=r"0F0\.0: the last layer of stage 0 wrote in place to the sum"):
        run_together(programs)


def test_a_sum_is_handed_on_once_though_a_backward_makes_it_again() -> None:
    """As under activation checkpointing."""
    schedule, again = terapipe(2, 1, 1), []
    programs = _programs(schedule, [])
    x, stage = torch.tensor(3.0), programs[0].stages[0]

    def forward(*_: Any, out: Any, **__: Any) -> Tensor:
        again.append(out)
        return out(x, x)

    stage.forward, stage.backward = forward, lambda *_, **__: again.append(again[0](x, x))  # type: ignore
    _begin(programs, schedule, torch.tensor(1.0))
    run_together(programs)
    assert float(again[1]) == 6.0
    assert len(programs[0].sent) == 1


@pytest.mark.parametrize("early", [True, False])
def test_the_first_norm_is_the_links_where_that_starts_early(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalLink, "norms_early", early)
    schedule, given = terapipe(2, 1, 1), []
    norm = Norm(2, rms=False, bias=True, eps=1e-5, dtype=torch.float32, device="cpu")
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)  # type: ignore[arg-type]
    monkeypatch.setattr(Stage, "entry_norm", norm)
    programs = _programs(schedule, [], shape=(3, 2))
    x = torch.randn(3, 2)
    programs[0].stages[0].forward = lambda *_, out, **__: out(x, x)  # type: ignore
    programs[1].stages[1].forward = lambda *_, normed, **__: given.append(normed)  # type: ignore
    _begin(programs, schedule, None)
    run_together(programs)
    assert (given[0] is not None) == early
    if early:
        assert torch.equal(given[0].total, x + x) and torch.equal(given[0].out, norm(x + x))
        began, ready = programs[1].taken.popitem()[1]
        assert programs[0].sent.popitem()[1][0] < began < ready


def test_waits_and_computation_are_separate_rows() -> None:
    schedule = terapipe(2, 1, 2)
    programs = _programs(schedule, [])
    _begin(programs, schedule, torch.tensor(1.0))
    run_together(programs)
    for program in programs:
        computed = [str(span.action) for span in program.spans if span.kind == "compute"]
        waited = [str(span.action) for span in program.spans if span.kind == "wait"]
        assert computed == [str(action) for action in schedule[program.rank]]
        assert set(waited) <= ({"0B0.0", "0B0.1"} if program.rank == 0 else {"1F0.0", "1F0.1"})
        assert all(a.end <= b.start for a, b in zip(program.spans, program.spans[1:], strict=False))


def test_the_scale_is_one_over_the_targets_in_fp64() -> None:
    scale = one_over(3, torch.device("cpu"))
    assert scale.dtype == torch.float64 and float(scale) == 1 / 3
