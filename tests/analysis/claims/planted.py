"""Runs made of frames, and studies with a planted truth, one maker a claim: `make(truth, rng, seeds, tails)` → runs.

`truth` is "effect" (of the claimed direction and of a size that matters), "none", or "wrong" (the opposite direction).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from sharpscope.analysis import claims

CONFIG: dict[str, Any] = {
    "task": {"kind": "knights_knaves", "train_size": 100, "people": 3},
    "policy": {"model": "embedded:knights_knaves"},
    "optimizer": {"lr": 1e-4, "beta1": 0.9, "weight_decay": 0.0},
    "rollout": {"prompts_per_step": 24, "group_size": 8, "temperature": 1.0},
}


@dataclass(eq=False)
class FrameRun:
    """Has what the claims read of a `sharpscope.traces.Run`."""

    name: str
    method: str
    seed: int
    config: dict[str, Any]
    steps: pd.DataFrame
    eval: pd.DataFrame
    probes: pd.DataFrame
    token_frame: pd.DataFrame | None = None
    status: str = "finished"
    task: str = "knights_knaves"
    info: dict[str, Any] = field(
        default_factory=lambda: {"parameters": 900_000, "vocabulary": None}
    )
    reads: list[Any] = field(default_factory=list)
    reductions: None = None
    forks: pd.DataFrame = field(default_factory=pd.DataFrame)
    probe_prompts: pd.DataFrame = field(default_factory=pd.DataFrame)
    updates: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def token_steps(self) -> list[int]:
        return (
            [] if self.token_frame is None else sorted(self.token_frame["step"].unique().tolist())
        )

    def rows(self, table: str) -> int:
        return 0 if self.token_frame is None else len(self.token_frame)

    def tokens(self, steps=None, columns=None) -> pd.DataFrame:
        frame = self.token_frame
        self.reads.append((tuple(steps), tuple(columns)))
        blank = {name: np.nan for name in columns if name not in frame}
        return frame[frame["step"].isin(steps)].assign(**blank)[list(columns)]


def study(*runs: FrameRun) -> Any:
    """What `test_claims` takes."""
    return SimpleNamespace(by_name={run.name: run for run in runs})


def eval_frame(
    rows: list[tuple[int, str, float]], n: int = 400, shift: float = 0.0
) -> pd.DataFrame:
    """(step, split, accuracy) as greedy eval rows, and rows at temperature 1 whose accuracy is higher by `shift`."""
    table = [
        {
            "step": step,
            "split": split,
            "level": "3",
            "n": n,
            "k": 1,
            "accuracy": value + more,
            "temperature": heat,
        }
        for step, split, value in rows
        for heat, more in ((0.0, 0.0), (1.0, shift))
    ]
    return pd.DataFrame(
        table, columns=["step", "split", "level", "n", "k", "accuracy", "temperature"]
    )


PROBE_COLUMNS = [
    "step",
    "probe_set",
    "functional",
    "parameters",
    "quantity",
    "value",
    "rho",
    "converged",
    "ceiling",
    "prompts",
]


def probe_frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    base = {"probe_set": "train-0", "functional": "expected_failure", "parameters": "all"}
    base |= {"rho": np.nan, "converged": None}
    return pd.DataFrame([base | row for row in rows], columns=PROBE_COLUMNS)


def steps_frame(rng: np.random.Generator, count: int, **columns: Any) -> pd.DataFrame:
    t = np.arange(1, count + 1)
    reward = 1 - 2 * np.exp(-t / (count / 4)) + rng.normal(0, 0.05, count)
    base = {
        "step": t,
        "updates": 1,
        "reward_mean": reward,
        "accuracy": 0.6,
        "update_norm": 0.01,
        "lr": 1e-4,
    }
    base |= {
        "entropy_mean": 1.0 + rng.normal(0, 0.01, count),
        "grad_norm": np.exp(rng.normal(0, 0.3, count)),
    }
    return pd.DataFrame(base | columns)


def frame_run(
    method: str = "grpo",
    seed: int = 0,
    *,
    steps: int = 40,
    config: dict[str, Any] | None = None,
    heldout: float = 0.5,
    unseen: float | None = None,
    train: float | None = None,
    sharpness: float | None = None,
    probes: list[dict[str, Any]] | None = None,
    columns: dict[str, Any] | None = None,
    tokens: pd.DataFrame | None = None,
    tag: str = "",
    answers: int = 400,
    ceiling: float | None = 1.0,
    shift: float = 0.0,
) -> FrameRun:
    """One run. `config` is laid over CONFIG's parts; `sharpness` becomes sam, asam and largest at three steps."""
    rng = np.random.default_rng([seed, 0, *method.encode(), *tag.encode()])
    whole = {key: {**value, **(config or {}).get(key, {})} for key, value in CONFIG.items()}
    whole |= {
        "steps": steps,
        "seed": seed,
        "name": f"{method}{tag}-{seed}",
        "method": {"name": method},
    }
    rows: list[tuple[int, str, float]] = [(0, "heldout", 0.2), (steps, "heldout", heldout)]
    rows += [] if unseen is None else [(steps, "unseen", unseen)]
    rows += [] if train is None else [(steps, "train", train)]
    surface = list(probes or [])
    if sharpness is not None:
        for step, functional in itertools.product(
            (0, steps // 2, steps), ("expected_failure", "nll")
        ):
            value = 0.2 if step == 0 else sharpness
            row = {"step": step, "functional": functional}
            most = ceiling if functional == "expected_failure" else None
            surface += [
                {**row, "quantity": q, "value": value, "rho": 0.05, "ceiling": most}
                for q in ("sam", "asam")
            ]
            surface.append({**row, "quantity": "largest", "value": 10 * value})
    return FrameRun(
        name=f"{method}{tag}-{seed}",
        method=method,
        seed=seed,
        config=whole,
        steps=steps_frame(rng, steps, **(columns or {})),
        eval=eval_frame(rows, answers, shift),
        probes=probe_frame(surface),
        token_frame=tokens,
    )


def draw(
    rng: np.random.Generator, kind: str, size: int | tuple[int, ...], scale: float
) -> np.ndarray:
    """Noise: normal, or heavy-tailed (Student's t with 2 degrees of freedom, without a variance)."""
    return scale * (rng.normal(size=size) if kind == "normal" else rng.standard_t(2, size=size))


def tokens_frame(
    rng: np.random.Generator,
    steps: int = 8,
    count: int = 300,
    *,
    slope: float = 1.0,
    hidden_slope: float = 0.0,
    low_influence: float = 0.0,
    correlated: float = 0.0,
    tails: str = "normal",
    concentration: float = 0.3,
) -> pd.DataFrame:
    """Tokens of several steps whose norm is (1 − π)^slope·‖h‖·noise, `concentration` its spread [ln]; ‖h‖ is (1 − π)^hidden_slope.

    `low_influence`: mean influence of the lowest tenth by probability, over noise of scale 1; `correlated`: standard deviation of a
    shift of influence and ln norm that all tokens of a step share.
    """
    parts = []
    for step in range(1, steps + 1):
        rest = np.clip(rng.beta(0.3, 1.0, count), 1e-5, 1 - 1e-5)
        logp = np.log1p(-rest)
        hidden = np.exp(0.2 * rng.normal(size=count)) * rest**hidden_slope
        logit_norm = rest * rng.uniform(1.05, 1.35, count)
        shift = correlated * rng.normal()
        reach = max(5.0, 4 * concentration)  # heavy tails are cut off
        norm = (
            3
            * rest**slope
            * hidden
            * np.exp(draw(rng, tails, count, concentration).clip(-reach, reach) + shift)
        )
        advantage = rng.normal(size=count)
        low = rest >= np.quantile(rest, 0.9)
        influence = draw(rng, tails, count, 1.0) + correlated * rng.normal() + low_influence * low
        exact = np.zeros(count, dtype=bool)
        local = 0.95 * norm
        order = np.argsort(-local)
        exact[order[:8]] = True
        exact[rng.choice(order[8:], 16, replace=False)] = True
        chance = np.full(count, 16 / (count - 8))
        chance[order[:8]] = 1.0
        table = {"step": step, "position": np.arange(count) % 40, "logp": logp, "logit": 10.0}
        table |= {"collision": (1 - rest) ** 2 + rest**2 * rng.uniform(0.1, 0.8, count)}
        table |= {"polarity": rng.normal(size=count), "advantage": advantage, "weight": 1.0}
        table |= {
            "loss_coef": -advantage / count,
            "heldout_influence": influence,
            "score_norm_local": local,
        }
        table |= {"logit_grad_norm": logit_norm, "head_grad_norm": logit_norm * hidden}
        measured = {"draw_probability": chance, "score_norm": norm, "score_norm_std_error": 0.0}
        parts.append(
            pd.DataFrame(table | {name: np.where(exact, v, np.nan) for name, v in measured.items()})
        )
    return pd.concat(parts, ignore_index=True)


def paired_study(
    seeds: int,
    effect: float = 0.0,
    *,
    base: float = 0.5,
    noise: float = 0.02,
    tails: str = "normal",
    measure: str = "heldout",
    rng: np.random.Generator | None = None,
    treatment: str = "grpo-sg",
    treatment_config: dict[str, Any] | None = None,
    relative: bool = False,
    **options: Any,
) -> Any:
    """Pairs of runs whose `measure` differs by `effect` (times `base` if `relative`); seeds shift both alike."""
    rng = rng or np.random.default_rng(0)
    runs = []
    for seed in range(seeds):
        level = base * (1 + 0.1 * rng.normal())
        for method in ("grpo", treatment):
            value = level + (effect * (base if relative else 1.0) if method == treatment else 0.0)
            value += draw(rng, tails, 1, noise)[0]
            config = treatment_config if method == treatment else None
            runs.append(frame_run(method, seed, config=config, **{measure: value}, **options))
    return study(*runs)


SIGN = {"effect": 1.0, "none": 0.0, "wrong": -1.0}
Rng = np.random.Generator


def token_claim(**by_truth: dict[str, Any]) -> Any:
    def make(truth: str, rng: Rng, seeds: int, tails: str) -> Any:
        return study(
            *(
                frame_run(seed=s, tokens=tokens_frame(rng, 6, 200, tails=tails, **by_truth[truth]))
                for s in range(seeds)
            )
        )

    return make


score_norm = token_claim(effect={"slope": 1.0}, none={"slope": 0.0}, wrong={"slope": -1.0})
dominance = token_claim(
    effect={"concentration": 3.5},
    none={"concentration": 0.0},
    wrong={"slope": 0.3, "concentration": 0.0},
)
influence = token_claim(effect={"low_influence": -2.0}, none={}, wrong={"low_influence": 2.0})


def sharpness(truth: str, rng: Rng, seeds: int, tails: str) -> Any:
    return paired_study(
        seeds,
        -0.4 * SIGN[truth],
        base=0.1,
        noise=0.005,
        tails=tails,
        measure="sharpness",
        rng=rng,
        relative=True,
    )


def generalization(truth: str, rng: Rng, seeds: int, tails: str) -> Any:
    return paired_study(
        seeds, 0.1 * SIGN[truth], noise=0.02, tails=tails, rng=rng, unseen=0.3, train=0.7
    )


def grid(truth: str, rng: Rng, seeds: int, tails: str) -> Any:
    """Learning rate raises sharpness and gap in every truth; within a learning rate only the planted tie is left."""
    runs = []
    for seed in range(seeds):
        for lr in (1e-4, 2e-4, 4e-4):
            for size in (4, 8):
                for decay in (0.0, 1.0):
                    common, own = np.log2(lr / 1e-4), rng.normal()
                    value = float(np.exp(common + own))
                    gap = (
                        0.1
                        + 0.05 * common
                        + 0.03 * SIGN[truth] * own
                        + draw(rng, tails, 1, 0.01)[0]
                    )
                    config = {"optimizer": {"lr": lr, "weight_decay": decay}}
                    config |= {"rollout": {"group_size": size, "prompts_per_step": 24}}
                    options = {
                        "answers": 40_000,
                        "columns": {"lr": lr, "updates": 30},
                        "config": config,
                    }
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


def alignment(
    truth: str, rng: Rng, seeds: int, tails: str, as_good: str = "", missing: str = ""
) -> Any:
    """The treatment beats all rivals by 0.1, by 0, or loses; `as_good` names one rival that is as good as it."""
    runs = []
    for seed in range(seeds):
        level = 0.5 + 0.05 * rng.normal()
        for name in ("grpo-sg", "grpo-sg-shuffled", "grpo-sg-reverse", "grpo"):
            better = name in ("grpo-sg", as_good)
            value = level + 0.1 * SIGN[truth] * better + draw(rng, tails, 1, 0.02)[0]
            runs += [frame_run(name, seed, heldout=value)] if name != missing else []
    return study(*runs)


def learning_rate(truth: str, rng: Rng, seeds: int, tails: str) -> Any:
    """The treatment at 1e-4 beats the baseline at every rate by 0.1, by 0, or loses."""
    runs = []
    for seed in range(seeds):
        level = 0.5 + 0.05 * rng.normal()
        value = level + 0.1 * SIGN[truth] + draw(rng, tails, 1, 0.02)[0]
        runs.append(frame_run("grpo-sg", seed, heldout=value))
        for rate in (5e-5, 1e-4, 2e-4):
            options = {
                "config": {"optimizer": {"lr": rate}},
                "heldout": level + draw(rng, tails, 1, 0.02)[0],
            }
            runs.append(frame_run("grpo", seed, tag=f"-{rate:g}", **options))
    return study(*runs)


def entropy(truth: str, rng: Rng, seeds: int, tails: str) -> Any:
    """Entropy moves by the mean of c·polarity (or not, or against it); cov-grpo drifts a third as much (or more)."""
    runs = []
    for seed in range(seeds):
        for method in ("grpo", "cov-grpo"):
            push = rng.normal(size=60)
            steps, each = np.repeat(np.arange(1, 61), 4), np.repeat(push, 4)
            tokens = pd.DataFrame(
                {"step": steps, "loss_coef": -1.0, "polarity": -each, "logp": -0.5}
            )
            moved = np.cumsum(0.01 * SIGN[truth] * push)
            slope = (
                {"effect": 1 / 3, "none": 1.0, "wrong": 2.0}[truth] if method == "cov-grpo" else 1.0
            )
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
    rng: Rng,
    effects: dict[str, float],
    outcome: str,
    batches: int = 12,
    noise: float = 0.05,
    tails: str = "normal",
) -> pd.DataFrame:
    """Table `forks` of one state: the reference `grpo` changes the outcome by −0.02; each arm by 1 + its effect times as much.

    Of `sam_sharpness` the value is 0.1·e^effect instead, with half of the completions correct.
    """
    rows = []
    for batch in range(batches):
        shared = 0.002 * rng.normal()
        for arm, effect in {"grpo": 0.0, **effects}.items():
            own = effect + (draw(rng, tails, 1, noise)[0] if arm != "grpo" else 0.0)
            value = (
                0.1 * np.exp(own) if outcome == "sam_sharpness" else 0.5 + shared - 0.02 * (1 + own)
            )
            base = {
                "step": 10,
                "fork": "a",
                "batch": batch,
                "arm": arm,
                "reference": "grpo",
                "valid": True,
            }
            rows.append(
                base
                | {"comparison": "kl", "outcome": outcome, "value": value, "start": 0.5 + shared}
            )
            if outcome == "sam_sharpness":
                rows.append(
                    base
                    | {"comparison": "kl", "outcome": "train_failure", "value": 0.5, "start": 0.5}
                )
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
    claim: str,
    truth: str,
    tails: str = "normal",
    seeds: int | None = None,
    stream: int = 0,
    **options: Any,
) -> Any:
    rng = np.random.default_rng([stream, *claim.encode()])
    return MAKERS[claim](truth, rng, seeds or SEEDS.get(claim, 8), tails, **options)
