"""`terapipe reproduce`: the paper's experiments, published beside simulated, without slices and with the planner's.

Costs come from `paper_cluster`, slices from the exact search on them (in units of eight tokens, as the authors'), step
times from the schedule simulator. Three settings and two curves were used to fit four rates; everything else that is
printed is a prediction. Any other model on the same cluster is replayed with the same rates.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from terapipe import files
from terapipe.models.presets import PRESETS
from terapipe.names import unknown
from terapipe.planner.paper_cluster import leaves_node, once_per_step_s, stage_times, step_s
from terapipe.planner.paper_fit import FITTED_SETTINGS
from terapipe.planner.paper_settings import PUBLISHED, SETTINGS, TOKENS, Setting
from terapipe.planner.slicing import Slicing, slice_sequence
from terapipe.schedule import simulate
from terapipe.schedule.action import Action
from terapipe.schedule.generators import terapipe

UNIT_TOKENS = 8  # the authors' planner counted in these
MOST_TOKENS = 32768  # 0.8 GB and 2 s; twice as many take four times both
MOST_ACTIONS = 400_000  # of a simulated step; the paper's have at most 20,000
NUMBERS = ("stages", "tensor", "data", "batch", "tokens")  # options of a setting of the user's


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One setting. Published times are None for a setting of the user's. `fitted`: used to fit the rates."""

    setting: int | None
    model: str
    gpus: int
    published_without_s: float | None
    published_with_s: float | None
    provenance: str | None
    simulated_without_s: float
    simulated_with_s: float
    slices: tuple[int, ...]
    uniform_slices: int
    uniform_s: float
    fitted: bool

    @property
    def simulated_ratio(self) -> float:
        return self.simulated_without_s / self.simulated_with_s

    @property
    def published_ratio(self) -> float | None:
        if self.published_without_s is None or self.published_with_s is None:
            return None
        return self.published_without_s / self.published_with_s

    @property
    def ratio_error(self) -> float | None:
        """Simulated over published ratio of times without and with slices, less 1."""
        return None if self.published_ratio is None else self.simulated_ratio / self.published_ratio - 1


def replay(setting: Setting, number: int | None = None) -> Replay:
    """Simulate `setting`; `number` of the paper's, to put the published times beside it."""
    published = None if number is None else PUBLISHED[number]
    slices = tuple(UNIT_TOKENS * units for units in plan_slices(setting).slices)
    best_count = min(uniform_counts(setting), key=lambda count: step_s(setting, equal_slices(setting, count)))
    return Replay(
        setting=number,
        model=setting.name,
        gpus=setting.gpus,
        published_without_s=None if published is None else published.without_s,
        published_with_s=None if published is None else published.with_s,
        provenance=None if published is None else published.provenance,
        simulated_without_s=simulated_step_s(setting, equal_slices(setting, 1)),
        simulated_with_s=simulated_step_s(setting, slices),
        slices=slices,
        uniform_slices=best_count,
        uniform_s=simulated_step_s(setting, equal_slices(setting, best_count)),
        fitted=number in FITTED_SETTINGS,
    )


def plan_slices(setting: Setting) -> Slicing:
    """The best slices, in units, for the slowest kind of stage."""
    _check_actions(setting, 1)
    if setting.tokens > MOST_TOKENS:
        raise ValueError(f"tokens is {setting.tokens}; it must be at most {MOST_TOKENS}.")
    if setting.tokens % UNIT_TOKENS:
        raise ValueError(f"tokens is {setting.tokens}; give a multiple of {UNIT_TOKENS}, the unit of the search.")
    units = setting.tokens // UNIT_TOKENS
    lengths, starts = UNIT_TOKENS * np.arange(1, units + 1), UNIT_TOKENS * np.arange(units)
    network = any(leaves_node(setting, stage) for stage in range(setting.pipe))
    times = stage_times(setting, lengths[None, :], starts[:, None], network=network)
    return slice_sequence(times.forward + times.backward, stages=setting.pipe, micros=setting.micros)


def simulated_step_s(setting: Setting, slices: Sequence[int]) -> float:
    """All forwards, then all backwards, on every stage with its own hop; optimizer and all-reduce after it."""
    _check_actions(setting, len(slices))
    starts = np.cumsum([0, *slices[:-1]])
    tables = {}
    for network in (True, False):
        times = stage_times(setting, slices, starts, network=network)
        tables[network] = {"F": times.forward.tolist(), "B": times.backward.tolist()}
    of_stage = [tables[leaves_node(setting, stage)] for stage in range(setting.pipe)]

    def cost(action: Action) -> float:
        return of_stage[action.stage][action.kind][action.slice]

    schedule = terapipe(setting.pipe, setting.micros, len(slices))
    return float(simulate(schedule, cost).makespan) + once_per_step_s(setting)


def _check_actions(setting: Setting, slices: int) -> None:
    actions = 2 * setting.pipe * setting.micros * slices
    if actions > MOST_ACTIONS:
        raise ValueError(
            f"{setting.pipe} stages, {setting.micros} sequences a replica and {slices} slices are {actions} actions a "
            f"step, more than the {MOST_ACTIONS} that are simulated; give a smaller batch."
        )


def uniform_counts(setting: Setting) -> list[int]:
    """1, 2, 4, ... equal slices of whole units."""
    units = setting.tokens // UNIT_TOKENS
    return [count for count in (2**power for power in range(units.bit_length())) if units % count == 0]


