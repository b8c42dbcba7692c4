#!/usr/bin/env bash
# without_compiler.sh COMMAND ...: runs it as on a machine that has no C++ compiler and never had one: the path is a
# folder of links to everything else on it, and no compiled kernels are kept.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/bin" "$folder/cache"
IFS=: read -ra places <<< "$PATH"
for place in "${places[@]}"; do
  for program in "$place"/*; do
    name=${program##*/}
    case $name in *c++* | *g++* | *clang*) continue ;; esac
    [ -x "$program" ] && [ ! -e "$folder/bin/$name" ] && ln -s "$program" "$folder/bin/$name" || true
  done
done
unset CXX
PATH=$folder/bin PLAUDIT_CACHE=$folder/cache "$@"
