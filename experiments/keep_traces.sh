#!/usr/bin/env bash
# Copy a run's traces with their text and its tokenizer, without checkpoints, to TARGET: one part a table. With steps, only their
# tokens are kept.
#   experiments/keep_traces.sh runs/sums data/example/sums
#   experiments/keep_traces.sh runs/spike data/example/spike 1,50,68,69,70,71,72
#   experiments/keep_traces.sh runs/example/grpo-s0 tests/data/pair/grpo-s0
set -euo pipefail
run=$1
target=$2
rm -rf "$target"
mkdir -p "$target"
cp "$run/run.json" "$run/config.yaml" "$target/"
cp -r "$run/tokenizer" "$target/"
python -c '
import sys
import pyarrow.compute as pc
from sharpscope.traces import TABLES, TraceWriter, load_run
steps = [int(step) for step in sys.argv[3].split(",")] if sys.argv[3] else []
with TraceWriter(sys.argv[2]) as writer:
    for table in TABLES:
        rows = load_run(sys.argv[1]).arrow(table)
        if table == "tokens" and steps:
            rows = rows.filter(pc.is_in(rows["step"], pc.cast(steps, rows["step"].type)))
        if len(rows):
            writer.append_table(table, rows)' "$run" "$target" "${3:-}"
find "$target" -type d -empty -delete
du -sh "$target"
