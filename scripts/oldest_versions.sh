#!/usr/bin/env bash
# The fast part of the tests on the oldest releases that pyproject.toml allows: its lower bounds are true or this fails. A
# copy of the tree is built and tested in a throw-away environment; torch comes with what it wants of CUDA, 5 GB of disk.
#   bash scripts/oldest_versions.sh [PYTEST ARGUMENT ...]      default: the fast part, a quarter of an hour on two busy cores;
#                                                              PYTHON names the interpreter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fast=(tests/terapipe/{models,planner,schedule,train,viz} tests/terapipe/test_*.py tests/terapipe/engine/test_{pipeline,gradients}.py
  tests/tpkernels/test_{backends,block,compat,compile,fused,mask,prefix_cache,reference,transformers}.py
  --ignore=tests/terapipe/train/test_trainer_processes.py)
[ $# -gt 0 ] || set -- "${fast[@]}"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" - pyproject.toml > "$folder/oldest.txt" <<'PYTHON'
# Prints NAME==VERSION of the oldest release that each lower bound leaves; checks of style are left out.
import re, subprocess, sys, tomllib
from pip._vendor.packaging.version import Version

with open(sys.argv[1], "rb") as file:
    text = tomllib.load(file)
extras = text["project"]["optional-dependencies"]
wanted = [*text["build-system"]["requires"], *text["project"]["dependencies"], *extras["triton"], *extras["dev"]]
for name, least in dict(re.fullmatch(r"([\w-]+)(?:>=([\d.]+))?", one).groups() for one in wanted).items():
    if least is None or name in ("ruff", "mypy", "clang-format"):
        continue
    said = subprocess.run([sys.executable, "-m", "pip", "index", "versions", name], capture_output=True, text=True, check=True)
    releases = map(Version, said.stdout.split("Available versions:")[1].splitlines()[0].replace(" ", "").split(","))
    print(f"{name}=={min(version for version in releases if version >= Version(least))}")
PYTHON
echo "oldest_versions: $(tr '\n' ' ' < "$folder/oldest.txt")"
"$python" -m pip install --quiet ninja -r "$folder/oldest.txt"
mkdir "$folder/tree"
git ls-files -co --exclude-standard | tar -c -T - | tar -x -C "$folder/tree"
cd "$folder/tree"
"$python" -m pip install --quiet --no-build-isolation --no-deps -e .
"$python" -m pytest -q -p no:cacheprovider "$@"
