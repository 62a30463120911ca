#!/usr/bin/env bash
# The long versions of the tests of links, about an hour on two cores:  bash scripts/soak.sh [TIMES]
# A million slices over 1 to 8 slots between two threads and between two processes, with naps and wrapping epochs; the same under
# ThreadSanitizer, shorter; TIMES (100) faults of each kind at each action of each side of a link.
set -euo pipefail
times=${1:-100}
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" requirements/lock-dev.txt
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for flags in "-O2" "-O1 -fsanitize=thread"; do
  # shellcheck disable=SC2086
  "${CXX:-c++}" -std=c++20 -g $flags -pthread -Icsrc tests/tpkernels/links/ring_threads.cpp -o "$folder/ring"
  uses=1000000
  [[ $flags == *sanitize* ]] && uses=100000
  for slots in 1 2 3 4 5 6 7 8; do
    for between in threads processes; do
      first=$((4294967296 - uses / slots / 2))  # the epochs of a slot wrap half-way
      echo "ring $flags, $uses slices, $slots slots, $between: $(setarch -R "$folder/ring" sound $uses $slots 3 $first $slots 20 2000 $between)"
    done
  done
done
before=$(find /dev/shm -maxdepth 1 | wc -l)
.venv/bin/python tests/tpkernels/links/faults.py "$times" > "$folder/faults"
cut -d'|' -f1,2 "$folder/faults" | sort | uniq -c
awk -F' \\| ' '$5 > worst { worst = $5 } $6 !~ /stage 1, micro 0, slice .*tile .*wanted epoch .*saw/ { bad += 1; print }
  END { printf "slowest survivor: %s s; without an error that says all: %d\n", worst, bad }' "$folder/faults"
[ "$(find /dev/shm -maxdepth 1 | wc -l)" = "$before" ] && echo "nothing left behind"
