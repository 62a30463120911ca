"""What the quickstart leaves behind: summary.json, the timelines, and the text on the terminal. No torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from terapipe import environment, files
from terapipe.train.config import TrainConfig
from terapipe.viz import write_comparison_png, write_html, write_perfetto
from terapipe.viz.png import Panel

if TYPE_CHECKING:
    from terapipe.quickstart.comparison import Comparison
    from terapipe.train.trainer import TrainResult

Summary = dict[str, Any]
"""Keys: those of `summary_of`."""


def summary_of(config: TrainConfig, result: TrainResult, comparison: Comparison) -> Summary:
    """Losses in nats a byte, times in seconds, `speedup` two stages without slices over two with them; the machine."""
    return {
        "validation_loss_before": result.validation_loss_before,
        "validation_loss_after": result.validation_loss_after,
        "step_s": {name: time.median_s for name, time in comparison.times.items()},
        "step_s_quartiles": {name: [time.quarter_s, time.three_quarters_s] for name, time in comparison.times.items()},
        "speedup": comparison.speedup,
        "bound": comparison.bound,
        "slices": comparison.slices,
        "steps": result.steps,
        "tokens": config.tokens,
        "train_s": result.train_s,
        "environment": environment.collect().to_shared_dict(),
    }


def write(config: TrainConfig, comparison: Comparison, summary: Summary) -> str:
    """Write the files of the run folder; returns the text that closes the quickstart."""
    folder = config.run_dir
    files.write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    title = f"two stages, {comparison.slices} slices of one sequence of {config.tokens} tokens"
    note = f"One measured training step. Without slices it takes {summary['speedup']:.2f} times as long."
    write_html(folder / "timeline.html", comparison.sliced, title=title, note=note)
    write_perfetto(folder / "timeline.json", comparison.sliced, title=title)
    write_comparison_png(
        folder / "timeline.png",
        Panel("two stages, no slices", comparison.pipeline),
        Panel(f"two stages, {comparison.slices} slices", comparison.sliced),
    )
    return "\n".join([_table(comparison), "", _verdict(comparison), "", _losses(summary), "", _next_steps(config)])


def _table(comparison: Comparison) -> str:
    names = {
        "single": "one process, one thread",
        "single_two_threads": "one process, two threads (*)",
        "pipeline": "two stages, no slices",
        "sliced": f"two stages, {comparison.slices} slices",
    }
    rows = [
        f"  {names[name]:<30} {time.median_s * 1e3:8.1f}   {time.quarter_s * 1e3:.1f} to "
        f"{time.three_quarters_s * 1e3:.1f}"
        for name, time in comparison.times.items()
    ]
    head = (
        f"\n  {'one training step':<30} {'median ms':>9}   half of {comparison.times['sliced'].steps} steps lay within"
    )
    return "\n".join([head, *rows])


def _verdict(comparison: Comparison) -> str:
    return (
        f"Slices make the two-stage pipeline {comparison.speedup:.2f}x as fast; the bound for {comparison.slices} "
        f"equal slices is 2k/(k+1) = {comparison.bound:.2f}x.\n"
        "(*) Not the rival: stages stand for machines or devices that cannot share memory as two threads of one "
        "process do."
    )


def _losses(summary: Summary) -> str:
    return (
        f"Validation loss {summary['validation_loss_before']:.2f} before and {summary['validation_loss_after']:.2f} "
        f"after {summary['steps']} steps, in nats a byte; training took {summary['train_s']:.0f} s."
    )


def _next_steps(config: TrainConfig) -> str:
    folder = config.run_dir
    return (
        f"Written to {folder}/: metrics.jsonl, summary.json, checkpoints/, timeline.html (open it in a browser), "
        "timeline.png,\ntimeline.json (for https://ui.perfetto.dev).\n\n"
        "Next, train on your own text (source .venv/bin/activate first):\n"
        "  terapipe train --preset quickstart --local-ranks 2 --data.train PATH --run-dir runs/mine\n"
        "and see `terapipe train --help`, or README.md for GPUs, several hosts and your own layers."
    )
