#!/usr/bin/env bash
# Everything to do on a machine with a CUDA device; each sub-command ends within ten minutes.
#
#   bench/cuda.sh prepare   where the tool and torchvision are, no device needed: model files without weights in build/cuda-models
#   bench/cuda.sh build     the op libraries alone, into build-cuda: needs nvcc, CMake, ninja and a torch with CUDA; no network
#   bench/cuda.sh test      the tests, then compute-sanitizer's memcheck and racecheck on a few ops
#   bench/cuda.sh kernels   bandwidth of every kernel on ResNet-50's shapes, against a copy, PyTorch and torch.compile
#   bench/cuda.sh each      time of each kernel on one large map, by PyTorch's profiler
#   bench/cuda.sh models    memory and time of a training step of whole models
#   bench/cuda.sh batches   the largest batch that trains
#
# PYTHON names the Python with torch (default: .venv's, else python3). Tables go to the terminal and to $OUT (default build/bench).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then PYTHON=python3; [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python; fi
OUT=${OUT:-build/bench}
export TSMEM_CUDA_MODELS=${TSMEM_CUDA_MODELS:-build/cuda-models} OUT
mkdir -p "$OUT"

build() {
  local torch
  torch=$("$PYTHON" -c 'import os, torch; print(os.path.dirname(torch.__file__))')
  cmake -S . -B build-cuda -G Ninja -DCMAKE_BUILD_TYPE=Release -DTSMEM_CLI=OFF -DTSMEM_TESTS=OFF -DTSMEM_CUDA=ON -DTSMEM_TORCH="$torch"
  cmake --build build-cuda
}

need_library() {
  export TSMEM_OPS=${TSMEM_OPS:-$PWD/build-cuda/lib/libtsmem_ops.so}
  [ -f "$TSMEM_OPS" ] || { echo "There is no $TSMEM_OPS: run bench/cuda.sh build first." >&2; exit 1; }
}

case "${1:-}" in
  prepare) "$PYTHON" bench/gpu.py prepare ;;
  build) build ;;
  test)
    need_library
    status=0
    if "$PYTHON" -c 'import pytest' 2>/dev/null; then
      timeout 420 "$PYTHON" -m pytest -q tests/ops/test_cuda.py || status=1
    else
      echo "pytest is missing for $PYTHON: tests/ops/test_cuda.py was not run." >&2
      status=1
    fi
    if command -v compute-sanitizer >/dev/null; then
      for tool in memcheck racecheck; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 110 compute-sanitizer --tool $tool --error-exitcode 9 --kernel-name regex=tsmem "$PYTHON" bench/gpu.py sanitize || status=1
      done
    else
      echo "compute-sanitizer is missing: memory and races were not checked." >&2
      status=1
    fi
    exit $status ;;
  kernels | each | models | batches) need_library; timeout 590 "$PYTHON" bench/gpu.py "$@" ;;
  *) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
