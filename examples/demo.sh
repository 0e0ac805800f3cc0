#!/usr/bin/env bash
# The whole idea on a laptop: a trace is planned, the plan runs on a real engine with real
# language models, and the prediction is held against the measurement. `make demo` runs this.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-demo}
mkdir -p "$out"

step() {
  printf '\n== %s\n' "$*"
  "$@"
}

step codesign trace show traces/low.parquet
step codesign models fetch smollm2-135m
step codesign profile --out "$out/profile"
step codesign fit --profile "$out/profile" --out "$out/fit.json"
step codesign plan --trace traces/low.parquet --fit "$out/fit.json" --out "$out/plan.json"
step codesign run --plan "$out/plan.json" --out "$out/run"
step codesign validate --run "$out/run" --report "$out/report.html"
