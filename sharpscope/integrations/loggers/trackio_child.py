"""Run as a process of its own by TrackioSink: lines of JSON from standard input into trackio, local only."""

from __future__ import annotations

import json
import sqlite3
import sys


def main() -> None:
    """First line: project, name, config; every further line: step and values."""
    import trackio

    first = json.loads(sys.stdin.readline())
    trackio.init(
        project=first["project"], name=first["name"], config=first["config"], embed=False, auto_log_gpu=False,
        auto_log_cpu=False,
    )  # fmt: skip
    sent = 0
    for line in sys.stdin:
        message = json.loads(line)
        trackio.log(message["values"], step=message["step"])
        sent += 1
    trackio.finish()
    # trackio only warns where it cannot write, so what it holds is counted.
    from trackio.sqlite_storage import SQLiteStorage

    try:
        held = len(SQLiteStorage.get_logs(first["project"], first["name"]))
    except (OSError, sqlite3.Error) as error:
        sys.exit(f"its database cannot be read: {error}")
    if held < sent:
        sys.exit(f"its database holds {held} of {sent} steps; is the folder writable?")


if __name__ == "__main__":
    main()
