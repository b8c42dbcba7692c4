#!/usr/bin/env bash
# orders.sh [SEED ...]: `make test` in random orders, one a seed (0 to 9), every other one beside a busy core. Nothing may fail.
set -uo pipefail
[ $# -gt 0 ] || set -- {0..9}
trap 'kill $(jobs -p) 2>/dev/null' EXIT
failed=()
for seed in "$@"; do
  if ((seed % 2)); then
    while :; do :; done &
  fi
  make test ARGS="-p randomly -p no:cacheprovider --randomly-seed=$seed" || failed+=("$seed")
  kill $(jobs -p) 2>/dev/null
done
echo "orders that failed: ${failed[*]:-none}, of $#"
((${#failed[@]} == 0))
