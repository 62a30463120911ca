#!/usr/bin/env bash
# The Triton kernels on other versions of Triton than the locked one: the compiler's promises for every architecture, and
# a part of the interpreter's cases. Each version goes into a throw-away environment in front of .venv's packages.
#   bash scripts/triton_versions.sh [VERSION ...]      default: 3.6 3.8 3.9; about four minutes each on two cores
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(3.6 3.8 3.9)
[ -x .venv/bin/python ] || { echo "triton_versions: no .venv; run scripts/test.sh first" >&2; exit 2; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
subset='compiled_kernels or compiles or split or packed or (results_are_as_close and (t33 or t43 or d72 or t41)) or (no_slicing and float32)'
failed=0
summary=()
for version in "${versions[@]}"; do
  place="$folder/$version"
  .venv/bin/python -m venv "$place"
  if ! "$place/bin/python" -m pip install --quiet --no-deps "triton==$version.*" >"$folder/pip.log" 2>&1; then
    summary+=("triton $version: cannot be installed here ($(tail -n 1 "$folder/pip.log"))")
    failed=1
    continue
  fi
  # The environment's own packages come first on the path, so its triton hides that of .venv.
  echo "import site; site.addsitedir('$packages')" >"$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
  # Triton 3.6's interpreter makes numbers of one-element arrays, which numpy 2.4 refuses.
  case "$version" in 3.6*) "$place/bin/python" -m pip install --quiet "numpy==2.2.*" >"$folder/pip.log" 2>&1 ;; esac
  exact=$("$place/bin/python" -c 'import triton; print(triton.__version__)')
  echo "== triton $exact"
  if TRITON_CACHE_DIR="$place/cache" "$place/bin/python" -m pytest tests/tpkernels/triton -q -p no:cacheprovider -k "$subset" 2>&1 |
    tee "$folder/log" | tail -n 25; then
    summary+=("triton $exact: $(tail -n 1 "$folder/log")")
  else
    summary+=("triton $exact: FAILED, $(tail -n 1 "$folder/log")")
    failed=1
  fi
done
printf '%s\n' "" "${summary[@]}"
exit "$failed"
