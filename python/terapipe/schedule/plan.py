"""Everything decided before the first step: slice lengths, micros, which layers each stage has, who runs what when.

A `Plan` that exists is checked: its constructor refuses shapes that do not fit each other and runs `check`. It is plain
data, saved as JSON, and every rank of a run must hold the same one. The trap: `plan.slices` are token lengths, while
`plan.schedule.slices` is their number.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from terapipe.names import unknown
from terapipe.schedule.check import check
from terapipe.schedule.generators import GENERATORS
from terapipe.schedule.schedule import Schedule
from terapipe.schedule.slots import SlotAssignment, assign_slots

FORMAT, VERSION = "terapipe-plan", 1


@dataclass(frozen=True)
class Plan:
    """`slices`: token lengths that sum to the sequence; `stages`: layer ranges [first, last) in order, one a stage."""

    slices: tuple[int, ...]
    micros: int
    micro_size: int
    stages: tuple[tuple[int, int], ...]
    schedule: Schedule

    def __post_init__(self) -> None:
        object.__setattr__(self, "slices", _slice_lengths(self.slices))
        object.__setattr__(self, "stages", tuple((int(first), int(last)) for first, last in self.stages))
        _positive("micros", self.micros)
        _positive("micro_size", self.micro_size)
        _check_stages(self.stages)
        for name, planned, scheduled in (
            ("stages", len(self.stages), self.schedule.stages),
            ("micros", self.micros, self.schedule.micros),
            ("slices", len(self.slices), self.schedule.slices),
        ):
            if planned != scheduled:
                raise ValueError(f"the plan has {planned} {name} but its schedule has {scheduled}; make them agree")
        check(self.schedule)

    @property
    def ranks(self) -> int:
        return self.schedule.ranks

    @property
    def layers(self) -> int:
        return self.stages[-1][1]

    @property
    def tokens(self) -> int:
        """Length of a sequence in tokens."""
        return sum(self.slices)

    @cached_property
    def slice_starts(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.slices[:-1], initial=0))

    def slice_start(self, index: int) -> int:
        """First token of slice `index`."""
        return self.slice_starts[index]

    @cached_property
    def slots(self) -> SlotAssignment:
        """The resident slot of every transfer, so many that no put ever waits for one."""
        return assign_slots(self.schedule)

    def to_json(self) -> str:
        fields: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "slices": list(self.slices),
            "micros": self.micros,
            "micro_size": self.micro_size,
            "stages": [list(stage) for stage in self.stages],
            "schedule": self.schedule.to_text().splitlines(),
        }
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items() if name != "schedule"]
        orders = ",\n".join(f"    {json.dumps(line)}" for line in fields["schedule"])  # one rank a line, for people
        return "{\n" + ",\n".join([*lines, f'  "schedule": [\n{orders}\n  ]']) + "\n}\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads `to_json`; ValueError for anything else, another version, or a plan that does not hold together."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the plan file is not JSON: {error}") from None
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise ValueError(f'the file is not a plan: it lacks "format": "{FORMAT}"')
        if fields.get("version") != VERSION:
            raise ValueError(
                f"the plan file has version {fields.get('version')!r}, this program reads version {VERSION}; "
                f"make the plan again with this program"
            )
        known = {"format", "version", "slices", "micros", "micro_size", "stages", "schedule"}
        for name in sorted(known - set(fields)):
            raise ValueError(f"the plan file lacks {name!r}")
        for name in sorted(set(fields) - known):
            raise ValueError(f"the plan file: {unknown('key', name, known)}")
        try:
            return Plan(
                slices=tuple(fields["slices"]),
                micros=fields["micros"],
                micro_size=fields["micro_size"],
                stages=tuple((first, last) for first, last in fields["stages"]),
                schedule=Schedule.from_text("\n".join(fields["schedule"])),
            )
        except (TypeError, OverflowError) as error:
            raise ValueError(f"a field of the plan file has the wrong type: {error}") from None


def make_plan(
    *,
    layers: int,
    ranks: int,
    slices: Sequence[int] | int,
    tokens: int,
    micros: int = 1,
    micro_size: int = 1,
    schedule: str = "terapipe",
    warmup_per_hop: int = 1,
    chunks: int | None = None,
    stages: Sequence[tuple[int, int]] | None = None,
) -> Plan:
    """A checked plan.

    slices: token lengths in order, or a number of (nearly) equal slices. chunks: stages a rank in the interleaved
    schedules (2 if None), one in the others. stages: layer ranges [first, last), stage `chunk * ranks + rank` of each
    rank; as even as possible if None. ValueError, with the values and the remedy, for anything that does not fit.
    """
    for name, value in (("layers", layers), ("ranks", ranks), ("tokens", tokens), ("micros", micros)):
        _positive(name, value)
    if schedule not in GENERATORS:
        raise ValueError(unknown("schedule", schedule, GENERATORS))
    if isinstance(slices, Sequence) and not isinstance(slices, str):
        lengths = _slice_lengths(slices)
        if sum(lengths) != tokens:
            raise ValueError(
                f"the slices {_brief(lengths)} sum to {sum(lengths)} but a sequence has {tokens} tokens; they must "
                f"cover it exactly (the difference is {tokens - sum(lengths):+d})"
            )
    else:
        lengths = equal_slices(tokens, slices)
    orders = GENERATORS[schedule](
        ranks, micros, len(lengths), warmup_per_hop=_positive("warmup_per_hop", warmup_per_hop), chunks=chunks
    )
    if stages is None:
        stages = split_layers(layers, orders.stages)
    else:
        stages = tuple((first, last) for first, last in stages)
        if len(stages) != orders.stages:
            a_rank = "one stage" if orders.stages == ranks else f"{orders.stages // ranks} stages"
            raise ValueError(f"{len(stages)} stages were given for {ranks} ranks; a rank runs exactly {a_rank}")
        if stages[-1][1] != layers:
            raise ValueError(f"the stages {_brief(stages)} cover {stages[-1][1]} layers but the model has {layers}")
    return Plan(lengths, micros, micro_size, stages, orders)


def unchecked_plan(
    slices: tuple[int, ...],
    micros: int,
    micro_size: int,
    stages: tuple[tuple[int, int], ...],
    schedule: Schedule,
) -> Plan:
    """A plan without the checks, which take longer than simulating it: for a search over schedules of the generators,
    whose tests have checked them. Never execute one."""
    plan = object.__new__(Plan)
    fields = {"slices": slices, "micros": micros, "micro_size": micro_size, "stages": stages, "schedule": schedule}
    for name, value in fields.items():
        object.__setattr__(plan, name, value)
    return plan


def equal_slices(tokens: int, count: int) -> tuple[int, ...]:
    """`count` lengths that sum to `tokens` and differ by at most one, the longer ones first."""
    _positive("tokens", tokens)
    _positive("number of slices", count)
    if count > tokens:
        raise ValueError(f"{tokens} tokens cannot be cut into {count} slices; ask for at most {tokens}")
    return tuple(tokens // count + (index < tokens % count) for index in range(count))


def split_layers(layers: int, stages: int) -> tuple[tuple[int, int], ...]:
    """`layers` in `stages` contiguous ranges [first, last) that differ by at most one, the larger ones first."""
    _positive("layers", layers)
    _positive("stages", stages)
    if stages > layers:
        raise ValueError(
            f"{stages} stages need at least {stages} layers, the model has {layers}, embedding and head included; use "
            "fewer ranks"
        )
    ends = itertools.accumulate(equal_slices(layers, stages), initial=0)
    return tuple(itertools.pairwise(ends))


def _slice_lengths(slices: Iterable[Any]) -> tuple[int, ...]:
    lengths = tuple(slices)
    if not lengths:
        raise ValueError("a sequence needs at least one slice, got none")
    for index, length in enumerate(lengths):
        if isinstance(length, (tuple, list, range, slice)):
            raise ValueError(f"slice {index} is {length!r}; give the slices' lengths in tokens, in order, not ranges")
        _positive(f"length of slice {index}", length, of=_brief(lengths))
    return tuple(operator.index(length) for length in lengths)


def _check_stages(stages: Sequence[tuple[int, int]]) -> None:
    expected = 0
    for index, (first, last) in enumerate(stages):
        if first != expected:
            raise ValueError(
                f"stage {index} begins at layer {first}, expected {expected}: the stages {_brief(stages)} must follow "
                f"each other from layer 0 without a gap"
            )
        if last <= first:
            raise ValueError(f"stage {index} has no layer: [{first}, {last}) in {_brief(stages)}; use fewer ranks")
        expected = last


def _positive(name: str, value: Any, *, of: str = "") -> int:
    within = f" in {of}" if of else ""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}{within}") from None
    if isinstance(value, bool) or number < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}{within}")
    return number


def _brief(items: Sequence[Any]) -> str:
    shown = [str(item) for item in items]
    return "[" + ", ".join(shown if len(shown) <= 12 else [*shown[:8], "...", *shown[-3:]]) + "]"
