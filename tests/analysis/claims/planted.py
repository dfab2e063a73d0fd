"""Studies with a planted truth, one maker a claim: `make(truth, rng, seeds, tails)` → runs.

`truth` is "effect" (of the claimed direction and of a size that matters), "none", or "wrong" (the opposite direction).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from sharpscope.analysis import claims
from tests.analysis.claims.frames import draw, frame_run, paired_study, study, tokens_frame

SIGN = {"effect": 1.0, "none": 0.0, "wrong": -1.0}
Rng = np.random.Generator


def token_claim(**by_truth: dict[str, Any]) -> Any:
    def make(truth: str, rng: Rng, seeds: int, tails: str) -> Any:
        return study(
            *(frame_run(seed=s, tokens=tokens_frame(rng, 6, 200, tails=tails, **by_truth[truth])) for s in range(seeds))
        )

    return make


score_norm = token_claim(effect={"slope": 1.0}, none={"slope": 0.0}, wrong={"slope": -1.0})
dominance = token_claim(
    effect={"concentration": 3.5}, none={"concentration": 0.0}, wrong={"slope": 0.3, "concentration": 0.0}
)
influence = token_claim(effect={"low_influence": -2.0}, none={}, wrong={"low_influence": 2.0})


def sharpness(truth: str, rng: Rng, seeds: int, tails: str) -> Any:
    return paired_study(
        seeds, -0.4 * SIGN[truth], base=0.1, noise=0.005, tails=tails, measure="sharpness", rng=rng, relative=True
    )


def generalization(truth: str, rng: Rng, seeds: int, tails: str) -> Any:
    return paired_study(seeds, 0.1 * SIGN[truth], noise=0.02, tails=tails, rng=rng, unseen=0.3, train=0.7)


def grid(truth: str, rng: Rng, seeds: int, tails: str, hidden: bool = True) -> Any:
    """Learning rate raises sharpness and gap in every truth; within a learning rate only the planted tie is left."""
    runs = []
    for seed in range(seeds):
        for lr in (1e-4, 2e-4, 4e-4):
            for size in (4, 8):
                for decay in (0.0, 1.0):
                    common = np.log2(lr / 1e-4) * hidden
                    own = rng.normal()
                    value = float(np.exp(common + own))
                    gap = 0.1 + 0.05 * common + 0.03 * SIGN[truth] * own + draw(rng, tails, 1, 0.01)[0]
                    config = {"optimizer": {"lr": lr, "weight_decay": decay}}
                    config |= {"rollout": {"group_size": size, "prompts_per_step": 24}}
                    options = {"answers": 40_000, "columns": {"lr": lr, "updates": 30}, "config": config}
                    options |= {"heldout": 0.7 - gap, "train": 0.7, "sharpness": value}
                    runs.append(frame_run(seed=seed, tag=f"-{lr:g}-{size}-{decay:g}", **options))
    return study(*runs)


def smoothness(truth: str, rng: Rng, seeds: int, tails: str) -> Any:
    runs = []
    for seed in range(seeds):
        level = 0.3 * np.exp(0.2 * rng.normal())
        for method, scale in (("grpo", 1.0), ("grpo-sg", 1 - 0.4 * SIGN[truth])):
            # the treatment's norms are larger as a whole, which must not count
            norms = 5 ** (method == "grpo-sg") * np.exp(draw(rng, tails, 200, level * scale))
            runs.append(frame_run(method, seed, steps=200, columns={"grad_norm": norms}))
    return study(*runs)


RIVALS = ("grpo-sg-shuffled", "grpo-sg-reverse")


def alignment(truth: str, rng: Rng, seeds: int, tails: str, as_good: str = "", missing: str = "") -> Any:
    """The treatment beats all rivals by 0.1, by 0, or loses; `as_good` names one rival that is as good as it."""
    runs = []
    for seed in range(seeds):
        level = 0.5 + 0.05 * rng.normal()
        for name in ("grpo-sg", *RIVALS, "grpo"):
            if name == missing:
                continue
            better = name in ("grpo-sg", as_good)
            value = level + 0.1 * SIGN[truth] * better + draw(rng, tails, 1, 0.02)[0]
            runs.append(frame_run(name, seed, heldout=value))
    return study(*runs)


RATES = (5e-5, 1e-4, 2e-4)


def learning_rate(truth: str, rng: Rng, seeds: int, tails: str, as_good: float = 0.0) -> Any:
    """The treatment at 1e-4 beats the baseline at every rate by 0.1, by 0, or loses; at the rate `as_good` they are equal."""
    runs = []
    for seed in range(seeds):
        level = 0.5 + 0.05 * rng.normal()
        value = level + 0.1 * SIGN[truth] + draw(rng, tails, 1, 0.02)[0]
        runs.append(frame_run("grpo-sg", seed, heldout=value))
        for rate in RATES:
            value = level + 0.1 * SIGN[truth] * (rate == as_good) + draw(rng, tails, 1, 0.02)[0]
            config = {"optimizer": {"lr": rate}}
            runs.append(frame_run("grpo", seed, config=config, heldout=value, tag=f"-{rate:g}"))
    return study(*runs)


def entropy(truth: str, rng: Rng, seeds: int, tails: str, stable: bool = True) -> Any:
    """Entropy moves by the mean of c·polarity (or not, or against it); cov-grpo drifts a third as much (or more)."""
    runs = []
    for seed in range(seeds):
        for method in ("grpo", *(("cov-grpo",) if stable else ())):
            push = rng.normal(size=60)
            steps, each = np.repeat(np.arange(1, 61), 4), np.repeat(push, 4)
            tokens = pd.DataFrame({"step": steps, "loss_coef": -1.0, "polarity": -each, "logp": -0.5})
            moved = np.cumsum(0.01 * SIGN[truth] * push)
            slope = {"effect": 1 / 3, "none": 1.0, "wrong": 2.0}[truth] if method == "cov-grpo" else 1.0
            drift = -0.3 * slope * (1 + 0.2 * rng.normal()) * np.arange(60) / 60
            level = 1 + drift + moved - np.linspace(0, moved[-1], 60) + draw(rng, tails, 60, 0.005)
            place = {"functional": "nll", "quantity": "entropy"}
            rows = [place | {"step": step, "value": value} for step, value in enumerate(level, 1)]
            runs.append(frame_run(method, seed, steps=60, tokens=tokens, probes=rows))
    return study(*runs)


def lucky(truth: str, rng: Rng, seeds: int, tails: str) -> Any:
    """Both methods' tokens are drawn alike; the treatment's unlikely tokens with A > 0 pull half, as much, or twice."""
    runs = []
    for seed in range(seeds):
        for method in ("grpo", "grpo-sg"):
            tokens = tokens_frame(rng, 4, 500, tails=tails, concentration=0.2)
            chosen = (tokens["logp"] < np.log(0.25)) & (tokens["advantage"] > 0)
            factor = {"effect": 0.5, "none": 1.0, "wrong": 2.0}[truth]
            if method == "grpo-sg":
                tokens.loc[chosen, ["loss_coef", "weight"]] *= factor
            runs.append(frame_run(method, seed, tokens=tokens))
    return study(*runs)


def fork_frame(
    rng: Rng, effects: dict[str, float], outcome: str, batches: int = 12, noise: float = 0.05, tails: str = "normal"
) -> pd.DataFrame:
    """Table `forks` of one state: the reference `grpo` changes the outcome by −0.02; each arm by 1 + its effect times as much.

    Of `sam_sharpness` the value is 0.1·e^effect instead, with half of the completions correct.
    """
    rows = []
    for batch in range(batches):
        shared = 0.002 * rng.normal()
        for arm, effect in {"grpo": 0.0, **effects}.items():
            own = effect + (draw(rng, tails, 1, noise)[0] if arm != "grpo" else 0.0)
            value = 0.1 * np.exp(own) if outcome == "sam_sharpness" else 0.5 + shared - 0.02 * (1 + own)
            base = {"step": 10, "fork": "a", "batch": batch, "arm": arm, "reference": "grpo", "valid": True}
            rows.append(base | {"comparison": "kl", "outcome": outcome, "value": value, "start": 0.5 + shared})
            if outcome == "sam_sharpness":
                rows.append(base | {"comparison": "kl", "outcome": "train_failure", "value": 0.5, "start": 0.5})
            turned = {"comparison": "step", "outcome": "update_rotation", "start": None}
            rows.append(base | turned | {"value": 0.0 if arm == "grpo" else 12.0})
    return pd.DataFrame(rows)


def unlikely(truth: str, rng: Rng, seeds: int, tails: str) -> Any:
    """An update with the unlikely tokens alone raises the failure, leaves it, or lowers it; the likely ones always lower it."""
    low = {"effect": -1.5, "none": -1.0, "wrong": 0.0}[truth]
    run = frame_run(seed=0)
    run.forks = fork_frame(rng, {"low": low, "high": 0.0}, "heldout_failure", tails=tails)
    return study(run)


MAKERS = {
    "C2": score_norm,
    "C3": dominance,
    "C4": sharpness,
    "C6": grid,
    "C7": generalization,
    "C8": smoothness,
    "C9": unlikely,
    "C10": alignment,
    "C12": entropy,
    "C13": lucky,
    "C14": learning_rate,
}
"""Claim → maker of its studies."""
SEEDS = {"C2": 2, "C3": 2, "C9": 3, "C6": 2, "C7": 10, "C10": 10}
"""Seeds of an ordinary study; 8 where not named. The token claims' clusters are steps × seeds."""
NOT_SUPPORTED = ("refuted", "inconclusive")


def verdicts(runs: Any, names: list[str] | None = None, **options: Any) -> list[claims.Verdict]:
    return claims.judge(claims.study_of(runs, **options), names)[0]


def verdict(runs: Any, claim: str, **options: Any) -> claims.Verdict:
    (result,) = verdicts(runs, [claim], **options)
    return result


def made(
    claim: str, truth: str, tails: str = "normal", seeds: int | None = None, stream: int = 0, **options: Any
) -> Any:
    rng = np.random.default_rng([stream, *claim.encode()])
    return MAKERS[claim](truth, rng, seeds or SEEDS.get(claim, 8), tails, **options)
