"""Which figures the claims get: each a `Picture`, or one clear line that says what is missing for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis import claim_evidence as evidence
from sharpscope.analysis import claim_figures as figures
from sharpscope.analysis.claims import Verdict, study_of, test_claims
from sharpscope.analysis.claims.c07_generalisation import held_out
from sharpscope.analysis.claims.c11_oscillator import fitted_curves
from sharpscope.analysis.claims.measures import last_step
from sharpscope.analysis.figures.study import Picture
from sharpscope.analysis.figures.style import lines, save
from sharpscope.analysis.study import Study

if TYPE_CHECKING:
    from sharpscope.traces import Runs

_CONSTANT = re.compile(r"weight\.(?:of\.)?(\w+)=(-?[0-9.]+(?:e-?[0-9]+)?)")
DEFAULTS = {"alpha": 2.0, "tau": 9.0, "mu": 0.25, "L": 1.0, "U": 1.4}
"""The published constants of GRPO-SG's shaping; a calibrated tau has no fixed default and is not marked."""


def claim_pictures(
    runs: Runs, verdicts: Sequence[Verdict] | None = None, *, baseline: str = "grpo", treatment: str = "grpo-sg"
) -> Iterator[Picture]:
    """The figures of the claims, in their order. `verdicts`: from `test_claims` on the same runs; None: made here."""
    found = {v.claim: v for v in verdicts or test_claims(runs, baseline=baseline, treatment=treatment)}
    study = study_of(runs, baseline, treatment)
    colours = lines(study.methods)
    plans: list[tuple[str, str, str, str, Callable[[pd.DataFrame], Figure]]] = [
        ("C1", "violations", "logit_bounds", "Tokens outside the bounds of the logit gradient", evidence.bound_counts),
        ("C2", "sample", "exact_norms", "Exact score norms of some tokens of each step", evidence.norm_sample),
        ("C3", "lorenz", "dominance", "Lorenz curve of the tokens' parts of the gradient, mean over steps and seeds",
         evidence.dominance),
        ("C9", "influence", "influence_by_decile", "First-order influence on the held-out loss by decile of "
         "probability and sign of the advantage", figures.influence_by_decile),
        ("C5", "bound", "bound_tightness", "Held-out failure and the sharpness bound along training, its radius "
         "fixed on other seeds than those drawn", figures.bound_tightness),
        ("C6", "grid", "gap_against_sharpness", "Generalisation gap against adaptive sharpness over the grid",
         figures.gap_against_sharpness),
        ("C10", "comparisons", "shaping_ablation", "Held-out accuracy against each control and rival, paired by seed",
         figures.shaping_ablation),
        ("C13", "shares", "lucky_spikes", "Gradient share of lucky and of confident tokens",
         lambda frame: figures.lucky_spikes(frame, colours)),
        ("C12", "prediction", "entropy_prediction", "Predicted against measured change of entropy",
         lambda frame: figures.entropy_prediction(frame, colours)),
    ]  # fmt: skip
    for claim, key, name, caption, draw in plans:
        yield _picture(found.get(claim), claim, key, name, f"{caption} ({claim})", draw)
    for claim, (keys, unit) in _PAIRED.items():
        yield _pairs(found.get(claim), claim, keys, unit)
    yield _constants(study)
    yield _rewards(study)


def write_claim_figures(runs: Runs, out: str | Path, verdicts: Sequence[Verdict] | None = None) -> list[Path]:
    """Draw what can be drawn into `out` as PNG and SVG; returns the files."""
    return save_pictures(claim_pictures(runs, verdicts), out)


def save_pictures(pictures: Iterable[Picture], out: str | Path) -> list[Path]:
    """Save those that were drawn into `out` as PNG and SVG; returns the files."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    return [path for p in pictures if p.figure is not None for path in save(p.figure, folder, p.name)]


def _picture(
    verdict: Verdict | None, claim: str, key: str, name: str, caption: str, draw: Callable[[pd.DataFrame], Figure]
) -> Picture:
    frame = None if verdict is None else verdict.frames.get(key)
    if verdict is None or frame is None or not len(frame):
        why = "not tested" if verdict is None else verdict.reason
        return Picture(name, "", missing=f"{name.replace('_', ' ')}: {why}", claim=claim)
    return Picture(name, f"{caption}: {verdict.verdict}.", draw(frame), claim=claim)


_PAIRED: dict[str, tuple[dict[str, str], str]] = {
    "C4": ({"sharpness_sam": "plain (sam)", "sharpness_asam": "adaptive (asam)"}, "sharpness at the last probed step"),
    "C7": ({"heldout": "held-out", "unseen": "unseen sizes"}, "accuracy at the last evaluation [share]"),
    "C8": ({"roughness": "gradient norm"}, "median |ln g(t+1) − ln g(t)|"),
}
"""claim → (frame → title of its panel, unit): baseline against treatment, paired by seed."""


def _pairs(verdict: Verdict | None, claim: str, keys: dict[str, str], unit: str) -> Picture:
    name = f"pairs_{claim.lower()}"
    frames = (
        {} if verdict is None else {title: verdict.frames[key] for key, title in keys.items() if key in verdict.frames}
    )
    if verdict is None or not any(map(len, frames.values())):
        return Picture(
            name, "", missing=f"pairs of {claim}: {verdict.reason if verdict else 'not tested'}", claim=claim
        )
    caption = f"Baseline and treatment, paired by seed ({claim}): {verdict.verdict}."
    return Picture(name, caption, evidence.paired(frames, verdict.methods, unit), claim=claim)


def constants_frame(study: Study) -> pd.DataFrame:
    """constant, setting, seed, accuracy (held-out, last evaluation), default; from labels such as grpo-sg+weight.tau=4.

    Runs that change one constant alone, and the method's own runs at each constant's default, where it has one.
    """
    rows = []
    for run in study.alike(*study.methods).values():
        step = last_step(run)
        accuracy = None if step is None else held_out(run, step)
        if accuracy is None:
            continue
        if run.method == study.treatment:
            rows += [(name, value, run.seed, accuracy, True) for name, value in DEFAULTS.items()]
        else:
            match = _CONSTANT.fullmatch(run.method.removeprefix(f"{study.treatment}+"))
            if match is not None and run.method.startswith(f"{study.treatment}+"):
                rows.append((match[1], float(match[2]), run.seed, accuracy, False))
    frame = pd.DataFrame(rows, columns=["constant", "setting", "seed", "accuracy", "default"])
    varied = frame.loc[~frame["default"].astype(bool), "constant"].unique()
    return frame[frame["constant"].isin(varied)].astype({"default": bool})


def _constants(study: Study) -> Picture:
    frame = constants_frame(study)
    name = "constants_sensitivity"
    if not len(frame):
        return Picture(name, "", missing=f"constants: no run such as {study.treatment}+weight.tau=4 was evaluated")
    caption = "Held-out accuracy against each constant of the shaping; dashed: the published one."
    return Picture(name, caption, figures.constants_sensitivity(frame))


def _rewards(study: Study) -> Picture:
    chosen: dict[str, pd.DataFrame] = {}
    for method in (study.baseline, study.treatment):
        for name, run in sorted(study.alike(method).items()):
            if len(run.steps) >= 10 and run.steps["reward_mean"].notna().sum() >= 10:
                chosen[name] = fitted_curves(run)
                break
    if not chosen:
        return Picture("reward_fit", "", missing="reward fit: no finished run has 10 steps with a reward", claim="C11")
    caption = "Reward of one run a method with the damped oscillator and its overdamped limit (C11)."
    return Picture("reward_fit", caption, figures.reward_fit(chosen), claim="C11")
