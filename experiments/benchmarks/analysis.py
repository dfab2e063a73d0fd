"""Analysis: `diagnose` of a long log, `show`, `analyze` of one run and of a hundred, generation against `generate`."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

from experiments.benchmarks.common import ROOT, Row, child, costs, described, ratios, seconds
from sharpscope.config import build_config
from sharpscope.policy import load_policy, render_prompts, with_openings
from sharpscope.tasks import make_task


def _command(what: str, arguments: Sequence[str], folder: str, repeats: int, *texts: str) -> Row:
    """Processor seconds of a `sharpscope` command in new processes, after a first one; `texts`: required, stretch."""
    allowed = (0, 1) if arguments[0] == "diagnose" else (0,)  # 1: it has found something
    command = ["-m", "sharpscope", *arguments]
    found = [child(command, folder, allowed)[:2] for _ in range(repeats + 1)][1:]
    note = f"{statistics.median(wall for wall, _ in found):.3g} s of wall time"
    return Row.of_turns(what, [cpu for _, cpu in found], "s", *texts, note)


def diagnose(steps: int, repeats: int) -> list[Row]:
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
        what = f"`diagnose` of a log of {steps:,} steps"
        return [_command(what, ["diagnose", "log.jsonl"], folder, repeats, "≤ 2", "≤ 1")]


def show(repeats: int) -> list[Row]:
    """`show` of the example's run."""
    with tempfile.TemporaryDirectory() as folder:
        run = str(ROOT / "data" / "example" / "sums")
        return [_command("`show` of one run", ["show", run], folder, repeats, "", "")]


def analyze(repeats: int) -> list[Row]:
    """`analyze` of one run of the example, and of the 105 runs of data/reference."""
    sources = {"one run": ("example/sums", "≤ 8", "≤ 4"), "105": ("reference", "≤ 40", "≤ 20")}
    with tempfile.TemporaryDirectory() as folder:
        return [
            _command(
                f"`analyze` of {what}",
                ["analyze", str(ROOT / "data" / data), "--out", "page"],
                folder,
                repeats,
                *limits,
            )
            for what, (data, *limits) in sources.items()
        ]


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
    drawn: dict[str, list[int]] = {"ours": [], "theirs": []}  # tokens of each call

    def ours() -> None:
        out = generate(policy, prompts, size, spec, torch.Generator().manual_seed(0))
        drawn["ours"].append(int(out.completion_mask.sum()))

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
        drawn["theirs"].append(int((ended.cumsum(1) - ended == 0).sum()))

    found = costs({"ours": ours, "theirs": theirs}, repeats)
    counts = zip(drawn["ours"][1:], drawn["theirs"][1:], strict=True)
    times = ratios(found["theirs"], found["ours"])
    turns = [time * mine / other for time, (mine, other) in zip(times, counts, strict=True)]
    note = f"{len(prompts) * size} completions of {task} in {seconds(found['ours'])}; {described(policy.model)}"
    what = "generation, tokens a second against `generate`"
    return [Row.of_turns(what, turns, "×", "≥ 3", "", note)]
