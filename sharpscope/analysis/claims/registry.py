"""All claims by name, and the functions that test them together and draw their figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sharpscope.analysis.claims import (
    c01_logit_bounds,
    c02_score_norm,
    c03_dominance,
    c04_sharpness,
    c05_bound,
    c06_gap,
    c07_generalization,
    c08_smoothness,
    c09_influence,
    c10_alignment,
    c11_oscillator,
    c12_entropy,
    c13_lucky,
)
from sharpscope.analysis.claims.base import Claim, Finding, Verdict, decide
from sharpscope.analysis.figures.style import Picture
from sharpscope.analysis.statistics import holm
from sharpscope.analysis.study import Study
from sharpscope.analysis.tokens import DECILE_SUMS
from sharpscope.errors import UserError, nearest

if TYPE_CHECKING:
    from sharpscope.traces import Runs

_ALL = (
    c01_logit_bounds.CLAIM,
    c02_score_norm.CLAIM,
    c03_dominance.CLAIM,
    c04_sharpness.CLAIM,
    c05_bound.CLAIM,
    c06_gap.CLAIM,
    c07_generalization.CLAIM,
    c08_smoothness.CLAIM,
    c09_influence.CLAIM,
    c10_alignment.CLAIM,
    c11_oscillator.CLAIM,
    c12_entropy.CLAIM,
    c13_lucky.CLAIM,
)
CLAIMS: dict[str, Claim] = {claim.name: claim for claim in _ALL}
PRIMARY = tuple(name for name, claim in CLAIMS.items() if claim.role == "primary")
REDUCERS = (*(reducer for claim in _ALL for reducer in claim.reducers), *DECILE_SUMS)
"""Everything that claims and figures need of whole token tables, and that `reduce` keeps in their place."""


def test_claims(
    runs: Runs,
    claims: Sequence[str] | None = None,
    *,
    baseline: str = "grpo",
    treatment: str = "grpo-sg",
    ignore: Sequence[str] = (),
) -> list[Verdict]:
    """A verdict for each claim.

    The primary claims (C4, C7, C10) share one error rate by Holm's method, and all of them are tested whichever are asked
    for, so that a verdict does not depend on what else was asked. One without a p-value counts as p = 1.

    Args:
        runs: from `load_runs`; unfinished ones are left out and named.
        claims: names, e.g. ["C7"]; None: all.
        baseline, treatment: names of the two methods compared, as in run.json. Where a claim says GRPO-SG it is tested on
            `treatment`. If no run has one of them, the claims that need it are untestable and say so.
        ignore: settings in which the two runs of a pair may differ, e.g. optimizer.lr if it was tuned for each method.

    Raises:
        UserError: an unknown claim, or a method compared with itself.
    """
    names = _names(claims)
    study = study_of(runs, baseline, treatment, ignore)
    study.read_tokens([reducer for name in _tested(names) for reducer in CLAIMS[name].reducers])
    return verdicts_of(study, names)


test_claims.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever its name looks like


def verdicts_of(study: Study, names: Sequence[str] = tuple(CLAIMS)) -> list[Verdict]:
    """The verdicts on the claims `names`; the study has read the tokens that they need."""
    findings = {name: CLAIMS[name].test(study) for name in _tested(names)}
    corrected = _corrected({name: finding for name, finding in findings.items() if name in PRIMARY})
    methods = (study.baseline, study.treatment)
    verdicts = []
    for name in names:
        if name in PRIMARY:
            supported, refuted = corrected[name]
            options = {"p_supported": supported, "p_refuted": refuted}
            verdicts.append(decide(CLAIMS[name], findings[name], methods, family=len(PRIMARY), **options))
        else:
            verdicts.append(decide(CLAIMS[name], findings[name], methods))
    return verdicts


def claim_pictures(verdicts: Sequence[Verdict], study: Study) -> Iterator[Picture]:
    """The figures of the claims that compare methods, in the claims' order."""
    for verdict in verdicts:
        draw = CLAIMS[verdict.claim].draw
        if draw is not None:
            yield from draw(verdict, study)


def study_of(runs: Runs, baseline: str = "grpo", treatment: str = "grpo-sg", ignore: Sequence[str] = ()) -> Study:
    """The runs laid out for comparing two methods.

    Raises:
        UserError: a method compared with itself.
    """
    if baseline == treatment:
        raise UserError(f"treatment {treatment}: the same as the baseline; give another method")
    return Study(runs.by_name, baseline, treatment, tuple(ignore))


def _names(claims: Sequence[str] | None) -> list[str]:
    if claims is None:
        return list(CLAIMS)
    asked = [claims] if isinstance(claims, str) else list(claims)
    for name in asked:
        if name.upper() not in CLAIMS:
            raise UserError(f"claim {name}: no such claim{nearest(name.upper(), CLAIMS)}")
    wanted = {name.upper() for name in asked}
    return [name for name in CLAIMS if name in wanted]


def _tested(names: Sequence[str]) -> list[str]:
    """The claims asked for, and with any primary one all primary ones."""
    return [name for name in CLAIMS if name in names or (name in PRIMARY and set(names) & set(PRIMARY))]


def _corrected(findings: dict[str, Finding]) -> dict[str, tuple[float | None, float | None]]:
    """Holm's p-values for and against, over all primary claims; what cannot be tested counts as 1."""

    def adjusted(values: dict[str, float | None]) -> dict[str, float | None]:
        whole = holm({name: 1.0 if value is None else value for name, value in values.items()})
        return {name: None if values[name] is None else whole[name] for name in values}

    supported = adjusted({name: None if f.missing else f.evidence.p_supported for name, f in findings.items()})
    refuted = adjusted({name: None if f.missing else f.evidence.p_refuted for name, f in findings.items()})
    return {name: (supported[name], refuted[name]) for name in findings}
