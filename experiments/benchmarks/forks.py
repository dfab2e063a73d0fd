"""One step of each method from the start, the middle and the end of GRPO training, for four policies.

Trains runs of plain GRPO, which differ in their seed, and forks each at its states. The start is the same for all seeds, so
only seed 0 is forked there. A repeated call continues, also with more batches. `forks_report` makes the tables of docs/fork.md
and of the second study from the runs. From the repository's folder:

    python -m experiments.benchmarks.forks --batches 30
    python -m experiments.benchmarks.forks --seed 1 --seed 2 --batches 10
    python -m experiments.benchmarks.forks --policy math --sharpness --batches 10
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sharpscope
from sharpscope.config import RunConfig, arm_name, build_config
from sharpscope.training import train

POLICIES: dict[str, dict[str, Any]] = {
    "math": {},
    "tool_qa": {},
    "knights_knaves": {},
    "arithmetic": {
        "task": {
            "kind": "math",
            "families": ["arithmetic"],
            "levels": [2],
            "unseen_levels": [1, 3],
            "train_size": 200,
            "heldout_size": 500,
            "unseen_size": 100,
        },
        "policy.model": "data/studies/2/policy",
        "rollout.prompts_per_step": 12,
        "rollout.group_size": 8,
        "rollout.max_new_tokens": 96,
        "update.mini_batches": 2,
        "optimizer.lr": 1e-4,
    },
}
"""Policy -> settings of its runs: the embedded policies under the names of their tasks, and that of the second study."""
STEPS = {"arithmetic": 160}
MASS = "weight.preset=calibrated+weight.percentiles=gradient"
INNER = "weight.of.preset=calibrated+weight.of.percentiles=gradient+weight.of.U=4"
ARMS = (
    "grpo",
    "published=grpo-sg+weight.preset=paper",
    f"mass 1.4=grpo-sg+{MASS}",
    f"mass 4=grpo-sg+{MASS}+weight.U=4",
    f"mass 4 reversed=grpo-sg-reverse+{INNER}",
    f"mass 4 shuffled=grpo-sg-shuffled+{INNER}",
    "ar=grpo+weight.kind=linear",
    "cov-grpo",
    "sapo",
    "grpo-sam",
    "low p=grpo+tokens.kind=probability",
    "high p=grpo+tokens.kind=probability+tokens.side=high",
    "A>0=grpo+tokens.kind=advantage",
    "A<0=grpo+tokens.kind=advantage+tokens.sign=negative",
)
FEWER = ("grpo", "published", "mass 4", "mass 4 reversed", "mass 4 shuffled", "ar", "cov-grpo", "low p", "high p")
"""Arms of Knights and Knaves, whose batches take longest; the other arms are a fork of their own there."""
SHARPER = ("grpo", "mass 4", "mass 4 reversed", "mass 4 shuffled", "grpo-sam")
RUN = {
    "method": "grpo",
    "evaluation.every": 0,
    "recording.tokens_every": 0,
    "recording.rollouts_every": 0,
    "recording.heldout_influence_every": 0,
    "checkpoint.keep_last": 3,
}


def settings(policy: str) -> list[dict[str, Any]]:
    """Settings of the forks of a policy's run."""
    if policy == "knights_knaves":
        rest = ("grpo", *(name for name in map(arm_name, ARMS) if name not in FEWER))
        return [{"methods": _named(names), "comparisons": ("step", "kl")} for names in (FEWER, rest)]
    return [{"methods": ARMS}]


def sharpness_settings() -> dict[str, Any]:
    """Settings of the fork that measures sharpness."""
    return {"methods": _named(SHARPER), "comparisons": ("step", "kl"), "outcomes": ("failure", "sharpness")}


def states(policy: str, seed: int) -> list[int]:
    """Steps that a run is forked at: start, middle and end; of later seeds only those that differ from seed 0's."""
    steps = STEPS.get(policy, 100)
    return [0, steps // 2, steps] if seed == 0 else [steps // 2, steps]


def run_name(policy: str, seed: int) -> str:
    """Folder of a run."""
    return policy if seed == 0 else f"{policy}-s{seed}"


def _named(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(arm for arm in ARMS if arm_name(arm) in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", choices=POLICIES, help="default: all")
    parser.add_argument("--seed", action="append", type=int, help="of the GRPO run; default: 0")
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--sharpness", action="store_true", help="with fewer arms")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/forks"))
    options = parser.parse_args()
    for policy in options.policy or POLICIES:
        for seed in options.seed or [0]:
            folder = options.runs / run_name(policy, seed)
            trained(folder, policy, seed)
            for chosen in [sharpness_settings()] if options.sharpness else settings(policy):
                sharpscope.fork(
                    folder,
                    checkpoint=states(policy, seed),
                    batches=options.batches,
                    threads=options.threads,
                    on_progress=lambda text: print(f"  {text}", flush=True),
                    **chosen,
                )


def trained(folder: Path, policy: str, seed: int) -> None:
    """Train a run of GRPO with checkpoints in the middle and at the end, or continue it."""
    config = configured(policy, {"seed": seed, "out": str(folder)})
    if not (folder / "run.json").exists():
        train(config)
    elif sharpscope.load_run(folder).status != "finished":
        train(config, resume=True)


def configured(policy: str, values: Mapping[str, Any]) -> RunConfig:
    """The configuration of a run of GRPO."""
    steps = STEPS.get(policy, 100)
    own = {"task": {"kind": policy}, **POLICIES[policy], "steps": steps, "checkpoint.every": steps // 2}
    return build_config(values={**RUN, **own, **values})


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
