#!/usr/bin/env bash
# Everything that is measured on GPUs, in parts of less than ten minutes for a machine by the minute.
#
#     bash benchmarks/rented_gpus.sh PART OUT      with codesign[engine] installed, in the repository
#
#   kernels   every kernel by itself and in whole forwards, sums over all GPUs; other projects' if installed
#   tests     all GPU tests
#   pairs     70B + 1B and 70B + 3B: asynchronous on 3+1 and 2+2, serial and plain on four GPUs
#   campaign  profiles, plans and replays, as far as CAMPAIGN_SECONDS go; call it again to go on
#   policies  every policy on traffic, with the step times that the campaign has measured
#
# All but kernels need `codesign models fetch smollm2-135m`; policies needs `codesign trace fetch azure-code` and
# mooncake-conversation, or these files in the folder that TRACES names. A part that is cut off has written what it had.
# About, on four H200s with everything compiled anew: 190 s, 450, 250, 560 and again 560, 130.
set -euo pipefail
part=${1:?kernels, tests, pairs, campaign or policies}
out=$(mkdir -p "${2:?a folder for results}" && cd "$2" && pwd)
gpus=$(nvidia-smi -L | wc -l)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# limited SECONDS COMMAND...: what is cut off has written what it had, and the next one runs; a failure ends all.
limited() {
  local code=0
  timeout "$@" || code=$?
  if [ "$code" = 124 ]; then echo "rented_gpus.sh: cut off after $1 s: ${*:2}" >&2; else return "$code"; fi
}

kernels() {
  local gpu=0 models
  for models in "1b 70b/4" "3b 70b/2" 8b 70b; do # one GPU each, side by side where there are four
    CUDA_VISIBLE_DEVICES=$((gpu % gpus)) limited 150 python -m benchmarks.bench_forward \
      --models $models --out "$out/forward_$gpu" &
    gpu=$((gpu + 1))
    if [ "$gpus" -lt 4 ]; then wait; fi
  done
  wait
  limited 240 python -m benchmarks.bench_kernels --models "llama-70b TP4" --rows 8 16 --peers --out "$out"
  limited 90 python -m benchmarks.bench_heads --out "$out"
  limited 90 python -m benchmarks.bench_attention --models 1 --peers --out "$out"
  if [ "$gpus" -gt 1 ]; then limited 90 python -m benchmarks.bench_collectives --peers --out "$out"; fi
}

tests() {
  timeout 590 python tests/gpu/run_all.py -q | tee "$out/tests.log"
}

# pair NAME SHAPES POLICIES FLAGS...
pair() {
  local name=$1 shapes=$2 policies=$3
  shift 3
  python -m benchmarks.inflated_plan "$shapes" --plan "$out/$name/plan.json" --policies $policies "$@"
  limited 200 python -m benchmarks.bench_engine --plan "$out/$name/plan.json" --out "$out" --name "$name" \
    --trace "$out/$name.trace.json"
}

pairs() {
  local model=$out/sharp
  [ -d "$model" ] || python -m benchmarks.random_pair "$model"
  pair engine_pair_1b llama-3-70b+llama-3.2-1b "async-tree-8x4x8@3+1 tree-8x4x4@4 async-tree-8x4x6@2+2" \
    --sources "$model" "$model" --noise 0.025 --requests 12
  pair engine_pair_3b llama-3-70b+llama-3.2-3b "async-tree-8x4x4@3+1 tree-8x4x4@4" \
    --sources smollm2-135m smollm2-135m --drop-layers 4 5 --requests 14
}

campaign() {
  python -m benchmarks.campaign --out "$out/campaign" --gpus "$gpus" --max-seconds "${CAMPAIGN_SECONDS:-560}"
}

policies() {
  local pair=$out/campaign/llama-3-70b+llama-3.2-1b
  python - "$pair" <<'END'
import sys
from pathlib import Path

from benchmarks.campaign.closed_profile import closed_profile
from codesign.fit import fit_profile

folder = Path(sys.argv[1])
fit_profile(closed_profile(folder)).save(folder / "fit.json")
END
  python -m benchmarks.policy_ranks serve "$out/policies" --gpus 2 --fit "$pair/fit.json" ${TRACES:+--traces "$TRACES"}
}

case $part in
  kernels | tests | pairs | campaign | policies) "$part" ;;
  *)
    echo "rented_gpus.sh: no part is called $part; parts: kernels, tests, pairs, campaign, policies" >&2
    exit 2
    ;;
esac
