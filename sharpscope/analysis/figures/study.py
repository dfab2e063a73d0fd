"""The figures of a study: each a Picture, or one line that says what is missing for it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pandas as pd

from sharpscope.analysis.claims import c01_logit_bounds, c02_score_norm, c03_dominance, c09_influence
from sharpscope.analysis.figures import steps, surface, tokens
from sharpscope.analysis.figures.style import Lines, Picture, lines
from sharpscope.analysis.frames import (
    density_nodes,
    eval_values,
    middle_radius,
    probe_values,
    slice_values,
    stability_values,
    step_values,
)
from sharpscope.analysis.statistics import FEWEST
from sharpscope.analysis.study import Study
from sharpscope.analysis.text import sampling
from sharpscope.analysis.weight_curve import weight_config

FIRST_ORDER = "_first_order"
MOST = 8
"""Settings that a figure can tell apart; of more, those with the most seeds are drawn, and one figure has them all."""
CARRIED = ["logp", "loss_coef", "weight", "score_norm_local"]
BAND = f"Line: mean over seeds; band: 95 % t-interval, below {FEWEST} seeds a thin line each"


def study_pictures(whole: Study) -> Iterator[Picture]:
    """Every figure of one study. `whole.reduced` has the results of the claims' reducers."""
    study = whole.largest(MOST)
    styles = lines(study.labels)
    values = step_values(study, list(steps.AXES))
    yield from _steps(values, styles)
    yield from _evaluations(whole, study, styles)
    yield from _weights(study, values, styles)
    for claim in (c01_logit_bounds, c02_score_norm, c03_dominance, c09_influence):
        yield claim.figure(study, styles)
    yield _attribution(study, styles)
    yield from _surface(study, styles)


def _steps(values: pd.DataFrame, styles: Lines) -> Iterator[Picture]:
    recorded = set(values["quantity"])
    if recorded & {"reward_mean", "accuracy"}:
        yield Picture("reward", f"Reward and accuracy on the training prompts. {BAND}.", steps.reward(values, styles))
    else:
        yield Picture("reward", "", missing="reward: none is recorded in these runs")
    if recorded & {"grad_norm", "update_norm"}:
        caption = f"Gradient norm before clipping and size of the update (geometric mean over seeds). {BAND}."
        yield Picture("gradient_norm", caption, steps.gradient_norm(values, styles))
    else:
        yield Picture("gradient_norm", "", missing="gradient norm: no update has been made yet")
    if "entropy_mean" in recorded:
        yield Picture("entropy", f"Entropy of the policy. {BAND}.", steps.entropy(values, styles))
    if recorded & set(steps.CLIPPING):
        caption = f"Clipped tokens, truncated completions, groups that teach nothing. {BAND}."
        yield Picture("clipping", caption, steps.clipping(values, styles))
    else:
        yield Picture("clipping", "", missing="clipping: no ratio, truncation or group is recorded in these runs")


def _evaluations(whole: Study, study: Study, styles: Lines) -> Iterator[Picture]:
    values = eval_values(study)
    if values.empty:
        why = "held-out accuracy: no evaluation was recorded (evaluation.every is 0, or the runs have only begun)"
        yield Picture("accuracy", "", missing=why)
        return
    caption = f"Accuracy at each evaluation, by split (`train` is trained on), pooled over sizes. {BAND}."
    yield Picture("accuracy", caption, steps.evaluations(values, styles))
    if len(whole.settings) >= 3:
        yield from _every_setting(whole, len(whole.settings) - len(study.settings))
    levels = values[values["level"] != "all"]
    if levels["level"].nunique() > 1:
        for temperature in sorted(levels["temperature"].unique()):
            name = sampling(temperature, "temperature_")
            figure = steps.evaluations_by_level(values, styles, float(temperature))
            yield Picture(f"accuracy_by_level_{name}", f"The same by size, {name.replace('_', ' ')}. {BAND}.", figure)
    rewards = eval_values(study, "reward_mean")
    if len(rewards):
        figure = steps.evaluations(rewards, styles, "mean reward of a completion [reward]")
        yield Picture("heldout_reward", f"Reward at each evaluation, by split (`train` is trained on). {BAND}.", figure)


def _every_setting(whole: Study, spare: int) -> Iterator[Picture]:
    """Final held-out accuracy of all settings, also of the `spare` ones that the other figures have no room for."""
    values = eval_values(whole)
    values = values[(values["level"] == "all") & (values["split"] == "heldout")]
    values = values[values["temperature"] == values["temperature"].max()]
    values = values[values["step"] == values.groupby("setting")["step"].transform("max")]
    if values.empty:
        return
    rest = f" The other figures show the {MOST} settings with the most seeds, {spare} are here alone." if spare else ""
    caption = (
        f"Held-out accuracy of every setting at its last evaluation, temperature {values['temperature'].iloc[0]:g}; pale "
        f"dots: seeds; diamond: mean; bar: 95 % t-interval, from {FEWEST} seeds on.{rest}"
    )
    yield Picture("settings", caption, steps.every_setting(values, lines(whole.labels)))


