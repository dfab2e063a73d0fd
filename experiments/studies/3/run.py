"""Make the runs of the third study: for each seed one shared warm-up by plain GRPO, then every arm from its checkpoint.

An arm goes on from the weights and AdamW's moments of the warm-up. Repeat the command to continue; processes that share the work
take different seeds.

python -m experiments.studies.3.run --seeds 0,1,2
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import yaml

from sharpscope.config import RunConfig
from sharpscope.methods import method_label, parse_methods
from sharpscope.sweeps import plan_sweep, read_sweep
from sharpscope.training import Display, train

task = importlib.import_module("experiments.studies.3.task")
WARM_UP_STEPS = 4


def main() -> None:
    """Make the runs that are missing, block by block."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", type=Path, default=Path(__file__).with_name("study.yaml"))
    parser.add_argument(
        "--seeds", default="", help="seeds, separated by commas: a block each; default: all"
    )
    parser.add_argument("--arms", default="", help="arms, separated by commas; default: all")
    parser.add_argument("--out", type=Path, help="folder of the runs; default: that of the study")
    args = parser.parse_args()
    spec = read_sweep(args.study)
    out = args.out or Path(spec.out)
    runs = [planned.config for planned in plan_sweep(spec)]
    for seed in (
        map(int, args.seeds.split(",")) if args.seeds else sorted({run.seed for run in runs})
    ):
        task.SEED = seed
        block = [run for run in runs if run.seed == seed]
        start = out.with_name(f"{out.name}-warm-up") / f"s{seed}"
        make(warm_up(block[0]), start)
        for config in block:
            arm = method_label(config.method)
            if arm in (args.arms.split(",") if args.arms else [arm]):
                make(config, out / f"{arm}-s{seed}", start)


def warm_up(config: RunConfig) -> RunConfig:
    """The first steps of a block, by plain GRPO, without evaluation or probes."""
    shorter = {"every": 0}
    parts = {
        name: getattr(config, name).model_copy(update=shorter) for name in ("evaluation", "probes")
    }
    return config.model_copy(
        update={"method": parse_methods(["grpo"])["grpo"], "steps": WARM_UP_STEPS, **parts}
    )


def make(config: RunConfig, folder: Path, start: Path | None = None) -> None:
    """Make a run, or finish one that was interrupted; `start`: the finished warm-up that it goes on from."""
    config = config.model_copy(update={"out": str(folder)})
    file = folder / "run.json"
    if file.exists() and json.loads(file.read_text())["steps_done"] == config.steps:
        return
    if start is not None and not file.exists():
        copy = folder.with_name(f"copy-of-{folder.name}")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(start, copy)
        data = config.model_dump(mode="json")
        info = json.loads((start / "run.json").read_text())
        info |= {
            "name": folder.name,
            "method": method_label(config.method),
            "config": data,
            "parent": str(start),
        }
        (copy / "run.json").write_text(json.dumps(info))
        (copy / "config.yaml").write_text(yaml.safe_dump(data))
        give_method(
            copy / "checkpoints" / f"step-{WARM_UP_STEPS:06d}",
            config.resolved_method.model_dump(mode="json"),
        )
        copy.rename(folder)
    train(config, Display(), resume=file.exists())


def give_method(checkpoint: Path, method: dict[str, Any]) -> None:
    """Let the run that resumes from `checkpoint` go on with another method; a calibrated one is calibrated at its first step."""
    state = checkpoint / "trainer_state.json"
    content = json.dumps(json.loads(state.read_text()) | {"method": method}).encode()
    state.write_bytes(content)
    file = checkpoint / "checksums.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {state.name: [len(content), zlib.crc32(content)]})
    )


if __name__ == "__main__":
    main()
