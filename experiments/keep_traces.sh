#!/usr/bin/env bash
# Copy a run's traces with their text and its tokenizer, without checkpoints, to TARGET: one part a table.
#   experiments/keep_traces.sh runs/sums data/example/sums
set -euo pipefail
run=$1
target=$2
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
