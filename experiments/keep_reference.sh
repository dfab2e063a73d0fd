#!/usr/bin/env bash
# Copy the reference runs' traces, without their checkpoints, to data/reference.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf data/reference
for run in runs/reference/*/; do
  target=data/reference/$(basename "$run")
  mkdir -p "$target"
  cp -r "$run/run.json" "$run/config.yaml" "$run/tokenizer" "$run/traces" "$target/"
done
du -sh data/reference
