"""What a planned study can decide, before any compute: from its configurations alone, and with a pilot the power of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from sharpscope.analysis.claims import CLAIMS
from sharpscope.analysis.claims.base import Claim, Evidence, unreachable_text
from sharpscope.analysis.claims.c10_alignment import RIVALS
from sharpscope.analysis.claims.c12_entropy import STABLE
from sharpscope.analysis.claims.c14_learning_rate import MINIMUM, rate_pairings
from sharpscope.analysis.power import Design, Power
from sharpscope.analysis.statistics import smallest_sign_flip_p
from sharpscope.analysis.study import GRID, Study, grid_settings
from sharpscope.analysis.terms import Terms
from sharpscope.config import control_label


@dataclass(eq=False)
class PlannedRun:
    """What the pairing of runs reads of a run that does not exist yet."""

    name: str
    method: str
    seed: int
    task: str
    config: dict[str, Any]
    status: str = "finished"
    info: dict[str, Any] = field(default_factory=dict)
    steps: pd.DataFrame = field(default_factory=pd.DataFrame)


@dataclass(frozen=True)
class Outlook:
    """What a planned study can say of a claim.

    Attributes:
        claim, version, unit: see `Claim`.
        n: planned sample size.
        missing: why the claim will be untestable; empty if it can come out supported and refuted.
        design: power at this size, from a pilot; None without one.
        budgeted: whether `recording.budget` decides how many of the `n` are recorded.
    """

    claim: str
    version: str
    unit: str
    n: int
    missing: str = ""
    design: Design | None = None
    budgeted: bool = False

    def line(self) -> str:
        """The outlook in one line."""
        name = f"{self.claim:<4}{f'({self.version}) ' if self.version else ''}"
        if self.missing:
            return f"{name}untestable: {self.missing}"
        most = "as far as recording.budget allows, at most " if self.budgeted else ""
        text = f"{name}can be supported and refuted: {most}{self.n:,} {self.unit}"
        if self.design is None:
            return text
        return f"{text}; power {self.design.supported:.0%} at the margin, {self.design.refuted:.0%} to refute without an effect"


def outlook(
    configs: Mapping[str, Mapping[str, Any]],
    terms: Terms,
    baseline: str,
    treatment: str,
    pilot: Sequence[Power] = (),
) -> list[Outlook]:
    """What the runs with these configurations can decide.

    Args:
        configs: name → configuration of each planned run, as in config.yaml, with the method's label as its name.
        terms, baseline, treatment: of the claims.
        pilot: of `power_of`.
    """
    runs = {
        name: PlannedRun(name, config["method"]["name"], config["seed"], config["task"]["kind"], dict(config))
        for name, config in configs.items()
    }
    study = Study(runs, baseline, treatment, terms=terms)  # type: ignore[arg-type]  # only names, seeds and configurations are read
    rows = []
    for claim in CLAIMS.values():
        for version in (claim, claim.beside) if claim.beside is not None else (claim,):
            rows.append(_outlook(version, study, pilot))
    return rows


def _outlook(claim: Claim, study: Study, pilot: Sequence[Power]) -> Outlook:
    rule = claim.rule.under(study.terms, claim.key)
    n, parts, missing = _planned(claim, study)
    counted = rule.minimal_n >= 1_000  # tokens: as many as a run has
    if not missing and not counted:
        if n < rule.minimal_n:
            missing = f"{n} {rule.unit}; the rule needs {rule.minimal_n}: {rule.minimal_n - n} more"
        else:
            smallest = smallest_sign_flip_p(n), min(1.0, parts * smallest_sign_flip_p(n, "less"))
            missing = unreachable_text(
                rule, n, Evidence(smallest_p=smallest[0], smallest_p_refuted=smallest[1], parts=parts)
            )
    budgeted = not missing and claim.name in ("C2", "C3") and _budgeted(_config(study), "token_gradients_every")
    result = Outlook(claim.name, claim.version, rule.unit, n, missing, budgeted=budgeted)
    of_claim = [p for p in pilot if (p.claim, p.version) == (claim.name, claim.version) and not p.missing]
    if missing or not of_claim or counted:
        return result
    if of_claim[0].unit != rule.unit:  # the pilot's clusters are not what n counts
        return result
    return replace(result, design=of_claim[0].at(n, _sizes(study), rule.level))


def _config(study: Study) -> Mapping[str, Any]:
    """Configuration of a planned run of the baseline or the treatment; empty without one."""
    runs = study.alike(study.baseline) | study.alike(study.treatment)
    return next(iter(runs.values())).config if runs else {}


def _budgeted(config: Mapping[str, Any], key: str) -> bool:
    """Whether the budget decides at which steps the measure with this interval is made (see `recording.budget`)."""
    recording = config.get("recording") or {}
    return recording.get("budget") is not None and key in recording and recording[key] is None


def _sizes(study: Study) -> dict[str, float]:
    """Source → planned size, for the sources that a configuration sets."""
    runs = list(study.of(study.baseline, study.treatment).values())
    if not runs:
        return {}
    evaluation, probes = (runs[0].config.get(part) or {} for part in ("evaluation", "probes"))
    levels = _levels(runs[0].config.get("task") or {})
    sizes = {"answers": float(evaluation.get("prompts", 0) * evaluation.get("samples", 1) * levels)}
    return sizes | ({"probe prompts": float(probes["prompts"])} if probes.get("prompts") else {})


def _levels(task: Mapping[str, Any]) -> int:
    """Number of levels of the held-out split; `evaluation.prompts` counts the prompts of each."""
    return next((len(task[key]) for key in ("people", "levels", "hops") if isinstance(task.get(key), list | tuple)), 1)


NEEDED = {
    "C2": ("token_gradients_every",),
    "C3": ("token_gradients_every",),
    "C9": ("heldout_influence_every",),
    "C12": ("tokens_every", "probe_entropy_every"),
    "C13": ("token_gradients_every",),
}
"""Claim → fields of `recording` without which it has no data."""


def _planned(claim: Claim, study: Study) -> tuple[int, int, str]:
    """Sample size, number of joined tests, and what will be missing, for one claim."""
    name = claim.name
    if claim.version == "one update":
        return 0, 1, "counterfactual updates are no runs of a sweep; make them with `sharpscope fork`"
    baseline, treatment = study.alike(study.baseline), study.alike(study.treatment)
    both = baseline | treatment
    if not both:
        return 0, 1, f"no run of {study.baseline} or {study.treatment}"
    config = next(iter(both.values())).config
    if off := _not_recorded(name, config):
        return 0, 1, off
    pairing = study.pairing()
    if name == "C13" and claim.version != "between runs":
        return len({run.seed for run in treatment.values()}), 1, "" if treatment else f"no run of {study.treatment}"
    if name in ("C2", "C3", "C9"):
        seeds = len({run.seed for run in (both if name == "C2" else baseline).values()})
        key = "heldout_influence_every" if name == "C9" else "token_gradients_every"
        return seeds * _recorded_steps(config, key), 1, ""
    if name in ("C4", "C7", "C8", "C13"):
        return len(pairing.pairs), 1, pairing.missing
    if name == "C5":
        seeds = len({run.seed for run in both.values()})
        return max(0, seeds - max(2, seeds // 3)), 2, ""
    if name == "C6":
        return _grid(study)
    if name == "C10":
        pairs = [study.pairing(baseline=control_label(study.treatment, suffix)) for suffix in RIVALS]
        lacking = [pair.missing for pair in pairs if pair.missing]
        return min(len(pair.pairs) for pair in pairs), len(RIVALS), lacking[0] if lacking else ""
    if name == "C11":
        return len({run.seed for run in both.values()}), 2, ""
    if name == "C12":
        pairs_of = study.pairing(STABLE)
        return len(pairs_of.pairs), 2, pairs_of.missing
    if name == "C14":
        return _rates(study)
    return (3_000, 1, "") if _recorded_steps(config, "tokens_every") else (0, 1, "recording.tokens_every is 0")


def _recorded_steps(config: Mapping[str, Any], key: str) -> int:
    """Number of recorded steps; an upper bound where a budget decides."""
    every = (config.get("recording") or {}).get(key, 0)
    every = int(every or 0)
    return int(config.get("steps", 0)) // every if every else 0


def _not_recorded(claim: str, config: Mapping[str, Any]) -> str:
    """Reason why a configuration records no data for a claim; empty if it does record them."""
    recording, probes, evaluation = (config.get(part) or {} for part in ("recording", "probes", "evaluation"))
    every = probes.get("every")
    probed = probes.get("rounds") if every is None else every
    if claim == "C9" and _budgeted(config, "heldout_influence_every"):
        return "no step is sure to measure held-out influence within recording.budget; set recording.heldout_influence_every"
    if claim in ("C7", "C10", "C14"):
        return "" if evaluation.get("every") else "no evaluation"
    if claim in ("C4", "C5", "C6"):
        return "" if probed else "no probes (probes.every is 0)"
    if claim == "C11":
        return "" if probed and probes.get("curvature") else "no curvature probes (probes.curvature)"
    if claim == "C2" and not recording.get("exact_random"):
        return "recording.exact_random or recording.token_gradients_every is 0"
    for key in NEEDED.get(claim, ()):
        if not _recorded_steps(config, key):
            both = "recording.exact_random or " if claim == "C2" else ""
            return f"{both}recording.{key} is 0"
    return ""


def _grid(study: Study) -> tuple[int, int, str]:
    """Runs of the grid, and too few strata in words."""
    family = study.alike(study.baseline, study.treatment, but=list(GRID.values()))
    settings = {name: grid_settings(run) for name, run in family.items()}
    axes = [a for a in GRID if len({s.get(a) for s in settings.values()}) > 1 and a != "learning rate"]
    if not axes:
        return len(family), 1, "no grid: group size or weight decay must vary at a fixed learning rate"
    strata: dict[tuple[Any, ...], int] = {}
    for name, run in family.items():
        setting = (run.method, run.seed, settings[name].get("learning rate"))
        strata[setting] = strata.get(setting, 0) + 1
    usable = [count for count in strata.values() if count > 1]
    smallest = smallest_sign_flip_p(len(usable), "less")
    short = f"{len(usable)} strata (method × seed × learning rate) can give no p below {smallest:.3g} for refuted"
    return sum(usable), 1, short if smallest > study.terms.level else ""


def _rates(study: Study) -> tuple[int, int, str]:
    pairings = {rate: pairing for rate, pairing in rate_pairings(study).items() if len(pairing.pairs) >= MINIMUM}
    treated = list(study.alike(study.treatment).values())
    own = grid_settings(treated[0]).get("learning rate") if treated else None
    if own is None or own not in pairings or not min(pairings) < own < max(pairings):
        return (
            0,
            1,
            f"needs {study.baseline} at learning rates below, equal to and above that of {study.treatment}, {MINIMUM} seeds each",
        )
    return min(len(pairing.pairs) for pairing in pairings.values()), len(pairings), ""
