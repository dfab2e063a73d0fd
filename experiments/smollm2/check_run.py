"""Training, resuming, forks and rotation on a real model against plain PyTorch.

    python -m experiments.smollm2.check_run smollm2 runs/check

Trains three steps of the sums, and again with an interruption after the second. Step 3 is then made in three other ways: by the resumed
run, by `fork`, and by `torch.autograd.grad` and `torch.optim.AdamW` from the recorded coefficients of the tokens. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import sharpscope
from experiments.smollm2.check import flat_gradient, log_probabilities
from sharpscope.forks.start import Start, resolve

STEPS, ROWS = 3, 16
ARM = "grpo-sg+weight.U=4"
SETTINGS = ["checkpoint.every=1", "checkpoint.keep_last=3", "evaluation.every=0", "probes.every=0"]
SETTINGS += [
    "recording.tokens_every=1",
    "recording.token_gradients_every=0",
    "recording.rotation_every=0",
]


def train(*words: str, until: Path | None = None) -> None:
    """Run the command; with `until`, kill it once that checkpoint is there."""
    command = [sys.executable, "-m", "sharpscope", "run", *words, "--quiet"]
    if until is None:
        subprocess.run(command, check=True)
        return
    process = subprocess.Popen(command)
    while not until.exists() and process.poll() is None:
        time.sleep(0.1)
    process.kill()
    process.wait()


def checkpoint(folder: Path, step: int) -> Path:
    """Folder of a run's checkpoint."""
    return folder / "checkpoints" / f"step-{step:06d}"


