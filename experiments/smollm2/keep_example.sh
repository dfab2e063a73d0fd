#!/usr/bin/env bash
# Copy a run's traces with their text and its tokenizer, without checkpoints, to data/example/NAME: one part a table.
#   experiments/smollm2/keep_example.sh runs/sums
set -euo pipefail
cd "$(dirname "$0")/../.."
run=$1
target=data/example/$(basename "$run")
rm -rf "$target"
mkdir -p "$target"
cp "$run/run.json" "$run/config.yaml" "$target/"
cp -r "$run/tokenizer" "$target/"
python -c '
import sys
from sharpscope.traces import TABLES, TraceWriter, load_run
with TraceWriter(sys.argv[2]) as writer:
    for table in TABLES:
        rows = load_run(sys.argv[1]).arrow(table)
        if len(rows):
            writer.append_table(table, rows)' "$run" "$target"
find "$target" -type d -empty -delete
du -sh "$target"
