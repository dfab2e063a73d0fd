"""Command line of the benchmarks: `python -m experiments.benchmarks NAME`, run from the repository's root.

Each measures in turns and prints rows of the table in speed.md, the median with the smallest and largest turn: `step`, `trl`,
`recording`, `rotation`, `generation`, `norms`, `exact`, `shares`, `effects`, `surface`, `peers`, `growth`, `diagnose`, `show`,
`analyze`, `large`, `startup`, `fsdp` and `gpu`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from experiments.benchmarks import analysis, gpu, large, measures, memory, peers, training
from experiments.benchmarks.common import SHAPES, Row, table

BENCHMARKS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "step": lambda o: training.step(o.model, o.steps, o.size, o.tokens or (16, 64)),
    "trl": lambda o: training.recorded_trl(o.model, o.steps, o.size),
    "recording": lambda o: training.recording(o.model, o.steps, o.size, o.repeats),
    "rotation": lambda o: training.rotation(o.model, o.size, o.repeats),
    "generation": lambda o: analysis.generation(o.model, o.task, o.repeats, o.size),
    "norms": lambda o: measures.norms(o.model, o.repeats, o.length),
    "exact": lambda o: measures.exact(o.model, o.repeats, o.size, o.length),
    "shares": lambda o: measures.shares(o.model, o.repeats, o.size, o.length),
    "effects": lambda o: measures.effects(o.model, o.repeats, o.size, o.length),
    "surface": lambda o: measures.surface(o.model, o.repeats, o.prompts, o.length),
    "peers": lambda o: peers.peers(o.model, o.repeats, min(o.prompts, 8), o.length),
    "growth": lambda o: measures.growth(
        o.repeats,
        o.axis or list(measures.LIMITS),
        ["0.9m"] if o.quick else o.shape or ["0.9m"],
        o.out,
        o.quick,
    ),
    "diagnose": lambda o: analysis.diagnose(20 if o.quick else 10_000, o.repeats),
    "show": lambda o: analysis.show(o.repeats),
    "analyze": lambda o: analysis.analyze(o.repeats),
    "large": lambda o: large.large(
        [24_000] if o.quick else o.rows or [1_300_000, 13_000_000], o.repeats
    ),
    "startup": lambda o: training.startup(o.repeats),
    "fsdp": lambda o: memory.fsdp(),
    "gpu": lambda o: gpu.gpu(
        o.minutes, o.shape or ["0.5b", "1.5b", "3b"], o.size, o.length, min(o.steps, 11)
    ),
}
QUICK = {"steps": 2, "size": 4, "repeats": 1, "length": 32, "prompts": 4, "shape": ["tiny"]}


def main() -> None:
    """Run the benchmarks that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=BENCHMARKS, metavar="NAME")
    parser.add_argument(
        "--model", default="embedded:math", help=f"folder, embedded:NAME or {', '.join(SHAPES)}"
    )
    parser.add_argument("--task", default="math", help="task of `generation`")
    parser.add_argument("--steps", type=int, default=30, help="measured steps, each a turn")
    parser.add_argument(
        "--size", type=int, default=8, help="prompts of a step, completions of each, and rows"
    )
    parser.add_argument(
        "--tokens", type=int, action="append", help="of a completion, for `step`; may be repeated"
    )
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--prompts", type=int, default=128, help="prompts of `surface`")
    parser.add_argument("--repeats", type=int, default=5, help="turns, of which the median counts")
    parser.add_argument(
        "--rows", type=int, action="append", help="token rows of `large`; may be repeated"
    )
    parser.add_argument("--minutes", type=float, default=8, help="time for `gpu`")
    parser.add_argument(
        "--shape", action="append", choices=SHAPES, help="of `gpu` and `growth`; may be repeated"
    )
    parser.add_argument(
        "--axis", action="append", choices=measures.LIMITS, help="of `growth`; may be repeated"
    )
    parser.add_argument("--threads", type=int, default=None, help="CPU threads")
    parser.add_argument("--out", type=Path, default=None, help="PNG file for `growth`")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    rows: list[Row] = []
    for name in options.names:
        rows += BENCHMARKS[name](options)
    print(table(rows))


if __name__ == "__main__":
    main()
