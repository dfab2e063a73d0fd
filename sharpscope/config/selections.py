"""Selections of the loss tokens that take part in the surrogate: values of a method's `tokens`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from sharpscope.config.base import Band, Part, Schedule, Share


class HighEntropyTokens(Part):
    """Only the `share` of the loss tokens with the highest entropy, with ties, is in the surrogate (arXiv 2506.01939)."""

    kind: Literal["high_entropy"] = "high_entropy"
    share: Annotated[float, Field(gt=0, le=1)] | Schedule = 0.2
    """Share of tokens kept, rounded up; published 0.2."""
    over: Literal["step", "completion"] = "step"
    """Tokens of the share: of the step, as published, or of each completion (arXiv 2605.25381)."""


class SuffixTokens(Part):
    """Leave the first ⌊context·n⌋ of a completion's n loss tokens out of the surrogate, never its last (arXiv 2605.25381)."""

    kind: Literal["suffix"] = "suffix"
    context: Share = Field(0.5, description="Share that is left out; the authors' schedule goes from 0.99 to 0.")


Bin = Literal["pos_peak", "pos_valley", "neg_peak", "neg_valley"]


class BinTokens(Part):
    """Only some of four bins of tokens are in the surrogate: A > 0 or A < 0, and π ≥ Σ_v π_v² (peak) or below (valley).

    To first order, raising a peak's logit lowers the collision entropy −ln Σ_v π_v² and raising a valley's raises it
    (arXiv 2606.16154). Give `include` or `exclude`. Tokens with A = 0 are in no bin.
    """

    kind: Literal["bins"] = "bins"
    include: tuple[Bin, ...] = Field((), description="Bins that are kept.")
    exclude: tuple[Bin, ...] = Field((), description="Bins that are left out.")

    @model_validator(mode="after")
    def _one_list(self) -> Self:
        if bool(self.include) == bool(self.exclude):
            raise ValueError("bins needs include or exclude, one of them, such as include=[pos_peak, pos_valley]")
        return self


class RelativeSurpriseTokens(Band):
    """Only tokens with low ≤ −ln π/(H + 1e-8) ≤ high are in the surrogate (RSI-S, arXiv 2606.31575).

    The mean of the ratio is 1 at every position. Where the policy is certain (H = 0, ln π = 0) it is 0.
    """

    kind: Literal["relative_surprise"] = "relative_surprise"
    low: float = Field(0.5, ge=0)
    """Smallest ratio kept; 0.5 by one reader, 0.1 by another (the paper's: not found)."""
    high: float = Field(2.0, gt=0)
    """Largest ratio kept; 2 by one reader, 3 by another (the paper's: not found)."""


class CurvatureTokens(Part):
    """Leave tokens out whose own Adam step of the output layer would change objective or policy too much (CAPO, arXiv 2510.00819).

    With v = e_y − π, h the layer's input, g = A·v⊗h and G the step per learning rate that AdamW would make from its present
    moments on g alone: m_H = lr·⟨g, G⟩ + lr²/2·A·[(v·u)² − uᵀFu] with u = Gh and F = diag π − ππᵀ, m_F = lr²/2·(v·u)². A
    token is kept if |m_H| and m_F are below their thresholds. Only the 50 most likely words and y have a gradient here.
    """

    kind: Literal["curvature"] = "curvature"
    max_objective: float = Field(0.01, gt=0, description="Bound of |m_H|; published 0.01 (Dr.CAPO 5e-4, ReinCAPO 0.1).")
    max_kl: float = Field(1e-4, gt=0, description="Bound of m_F [nats]; published 1e-4 (Dr.CAPO 1e-3, ReinCAPO 1e-5).")


class ClipCovTokens(Band):
    """Leave random tokens with covariance in (low, high) out of the surrogate (Clip-Cov, arXiv 2505.22617)."""

    kind: Literal["clip_cov"] = "clip_cov"
    share: float = Field(2e-4, gt=0, le=1)
    """Share of the step's loss tokens to leave out, at least one token; published 2e-4."""
    low: float = Field(1.0, description="Lower bound of the covariance [nats × advantage]; published 1.")
    high: float = Field(5.0, description="Upper bound of the covariance, > low; published 5.")


class ProbabilityTokens(Part):
    """Only tokens with π_old < threshold (`low`) or π_old ≥ threshold (`high`) are in the surrogate.

    Both divide by the full token count, so that the two gradients add up to that of all tokens.
    """

    kind: Literal["probability"] = "probability"
    side: Literal["low", "high"] = Field("low", description="Which tokens are kept.")
    threshold: float = Field(0.5, gt=0, lt=1, description="Probability that separates both sides; ours.")


class AdvantageTokens(Part):
    """Only tokens with a positive or only those with a negative advantage are in the surrogate; both divide by the full count."""

    kind: Literal["advantage"] = "advantage"
    sign: Literal["positive", "negative"] = Field("positive", description="Which tokens are kept.")


class SpuriousTokens(Part):
    """Leave tokens with A > 0, π < probability and H < h out of the surrogate (STAPO, arXiv 2602.15620).

    h is the `quantile` (linearly interpolated) of the entropy over the step's loss tokens with A > 0 and π < probability (the
    paper's later version), all under the policy at its start.
    """

    kind: Literal["stapo"] = "stapo"
    probability: float = Field(0.002, gt=0, le=1)
    """Probability below which a token is rare; published 0.002."""
    quantile: float = Field(0.75, ge=0, le=1, description="Quantile of the entropy; published 0.75.")


Tokens = Annotated[
    HighEntropyTokens
    | ClipCovTokens
    | ProbabilityTokens
    | AdvantageTokens
    | SpuriousTokens
    | SuffixTokens
    | BinTokens
    | RelativeSurpriseTokens
    | CurvatureTokens,
    Field(discriminator="kind"),
]
