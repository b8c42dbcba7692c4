#!/bin/sh
# Create the environments of the systems that benchmarks/baseline.py measures Assent beside, next to .venv:
#   .venv-trl     TRL's SFT, reward model, DPO and GRPO, and transformers' generate
#   .venv-trl112  the last TRL that has PPO
# Both on the torch, transformers and so on of requirements.txt, so that nothing but the system differs.
# Left out: anything installed into .venv. Runs again where it was interrupted. PYTHON chooses the interpreter.
set -eu
cd "$(dirname "$0")/.."
: "${PYTHON:=python3}"
export PIP_DISABLE_PIP_VERSION_CHECK=1

peer() { # peer FOLDER PACKAGE...
  folder=$1
  shift
  if [ -e "$folder/.installed" ]; then
    echo "$folder is there"
    return
  fi
  echo "Setting up $folder: one to two minutes"
  test -x "$folder/bin/python" || "$PYTHON" -m venv "$folder"
  "$folder/bin/python" -m pip install -qq --no-input -c requirements.txt "$@"
  "$folder/bin/python" -m pip check
  touch "$folder/.installed"
}

peer .venv-trl trl==1.16.0 accelerate==1.15.0
peer .venv-trl112 trl==1.12.0 accelerate==1.15.0
