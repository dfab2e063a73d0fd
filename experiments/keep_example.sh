#!/usr/bin/env bash
# Copy the example runs' traces, without their checkpoints, to data/example.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf data/example
for run in runs/example/*/; do
  target=data/example/$(basename "$run")
  mkdir -p "$target"
  cp -r "$run/run.json" "$run/config.yaml" "$run/tokenizer" "$run/traces" "$target/"
done
du -sh data/example
