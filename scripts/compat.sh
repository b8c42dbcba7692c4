#!/usr/bin/env bash
# compat.sh PYTHON ...: runs the tests of models, checkpoints, tokenizers, data and evaluation with the oldest and with the
# newest transformers that pyproject.toml allows, and those of our runtime on Ray with the oldest and the newest Ray. Each
# lies over PYTHON's environment, which stays as it is: only what must differ is installed. Further words go to pytest.
set -euo pipefail
python=$1 folder=.venv-compat
shift
version() { "$1" -c "import $2; print($2.__version__)"; }
try() {  # PACKAGE RANGE ARGUMENT-OF-PYTEST...
  scripts/over.sh "$python" "$folder"
  "$folder/bin/python" -m pip install -qq --no-input --upgrade "$2"
  version=$(version "$folder/bin/python" "$1")
  echo "$1 $version"
  if [ "$version" = "$(version "$python" "$1")" ]; then
    echo "as in $python, whose tests show it"
    return
  fi
  "$folder/bin/python" -m pytest -n "${JOBS:-2}" --dist loadgroup "${@:3}"
}
range() { sed -n "s/^ *\"\($1>=[^\"]*\)\",.*/\1/p" pyproject.toml; }
ends() { echo "$1" | sed 's/>=/==/; s/,.*//'; echo "$1"; }
for wanted in $(ends "$(range transformers)"); do try transformers "$wanted" tests/models tests/data tests/evaluate "$@"; done
for wanted in $(ends "$(range ray)"); do try ray "$wanted" tests/runtime/test_ray.py "$@"; done
rm -rf "$folder"
