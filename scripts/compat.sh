#!/usr/bin/env bash
# compat.sh PYTHON ...: runs the tests of models, checkpoints, tokenizers, data and evaluation with the oldest and with the
# newest transformers that pyproject.toml allows. Each lies over PYTHON's environment, which stays as it is: only what must
# differ is installed. Further words go to pytest.
set -euo pipefail
python=$1 folder=.venv-compat
shift
range=$(sed -n 's/^ *"\(transformers>=[^"]*\)",.*/\1/p' pyproject.toml)
lowest=${range%%,*}
for wanted in "${lowest/>=/==}" "$range"; do
  scripts/over.sh "$python" "$folder"
  "$folder/bin/python" -m pip install -qq --no-input --upgrade "$wanted"
  "$folder/bin/python" -c 'import transformers; print("transformers", transformers.__version__)'
  "$folder/bin/python" -m pytest -n "${JOBS:-2}" --dist loadgroup tests/models tests/data tests/evaluate "$@"
done
rm -rf "$folder"