def equal_slices(setting: Setting, count: int) -> tuple[int, ...]:
    """`count` equal slices of a sequence, in tokens."""
    return (setting.tokens // count,) * count


def table(rows: Sequence[Replay]) -> str:
    """Rows for people, with the errors and what they mean."""
    head = (
        f"{'':>3} {'model':<10} {'GPUs':>4}   {'published s':>15}   {'simulated s':>15}   {'ratio':>11}  {'error':>6}"
    )
    lines = [head, f"{'':>18}   {'without':>7} {'with':>7}   {'without':>7} {'with':>7}   {'publ.':>5} {'sim.':>5}"]
    for row in rows:
        published = (row.published_without_s, row.published_with_s)
        times = " ".join(f"{time:7.3f}" if time is not None else f"{'-':>7}" for time in published)
        ratio = f"{row.published_ratio:5.2f}" if row.published_ratio is not None else f"{'-':>5}"
        error = f"{row.ratio_error:+6.0%}" if row.ratio_error is not None else f"{'-':>6}"
        marks = ("  fitted" if row.fitted else "") + ("  unconfirmed" if row.provenance == "unconfirmed" else "")
        lines.append(
            f"{row.setting or '':>3} {row.model:<10} {row.gpus:>4}   {times}   {row.simulated_without_s:7.3f} "
            f"{row.simulated_with_s:7.3f}   {ratio} {row.simulated_ratio:5.2f}  {error}{marks}"
        )
        lines.append(
            f"{'':>20} {_slices(row.slices)}; best of equal slices: {row.uniform_slices}, {row.uniform_s:.3f} s"
        )
    judged = [row for row in rows if row.ratio_error is not None and not _trivial(row)]
    for name, some in (("all", judged), ("not used in the fit", [row for row in judged if not row.fitted])):
        if some:
            median = statistics.median(abs(row.ratio_error or 0.0) for row in some)
            lines.append(f"median error of the ratio, where it is not 1: {median:.1%} ({name}: {len(some)} settings)")
    return "\n".join(lines)


def _trivial(row: Replay) -> bool:
    return row.published_ratio is not None and math.isclose(row.published_ratio, 1.0)


def _slices(slices: Sequence[int]) -> str:
    """Runs of equal lengths: "4 x 120, 64"."""
    runs: list[list[int]] = []
    for length in slices:
        if runs and runs[-1][1] == length:
            runs[-1][0] += 1
        else:
            runs.append([1, length])
    text = ", ".join(str(length) if count == 1 else f"{count} x {length}" for count, length in runs)
    return f"{len(slices)} slices: {text}" if len(slices) > 1 else "do not slice"


def main(arguments: Sequence[str]) -> int:
    """`terapipe reproduce` with these arguments: prints the rows; the exit status."""
    parser = argparse.ArgumentParser(
        prog="terapipe reproduce",
        description="Replay the paper's experiments in simulation, or another model on the same cluster (--model).",
        allow_abbrev=False,
    )
    parser.add_argument("--setting", type=int, action="append", metavar="N", help="only this one of table 1 (repeat)")
    parser.add_argument("--model", help=f"another model: {', '.join(PRESETS)}")
    parser.add_argument("--stages", type=int, help="number of pipeline stages")
    parser.add_argument("--tensor", type=int, help="GPUs per stage (default: 1)")
    parser.add_argument("--data", type=int, help="replicas of the pipeline (default: 1)")
    parser.add_argument("--batch", type=int, help="sequences per step, over all replicas")
    parser.add_argument("--tokens", type=int, help=f"tokens in a sequence (default: {TOKENS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    options = parser.parse_args(arguments)
    rows = [_of_user(options)] if options.model is not None else [replay(SETTINGS[n], n) for n in _numbers(options)]
    print(table(rows))
    if options.json is not None:
        files.write_text(options.json, json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    return 0


def _of_user(options: argparse.Namespace) -> Replay:
    if options.setting:
        raise ValueError("--setting names a setting of the paper, --model another one; give one of them.")
    if options.model not in PRESETS:
        raise ValueError(unknown("model", options.model, PRESETS))
    for key in NUMBERS:
        value = getattr(options, key)
        if value is not None and value < 1:
            raise ValueError(f"--{key} is {value}; it must be at least 1.")
    missing = [f"--{key}" for key in ("stages", "batch") if getattr(options, key) is None]
    if missing:
        raise ValueError(f"--model needs {' and '.join(missing)} too.")
    return replay(
        Setting(
            model=PRESETS[options.model](),
            name=options.model,
            batch=options.batch,
            data=1 if options.data is None else options.data,
            pipe=options.stages,
            tensor=1 if options.tensor is None else options.tensor,
            tokens=TOKENS if options.tokens is None else options.tokens,
        )
    )


def _numbers(options: argparse.Namespace) -> list[int]:
    for key in NUMBERS:
        value = getattr(options, key)
        if value is not None:
            raise ValueError(
                f"--{key} {value} goes with --model NAME, which is not given; the paper's settings have their own."
            )
    wanted = options.setting or list(SETTINGS)
    strange = [number for number in wanted if number not in SETTINGS]
    if strange:
        raise ValueError(f"there is no setting {strange[0]}; table 1 has {min(SETTINGS)} to {max(SETTINGS)}.")
    return wanted