def _weights(study: Study, values: pd.DataFrame, styles: Lines) -> Iterator[Picture]:
    shapings = {s.label: [weight_config(run.info) for run in s.runs.values()] for s in study.settings}
    weighted = [label for label, own in shapings.items() if any(w.get("kind", "uniform") != "uniform" for w in own)]
    if not weighted:
        yield Picture("weights", "", missing="token weights: every method here has w = 1 (try grpo-sg)")
        return
    found = study.samples(["logp", "logit", "entropy", "weight"])
    samples = {label: found[label] for label in weighted if label in found}
    if samples:
        parts = [part[part["loss_coef"] != 0] for part in study.samples(CARRIED).values()]
        carried = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
        caption = (
            "Token weights: as a function, as observed against the probability of the token, and where along it the gradient "
            "is that they multiply (|c|·‖∇ ln π‖/w with the local norm; tokens of all settings that have a loss coefficient)."
        )
        functions = {label: shapings[label][0] for label in samples}
        figure = tokens.weights(samples, functions, styles, carried if len(carried) else None)
        yield Picture("weights", caption, figure)
    else:
        yield Picture("weights", "", missing="observed weights: no token rows (recording.tokens_every is 0)")
    caption = f"Token weights by step: mean, effective sample size, share on a bound. {BAND}."
    yield Picture("weight_statistics", caption, steps.weight_statistics(values, styles))


def _attribution(study: Study, styles: Lines) -> Picture:
    """Sums by decile in each update, then their mean over the updates of a run."""
    pieces = []
    for setting in study.settings:
        by_seed: dict[object, list[pd.DataFrame]] = {}
        for result in study.results_of("deciles attribution", setting):
            by_seed.setdefault(result.seed, []).append(pd.DataFrame(result.values).assign(step=result.step))
        for seed, parts in by_seed.items():
            sums = pd.concat(parts, ignore_index=True)
            updates = len(sums[["step", "update"]].drop_duplicates())
            each = sums.groupby("decile", as_index=False)["value"].sum()
            pieces.append(each.assign(value=each["value"] / updates, setting=setting.label, seed=seed))
    if not pieces:
        return Picture("attribution", "", missing="attribution: not recorded (set recording.token_gradients_every)")
    content = {"all tokens": pd.concat(pieces, ignore_index=True)}
    figure = tokens.draw_deciles(content, styles, "share of the squared gradient norm")
    caption = (
        "Share of ‖∇L‖² by decile of the token's probability, mean over updates. Bars: 95 % t-interval over seeds."
    )
    return Picture("attribution", caption, figure)


def _surface(study: Study, styles: Lines) -> Iterator[Picture]:
    values, unconverged = probe_values(study, list(surface.CURVATURE))
    values = middle_radius(values[values["parameters"] == "all"])
    if values.empty:
        why = "sharpness, spectrum, rho curves, slices: no probe was run (see the config's probes)"
        yield Picture("sharpness", "", missing=why)
    else:
        caption = f"Curvature of the loss surface along training.{_left_out(unconverged)} {BAND}."
        for ending, frame in _by_functional(values):
            yield Picture(f"sharpness{ending}", caption, surface.sharpness(frame, styles))
    nodes = density_nodes(study)
    if len(nodes):
        caption = "Spectral density of the Hessian at the last probed step, mean over seeds."
        yield Picture("spectrum", caption, surface.spectrum(nodes, styles))
    yield from _rho_curves(study, styles)
    values = slice_values(study)
    if len(values):
        caption = (
            f"Loss along lines through the parameters at step {values['step'].max()}: the gradient, the top eigenvector "
            f"of the Hessian, and random directions with the norm of each filter. {BAND}."
        )
        yield Picture("slices", caption, surface.slices(values, styles))
    values = stability_values(study)
    if len(values):
        caption = (
            "Largest eigenvalue of the AdamW-preconditioned Hessian; dotted: AdamW's stability threshold (2 + 2β₁)/((1 − "
            f"β₁)·lr), 38/lr at β₁ = 0.9 (arXiv 2207.14484). {BAND}."
        )
        yield Picture("stability", caption, surface.stability(values, styles))


def _rho_curves(study: Study, styles: Lines) -> Iterator[Picture]:
    names = {
        name
        for _, _, run in study.each()
        for name in run.probes.loc[(run.probes["probe"] == "perturbation") & run.probes["rho"].notna(), "quantity"]
    }
    rises = {name for name in names if not name.endswith((FIRST_ORDER, "_ratio"))}
    values, unconverged = probe_values(study, sorted(rises))
    values = values[(values["parameters"] == "all") & values["rho"].notna()]
    if values.empty:
        return
    beside, _ = probe_values(study, sorted(names - rises))
    beside = beside[(beside["parameters"] == "all") & beside["quantity"].str.endswith(FIRST_ORDER)]
    beside = beside.assign(quantity=beside["quantity"].str.removesuffix(FIRST_ORDER))
    last = values["step"].max()
    values, beside = values[values["step"] == last], beside[beside["step"] == last]
    caption = f"Rise of the loss within a radius rho at step {last}; dotted: rho·‖∇L‖.{_left_out(unconverged)} {BAND}."
    for ending, frame in _by_functional(values):
        yield Picture(f"rho_curves{ending}", caption, surface.rho_curves(frame, beside, styles))


def _left_out(unconverged: int) -> str:
    return f" {unconverged} estimates that did not converge are left out." if unconverged else ""


def _by_functional(values: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """(suffix of a file name, rows) of each functional; no suffix if there is only one."""
    names = sorted(values["functional"].unique())
    for number, name in enumerate(names, 1):
        ending = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")[:40] or str(number)
        yield ("" if len(names) == 1 else f"_{ending}"), values[values["functional"] == name]
