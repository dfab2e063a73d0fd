"""Which figures a study gets: each is a Figure, or one clear line that says what is missing for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis.bands import FEWEST
from sharpscope.analysis.figures import steps as figures_steps
from sharpscope.analysis.figures import surface as figures_probes
from sharpscope.analysis.figures import tokens as figures_tokens
from sharpscope.analysis.figures.style import lines
from sharpscope.analysis.frames import density_nodes, eval_values, probe_values, runs_of, step_values
from sharpscope.analysis.probe_frames import middle_radius, slice_values, stability_values
from sharpscope.analysis.studies import Study
from sharpscope.analysis.token_frames import SAMPLE, bound_violations, decile_sums, sample_tokens, score_column
from sharpscope.analysis.weight_curve import shaping_of

FIRST_ORDER = "_first_order"
MOST = 8
"""Settings that a figure can tell apart; of more, those with the most seeds are drawn, and one figure has them all."""


@dataclass(frozen=True)
class Picture:
    """A figure with its file name and caption, or `missing`: why there is none. `claim`: the claim it belongs to, if any."""

    name: str
    caption: str
    figure: Figure | None = None
    missing: str = ""
    claim: str = ""


class Pictures:
    """Makes every picture of one study; frames that several pictures need are read once."""

    def __init__(self, study: Study) -> None:
        self.study, self.whole = study.largest(MOST), study
        self.lines = lines(self.study.labels)

    def __iter__(self) -> Iterator[Picture]:
        makers: list[Callable[[], Iterator[Picture]]] = [
            self._steps, self._evaluations, self._weights, self._bounds, self._scores, self._attribution, self._surface,
        ]  # fmt: skip
        for maker in makers:
            yield from maker()

    @cached_property
    def _step_values(self) -> pd.DataFrame:
        return step_values(self.study, list(figures_steps.AXES))

    def _steps(self) -> Iterator[Picture]:
        values = self._step_values
        yield Picture(
            "reward", f"Reward and accuracy on the training prompts. {BAND}.", figures_steps.reward(values, self.lines)
        )
        if self._has("grad_norm", "update_norm"):
            caption = f"Gradient norm before clipping and size of the update (geometric mean over seeds). {BAND}."
            yield Picture("gradient_norm", caption, figures_steps.gradient_norm(values, self.lines))
        else:
            yield Picture("gradient_norm", "", missing="gradient norm: no update has been made yet")
        if self._has("entropy_mean"):
            yield Picture("entropy", f"Entropy of the policy. {BAND}.", figures_steps.entropy(values, self.lines))
        caption = f"Clipped tokens, truncated completions, groups that teach nothing. {BAND}."
        yield Picture("clipping", caption, figures_steps.clipping(values, self.lines))

    def _has(self, *quantities: str) -> bool:
        return bool(self._step_values["quantity"].isin(quantities).any())

    def _evaluations(self) -> Iterator[Picture]:
        values = eval_values(self.study)
        if values.empty:
            why = "held-out accuracy: no evaluation was recorded (evaluation.every is 0, or the runs have only begun)"
            yield Picture("accuracy", "", missing=why)
            return
        caption = f"Accuracy at each evaluation, by split (`train` is trained on), pooled over sizes. {BAND}."
        yield Picture("accuracy", caption, figures_steps.evaluations(values, self.lines))
        yield from self._every_setting()
        levels = values[values["level"] != "all"]
        if levels["level"].nunique() > 1:
            for temperature in sorted(levels["temperature"].unique()):
                name = "greedy" if temperature == 0 else f"temperature_{temperature:g}"
                figure = figures_steps.evaluations_by_level(values, self.lines, float(temperature))
                yield Picture(
                    f"accuracy_by_level_{name}", f"The same by size, {name.replace('_', ' ')}. {BAND}.", figure
                )
        rewards = eval_values(self.study, "reward_mean")
        if len(rewards):
            figure = figures_steps.evaluations(rewards, self.lines, "mean reward of a completion [reward]")
            yield Picture(
                "heldout_reward", f"Reward at each evaluation, by split (`train` is trained on). {BAND}.", figure
            )

    def _every_setting(self) -> Iterator[Picture]:
        """Final held-out accuracy of all settings, also of those that the other figures have no room for."""
        if len(self.whole.settings) < 3:
            return
        values = eval_values(self.whole)
        values = values[(values["level"] == "all") & (values["split"] == "heldout")]
        values = values[values["temperature"] == values["temperature"].max()]
        values = values[values["step"] == values.groupby("setting")["step"].transform("max")]
        if values.empty:
            return
        spare = len(self.whole.settings) - len(self.study.settings)
        rest = (
            f" The other figures show the {MOST} settings with the most seeds, {spare} are here alone." if spare else ""
        )
        caption = (
            f"Held-out accuracy of every setting at its last evaluation, temperature {values['temperature'].iloc[0]:g}; pale "
            f"dots: seeds; diamond: mean; bar: 95 % t-interval, from {FEWEST} seeds on.{rest}"
        )
        yield Picture("settings", caption, figures_steps.every_setting(values, lines(self.whole.labels)))

    def _weights(self) -> Iterator[Picture]:
        weighted = [
            s
            for s in self.study.settings
            if any(shaping_of(r.info).get("kind", "uniform") != "uniform" for r in s.runs.values())
        ]
        if not weighted:
            yield Picture("weights", "", missing="token weights: every method here has w = 1 (try grpo-sg)")
            return
        samples = self._samples(["logp", "logit", "entropy", "weight"])
        samples = {s.label: samples[s.label] for s in weighted if s.label in samples}
        if samples:
            shapings = {s.label: shaping_of(next(iter(s.runs.values())).info) for s in weighted if s.label in samples}
            parts = [part[part["loss_coef"] != 0] for part in self._samples(CARRIED).values()]
            carried = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
            caption = (
                "Token weights: as a function, as observed against the probability of the token, and where along it the gradient is that "
                "they multiply (|c|·‖∇ ln π‖/w with the local norm; tokens of all settings that have a loss coefficient)."
            )
            figure = figures_tokens.weights(samples, shapings, self.lines, carried if len(carried) else None)
            yield Picture("weights", caption, figure)
        else:
            yield Picture("weights", "", missing="observed weights: no token rows (recording.tokens_every is 0)")
        caption = f"Token weights by step: mean, effective sample size, share on a bound. {BAND}."
        yield Picture("weight_statistics", caption, figures_steps.weight_statistics(self._step_values, self.lines))

    def _bounds(self) -> Iterator[Picture]:
        samples = self._samples(["logp", "logit_grad_norm"], 20_000)
        if not samples:
            yield Picture(
                "logit_gradient", "", missing="logit gradients: no token rows with them (recording.tokens_every)"
            )
            return
        checks: dict[str, dict[str, Any]] = {}
        for label, _, run in runs_of(self.study):
            temperature = float((run.config.get("rollout") or {}).get("temperature") or 1.0)
            found = bound_violations(run, run.info.get("vocabulary"), temperature)
            known = checks.setdefault(label, {"tokens": 0, "below": 0, "above": 0})
            checks[label] = {key: known[key] + found[key] for key in known}
        vocabulary = next((run.info.get("vocabulary") for _, _, run in runs_of(self.study)), None)
        caption = (
            "Norm of a token's gradient by the logits against its probability, with the bounds "
            "√(V/(V−1))·(1 − π) ≤ ‖p − e_y‖ ≤ √2·(1 − π), checked on every recorded token: "
            + "; ".join(f"{label}: {c['below'] + c['above']} of {c['tokens']:,} outside" for label, c in checks.items())
            + "." + ("" if vocabulary else " The vocabulary's size is not recorded, so the lower bound is 1 − π.")
        )  # fmt: skip
        yield Picture("logit_gradient", caption, figures_tokens.logit_gradient(samples, self.lines, vocabulary, checks))

    def _scores(self) -> Iterator[Picture]:
        found = {score_column(run) for _, _, run in runs_of(self.study)} - {None}
        if not found:
            why = "no score norms were recorded (set recording.token_gradients_every)"
            yield Picture("score_norm", "", missing=f"score norm against probability, Lorenz curve: {why}")
            return
        column = "score_norm" if found == {"score_norm"} else "score_norm_local"
        what = "" if column == "score_norm" else " Credit through other positions is left out (the local tier)."
        samples = self._samples(["logp", "loss_coef", column])
        if not samples:
            yield Picture("score_norm", "", missing=f"score norm against probability: no token has {column}")
            return
        caption = f"Norm of ∇ ln π against the token's probability; dotted: the law ∝ (1 − π).{what}"
        yield Picture("score_norm", caption, figures_tokens.score_norm(samples, self.lines, column))
        caption = f"How few tokens make the gradient; dotted: what it would be if the norm were 1 − π.{what}"
        yield Picture("lorenz", caption, figures_tokens.concentration(samples, self.lines, column))

    def _attribution(self) -> Iterator[Picture]:
        setting = "set recording.token_gradients_every"
        sums = self._deciles("attribution", ["step", "update"])
        if sums.empty:
            yield Picture("attribution", "", missing=f"attribution: not recorded ({setting})")
        else:
            figure = figures_tokens.deciles(sums, self.lines, "share of the squared gradient norm")
            caption = f"Share of ‖∇L‖² by decile of the token's probability, mean over updates. {BARS}."
            yield Picture("attribution", caption, figure)
        sums = self._deciles("heldout_influence", ["step"], by_sign=True)
        if sums.empty:
            why = "held-out influence: not recorded (set recording.heldout_influence_every)"
            yield Picture("influence", "", missing=why)
        else:
            figure = figures_tokens.deciles(
                sums, self.lines, "fall of held-out loss per unit of lr [nats]", by_sign=True
            )
            caption = (
                "First-order effect on the held-out loss by decile of the token's probability, sum over a step, mean "
                f"over steps; positive lowers it. {BARS}."
            )
            yield Picture("influence", caption, figure)

    def _deciles(self, column: str, unit: list[str], *, by_sign: bool = False) -> pd.DataFrame:
        """setting, seed, decile(, sign), value: the sum in each unit (step or update), then the mean over units."""
        pieces = []
        keys = ["decile", "sign"] if by_sign else ["decile"]
        for label, seed, run in runs_of(self.study):
            sums = decile_sums(run, column)
            if len(sums):
                count = len(sums[unit].drop_duplicates())
                each = sums.groupby(keys, as_index=False)["value"].sum()
                pieces.append(each.assign(value=each["value"] / count, setting=label, seed=seed))
        return pd.concat(pieces, ignore_index=True) if pieces else pd.DataFrame()

    def _surface(self) -> Iterator[Picture]:
        values, unconverged = probe_values(self.study, list(figures_probes.CURVATURE))
        values = middle_radius(values[values["parameters"] == "all"])
        left_out = f" {unconverged} estimates that did not converge are left out." if unconverged else ""
        if values.empty:
            yield Picture(
                "sharpness",
                "",
                missing="sharpness, spectrum, rho curves, slices: no probe was run (see the config's probes)",
            )
        else:
            caption = f"Curvature of the loss surface along training.{left_out} {BAND}."
            for ending, frame in _by_functional(values):
                yield Picture(f"sharpness{ending}", caption, figures_probes.sharpness(frame, self.lines))
        nodes = density_nodes(self.study)
        if len(nodes):
            caption = "Spectral density of the Hessian at the last probed step, mean over seeds."
            yield Picture("spectrum", caption, figures_probes.spectrum(nodes, self.lines))
        yield from self._rho_curves()
        yield from self._slices_and_stability()

    def _slices_and_stability(self) -> Iterator[Picture]:
        values = slice_values(self.study)
        if len(values):
            caption = (
                f"Loss along lines through the parameters at step {values['step'].max()}: the gradient, the top eigenvector "
                f"of the Hessian, and random directions with the norm of each filter. {BAND}."
            )
            yield Picture("slices", caption, figures_probes.slices(values, self.lines))
        values = stability_values(self.study)
        if len(values):
            caption = (
                "Largest eigenvalue of the AdamW-preconditioned Hessian; dotted: AdamW's stability threshold (2 + 2β₁)/((1 − "
                f"β₁)·lr), 38/lr at β₁ = 0.9 (arXiv 2207.14484). {BAND}."
            )
            yield Picture("stability", caption, figures_probes.stability(values, self.lines))

    def _rho_curves(self) -> Iterator[Picture]:
        names = {
            name
            for _, _, run in runs_of(self.study)
            for name in run.probes.loc[(run.probes["probe"] == "perturbation") & run.probes["rho"].notna(), "quantity"]
        }
        rises = {name for name in names if not name.endswith((FIRST_ORDER, "_ratio"))}
        values, unconverged = probe_values(self.study, sorted(rises))
        values = values[(values["parameters"] == "all") & values["rho"].notna()]
        if values.empty:
            return
        beside, _ = probe_values(self.study, sorted(names - rises))
        beside = beside[(beside["parameters"] == "all") & beside["quantity"].str.endswith(FIRST_ORDER)]
        beside = beside.assign(quantity=beside["quantity"].str.removesuffix(FIRST_ORDER))
        last = values["step"].max()
        values, beside = values[values["step"] == last], beside[beside["step"] == last]
        left_out = f" {unconverged} estimates that did not converge are left out." if unconverged else ""
        caption = f"Rise of the loss within a radius rho at step {last}; dotted: rho·‖∇L‖.{left_out} {BAND}."
        for ending, frame in _by_functional(values):
            yield Picture(f"rho_curves{ending}", caption, figures_probes.rho_curves(frame, beside, self.lines))

    def _samples(self, columns: list[str], limit: int = SAMPLE) -> dict[str, pd.DataFrame]:
        """setting -> sampled tokens of all its seeds; settings without such tokens are left out."""
        found = {}
        for setting in self.study.settings:
            share = max(1, limit // max(1, len(setting.runs)))
            parts = [sample_tokens(run, columns, share) for run in setting.runs.values()]
            parts = [part for part in parts if len(part)]
            if parts:
                found[setting.label] = pd.concat(parts, ignore_index=True)
        return found


CARRIED = ["logp", "loss_coef", "weight", "score_norm_local"]
BARS = "Bars: 95 % t-interval over seeds"
BAND = f"Line: mean over seeds; band: 95 % t-interval, below {FEWEST} seeds a thin line each"


def _by_functional(values: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """(ending of a file name, rows) of each functional; no ending where there is one alone."""
    names = sorted(values["functional"].unique())
    for number, name in enumerate(names, 1):
        ending = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")[:40] or str(number)
        yield ("" if len(names) == 1 else f"_{ending}"), values[values["functional"] == name]
