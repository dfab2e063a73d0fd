"""The figures of a study: each a Picture, or one line that says what is missing for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from sharpscope.analysis.claims import c01_logit_bounds, c02_score_norm, c03_dominance, c09_influence
from sharpscope.analysis.figures import steps, surface, tokens
from sharpscope.analysis.figures.draw import BAND, with_groups
from sharpscope.analysis.figures.style import Lines, Picture, is_control, lines
from sharpscope.analysis.frames import (
    density_nodes,
    eval_values,
    middle_radius,
    probe_values,
    slice_values,
    slices_of,
    stability_values,
    step_values,
)
from sharpscope.analysis.statistics import FEWEST
from sharpscope.analysis.study import Study
from sharpscope.analysis.text import sampling
from sharpscope.analysis.weight_curve import weight_config

FIRST_ORDER = "_first_order"
PER_PANEL = 4
"""Settings in a panel, at most: those with the most seeds. The figure `settings` has all of them."""
COLUMNS = 3
"""Columns of panels, at most."""
Groups = Mapping[str, Sequence[str]]
CARRIED = ["logp", "loss_coef", "weight", "score_norm_local", "inclusion_probability"]
PAPER = (
    "accuracy",
    "pairs_c7",
    "shaping_ablation",
    "weights",
    "rotation",
    "sharpness_overview",
    "stability",
    "lorenz",
    "gap_against_sharpness",
    "spectrum",
)
"""Figures of a paper about a study, by importance; `main_figures` takes the first eight that there are."""


def setting_groups(study: Study) -> dict[str, list[str]]:
    """Title of a column of panels → labels of its settings: methods, the same with other settings, and controls.

    A column has at most PER_PANEL settings, those with the most seeds (of equally many the compared methods first), and
    there are at most COLUMNS columns; further columns of a kind come after the first of each kind.
    """
    first = (study.baseline, study.treatment)
    kinds: dict[str, list[str]] = {"methods": [], "other settings": [], "controls": []}
    for setting in sorted(study.settings, key=lambda s: (-len(s.runs), s.label not in first, s.label)):
        variant = "other settings" if set(setting.label) & set(" +") else "methods"
        kinds["controls" if is_control(setting.label) else variant].append(setting.label)
    chunks = [
        (start, f"{kind} ({start // PER_PANEL + 1})" if start else kind, labels[start : start + PER_PANEL])
        for kind, labels in kinds.items()
        for start in range(0, len(labels), PER_PANEL)
    ]
    chosen = {name for _, name, _ in sorted(chunks, key=lambda chunk: chunk[0])[:COLUMNS]}
    return {name: labels for _, name, labels in chunks if name in chosen}


def study_pictures(whole: Study) -> Iterator[Picture]:
    """Every figure of one study. `whole.reduced` has the results of the claims' reducers."""
    groups = setting_groups(whole)
    study = whole.only([label for labels in groups.values() for label in labels])
    main = whole.only(next(iter(groups.values())))
    styles = lines(whole.labels)
    values = with_groups(step_values(study, list(steps.AXES)), groups)
    yield from _steps(values, styles, study.baseline)
    yield from _evaluations(whole, study, groups, styles)
    yield from _weights(whole, groups, styles)
    for claim in (c01_logit_bounds, c02_score_norm, c03_dominance, c09_influence):
        yield claim.figure(main, styles)
    yield _attribution(main, styles)
    yield from _surface(study, main, groups, styles)


def main_figures(pictures: Mapping[str, Picture]) -> dict[str, Picture]:
    """The main figures among those of a report, at most eight, in the order of `PAPER`."""
    present = [name for name in PAPER if name in pictures and pictures[name].figure is not None]
    return {name: pictures[name] for name in present[:8]}


def _steps(values: pd.DataFrame, styles: Lines, reference: str) -> Iterator[Picture]:
    recorded = set(values["quantity"])
    missing = {
        "reward": "reward: none is recorded in these runs",
        "clipping": "clipping: no ratio, truncation or group is recorded in these runs",
        "gradient_norm": "gradient norm: no update has been made yet",
        "rotation": "rotation of the gradient: not recorded",
    }
    for name, (caption, quantities) in steps.FIGURES.items():
        if name == "weight_statistics":
            continue
        if recorded & set(quantities):
            figure = steps.trajectories(values, styles, quantities, reference)
            yield Picture(name, f"{caption}. {BAND}.", figure)
        elif name in missing:
            yield Picture(name, "", missing=missing[name])


