#!/usr/bin/env bash
# Copy the example runs' traces, without their checkpoints, to data/example: one part a table.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf data/example
mkdir -p data/example
for run in runs/example/*/; do
  target=data/example/$(basename "$run")
  python -c 'import sys; from pathlib import Path; from sharpscope.traces import load_run, unpack_run; unpack_run(load_run(sys.argv[1]), Path(sys.argv[2]))' "$run" "$target"
  cp -r "$run/tokenizer" "$target/"
done
du -sh data/example