def state(folder: Path, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and optimizer state of a checkpoint."""
    files = (
        checkpoint(folder, step) / name for name in ("model.safetensors", "optimizer.safetensors")
    )
    weights, moments = map(load_file, files)
    return weights, moments


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    """Whether tensors are equal bit for bit, in words."""
    unequal = [name for name in other if not torch.equal(one[name], other[name])]
    return "bit for bit" if not unequal else f"{len(unequal)} of {len(other)} tensors differ"


class Step:
    """The recorded completions of one step as plain tensors."""

    def __init__(self, folder: Path, step: int) -> None:
        run = sharpscope.load_run(folder)
        words = AutoTokenizer.from_pretrained(checkpoint(folder, step))
        self.tokens = run.tokens(steps=[step]).sort_values(["rollout", "position"])
        self.updates = run.updates[run.updates["step"] == step].sort_values("update")
        rows = run.rollouts[run.rollouts["step"] == step].sort_values("rollout")
        drawn = self.tokens.groupby("rollout")["token_id"].apply(list)
        prompts = {row.rollout: words(row.prompt)["input_ids"] for row in rows.itertuples()}
        self.ids = {row: torch.tensor([*prompt, *drawn[row]]) for row, prompt in prompts.items()}
        self.prompt = {row: len(prompt) for row, prompt in prompts.items()}

    def gradient(self, model: nn.Module, coefficient: pd.Series) -> Tensor:
        """Σ c ∇ ln π over the tokens, (P,), `ROWS` completions at a time."""
        total = torch.zeros(sum(p.numel() for p in model.parameters()))
        used = self.tokens.assign(c=coefficient.to_numpy())
        used = used[used["c"] != 0]
        groups: list[tuple[int, pd.DataFrame]] = list(used.groupby("rollout"))
        for begin in range(0, len(groups), ROWS):
            some = groups[begin : begin + ROWS]
            ids = nn.utils.rnn.pad_sequence([self.ids[row] for row, _ in some], batch_first=True)
            c = torch.zeros(ids.shape)
            for line, (row, own) in enumerate(some):
                c[line, self.prompt[row] + own["position"].to_numpy()] = torch.tensor(
                    own["c"].to_numpy()
                ).float()
            # causal: padding changes nothing
            total += flat_gradient((c * log_probabilities(model, ids)).sum(), model)
        return total


def plain_step(folder: Path, model: nn.Module, step: Step, lr: float) -> Iterator[Tensor]:
    """Make the step with PyTorch's AdamW from the checkpoint before it; yields the gradient of each update."""
    named = dict(model.named_parameters())
    weights, moments = state(folder, STEPS - 1)
    model.load_state_dict(weights, strict=False)
    optimizer = torch.optim.AdamW(named.values(), lr=lr, weight_decay=0.0)
    for key, value in moments.items():
        name, entry = key.rsplit("::", 1)
        optimizer.state[named[name]][entry] = value
    for row in step.updates.itertuples():
        chosen = step.tokens["loss_coef"].where(step.tokens["update"] == row.update, 0.0)
        gradient = step.gradient(model, chosen)
        yield gradient
        clipped = gradient * min(1.0, 1.0 / float(gradient.double().norm()))
        for p, part in zip(
            named.values(), clipped.split([p.numel() for p in named.values()]), strict=True
        ):
            p.grad = part.view_as(p)
        optimizer.step()


def angle(one: Tensor, other: Tensor) -> float:
    """Angle between two vectors [degrees]."""
    one, other = one.double() / one.double().norm(), other.double() / other.double().norm()
    return math.degrees(2 * math.atan2(float((one - other).norm()), float((one + other).norm())))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    whole, cut = given.out / "whole", given.out / "interrupted"
    sets = [word for field in SETTINGS for word in ("--set", field)]
    base = ["experiments/smollm2/sums.yaml", "--model", given.model, "--steps", str(STEPS), *sets]
    if not whole.exists():
        train(*base, "--out", str(whole))
    if not cut.exists():
        train(*base, "--out", str(cut), until=checkpoint(cut, STEPS - 1))
        train("--resume", str(cut))
    print("| | equal to step 3 of the run | processor s |\n|---|---|---|")
    before, _ = state(whole, STEPS - 1)
    after, moments = state(whole, STEPS)
    again, again_moments = state(cut, STEPS)
    print(
        f"| weights and AdamW's moments of the resumed run | {same(again | again_moments, after | moments)} | |"
    )
    config, began = resolve("fork", whole, None, None, None, ()), time.process_time()
    place = checkpoint(whole, STEPS - 1)
    start = Start(config, {"grpo": config.method}, place)
    start.update("grpo", 0)
    moved = dict(start.policy.model.named_parameters())
    text = same(
        {name: value.detach() for name, value in moved.items()},
        {n: v for n, v in after.items() if n in moved},
    )
    print(
        f"| weights after `fork`'s update | {text} | {time.process_time() - began:.0f} |",
        flush=True,
    )
    del start, moved, again, again_moments, moments
    model = AutoModelForCausalLM.from_pretrained(place).eval()
    step, began = Step(whole, STEPS), time.process_time()
    for row, gradient in zip(
        step.updates.itertuples(), plain_step(whole, model, step, config.optimizer.lr), strict=True
    ):
        error = abs(float(gradient.double().norm()) / row.grad_norm - 1)
        print(
            f"| gradient norm of update {row.update}: {row.grad_norm:.4f} | relative error {error:.1e} | |"
        )
    named = dict(model.named_parameters())
    move = torch.cat([(after[name] - before[name]).reshape(-1) for name in named])
    plain = torch.cat([(p.detach() - before[name]).reshape(-1) for name, p in named.items()])
    error = float((move - plain).double().norm() / move.double().norm())
    seconds = time.process_time() - began
    print(
        f"| change of the weights by plain autograd and AdamW | relative error {error:.1e} | {seconds:.0f} |",
        flush=True,
    )
    began = time.process_time()
    found = sharpscope.rotate([ARM], run=whole, checkpoint=STEPS - 1)
    seconds = time.process_time() - began
    weight = found.weights["weight"].to_numpy()
    assert np.allclose(found.weights["probability"], np.exp(step.tokens["logp"]), rtol=1e-3), (
        "other tokens"
    )
    model.load_state_dict(before, strict=False)
    length = step.tokens.groupby("rollout")["position"].transform("size")
    share = step.tokens["advantage"] / length
    expected = angle(step.gradient(model, share), step.gradient(model, share * weight))
    rotation = float(found.table["gradient_rotation"][0])
    print(
        f"| `rotate`, {ARM}: {rotation:.3f}° | {expected:.3f}° by plain autograd | {seconds:.0f} |"
    )


if __name__ == "__main__":
    main()