def _evaluations(whole: Study, study: Study, groups: Groups, styles: Lines) -> Iterator[Picture]:
    values = with_groups(eval_values(study), groups)
    if values.empty:
        why = "held-out accuracy: no evaluation was recorded (evaluation.every is 0, or the runs have only begun)"
        yield Picture("accuracy", "", missing=why)
        return
    caption = f"Accuracy at each evaluation, by split (`train` is trained on), pooled over sizes. {BAND}."
    yield Picture("accuracy", caption, steps.evaluations(values, styles, reference=study.baseline))
    if len(whole.settings) >= 3:
        yield from _every_setting(whole, len(whole.settings) - len(study.settings))
    levels = values[values["level"] != "all"]
    if levels["level"].nunique() > 1:
        for temperature, own in levels.groupby("temperature"):
            name = sampling(float(str(temperature)), "temperature_")
            figure = steps.evaluations_by_level(own, styles, reference=study.baseline)
            yield Picture(f"accuracy_by_level_{name}", f"The same by size, {name.replace('_', ' ')}. {BAND}.", figure)
    rewards = with_groups(eval_values(study, "reward_mean"), groups)
    if len(rewards):
        figure = steps.evaluations(rewards, styles, "mean reward of a completion [reward]", study.baseline)
        yield Picture("heldout_reward", f"Reward at each evaluation, by split (`train` is trained on). {BAND}.", figure)


def _every_setting(whole: Study, spare: int) -> Iterator[Picture]:
    """Final held-out accuracy of all settings, also of the `spare` ones that the other figures have no room for."""
    values = eval_values(whole)
    values = values[(values["level"] == "all") & (values["split"] == "heldout")]
    values = values[values["temperature"] == values["temperature"].max()]
    values = values[values["step"] == values.groupby("setting")["step"].transform("max")]
    if values.empty:
        return
    rest = f" {spare} settings are in no other figure of curves." if spare else ""
    caption = (
        f"Held-out accuracy of every setting at its last evaluation, temperature {values['temperature'].iloc[0]:g}; pale "
        f"dots: seeds; diamond: mean; bar: 95 % t-interval, from {FEWEST} seeds on.{rest}"
    )
    yield Picture("settings", caption, steps.every_setting(values, lines(whole.labels)))


def _weights(study: Study, groups: Groups, styles: Lines) -> Iterator[Picture]:
    """A figure for each group of settings with weights: the first is `weights`."""
    shapings = {s.label: [weight_config(run.info) for run in s.runs.values()] for s in study.settings}
    weighted = {label for label, own in shapings.items() if any(w.get("kind", "uniform") != "uniform" for w in own)}
    if not weighted:
        yield Picture("weights", "", missing="token weights: every method here has w = 1 (try grpo-sg)")
        return
    drawn: list[Picture] = []
    for name, labels in groups.items():
        samples = study.only([label for label in labels if label in weighted]).samples(
            ["logp", "logit", "entropy", "weight"]
        )
        if not samples:
            continue
        parts = [part[part["loss_coef"] != 0] for part in study.only(labels).samples(CARRIED).values()]
        carried = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
        caption = (
            f"Token weights ({name}): as a function, as observed against the probability of the token, and where along it the "
            "gradient is that they multiply (|c|·‖∇ ln π‖/w with the local norm; tokens of these settings that have a loss "
            "coefficient)."
        )
        functions = {label: shapings[label][0] for label in samples}
        figure = tokens.weights(samples, functions, styles, carried if len(carried) else None)
        drawn.append(Picture("weights" + (f"_{_word(name)}" if drawn else ""), caption, figure))
    yield from drawn or [
        Picture("weights", "", missing="observed weights: no token rows (recording.tokens_every is 0)")
    ]
    own = {name: [label for label in labels if label in weighted] for name, labels in groups.items()}
    caption, quantities = steps.FIGURES["weight_statistics"]
    values = with_groups(step_values(study.only(weighted), quantities), own)
    if len(values):
        yield Picture("weight_statistics", f"{caption}. {BAND}.", steps.trajectories(values, styles, quantities))


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


