"""Child process of TrackioSink: writes JSON lines from standard input to a local trackio run."""

from __future__ import annotations

import json
import sqlite3
import sys


def main() -> None:
    """Read project, name and config from the first line, and step and values from every other line."""
    import trackio

    first = json.loads(sys.stdin.readline())
    trackio.init(
        project=first["project"],
        name=first["name"],
        config=first["config"],
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    sent = 0
    for line in sys.stdin:
        message = json.loads(line)
        trackio.log(message["values"], step=message["step"])
        sent += 1
    trackio.finish()
    # trackio only warns if it cannot write, so count the stored steps.
    from trackio.sqlite_storage import SQLiteStorage

    try:
        stored = len(SQLiteStorage.get_logs(first["project"], first["name"]))
    except (OSError, sqlite3.Error) as error:
        sys.exit(f"the database cannot be read: {error}")
    if stored < sent:
        sys.exit(f"the database has {stored} of {sent} steps; check that the folder is writable")


if __name__ == "__main__":
    main()
