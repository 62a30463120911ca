"""What a GPU makes of the attention kernels: builds, tests, checks, times; one JSON and one Markdown file.

    python -m benchmarks.gpu_report [--out DIR] [--only PART ...] [--resume]

Needs torch, triton and, for what is built, pybind11, CMake and ninja; no network. shapes.py: what is measured;
contenders.py: our backends and their peers; answers.py: the exact answers; parts.py: one cell, from inputs to a row;
supervise.py: workers that may crash or hang without losing a row; markdown.py: the tables.

`--device cpu` walks the same code over tiny shapes on the CPU: a test of the report, whose figures mean nothing.
"""
