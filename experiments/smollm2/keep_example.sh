#!/usr/bin/env bash
# Copy a run's traces with their text and its tokenizer, without checkpoints, to data/example/NAME: one part a table.
# With steps, only their tokens are kept.
#   experiments/smollm2/keep_example.sh runs/sums
#   experiments/smollm2/keep_example.sh runs/spike 1,50,68,69,70,71,72
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
import pyarrow.compute as pc
from sharpscope.traces import TABLES, TraceWriter, load_run
steps = [int(step) for step in sys.argv[3].split(",")] if sys.argv[3] else []
with TraceWriter(sys.argv[2]) as writer:
    for table in TABLES:
        rows = load_run(sys.argv[1]).arrow(table)
        if table == "tokens" and steps:
            rows = rows.filter(pc.is_in(rows["step"], pc.cast(steps, rows["step"].type)))
        if len(rows):
            writer.append_table(table, rows)' "$run" "$target" "${2:-}"
find "$target" -type d -empty -delete
du -sh "$target"
