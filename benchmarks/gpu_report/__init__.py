"""What a GPU makes of the attention kernels: builds, tests, checks, times; one JSON and one Markdown file.

    python -m benchmarks.gpu_report [--out DIR] [--only PART ...] [--resume] [--in-all SECONDS]

Needs torch, triton and, for what is built, pybind11, CMake and ninja; no network. An installed package is measured
where its Python files are this checkout's: after a change in csrc/ install it anew, or let the report build.
On a machine that is had for ten minutes at a time, call it with `--resume --in-all 560` until no cell is left.

shapes.py: what is measured; contenders.py: our backends and their peers; answers.py: the exact answers; parts.py: one
cell, from inputs to a row; supervise.py: workers that may crash or hang without losing a row; markdown.py: the tables.

`--device cpu` walks the same code over tiny shapes on the CPU: a test of the report, whose figures mean nothing.
"""
