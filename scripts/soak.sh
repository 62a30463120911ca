#!/usr/bin/env bash
# The long versions of the tests of links:  bash scripts/soak.sh [all|rings|sanitized|faults|engine] [TIMES]
# About 18 minutes on two idle cores, 2 + 4 + 6 + 6; where other processes compete a hand-off waits for the scheduler, and it takes hours.
# rings: a million slices over 1 to 8 slots between two threads and between two processes, with naps and wrapping epochs; sanitized: the
# same under ThreadSanitizer; faults: TIMES (100) faults of each kind at each action of each side of a link; engine: at every moment of a
# pipeline's step on either rank an exception, kill -9 and SIGSTOP twice, and every lost post or release TIMES / 8 times.
# Every ring case is printed as it ends, faults are counted also when the run is cut short, and the parts may be run one by one.
set -euo pipefail
part=${1:-all}
times=${2:-100}
case "$part" in
all | rings | sanitized | faults | engine) ;;
*)
  echo "soak: no part \"$part\"; the parts are all, rings, sanitized, faults and engine" >&2
  exit 2
  ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" requirements/lock-dev.txt
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

ring_case() { # SLICES SLOTS threads|processes; the epochs of a slot wrap half-way
  local first=$((4294967296 - $1 / $2 / 2)) began=$SECONDS said
  said=$(setarch -R "$folder/ring" sound "$1" "$2" 3 "$first" "$2" 20 20000 "$3") || said="FAILED: $said"
  echo "$1 slices, $2 slots, between $3: $said ($((SECONDS - began)) s)"
  [ "$said" = ok ]
}

rings() { # FLAGS...; one case at a time: it has a thread for each of two cores, and two cases would wait for each other's turns
  echo "== ring built with $*"
  "${CXX:-c++}" -std=c++20 -g "$@" -pthread -Icsrc tests/tpkernels/links/ring_threads.cpp -o "$folder/ring"
  local bad=0
  for slots in 1 2 3 4 5 6 7 8; do
    for between in threads processes; do ring_case 1000000 "$slots" "$between" || bad=1; done
  done
  return "$bad"
}

faults() {
  local before
  before=$(find /dev/shm -maxdepth 1 | wc -l)
  echo "== faults, $times of each"
  .venv/bin/python tests/tpkernels/links/faults.py "$times" | (
    trap '' INT # what ended is summed up also when the run is cut short
    cat >"$folder/faults"
    cut -d'|' -f1,2 "$folder/faults" | sort | uniq -c
    awk -F' \\| ' '$5 > worst { worst = $5 } $6 !~ /stage 1, micro 0, slice .*tile .*wanted epoch .*saw/ { bad += 1; print }
      END { printf "slowest survivor: %s s; without an error that says all: %d\n", worst, bad; exit bad > 0 }' "$folder/faults"
  )
  [ "$(find /dev/shm -maxdepth 1 | wc -l)" = "$before" ] && echo "nothing left behind"
}

engine() {
  local faults=tests/terapipe/engine/faults.py
  echo "== faults of the engine"
  OMP_NUM_THREADS=1 .venv/bin/python "$faults" --raise 1 --times 2 | .venv/bin/python "$faults" --read
  OMP_NUM_THREADS=1 .venv/bin/python "$faults" --kill 1 --stop 1 --times 2 --together 6 | .venv/bin/python "$faults" --read
  OMP_NUM_THREADS=1 .venv/bin/python "$faults" --drop 1 --times $((times / 8 + 1)) --together 6 | .venv/bin/python "$faults" --read
}

[[ $part == all || $part == rings ]] && rings -O2
[[ $part == all || $part == sanitized ]] && rings -O1 -fsanitize=thread
[[ $part == all || $part == faults ]] && faults
[[ $part == all || $part == engine ]] && engine
exit 0
