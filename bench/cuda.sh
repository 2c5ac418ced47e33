#!/usr/bin/env bash
# Everything to do on a machine with a CUDA device.
#
#   bench/cuda.sh prepare         where the tool and torchvision are, no device needed: model files without weights in build/cuda-models
#   bench/cuda.sh build           the op libraries alone, into build-cuda: needs nvcc, CMake, ninja and a torch with CUDA; no network
#   bench/cuda.sh run [SECONDS]   all of the following for at most so long (default 590), in this order; the next run goes on where this one stopped
#   bench/cuda.sh test            the tests
#   bench/cuda.sh sanitize        compute-sanitizer's memcheck and racecheck of every kernel, without torch where build-cuda/bin/tsmem_cuda_cases is, else of a few ops
#   bench/cuda.sh each            time of each kernel on one large map, by PyTorch's profiler
#   bench/cuda.sh models          memory and time of a training step of whole models
#   bench/cuda.sh batches         the largest batch that trains
#   bench/cuda.sh kernels         bandwidth of every kernel on ResNet-50's shapes, against a copy, PyTorch and torch.compile
#
# Built elsewhere: TSMEM_OPS names libtsmem_ops.so, with libtsmem_ops_cuda.so beside it, TSMEM_CUDA_CASES tsmem_cuda_cases. PYTHON names the Python with torch (default: .venv's, else
# python3). Tables go to the terminal and, row by row, to $OUT (default build/bench); `--again` after one of the last four measures anew, `--only NAME` measures a part.
# Exit code 3: time was up, the next run goes on there. TSMEM_TEST_DEVICE=cpu tries all of it without a device (bench/gpu.py).
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
  cmake --build build-cuda --target tsmem_ops tsmem_ops_cuda tsmem_cuda_cases
}

need_library() {
  export TSMEM_OPS=${TSMEM_OPS:-$PWD/build-cuda/lib/libtsmem_ops.so}
  [ -f "$TSMEM_OPS" ] || { echo "There is no $TSMEM_OPS: run bench/cuda.sh build first." >&2; exit 1; }
}

# run_tests SECONDS
run_tests() {
  "$PYTHON" -c 'import pytest' 2>/dev/null || { echo "pytest is missing for $PYTHON: tests/ops/test_cuda.py was not run." >&2; return 1; }
  timeout "$1" "$PYTHON" -m pytest -q tests/ops/test_cuda.py
}

# sanitize SECONDS
sanitize() {
  command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is missing: memory and races were not checked." >&2; return 1; }
  local cases=${TSMEM_CUDA_CASES:-build-cuda/bin/tsmem_cuda_cases} tool status=0
  for tool in memcheck racecheck; do
    if [ -x "$cases" ]; then
      timeout $(($1 / 2)) compute-sanitizer --tool $tool --error-exitcode 9 "$cases" || status=$?
    else
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout $(($1 / 2)) compute-sanitizer --tool $tool --error-exitcode 9 --kernel-name regex=tsmem "$PYTHON" bench/gpu.py sanitize || status=$?
    fi
  done
  return $status
}

# piece NAME SECONDS [ARGUMENT ...]: exit code 3 where it goes on in the next run.
piece() {
  local name=$1 seconds=$2 status=0
  shift 2
  case $name in
    test) run_tests "$seconds" || status=$? ;;
    sanitize) sanitize "$seconds" || status=$? ;;
    *) timeout "$seconds" "$PYTHON" bench/gpu.py "$name" --seconds $((seconds > 40 ? seconds - 30 : seconds)) "$@" || status=$? ;;
  esac
  if [ $status = 124 ]; then
    echo "(time is up in the midst of: $name)"
    # The first two begin anew each time: with that much time they would never end.
    [[ $name =~ ^(test|sanitize)$ && $seconds -ge 400 ]] || status=3
  fi
  return $status
}

# What $OUT/done has was run to its end by an earlier call: each line a piece and its exit code.
run_all() {
  local end=$((SECONDS + $1)) name status worst=0
  touch "$OUT/done"
  for name in test sanitize each models batches kernels; do
    if grep -q "^$name " "$OUT/done"; then continue; fi
    if [ $((end - SECONDS)) -lt 10 ]; then echo "(time is up before: $name; the next run goes on there)"; return 3; fi
    echo "== $name"
    status=0
    piece "$name" $((end - SECONDS)) || status=$?
    [ $status != 3 ] || return 3
    echo "$name $status" >>"$OUT/done"
  done
  while read -r name status; do [ "$status" = 0 ] || { echo "$name ended with exit code $status." >&2; worst=1; }; done <"$OUT/done"
  echo "All is done: the tables are in $OUT. Remove $OUT/done to run it again."
  return $worst
}

case "${1:-}" in
  prepare) "$PYTHON" bench/gpu.py prepare ;;
  build) build ;;
  run) need_library; run_all "${2:-590}" ;;
  test | sanitize | kernels | each | models | batches) need_library; name=$1; shift; piece "$name" 590 "$@" ;;
  *) sed -n '2,18s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
