#!/usr/bin/env bash
# parity.sh PYTHON ...: compares losses, estimators and optimizer steps with TRL's own code (benchmarks/parity.py). TRL lies
# over PYTHON's environment, which stays as it is, in .venv-parity: its last version, and the last that has PPO in a folder.
# Further words go to the comparison. Then TRL's quick starts run as docs/switching.md has them.
set -euo pipefail
python=$1 folder=.venv-parity
shift
if ! [ "$folder/.installed" -nt scripts/parity.sh ]; then
  scripts/over.sh "$python" "$folder"
  "$folder/bin/python" -m pip install -qq --no-input --no-deps trl==1.16.0 accelerate==1.15.0 psutil==7.2.2
  "$folder/bin/python" -m pip install -qq --no-input --no-deps --target "$folder/trl112" trl==1.12.0
  touch "$folder/.installed"
fi
export TRL_EXPERIMENTAL_SILENCE=1
PYTHONPATH=src "$folder/bin/python" -W ignore benchmarks/parity.py --ppo "$folder/trl112" "$@"
"$folder/bin/python" -m pytest -q tests/test_their_quick_starts.py
