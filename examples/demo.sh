#!/usr/bin/env bash
# The whole idea on a laptop: a trace is planned, the plan runs on a real engine with real language
# models, and the prediction is held against the measurement. `make demo` runs this.
#
#   TRACE=file-or-name    another trace, for example TRACE=azure-conv once it is fetched
#   OUT=folder            where everything goes (demo)
#   SLO_TTFT_MS=60000 SLO_TPOT_MS=200    targets for a slow or busy machine, where no plan meets the
#                         usual ones (20000, 80)
set -euo pipefail
cd "$(dirname "$0")/.."
trace=${TRACE:-conv-twin}
out=${OUT:-demo}
# Two CPU cores decode some 25 tokens a second, so the traffic is thinned out and cut to size. Every
# command says so.
workload=(--slice 0:60 --rate-scale 0.2 --max-prompt 96 --max-output 32
  --max-requests 18)
mkdir -p "$out"

step() {
  printf '\n$ %s\n' "$*"
  "$@"
}

SECONDS=0
step codesign trace show "$trace" "${workload[@]}"
step codesign models fetch smollm2-135m
step codesign profile --quick --out "$out/profile"
step codesign fit "$out/profile" --out "$out/fit.json"
step codesign plan --trace "$trace" "${workload[@]}" --fit "$out/fit.json" --objective latency --max-batch 2 \
  --slo-ttft-ms "${SLO_TTFT_MS:-20000}" --slo-tpot-ms "${SLO_TPOT_MS:-80}" --out "$out/plan.json" || {
  code=$?
  if [ "$code" = 3 ]; then
    echo 'This machine is too slow or too busy for these targets. Relax them, for example:' \
      'make demo SLO_TTFT_MS=60000 SLO_TPOT_MS=200' >&2
  fi
  exit "$code"
}
step codesign run --plan "$out/plan.json" --baselines --out "$out/runs"
step codesign validate --plan "$out/plan.json" --run "$out"/runs/* --no-check \
  --report "$out/report.html"
printf '\nDone in %d s. Open %s/report.html, or read on: README.md, docs/architecture.md\n' \
  "$SECONDS" "$out"
