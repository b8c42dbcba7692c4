#!/usr/bin/env bash
# with.sh PYTHON FOLDER "PACKAGES" ...: runs tests that need further packages. These lie in FOLDER, over PYTHON's environment, which
# stays as it is. Further words go to pytest.
set -euo pipefail
python=$1 folder=$2 packages=$3
shift 3
if [ "$(cat "$folder/.installed" 2> /dev/null)" != "$packages" ]; then
  echo "Adding $packages in $folder: some minutes"
  scripts/over.sh "$python" "$folder"
  # shellcheck disable=SC2086  # packages are words
  "$folder/bin/python" -m pip install -qq --no-input $packages
  echo "$packages" > "$folder/.installed"
fi
"$folder/bin/python" -m pytest -rs "$@"
