#!/usr/bin/env bash
# On a machine with a GPU: builds the package, runs the tests with CUDA tensors, and times every kernel against a device
# copy, in under eight minutes. The table comes last; benchmarks/results/gpu_kernels.json is replaced.
#
#   PYTHON=~/venv/bin/python benchmarks/gpu_check.sh
#
# PYTHON has a torch with CUDA and what `pip install '.[test]'` needs; nothing is downloaded. Exits with 2 where there is
# no GPU, and with 1 if a step failed: later steps run all the same.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$(if [ -x .venv/bin/python ]; then echo .venv/bin/python; else command -v python3; fi)}
started=$SECONDS
table=$(mktemp)
trap 'rm -f "$table"' EXIT
failed=()

capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader --id=0 2>/dev/null) || {
  echo 'gpu_check: nvidia-smi finds no GPU; nothing was run' >&2
  exit 2
}

# A limit for each step: 180 + 150 + 120 s.
step() {
  local name=$1 seconds=$2 since=$SECONDS
  shift 2
  echo "gpu_check: $name" >&2
  timeout "$seconds" "$@" || failed+=("$name")
  echo "gpu_check: $name took $((SECONDS - since)) s" >&2
}

# Code for this GPU alone: `a` is the architecture's own instruction set, which later ones than 8.x have.
architecture=${capability//./}
[ "${capability%%.*}" -ge 9 ] && architecture+=a
export AGOQ_CUDA=ON AGOQ_CUDA_ARCHS=${AGOQ_CUDA_ARCHS:-$architecture-real} MAX_JOBS=${MAX_JOBS:-$(nproc)}

step build 180 "$PYTHON" -m pip install --quiet --no-build-isolation --no-deps --no-index --editable .
step tests 150 "$PYTHON" -m pytest -q -m 'not slow' tests/test_cuda.py
step timing 120 "$PYTHON" benchmarks/gpu_kernels.py --json benchmarks/results/gpu_kernels.json "$@" >"$table"

echo "gpu_check: $((SECONDS - started)) s in all; failed steps: ${failed[*]:-none}"
cat "$table"
[ ${#failed[@]} -eq 0 ]
