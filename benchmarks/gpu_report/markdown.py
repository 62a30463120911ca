"""The report as Markdown: the machine, the goals, then a table a part; what did not work stands under its table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.gpu_report import shapes
from benchmarks.gpu_report.parts import PARTS, RIVALS, direction

Row = dict[str, Any]
TIMED = ("forward", "backward", "slice-forward", "slice-backward", "flex-forward", "flex-backward")


def render(report: dict[str, Any]) -> str:
    """The whole file."""
    rows: list[Row] = report["rows"]
    lines = ["# Attention kernels on a GPU", "", *_machines(report), "", *_goals(rows)]
    for name, part in PARTS.items():
        mine = [row for row in rows if row["part"] == name]
        if not mine:
            lines += ["", f"## {name}", "", f"{part.what}: not run"]
            continue
        body = _timings(mine, rows) if name in TIMED else _ceilings(mine) if name == "ceilings" else _counts(mine)
        lines += ["", f"## {name}", "", f"{part.what[0].upper()}{part.what[1:]}.", "", *body, *_troubles(mine)]
    return "\n".join(lines) + "\n"


def _machines(report: dict[str, Any]) -> list[str]:
    """Facts that all parts share, then those that moved between them (clocks, temperature)."""
    machines: dict[str, Row] = report["machines"]
    first = next(iter(machines.values()), {})
    same = {name for name in first if all(m.get(name) == first[name] for m in machines.values())} - {"status"}
    lines = [f"- {name.replace('_', ' ')}: {first[name]}" for name in first if name in same]
    lines += [f"- {name}: {value}" for name, value in report["build"].items()]
    lines.append(f"- commit: {report['commit']}, {report['date']}")
    moved = [name for name in first if name not in same and name != "status"]
    if moved:
        lines += [
            "",
            *_table(["before part", *moved], [[p, *(m.get(n, "") for n in moved)] for p, m in machines.items()]),
        ]
    return lines


def _table(head: Sequence[str], body: Iterable[Sequence[object]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"] + [
        "| " + " | ".join(map(str, cells)) + " |" for cells in body
    ]


def _find(rows: list[Row], part: str, shape: shapes.Shape, contender: str) -> Row | None:
    wanted = (part, str(shape), contender)
    found = [row for row in rows if (row["part"], row["subject"], row["contender"]) == wanted]
    return found[0] if found and found[0]["status"] == "ok" else None


def _goals(rows: list[Row]) -> list[str]:
    """The goals of an H200: bf16, causal, head_dim 128, 64 query heads over 8 KV heads."""

    def rate(part: str, shape: shapes.Shape, goal: float) -> list[object]:
        found = [_find(rows, part, shape, who) for who in ("triton", "cuda")]
        best = max((row["tflops"] for row in found if row), default=None)
        return [_verdict(best, goal), "-" if best is None else f"{best:.0f} TFLOP/s", f"{goal:g} TFLOP/s"]

    body = [
        ["forward, 8k tokens", *rate("forward", shapes.EIGHT_THOUSAND, 450)],
        ["forward, slice of 2048 behind 30k", *rate("slice-forward", shapes.BEHIND_30K, 480)],
        ["forward, slice of 64 behind 32k: split keys over one owner", *_split(rows)],
        ["forward, ahead of FlexAttention everywhere", *_ahead(rows)],
        ["forward + backward of a slice, ahead of the best peer", *_both_ways(rows)],
    ]
    return ["## Goals", "", *_table(["what", "met", "measured", "goal"], body)]


def _verdict(value: float | None, goal: float) -> str:
    return "not run" if value is None else "yes" if value >= goal else "no"


def _split(rows: list[Row]) -> list[object]:
    """The deterministic forward never splits keys."""
    split = _find(rows, "slice-forward", shapes.SHORT_BEHIND_32K, "triton")
    whole = _find(rows, "slice-forward", shapes.SHORT_BEHIND_32K, "triton deterministic")
    factor = whole["ms"] / split["ms"] if split and whole else None
    return [_verdict(factor, 3), "-" if factor is None else f"{factor:.1f} times", "3 times"]


def _best(rows: list[Row], part: str, subject: str, contenders: Iterable[str]) -> float | None:
    times = [
        row["ms"]
        for row in rows
        if (row["part"], row["subject"], row["status"]) == (part, subject, "ok") and row["contender"] in contenders
    ]
    return min(times, default=None)


def _ahead(rows: list[Row]) -> list[object]:
    factors = []
    for row in rows:
        if row["part"] == "flex-forward" and row["contender"] == "FlexAttention" and row["status"] == "ok":
            ours = _best(rows, "flex-forward", row["subject"], ("triton", "cuda"))
            if ours is not None:
                factors.append(row["ms"] / ours)
    said = "-" if not factors else f"{min(factors):.2f} to {max(factors):.2f} times on {len(factors)} shapes"
    return [_verdict(min(factors, default=None), 1), said, "1 time or more"]


def _both_ways(rows: list[Row]) -> list[object]:
    factors = []
    for shape in shapes.slice_grid():
        spans = []
        for contenders in (("triton", "cuda"), RIVALS):
            one_way = [_best(rows, part, str(shape), contenders) for part in ("slice-forward", "slice-backward")]
            spans.append(None if None in one_way else sum(span for span in one_way if span is not None))
        if spans[0] is not None and spans[1] is not None:
            factors.append(spans[1] / spans[0])
    said = "-" if not factors else f"{min(factors):.2f} to {max(factors):.2f} times on {len(factors)} shapes"
    return [_verdict(min(factors, default=None), 1), said, "1 time or more"]


def _timings(mine: list[Row], rows: list[Row]) -> list[str]:
    """TFLOP/s, (share of the bf16 matrix product), milliseconds; a column a contender that ran anywhere."""
    ceiling = next((r["tflops"] for r in rows if r["subject"] == "gemm bfloat16" and r["status"] == "ok"), None)
    ran = {row["contender"] for row in mine if row["status"] == "ok"}
    contenders = [who for who in dict.fromkeys(row["contender"] for row in mine) if who in ran]
    if not contenders:
        return ["Nothing ran."]
    by_cell = {(row["subject"], row["contender"]): row for row in mine}

    def cell(subject: str, who: str) -> str:
        row = by_cell.get((subject, who))
        if row is None or row["status"] != "ok":
            return "not run" if row is None else row["status"]
        share = "" if ceiling is None else f" ({row['tflops'] / ceiling:.2f})"
        spread = f"{row['low_ms']:.3f}..{row['high_ms']:.3f}"
        return f"{row['tflops']:.3g}{share}, {row['ms']:.3f} ms [{spread}]{'' if row['within_tolerance'] else ' †'}"

    subjects = dict.fromkeys(row["subject"] for row in mine)
    way = direction(mine[0]["part"])
    note = "a peer adds its dk and dv into the fp32 gradient cache" if way == "backward" else "outputs in bf16"
    lines = [
        f"TFLOP/s (share of the bf16 matrix product), median ms [20th..80th percentile]; {note}. b batch, "
        "h query:KV heads, d head_dim, t slice + p prefix. † outside our tolerance.",
        "",
    ]
    return lines + _table(["shape", *contenders], [[s, *(cell(s, who) for who in contenders)] for s in subjects])


def _ceilings(mine: list[Row]) -> list[str]:
    def said(row: Row) -> str:
        if row["status"] != "ok":
            return row["status"]
        return (
            f"{row['tflops']:.3g} TFLOP/s" if "tflops" in row else f"{row['terabytes_per_s']:.3g} TB/s read + written"
        )

    return _table(["what", "measured"], [[row["subject"], said(row)] for row in mine])


def _counts(mine: list[Row]) -> list[str]:
    """How many cells came out how, by contender and dtype (the last word of a case)."""
    groups: dict[str, Counter[str]] = {}
    for row in mine:
        name = row["contender"] if row["part"] == "tests" else f"{row['contender']} {row['subject'].rpartition(' ')[2]}"
        groups.setdefault(name, Counter())[row["status"]] += 1
    lines = _table(["what", "outcome"], [[n, ", ".join(f"{v} {k}" for k, v in c.items())] for n, c in groups.items()])
    if mine[0]["part"] == "tests":
        lines += ["", *_table(["file", "outcome"], [[r["subject"], f"{r['status']}: {r['text']}"] for r in mine])]
    return lines


def _troubles(mine: list[Row]) -> list[str]:
    """What did not work, each text once with the places it stands for."""
    places: dict[str, list[str]] = {}
    for row in mine:
        if row["status"] != "ok" and row["part"] != "tests":
            text = f"{row['contender']}, {row['status']}: {row['text']}"
            places.setdefault(text, []).append(row["subject"])
    lines = [
        f"- {text} ({subjects[0] if len(subjects) == 1 else f'{len(subjects)} cells'})"
        for text, subjects in places.items()
    ]
    return ["", *lines] if lines else []
