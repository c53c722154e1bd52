#!/bin/bash
# Builds the stub driver, and a Python that has the CUDA build of PyTorch, under one cache folder.
#
#   VRAM_STUB_CACHE    the folder (default ~/.cache/pytest-vram-stub); nothing is written elsewhere
#   VRAM_STUB_PYTHON   an interpreter that has torch 2.14.1's CUDA build already (nothing is
#                      installed into it); without it a virtual environment is made, about 5.6 GB
#   VRAM_STUB_BASE     the interpreter that the virtual environment is made from (default python3)
#
# Needs gcc. A second call only rebuilds the libraries.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${VRAM_STUB_CACHE:-$HOME/.cache/pytest-vram-stub}
mkdir -p "$cache/lib" "$cache/objects"

root=$(cd "$here/../.." && pwd)
python=${VRAM_STUB_PYTHON:-}
if [ -z "$python" ]; then
    python=$cache/venv/bin/python
    [ -x "$python" ] || "${VRAM_STUB_BASE:-python3}" -m venv "$cache/venv"
    "$python" -c 'import torch; assert torch.version.cuda' 2>/dev/null ||
        "$python" -m pip install -q torch==2.14.1 torchvision==0.29.1
    "$python" -c 'import peft, pytest, xdist' 2>/dev/null ||
        "$python" -m pip install -q -c "$root/requirements/constraints.txt" \
            -r "$root/requirements/stub.txt"
fi
"$python" -c 'import torch; assert torch.version.cuda, "a CPU build of PyTorch"'
echo "$python" > "$cache/interpreter"

# What the package and its tests need beside torch, where that interpreter lacks it.
missing=$("$python" - <<'EOF'
import importlib.util
needs = {"pytest": "pytest>=8", "yaml": "PyYAML>=6", "deepdiff": "deepdiff>=8", "click": "click>=8.1",
         "filelock": "filelock>=3.13", "sortedcontainers": "sortedcontainers>=2.4"}
print(*(what for name, what in needs.items() if importlib.util.find_spec(name) is None))
EOF
)
if [ -n "$missing" ] && [ ! -f "$cache/site/.complete" ]; then
    # shellcheck disable=SC2086  # several requirements
    "$python" -m pip install -q --target "$cache/site" $missing
    touch "$cache/site/.complete"
fi

packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
include="-I/usr/local/cuda/include -I$packages/nvidia/cu13/include -I$packages/nvidia/cudnn/include"
for part in stub blas cudnn; do
    # shellcheck disable=SC2086
    gcc -O1 -g -fPIC -w -fvisibility=hidden $include -c "$here/src/$part.c" \
        -o "$cache/objects/$part.o"
done

# Every other function of the CUDA libraries that PyTorch names does nothing and answers success.
(cd "$cache/objects" && nm -g --defined-only stub.o blas.o cudnn.o) |
    awk 'NF == 3 {print $3}' | sort -u > "$cache/objects/defined"
for library in "$packages"/torch/lib/lib{c10_cuda,torch_cuda,torch_python,torch_cuda_linalg,torch_cpu}.so \
    "$packages"/torchvision/_C*.so; do
    [ ! -f "$library" ] || nm -D --undefined-only "$library"
done | awk '{print $2}' | sed 's/@.*//' | grep -E '^(_*cuda|cublas|cudnn)' | sort -u \
    > "$cache/objects/needed"
{
    echo '#define STUB(name) __attribute__((visibility("default"))) int name(void) { return 0; }'
    comm -13 "$cache/objects/defined" "$cache/objects/needed" | sed 's/.*/STUB(&)/'
} > "$cache/objects/rest.c"
gcc -O1 -fPIC -w -fno-builtin -c "$cache/objects/rest.c" -o "$cache/objects/rest.o"
gcc -shared -o "$cache/lib/libcudastub.so" "$cache"/objects/{stub,blas,cudnn,rest}.o \
    -ldl -lpthread -Wl,-soname,libcudastub.so
for front in libcuda.so.1 libnvidia-ml.so.1; do
    echo "int stub_front_${front//[^a-z0-9]/_};" |
        gcc -shared -x c - -o "$cache/lib/$front" -Wl,-soname,"$front" -Wl,--no-as-needed \
            -L"$cache/lib" -lcudastub
done

# The runtime compiler is opened by its name, so it is replaced as a whole library.
name=$(cd "$packages/nvidia/cu13/lib" && ls -d libnvrtc.so.*)
echo "$name { global: nvrtc*; };" > "$cache/objects/nvrtc.map"
# shellcheck disable=SC2086
gcc -O1 -g -fPIC -w $include -shared "$here/src/nvrtc.c" -o "$cache/lib/$name" \
    -Wl,-soname,"$name" -Wl,--version-script="$cache/objects/nvrtc.map"
echo "ready: $here/run.sh SCRIPT.py"
