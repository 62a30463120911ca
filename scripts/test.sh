#!/usr/bin/env bash
# Every check of this repository on any machine with Python, a C++20 compiler and two cores: set-up, lint, types, tests.
# Arguments go to pytest:  bash scripts/test.sh tests/terapipe/engine -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" requirements/lock-dev.txt
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.inc' 'csrc/*.cu' 'csrc/*.cuh' | xargs -r .venv/bin/clang-format --dry-run --Werror
exec .venv/bin/python -m pytest "$@"
