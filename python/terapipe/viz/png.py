"""A timeline as a picture: one row a rank, time to the right. matplotlib is imported inside the functions only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from terapipe import files
from terapipe.schedule.trace import HAND_OFF, WAIT, TraceEvent, bubble_share, num_ranks, span
from terapipe.viz.style import KIND_COLOURS, NAMES, TimeUnit, mixed, num_micros, num_slices, short_label, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, ROW_INCHES, DPI = 12.0, 0.46, 200
TEXT, MUTED, RULE = "#1f2733", "#667081", "#c9d0da"


class Panel(NamedTuple):
    """One timeline of a comparison and the words above it."""

    title: str
    events: Sequence[TraceEvent]


def write_png(path: str | Path, events: Sequence[TraceEvent], *, title: str = "") -> None:
    """One timeline. Idle time is the hatched ground."""
    _write(path, [Panel(title, events)])


def write_comparison_png(path: str | Path, above: Panel, below: Panel) -> None:
    """Two timelines on one time axis, with the time that the one below saves marked."""
    _write(path, [above, below])


def _write(path: str | Path, panels: Sequence[Panel]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [max(1, num_ranks(panel.events)) for panel in panels]
    header, footer, gap = 0.46, 0.86, 0.62
    heights = [count * ROW_INCHES for count in rows]
    total = sum(heights) + header * len(panels) + gap * (len(panels) - 1) * 0.4 + footer
    figure = Figure(figsize=(WIDTH_INCHES, total), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    longest = max(span(panel.events).duration_s for panel in panels) or 1.0
    unit = time_unit(longest)
    top = total
    for panel, height in zip(panels, heights, strict=True):
        top -= header
        axes = figure.add_axes((0.07, (top - height) / total, 0.91, height / total))
        _draw(axes, panel, unit, longest, last=panel is panels[-1])
        top -= height + gap * 0.4
    if len(panels) == 2:
        _mark_saving(figure, panels, unit)
    _legend(figure, panels)
    with files.whole(Path(path)) as begun:
        figure.savefig(begun, format="png", facecolor="white")


def _draw(axes: Axes, panel: Panel, unit: TimeUnit, longest: float, *, last: bool) -> None:
    from matplotlib.patches import Rectangle

    events, ranks = panel.events, max(1, num_ranks(panel.events))
    micros, slices, (begin, end) = num_micros(events), num_slices(events), span(events)
    axes.set_xlim(0, longest / unit.seconds)
    axes.set_ylim(ranks - 0.5, -0.5)
    bar = 0.80
    for rank in range(ranks):
        ground = Rectangle((0, rank - bar / 2), (end - begin) / unit.seconds, bar, linewidth=0)
        ground.set(facecolor="#f3f5f8", edgecolor="#dfe4ea", hatch="////", zorder=1)
        axes.add_patch(ground)
    inches_per_unit = WIDTH_INCHES * 0.91 * unit.seconds / longest
    for event in events:
        if event.category in (WAIT, HAND_OFF):  # too short to see here
            continue
        piece = event.action.slice if event.action is not None else 0
        left, width = (event.start_s - begin) / unit.seconds, event.duration_s / unit.seconds
        shape = Rectangle((left, event.rank - bar / 2), width, bar, linewidth=0.7, edgecolor="white", zorder=2)
        shape.set_facecolor(mixed(event.kind, piece, slices))
        axes.add_patch(shape)
        label = short_label(event, micros=micros, slices=slices)
        room = width * inches_per_unit
        size = min(9.0, 72 * room / (0.62 * len(label) + 0.5))
        if size >= 5.0:
            colour = KIND_COLOURS[event.kind].text
            x, y = left + width / 2, event.rank + 0.02
            axes.text(x, y, label, ha="center", va="center", size=size, color=colour, zorder=3, clip_on=True)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], color=TEXT, size=9)
    axes.tick_params(axis="both", length=0, pad=6)
    for side in axes.spines.values():
        side.set_visible(False)
    if last:
        axes.tick_params(axis="x", colors=MUTED, labelsize=8.5)
        axes.set_xlabel(f"time ({unit.name})", color=MUTED, size=9, labelpad=4)
    else:
        axes.set_xticks([])
    figures = f"{_number((end - begin) / unit.seconds)} {unit.name} · {100 * bubble_share(events):.0f} % idle"
    if panel.title:
        axes.set_title(panel.title, loc="left", size=11.5, color=TEXT, weight="bold", pad=7)
    axes.set_title(figures, loc="right", size=10, color=MUTED, pad=7)


def _mark_saving(figure: Figure, panels: Sequence[Panel], unit: TimeUnit) -> None:
    axes, above, below = figure.axes[1], span(panels[0].events), span(panels[1].events)
    if not 0 < below.duration_s < above.duration_s:
        return
    left, right = below.duration_s / unit.seconds, above.duration_s / unit.seconds
    middle = (max(1, num_ranks(panels[1].events)) - 1) / 2
    arrow = {"arrowstyle": "<->", "color": MUTED, "linewidth": 1.2, "shrinkA": 4, "shrinkB": 0}
    axes.annotate("", (right, middle), (left, middle), arrowprops=arrow, zorder=4)
    words = f"{above.duration_s / below.duration_s:.2f}x as fast"
    centre = (left + right) / 2
    axes.text(centre, middle - 0.16, words, ha="center", va="bottom", size=10.5, color=TEXT, weight="bold")
    axes.axvline(left, color=RULE, linewidth=1.0, zorder=0)


def _legend(figure: Figure, panels: Sequence[Panel]) -> None:
    from matplotlib.patches import Patch

    events = [event for panel in panels for event in panel.events]
    kinds = [kind for kind in KIND_COLOURS if kind != WAIT and any(event.kind == kind for event in events)]
    patches = [Patch(facecolor=mixed(kind, 2, 4), edgecolor="white", label=NAMES[kind]) for kind in kinds]
    patches.append(Patch(facecolor="#f3f5f8", edgecolor="#cdd4dd", hatch="/////", linewidth=0, label="idle"))
    numbered = {"micro": num_micros(events) > 1, "slice": num_slices(events) > 1}
    if any(numbered.values()):
        numbers = ".".join(name for name, shown in numbered.items() if shown)
        patches.append(Patch(facecolor="none", edgecolor="none", label=f"numbers: {numbers}"))
    figure.legend(
        handles=patches,
        loc="lower left",
        bbox_to_anchor=(0.062, 0.0),
        ncols=len(patches),
        frameon=False,
        fontsize=9,
        labelcolor=TEXT,
        handlelength=1.3,
        handleheight=1.0,
        columnspacing=1.8,
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
