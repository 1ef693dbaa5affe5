#!/bin/sh
# Run a command under torch and FBGEMM for CUDA, on a machine without a GPU (empty_cuda.c).
#
#   python3.12 -m venv /tmp/cuda && /tmp/cuda/bin/pip install torch==2.11.0 fbgemm-gpu==1.6.0 numpy pyarrow 'nvidia-cuda-crt<13.1'
#   PATH=/tmp/cuda/bin:$PATH bench/empty_cuda/run.sh python -m shardcore measure --device cuda ...
set -e
here=$(cd "$(dirname "$0")" && pwd)
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
headers=$(python -c 'import importlib.util as u; print(u.find_spec("nvidia").submodule_search_locations[0])')/cu13/include
gcc -w -O1 -shared -fPIC -I"$headers" -o "$built/libempty_cuda.so" "$here/empty_cuda.c" "$here/refused.c" "$here/libraries.c"
for name in libcuda.so.1 libnvidia-ml.so.1; do ln -s libempty_cuda.so "$built/$name"; done
PATH=$here:$PATH PYTHONPATH=$(dirname "$(dirname "$here")") \
    LD_LIBRARY_PATH=$built LD_PRELOAD=$built/libempty_cuda.so "$@"
