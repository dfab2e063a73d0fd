"""Try faults at random: `python -m tests.faults --minutes 10 --seed N`; exit status 1 if one did not hold.

A try is a kind of fault and a number; `--only KIND --first NUMBER --tries 1` repeats one with the same seed.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.bench import KINDS, SHARE, Bench


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="default: a new one")
    parser.add_argument("--only", action="append", choices=list(KINDS), help="kinds; default: all")
    parser.add_argument("--first", type=int, default=0, help="number of the first try of a kind")
    parser.add_argument("--tries", type=int, help="of each kind; default: until the time is over")
    parser.add_argument("--out", type=Path, help="file for the table, written after each minute")
    given = parser.parse_args()
    seed = secrets.randbelow(2**31) if given.seed is None else given.seed
    print(f"seed {seed}: python -m tests.faults --seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        bench = Bench(Path(folder), seed, given.first)
        until, told = time.monotonic() + 60 * given.minutes, time.monotonic()
        while time.monotonic() < until:
            kinds = [k for k in given.only or KINDS if bench.count[k].tried < (given.tries or 1e9)]
            if not kinds:
                break
            # The kind on which least of its time was spent.
            bench.attempt(min(kinds, key=lambda k: bench.count[k].seconds / SHARE.get(k, 1)))
            if given.out and time.monotonic() - told > 60:
                told = time.monotonic()
                given.out.write_text(bench.table())
    print(bench.table(), flush=True)
    if given.out:
        given.out.write_text(bench.table())
    return int(any(count.failed for count in bench.count.values()))


if __name__ == "__main__":
    sys.exit(main())
