#!/usr/bin/env bash
# long.sh [PART ...]: runs what `make test` leaves out, or only these parts of it. Each prints its time. One that fails does
# not keep the others from running; a table at the end has them all. CONTRIBUTING.md says which part goes with which room.
set -uo pipefail
unset MAKEFLAGS MAKEOVERRIDES ARGS # of the make that calls: the parts are no arguments of theirs
all=(long examples orders uncompiled compat parity kernels trackers page vllm kills)
declare -A commands=(
  [long]="make test ARGS='-m long'"
  [examples]="make test ARGS='-m hypothesis --hypothesis-profile=long'"
  [orders]="scripts/orders.sh"
  [uncompiled]="make test-uncompiled"
  [compat]="make compat"
  [parity]="make parity"
  [kernels]="make fuzz-kernels"
  [trackers]="make test-trackers"
  [page]="make test-page"
  [vllm]="make test-vllm"
  [kills]="make kills ARGS='--kills 50'"
)
[ $# -gt 0 ] || set -- "${all[@]}"
for part in "$@"; do
  [ -n "${commands[$part]:-}" ] || { echo "There is no part $part; there are: ${all[*]}" >&2; exit 2; }
done
table="" failed=0
for part in "$@"; do
  echo "== $part: ${commands[$part]}"
  began=$SECONDS
  if bash -c "${commands[$part]}"; then ended=passed; else ended=FAILED failed=1; fi
  line=$(printf '%-12s %-8s %5d s' "$part" "$ended" $((SECONDS - began)))
  echo "== $line"
  table+="$line"$'\n'
done
printf '\n%s' "$table"
exit $failed
