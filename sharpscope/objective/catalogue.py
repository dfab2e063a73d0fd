"""What each named method is: value, equation, constants, source, difference from GRPO, and the choices that are
ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from sharpscope.objective.shaping_spec import SigmoidShaping
from sharpscope.objective.spec import Kl, Method


@dataclass(frozen=True)
class MethodNote:
    """A named method and what a person should know of it."""

    method: Method
    title: str
    equation: str
    constants: str
    source: str
    differs: str
    ours: str


_GRPO = "L = −(1/N) Σ_i (1/|o_i|) Σ_t min(r_t A_i, clip(r_t, 1 − ε, 1 + ε) A_i) + β·k3_t"

NOTES: dict[str, MethodNote] = {
    "grpo": MethodNote(
        method=Method(name="grpo"),
        title="Group Relative Policy Optimization",
        equation=_GRPO + "; A_i = (r_i − mean r)/(std r + 1e-4) in the group of a prompt; r_t = π(y_t)/π_old(y_t)",
        constants="ε 0.2; β 0 unless set (kl.coef)",
        source="arXiv 2402.03300",
        differs="The reference point.",
        ours="std with n − 1 as in TRL; β = 0 by default.",
    ),
    "grpo-sg": MethodNote(
        method=Method(name="grpo-sg", weight=SigmoidShaping()),
        title="Sharpness-guided GRPO",
        equation="As GRPO with w_t·min(r_t A, clip(r_t) A), w = clip(alpha·[sigmoid((u − u0)/tau) − mu], L, U), no "
        "gradient through w",
        constants="alpha 2, tau 9, mu 0.25, L 1, U 1.4 (preset paper, u0 0); preset calibrated: tau and u0 from the "
        "first step",
        source="arXiv 2511.00066 v3, v4",
        differs="Each token's clipped surrogate is multiplied by a weight that grows with its logit; the KL term is "
        "not weighted.",
        ours="u is the raw logit: with u = π every weight would be L. u0 and the preset calibrated. w comes from π_old "
        "and stays fixed over "
        "the step's updates.",
    ),
    "tr-grpo": MethodNote(
        method=Method(name="tr-grpo", weight=SigmoidShaping(), weight_on="ratio", kl=Kl(weighted=True)),
        title="Token-regulated GRPO",
        equation="As GRPO with min(w_t r_t A, clip(w_t r_t, 1 − ε, 1 + ε) A) and β·w_t·k3_t; w as in grpo-sg",
        constants="as grpo-sg; ε 0.2",
        source="arXiv 2511.00066 v1, v2",
        differs="The weight multiplies the ratio inside the clip, and the KL term. Trap: at r = 1 every token with w > "
        "1 + ε and A > 0 is "
        "clipped to zero gradient.",
        ours="as grpo-sg.",
    ),
}
