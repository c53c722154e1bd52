#!/bin/bash
# run.sh SCRIPT.py [arguments]: runs it with the CUDA build of PyTorch on the stub driver.
# src/stub.c lists the STUB_* variables (card, number of cards, memory).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${VRAM_STUB_CACHE:-$HOME/.cache/pytest-vram-stub}
[ -e "$cache/lib/libcudastub.so" ] || { echo "build it first: $here/build.sh" >&2; exit 2; }
export LD_LIBRARY_PATH=$cache/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
root=$(cd "$here/../.." && pwd)
export PYTHONPATH=$root:$cache/site${PYTHONPATH:+:$PYTHONPATH}
export PYTHONDONTWRITEBYTECODE=1
shopt -s nullglob
preload=("$cache"/lib/libcudastub.so "$cache"/lib/libnvrtc.so.*)
exec env LD_PRELOAD="${preload[*]}" "$(cat "$cache/interpreter")" "$@"
