"""All claims by name, and the function that tests them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sharpscope.analysis.claims import (
    c01_logit_bounds,
    c02_score_norm,
    c03_dominance,
    c04_sharpness,
    c05_bound,
    c06_gap,
    c07_generalisation,
    c08_smoothness,
    c09_influence,
    c10_alignment,
    c11_oscillator,
    c12_entropy,
    c13_lucky,
)
from sharpscope.analysis.claims.base import Claim, Finding, Verdict, decide
from sharpscope.analysis.statistics import holm
from sharpscope.analysis.study import Study
from sharpscope.analysis.tokens import Reducer
from sharpscope.errors import UserError, nearest

if TYPE_CHECKING:
    from sharpscope.traces import Runs

_MODULES = (
    c01_logit_bounds,
    c02_score_norm,
    c03_dominance,
    c04_sharpness,
    c05_bound,
    c06_gap,
    c07_generalisation,
    c08_smoothness,
    c09_influence,
    c10_alignment,
    c11_oscillator,
    c12_entropy,
    c13_lucky,
)
CLAIMS: dict[str, Claim] = {module.CLAIM.name: module.CLAIM for module in _MODULES}
PRIMARY = tuple(name for name, claim in CLAIMS.items() if claim.role == "primary")


def test_claims(
    runs: Runs,
    claims: Sequence[str] | None = None,
    *,
    baseline: str = "grpo",
    treatment: str = "grpo-sg",
    ignore: Sequence[str] = (),
) -> list[Verdict]:
    """A verdict for each claim, on the runs there are.

    The primary claims (C4, C7, C10) share one error rate by Holm's method, and all of them are tested whichever are
    asked for, so that a verdict does not depend on what else was asked. One with nothing to compute a p from counts as p = 1.

    Args:
        runs: from `load_runs`; unfinished ones are left out and named.
        claims: names, e.g. ["C7"]; None: all.
        baseline, treatment: labels of the two methods compared, as in run.json. Where a claim says GRPO-SG it is
            tested on `treatment`. Where no run has one, what needs it is untestable and says so.
        ignore: settings in which the two runs of a pair may differ, e.g. optimizer.lr if it was tuned for each method.

    Raises:
        UserError: an unknown claim, or a method compared with itself.
    """
    names = _names(claims)
    study = study_of(runs, baseline, treatment, ignore)
    tested = [name for name in CLAIMS if name in names or (set(names) & set(PRIMARY) and name in PRIMARY)]
    study.read_tokens([r for name in tested if (make := CLAIMS[name].reducers) is not None for r in make(study)])
    findings = {name: CLAIMS[name].test(study) for name in tested}
    corrected = _corrected({name: findings[name] for name in tested if name in PRIMARY})
    verdicts = []
    for name in names:
        claim, finding = CLAIMS[name], findings[name]
        if name in PRIMARY:
            supported, refuted = corrected[name]
            verdict = decide(
                claim, finding, (baseline, treatment), family=len(PRIMARY), p_supported=supported, p_refuted=refuted
            )
        else:
            verdict = decide(claim, finding, (baseline, treatment))
        verdicts.append(verdict)
    return verdicts


test_claims.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever its name looks like


def reducers_of_all() -> list[Reducer]:
    """Every claim's reducers, each of interest in every run: what a reduction keeps, whichever methods are compared."""
    study = Study({})
    made = [r for claim in CLAIMS.values() if claim.reducers is not None for r in claim.reducers(study)]
    return [replace(reducer, of=lambda run: True) for reducer in made]


def study_of(runs: Runs, baseline: str = "grpo", treatment: str = "grpo-sg", ignore: Sequence[str] = ()) -> Study:
    """The runs laid out for comparing two methods.

    Raises:
        UserError: a method compared with itself.
    """
    if baseline == treatment:
        raise UserError(f"treatment, {treatment}: the same as the baseline; give another method")
    return Study(runs.by_name, baseline, treatment, tuple(ignore))


def _names(claims: Sequence[str] | None) -> list[str]:
    if claims is None:
        return list(CLAIMS)
    asked = [claims] if isinstance(claims, str) else list(claims)
    for name in asked:
        if name.upper() not in CLAIMS:
            raise UserError(f"claim, {name}: no such claim{nearest(name.upper(), CLAIMS)}")
    wanted = {name.upper() for name in asked}
    return [name for name in CLAIMS if name in wanted]


def _corrected(findings: dict[str, Finding]) -> dict[str, tuple[float | None, float | None]]:
    """Holm's p-values in favour and against, over all primary claims; what cannot be tested counts as 1."""
    if not findings:
        return {}

    def adjusted(values: dict[str, float | None]) -> dict[str, float | None]:
        whole = holm({name: 1.0 if value is None else value for name, value in values.items()})
        return {name: None if values[name] is None else whole[name] for name in values}

    for_it = adjusted({name: f.p_supported if not f.missing else None for name, f in findings.items()})
    against = adjusted({name: f.p_refuted if not f.missing else None for name, f in findings.items()})
    return {name: (for_it[name], against[name]) for name in findings}
