#!/usr/bin/env bash
# What to run on a GPU: the tests that need one, every kernel beside its rivals, and the levels of a small model.
#
#     bash benchmarks/gpu_check.sh [FOLDER]
#
# Takes less than five minutes on one device, 375 s at most, and needs torch, lightning, torchmetrics, numpy, CuPy,
# pytest and hypothesis; without SpikingJelly its rows say "not installed". Writes tests.txt, kernels_<gpu>.json,
# levels_<gpu>.json and what was printed to FOLDER, by default outputs/gpu_check. The exit status is 1 if one of the
# three did not succeed. PYTHON names another interpreter than python3, for example PYTHON=.venv/bin/python. With
# pytest-xdist the tests run in WORKERS processes on the one device, 8 by default.
set -u
cd "$(dirname "$0")/.." || exit 1

python=${PYTHON:-python3}
out=${1:-outputs/gpu_check}
mkdir -p "$out" || exit 1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name())') || exit 1
gpu=$(printf %s "$gpu" | tr -c '[:alnum:]' '_')
# Without SpikingJelly there is no spiking model to measure.
model=$("$python" -c 'import importlib.util as u; print("block" if u.find_spec("spikingjelly") else "gpt")') || exit 1
workers=$("$python" -c 'import importlib.util as u; print("yes" if u.find_spec("xdist") else "")') || exit 1
workers=${workers:+-n ${WORKERS:-8} --dist worksteal}
# The others would only take their time to be collected.
tests=$(grep -lE 'mark\.gpu|kernels: Kernels' tests/test_*.py)
status=0

step() {  # step SECONDS FILE COMMAND...: run a command for so long at most, and keep what it prints
    local seconds=$1 file=$out/$2
    shift 2
    echo "== $*"
    timeout --kill-after=5 "$seconds" "$@" 2>&1 | tee "$file"
    local code=${PIPESTATUS[0]}
    if [ "$code" -ne 0 ]; then
        echo "== failed with exit status $code (124: ran longer than $seconds s)"
        status=1
    fi
}

# The kernels first: their figures are what a GPU is needed for. Options of pytest plugins that may be missing are left
# out, and test files whose libraries are missing do not stop the others.
step 160 kernels.txt "$python" benchmarks/kernels.py --device cuda --quick --json "$out/kernels_$gpu.json"
step 45 levels.txt "$python" benchmarks/levels.py --device cuda --model "$model" --quick --json "$out/levels_$gpu.json"
# shellcheck disable=SC2086 # words
step 170 tests.txt "$python" -m pytest $tests -m gpu -q -o addopts= --continue-on-collection-errors $workers

exit "$status"
