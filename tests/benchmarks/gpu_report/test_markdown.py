"""The tables: goals read off the rows, and what did not run or is off."""

from __future__ import annotations

from benchmarks.gpu_report import markdown, parts, shapes


def row(part, shape, contender, ms, status="ok", **more):
    flops = shape.flops(parts.direction(part))
    figures = {"ms": ms, "low_ms": ms, "high_ms": ms, "tflops": flops / ms / 1e9, "within_tolerance": True}
    base = {"part": part, "subject": str(shape), "contender": contender, "status": status, "text": ""}
    return {**base, **(figures if status == "ok" else {}), **more}


def rendered(rows):
    machines = {"forward": {"gpu": "H", "clocks.sm": "1"}, "backward": {"gpu": "H", "clocks.sm": "2"}}
    return markdown.render(
        {"rows": rows, "machines": machines, "build": {"build": "x"}, "commit": "c", "date": "2026-11-30"}
    )


def goal(text, words):
    return next(line for line in text.splitlines() if words in line).split(" | ")[1]


def test_goals_are_read_off_the_rows():
    ms = shapes.EIGHT_THOUSAND.forward_flops / 460e9
    short, behind = shapes.SHORT_BEHIND_32K, shapes.BEHIND_30K
    rows = [
        row("forward", shapes.EIGHT_THOUSAND, "triton", ms),
        row("slice-forward", behind, "triton", behind.forward_flops / 470e9),
        row("slice-forward", short, "triton", 1.0),
        row("slice-forward", short, "triton deterministic", 3.5),
        row("flex-forward", behind, "triton", 1.0),
        row("flex-forward", behind, "FlexAttention", 1.2),
        row("flex-forward", short, "FlexAttention", 1.0, status="error"),
    ]
    text = rendered(rows)
    assert [goal(text, w) for w in ("8k tokens", "behind 30k", "split keys", "everywhere", "best peer")] == [
        "yes", "no", "yes", "yes", "not run",
    ]  # fmt: skip
    both = [row(part, behind, who, ms) for part, who, ms in (
        ("slice-forward", "SDPA flash", 2.0), ("slice-backward", "SDPA flash", 4.0), ("slice-backward", "triton", 2.0),
    )]  # fmt: skip
    assert goal(rendered(rows + both), "best peer") == ("yes" if behind.forward_flops / 470e9 + 2 < 6 else "no")
    rows[5]["ms"] = 0.9
    assert goal(rendered(rows), "everywhere") == "no" and goal(rendered([]), "8k tokens") == "not run"


def test_a_table_says_what_did_not_run_and_what_is_off():
    shape = shapes.BEHIND_30K
    rows = [
        row("slice-forward", shape, "triton", 2.0),
        row("slice-forward", shape, "SDPA flash", 3.0, within_tolerance=False),
        row("slice-forward", shapes.SHORT_BEHIND_32K, "triton", 1.0, status="crashed", text="killed by signal 9"),
        row("slice-forward", shape, "flash-attn 2", 1.0, status="refused", text="no module"),
        {
            "part": "ceilings",
            "subject": "gemm bfloat16",
            "contender": "torch",
            "status": "ok",
            "text": "",
            "tflops": 800.0,
        },
    ]
    text = rendered(rows)
    assert "3.000 ms [3.000..3.000] †" in text and f"{rows[0]['tflops'] / 800:.2f}" in text
    assert "- triton, crashed: killed by signal 9" in text and "- flash-attn 2, refused: no module" in text
    assert (
        "| crashed | not run |" in text
        and "forward: not run" not in text.split("## backward")[0].split("## forward")[0]
    )
    assert "| before part | clocks.sm |" in text and "- gpu: H" in text