def _surface(study: Study, main: Study, groups: Groups, styles: Lines) -> Iterator[Picture]:
    values, unconverged = probe_values(study, list(surface.CURVATURE))
    values = with_groups(middle_radius(values[values["parameters"] == "all"]), groups)
    if values.empty:
        why = "sharpness, spectrum, rho curves, slices: no probe was run (see the config's probes)"
        yield Picture("sharpness", "", missing=why)
    else:
        kept = values[
            values["quantity"].isin(["sam", "largest"]) & (values["probe_set"].map(surface.split_of) == "train")
        ]
        if len(kept):
            caption = (
                "Sharpness along training, on the training prompts of the probe set: SAM sharpness and the largest Hessian "
                f"eigenvalue of each objective.{_left_out(unconverged)} {BAND}."
            )
            yield Picture("sharpness_overview", caption, surface.sharpness(kept, styles, study.baseline))
        caption = f"Curvature of the loss surface along training.{_left_out(unconverged)} {BAND}."
        for ending, frame in _by_functional(values):
            yield Picture(f"sharpness{ending}", caption, surface.sharpness(frame, styles, study.baseline))
    nodes = density_nodes(main)
    if len(nodes):
        caption = (
            "Spectral density of the Hessian at the last probed step: Ritz values and weights of the Lanczos runs, all seeds, "
            f"on a symmetric-logarithmic axis. Outliers: Ritz values farther from 0 than {surface.OUTLIER:g} times the root "
            "mean square of the spectrum; median number of a seed."
        )
        yield Picture("spectrum", caption, surface.spectrum(nodes, styles))
    yield from _rho_curves(main, styles)
    values = slice_values(main)
    if len(values):
        caption = (
            f"Loss along lines through the parameters at step {values['step'].max()}: the gradient, the top eigenvector "
            f"of the Hessian, and random directions with the norm of each filter. {BAND}."
        )
        yield Picture("slices", caption, surface.slices(values, styles))
    values = stability_values(study)
    if len(values):
        caption = (
            "Edge of stability: sharpness against the optimizer's stability threshold (dotted). AdamW-preconditioned Hessian: "
            "largest eigenvalue, threshold (2 + 2β₁)/((1 − β₁)·lr), 38/lr at β₁ = 0.9 (arXiv 2207.14484). Critical sharpness: "
            f"2/η_c along the optimizer's update, threshold 2/lr (arXiv 2601.16979). {BAND}."
        )
        yield Picture("stability", caption, surface.stability(with_groups(values, groups), styles, study.baseline))


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


def probe_pictures(estimates: pd.DataFrame) -> Iterator[Picture]:
    """Figures of one model's probes table: radius curves, spectrum and slices of its last step, and sharpness by step."""
    whole = estimates[(estimates["parameters"] == "all") & ~estimates["converged"].isin([False])]
    whole = whole.assign(setting="model", seed=0).reset_index(drop=True)
    line, last = lines(["model"]), whole[whole["step"] == whole["step"].max()]
    first = last[last["quantity"].str.endswith(FIRST_ORDER)]
    first = first.assign(quantity=first["quantity"].str.removesuffix(FIRST_ORDER))
    rises = last[last["quantity"].isin(first["quantity"].unique()) & last["rho"].notna()]
    nodes = last[last["quantity"] == "density"].rename(columns={"rho": "node", "value": "weight"})
    slices = slices_of(last).assign(setting="model", seed=0)
    along = whole[whole["quantity"].isin(list(surface.CURVATURE)) & whole["value"].notna()]
    along = middle_radius(along)
    if len(rises):
        yield Picture("rho_curves", "Rise of the loss within a radius.", surface.rho_curves(rises, first, line))
    if len(nodes):
        yield Picture("spectrum", "Ritz values of the Hessian and their weights.", surface.spectrum(nodes, line))
    if len(slices):
        yield Picture("slices", "Loss along directions.", surface.slices(slices, line))
    if along["step"].nunique() > 1:
        yield Picture("sharpness", "Curvature by step.", surface.sharpness(along, line))


def token_picture(norms: pd.DataFrame) -> Picture:
    """Score norm against probability of one model's tokens."""
    figure = tokens.score_norms({"model": norms}, lines(["model"]))
    return Picture("score_norm", "Norm of ∇ ln π against the token's probability.", figure)


def _left_out(unconverged: int) -> str:
    return f" {unconverged} estimates that did not converge are left out." if unconverged else ""


def _by_functional(values: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """(suffix of a file name, rows) of each functional and split; neither is in the suffix if there is only one.

    The split `train` is not named either, so that a figure of 0.1 keeps its name.
    """
    names = sorted(values["functional"].unique())
    for number, name in enumerate(names, 1):
        own = values[values["functional"] == name]
        ending = "" if len(names) == 1 else f"_{_word(name) or number}"
        splits = own["probe_set"].map(surface.split_of)
        for split in sorted(splits.unique(), key=lambda split: (split != "train", split)):
            unnamed = split == "train" or splits.nunique() == 1
            yield ending + ("" if unnamed else f"_{_word(split)}"), own[splits == split]


def _word(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")[:40]
