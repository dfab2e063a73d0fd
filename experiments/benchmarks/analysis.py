"""Analysis: `diagnose` of a long log, `analyze` of one run and of a hundred, generation against `generate`."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

from experiments.benchmarks.common import ROOT, Row, child, costs
from sharpscope.config import build_config
from sharpscope.policy import load_policy, render_prompts, with_openings
from sharpscope.tasks import make_task


def _seconds(arguments: Sequence[str], folder: str) -> tuple[float, str]:
    """Wall seconds of a `sharpscope` command, and a note with its processor seconds."""
    wall, cpu, _ = child(["-m", "sharpscope", *arguments], folder)
    return wall, f"{cpu:.3g} s of processor time"


def diagnose(steps: int) -> list[Row]:
    """`diagnose` of a log of TRL's with this many steps."""
    draw = Random(0)
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "log.jsonl").open("w") as log:
            for step in range(1, steps + 1):
                values = {
                    "step": step,
                    "loss": draw.gauss(0, 0.1),
                    "reward": 1 - math.exp(-step / steps) + draw.gauss(0, 0.05),
                    "reward_std": 0.3 + draw.gauss(0, 0.02),
                    "kl": 1e-3 * step / steps,
                    "entropy": 0.5 + draw.gauss(0, 0.02),
                    "grad_norm": math.exp(draw.gauss(0, 0.3)),
                    "completions/mean_length": 200 + draw.gauss(0, 5),
                    "frac_reward_zero_std": abs(draw.gauss(0.2, 0.05)),
                }
                log.write(json.dumps(values) + "\n")
        seconds, note = _seconds(["diagnose", "log.jsonl"], folder)
    return [Row(f"`diagnose` of a log of {steps:,} steps", seconds, "s", "≤ 2", "≤ 1", note)]


def analyze(runs: Path | None = None) -> list[Row]:
    """`analyze` of one run of the example, and of all runs of a folder (data/reference)."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        one, note = _seconds(
            ["analyze", str(ROOT / "data" / "example" / "sums"), "--out", "one"], folder
        )
        rows.append(Row("`analyze` of one run", one, "s", "≤ 8", "≤ 4", note))
        data = runs or ROOT / "data" / "reference"
        many, note = _seconds(["analyze", str(data.resolve()), "--out", "many"], folder)
        rows.append(
            Row(
                f"`analyze` of {data.name}",
                many,
                "s",
                "≤ 40",
                "≤ 20",
                f"105 runs in data/reference; {note}",
            )
        )
    return rows


@torch.no_grad()
def generation(model: str, task: str, repeats: int, size: int) -> list[Row]:
    """Tokens per processor second of a step's completions against transformers' `generate` with its cache."""
    from sharpscope.policy.generation import generate, left_pad

    shape = [] if size == 8 else [f"rollout.prompts_per_step={size}", f"rollout.group_size={size}"]
    config = build_config(None, [f"task.kind={task}", f"policy.model={model}", *shape])
    policy, spec = load_policy(config.policy), config.rollout
    examples, size = (
        make_task(config.task).splits()["train"][: spec.prompts_per_step],
        spec.group_size,
    )
    prompts = render_prompts(with_openings(examples, policy), policy)
    drawn = {"ours": 0, "theirs": 0}

    def ours() -> None:
        out = generate(policy, prompts, size, spec, torch.Generator().manual_seed(0))
        drawn["ours"] = int(out.completion_mask.sum())

    def theirs() -> None:
        ids, present = (x.repeat_interleave(size, 0) for x in left_pad(prompts, policy.pad_id))
        sampling = {
            "do_sample": True,
            "temperature": spec.temperature,
            "top_k": 0,
            "pad_token_id": policy.pad_id,
        }
        out = policy.model.generate(
            input_ids=ids, attention_mask=present, max_new_tokens=spec.max_new_tokens, **sampling
        )
        new = out[:, ids.shape[1] :]
        ended = torch.isin(new, torch.tensor(policy.eos_ids)).int()
        drawn["theirs"] = int((ended.cumsum(1) - ended == 0).sum())

    found = costs({"ours": ours, "theirs": theirs}, repeats)
    ratio = found["theirs"].over(found["ours"]) * drawn["ours"] / drawn["theirs"]
    note = f"{len(prompts) * size} completions of {task}; {drawn['ours'] / found['ours'].cpu:.0f} tokens per processor second"
    return [Row("generation, tokens a second against `generate`", ratio, "×", "≥ 3", "", note)]
