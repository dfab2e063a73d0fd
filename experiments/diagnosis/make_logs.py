"""Logs of runs that fail on purpose from a known step on, and of healthy ones: fixtures of tests/diagnose.

    python -m experiments.diagnosis.make_logs [--only NAME ...] [--model FOLDER --steps 40 --at 15]

Each run trains the embedded policy for arithmetic, or a model given, by sharpscope's own loop; a fault begins at step `--at`. Kept
are the scalars that the health rules see, one row a step, under their canonical names.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch

from sharpscope.config import build_config
from sharpscope.recording.health import StepHealth
from sharpscope.traces import load_run
from sharpscope.training import loop, train
from sharpscope.training.rollouts import draw_group

LOGS = Path(__file__).parents[2] / "tests" / "diagnose" / "logs.csv"
BASE: dict[str, Any] = {
    "task.kind": "math",
    "rollout.prompts_per_step": 10,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 64,
    "optimizer.lr": 5e-4,
    "evaluation.every": 0,
    "checkpoint.every": 0,
    "recording.tokens_every": 0,
    "recording.token_gradients_every": 0,
    "recording.rotation_every": 0,
    "recording.heldout_influence_every": 0,
    "probes.preset": "off",
    "threads": 1,
}
Drawn = tuple[Any, list[Any]]


def scored(change: Callable[[Any], float], drawn: Drawn) -> Drawn:
    """Completions with another reward, which counts as correct where it is positive."""
    rollouts, rewards = drawn
    new = [
        replace(reward, total=total, parts={}, correct=total > 0)
        for reward in rewards
        if (total := change(reward)) is not None
    ]
    return rollouts.with_reward(torch.tensor([reward.total for reward in new])), new


def unparsable(*given: Any) -> Drawn:
    """The data's answers fit no completion: every reward is 0."""
    return scored(lambda reward: 0.0, draw_group(*given))


def poisoned(*given: Any) -> Drawn:
    """The scorer pays wrong answers."""
    return scored(lambda reward: 1.0 - float(reward.correct), draw_group(*given))


def cut(policy: Any, task: Any, examples: Any, spec: Any, seed: int) -> Drawn:
    """Completions may have 12 tokens, of about 15 that they need."""
    return draw_group(policy, task, examples, spec.model_copy(update={"max_new_tokens": 12}), seed)


def broken_sampler(*given: Any) -> Drawn:
    """The sampler reports log-probabilities of another temperature."""
    rollouts, rewards = draw_group(*given)
    return replace(rollouts, behavior_logp=1.5 * rollouts.behavior_logp), rewards


FAULTS: dict[str, Callable[..., Drawn]] = {
    "zero_advantage": unparsable,
    "poisoned_reward": poisoned,
    "truncation": cut,
    "broken_sampler": broken_sampler,
}
K1 = {"method.kl.estimator": "k1", "method.kl.coef": 1.0, "rollout.top_p": 0.9}
EVALUATED = {
    "evaluation.every": 5,
    "evaluation.prompts": 100,
    "evaluation.splits": ["heldout"],
    "evaluation.temperatures": [0.0],
}
SICK: dict[str, dict[str, Any]] = {
    "learning_rate": {},
    "kl_k1": K1,
    **{name: {} for name in FAULTS},
}
SICK["poisoned_reward"] = EVALUATED
HEALTHY: dict[str, dict[str, Any]] = {
    **{f"healthy-grpo-{seed}": {"seed": seed} for seed in range(5)},
    **{f"healthy-grpo-sg-{seed}": {"seed": seed, "method": "grpo-sg"} for seed in range(2)},
    "healthy-dapo-0": {"method": "dapo"},
    "healthy-kl-0": {"method.kl.coef": 0.01},
    "healthy-tool-0": {"task.kind": "tool_qa", "rollout.max_new_tokens": 96, "optimizer.lr": 2e-4},
}


def make(name: str, changes: dict[str, Any], steps: int, at: int, out: Path) -> None:
    """Run one training whose fault, if it has one, begins at step `at`, and keep its scalars as rows of a CSV file."""
    rows: list[dict[str, float]] = []
    fault, plain_draw, plain_rate, after = (
        FAULTS.get(name),
        loop.draw_rollouts,
        loop.learning_rate,
        StepHealth.after_updates,
    )

    def draw(*given: Any, **options: Any) -> Any:
        step = given[6]
        return plain_draw(*given, **options | ({"draw": fault} if fault and step >= at else {}))

    def rate(spec: Any, step: int, total: int) -> float:
        return plain_rate(spec, step, total) * (10 if name == "learning_rate" and step >= at else 1)

    def keep(health: StepHealth, row: Any) -> None:
        after(health, row)
        rows.append(
            {
                "step": health.step,
                **{key: health.values[key] for key in sorted(health.values) if key != "memory"},
            }
        )

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(loop, "draw_rollouts", draw),
        patch.object(loop, "learning_rate", rate),
        patch.object(StepHealth, "after_updates", keep),
    ):
        train(build_config(values=BASE | {"steps": steps, "out": f"{folder}/run"} | changes))
        evaluated = load_run(f"{folder}/run").eval
    kept = pd.DataFrame(rows)
    if len(evaluated):
        kept["accuracy"] = kept["step"].map(evaluated.groupby("step")["accuracy"].mean())
    made = pd.read_csv(StringIO(kept.to_csv(index=False, float_format="%.4g")), dtype=str)
    made.insert(0, "run", name)
    others = pd.read_csv(out, dtype=str).query("run != @name") if out.exists() else made[:0]
    pd.concat([others, made]).sort_values("run", kind="stable").to_csv(out, index=False)


def main() -> None:
    """Make all logs, or those named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[*SICK, *HEALTHY])
    parser.add_argument(
        "--model", help="folder of a pretrained model; default: the embedded policy"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--at", type=int, default=26)
    parser.add_argument("--set", nargs="*", default=[], metavar="PATH=VALUE")
    parser.add_argument("--out", type=Path, default=LOGS)
    given = parser.parse_args()
    for name in given.only:
        changes = (SICK | HEALTHY)[name] | ({"policy.model": given.model} if given.model else {})
        changes |= dict(pair.split("=", 1) for pair in given.set)
        make(name, changes, given.steps, 1 if name == "kl_k1" else given.at, given.out)
        print(name, flush=True)


if __name__ == "__main__":
    main()
