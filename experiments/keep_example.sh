#!/usr/bin/env bash
# Copy the example runs' traces, without their checkpoints, to data/example: one part a table.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf data/example
mkdir -p data/example
for run in runs/example/*/; do
  target=data/example/$(basename "$run")
  mkdir -p "$target"
  cp "$run/run.json" "$run/config.yaml" "$target/"
  python -c '
import sys
from sharpscope.traces import TABLES, TraceWriter, load_run
with TraceWriter(sys.argv[2]) as writer:
    for table in TABLES:
        writer.append_table(table, load_run(sys.argv[1]).arrow(table))' "$run" "$target"
  cp -r "$run/tokenizer" "$target/"
done
du -sh data/example
