#!/usr/bin/env bash
# Set-up, then a real training run over two stages on this machine; needs Python, a C++20 compiler and two cores, no GPU.
# Writes runs/quickstart/. Arguments go to the program:  bash scripts/quickstart.sh --steps 100
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" requirements/lock.txt
exec .venv/bin/python -m terapipe quickstart "$@"
