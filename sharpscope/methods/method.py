"""`Method`: a policy-gradient objective as one frozen value. Its token weights are defined in `token_weights`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sharpscope.methods.clips import Clip, PpoClip
from sharpscope.methods.token_weights import TokenWeight, UniformWeight
from sharpscope.settings.base import NonNegative, Part, Real, Schedule, Share


class GroupAdvantage(Part):
    """A_i = (R_i − mean R)/(std + 1e-4) within the group of one prompt, std with n − 1; 0 if the group's rewards are all equal."""

    kind: Literal["group"] = "group"
    scale: Literal["group", "batch", "none"] = "group"
    """group: divide by the std of the group's rewards; batch: by that of all rewards of the step (arXiv 2508.08221);
    none: no division (Dr. GRPO, arXiv 2503.20783)."""


class BaselineAdvantage(Part):
    """The reward minus a baseline of its group, not divided by a std; 0 if the group's rewards are all equal."""

    kind: Literal["leave_one_out", "length_baseline", "token_baseline", "mean_scaled"]
    """leave_one_out: A_i = R_i − mean of the other rewards of the group = G/(G − 1)·(R_i − mean R) (RLOO, arXiv 2402.14740).

    length_baseline: A_i = R_i − Σ_j n_j·R_j / Σ_j n_j over the group, n_j the number of loss tokens (OPO, arXiv 2505.23585).

    token_baseline: A_t = R_i − Σ_j R_j·V_jt / (Σ_j V_jt + 1e-8) over the group's completions with a t-th loss token; where one
    is left, A_t = R_i as in verl. V_jt = Σ_{s ≤ t} ‖p_s − e_y‖² = Σ_{s ≤ t} (1 − 2·π_s + Σ_v π_v²), under the policy at the
    start of the step (optimal token baseline, arXiv 2602.07078).

    mean_scaled: A_i = (R_i − mean R)/mean R, R = 1 for a correct answer, else 0; 0 if none is. It estimates the gradient of the
    log of the success rate, truncated at order G (MaxRL, arXiv 2602.02710)."""


class WhitenedAdvantage(Part):
    """Returns minus their mean, divided by their std over all loss tokens of the step (REINFORCE++, arXiv 2501.03262).

    A_t = (G_t − mean G)/√(var G + 1e-8), G_t = R_i for every token; with `baseline=group`, R_i − mean R. Long completions count
    more often in mean and var (divided by n − 1, as in verl).
    """

    kind: Literal["whitened"] = "whitened"
    baseline: Literal["none", "group"] = "none"
    """none: REINFORCE++; group: subtract the group's mean reward first (its baseline form)."""


class DecoupledAdvantage(Part):
    """Each part of the reward normalized within its group, then the weighted sum over the step (GDPO, arXiv 2601.05242).

    S_i = Σ_k weight_k·(R_ik − mean R_k)/(std R_k + 1e-4) within the group, A_i = (S_i − mean S)/(std S + 1e-4) over all
    completions of the step; 0 if all weighted parts are equal within the group.
    """

    kind: Literal["decoupled"] = "decoupled"
    weights: dict[str, float] = Field({"answer": 1.0, "format": 1.0})
    """Weight of each part of the reward by its name in the task; a part that is not named or has weight 0 does not
    count."""

    @model_validator(mode="after")
    def _has_a_part(self) -> Self:
        if not any(self.weights.values()):
            raise ValueError(
                "weights must name at least one part of the reward with a weight other than 0"
            )
        return self


Advantage = Annotated[
    GroupAdvantage | BaselineAdvantage | WhitenedAdvantage | DecoupledAdvantage,
    Field(discriminator="kind"),
]


class TokenRatio(Part):
    """r_t = π(y_t)/π_old(y_t), or π(y_t)/μ(y_t), μ the sampler's policy."""

    kind: Literal["token"] = "token"
    to: Literal["old", "sampler"] = "old"
    """Denominator: π_old, or the sampler's policy μ where it is known, else π_old (WAPO)."""


class SequenceRatio(Part):
    """s_i = exp(mean_t ln r_t), the same for all tokens of a completion (GSPO, arXiv 2507.18071)."""

    kind: Literal["sequence"] = "sequence"


class HolderRatio(Part):
    """s_i = (mean_t r_t^p)^(1/p), the same for all tokens (HölderPO, arXiv 2605.12058); p = 1: arithmetic, p → 0: GSPO."""

    kind: Literal["holder"] = "holder"
    p: Real = Field(1.0, description="Power of the mean; a schedule anneals it.")


Ratio = Annotated[TokenRatio | SequenceRatio | HolderRatio, Field(discriminator="kind")]


class TruncatedCorrection(Part):
    """Multiply the surrogate by min(ρ, high), ρ = π_old/μ, μ the sampler's policy (truncated importance sampling, TIS)."""

    kind: Literal["truncate"] = "truncate"
    level: Literal["token", "sequence"] = "token"
    """token: ρ of each token; sequence: their product over the completion."""
    high: float = Field(2.0, gt=0, description="Largest factor; 2 as in verl and slime.")


class Band(Part):
    """A part with `low` below `high`."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        low, high = getattr(self, "low"), getattr(self, "high")  # noqa: B009 - fields of every subclass
        if low >= high:
            raise ValueError(f"low = {low} must be below high = {high}")
        return self


class MaskedCorrection(Band):
    """Multiply the surrogate by ρ = π_old/μ where low ≤ ρ ≤ high, else by 0: IcePop; with low 0, MIS."""

    kind: Literal["mask"] = "mask"
    level: Literal["token", "sequence"] = "token"
    """token: ρ of each token; sequence: their product over the completion."""
    low: float = Field(0.5, ge=0, description="Smallest ρ kept; IcePop 0.5, MIS 0.")
    high: float = Field(5.0, gt=0, description="Largest ρ kept, > low; IcePop 5 (TRL's masks: 3).")


Correction = Annotated[TruncatedCorrection | MaskedCorrection, Field(discriminator="kind")]


class Kl(Part):
    """β·k per token in the loss; k estimates KL(π‖π_ref), with d = ln π − ln π_ref."""

    coef: float = Field(0.0, ge=0, description="β; 0 needs no reference model.")
    estimator: Literal["k1", "k3"] = "k3"
    """k1: d, whose gradient is zero on average at ratio 1; k3: exp(−d) − 1 + d."""
    weighted: bool = Field(
        False, description="Whether to multiply the term by the token's weight (TR-GRPO)."
    )


class KlCovPenalty(Part):
    """Add |ln r|, an estimate of D(π_old‖π), on the `share` of tokens with the largest covariance (KL-Cov, arXiv 2505.22617)."""

    kind: Literal["kl_cov"] = "kl_cov"
    share: float = Field(2e-4, gt=0, le=1)
    """Share of the step's loss tokens, at least one token; published 2e-4 (7 B model: 2e-3)."""


class LpRegPenalty(Part):
    """Add k3(π, q) where π < q, on the `share` of the tokens with A < 0 that are least likely (Lp-Reg, arXiv 2510.03222).

    k3 = q/π − 1 − ln(q/π). q is π_old without tokens below 0.02·max_j π_old(j), renormalized: it protects rare tokens that
    are not noise. A sampled token that q leaves out has no penalty. The tokens are chosen by π_old once a step, π < q is
    tested in every update.
    """

    kind: Literal["lp_reg"] = "lp_reg"
    share: float = Field(0.01, gt=0, le=1)
    """Share of the step's loss tokens with A < 0, at least one token; published 0.01 (32 B model: 0.005)."""


Penalty = Annotated[KlCovPenalty | LpRegPenalty, Field(discriminator="kind")]


class AveragedProximal(Part):
    """Clip around an exponential moving average of past policies (PPO-EWMA, arXiv 2110.00641).

    Decoupled objective (π_prox/π_old)·min(r·A, clip(r)·A) with r = π/π_prox. At step n, π_prox has the weights
    Σ_i decay^(n−i)·θ_i / Σ_i decay^(n−i), θ_i those at the start of step i = 1…n: of θ_1 at first. With decay 0 it is π_old. With
    `every=update` n and i count updates, as in the source (with decay 0 it is π then, and nothing is clipped); both are the same where
    a step makes one update.
    """

    kind: Literal["average"] = "average"
    decay: float = Field(0.889, ge=0, lt=1)
    """Factor of the older weights each time; their mean age becomes decay/(1 − decay) steps or updates, 8 for the source's 0.889."""
    every: Literal["step", "update"] = "step"
    """When the average moves: before each step, or before each update (another pass over its completions)."""


class Sharpness(Part):
    """Another gradient in place of g = ∇L(θ), from that at an ascended point θ + d·g, applied at θ.

    - sam: ∇L(θ + d·g), d = rho/‖g‖₂ (arXiv 2010.01412).
    - gradient_norm_penalty: g + 0.8·(∇L(θ + d·g) − g), d = rho/‖g‖₂: the gradient of L + λ·‖∇L‖₂ by a finite difference, λ = 0.8·rho
      (arXiv 2202.03599). 0.8 is ours; with 1 it is SAM.
    - squared_gradient_norm: g + (rho/d)·(∇L(θ + d·g) − g), d = 0.001: the gradient of L + (rho/2)·‖∇L‖₂² by a finite difference
      (arXiv 2602.18037).
    """

    kind: Literal["sam", "gradient_norm_penalty", "squared_gradient_norm"]
    small: ClassVar[float] = 0.001
    rho: float = Field(
        0.05,
        gt=0,
        description="Length of the ascent step [parameters' L2 norm]; 0.05 as in SAM, tune it. Of squared_gradient_norm the "
        "strength of the penalty; published 0.01.",
    )

    def ascent(self, norm: float) -> float:
        """Factor d of a gradient of this norm."""
        return self.small if self.kind == "squared_gradient_norm" else self.rho / norm

    @property
    def share(self) -> float:
        """Factor of ∇L(θ + d·g) − g, which is added to g."""
        shares = {
            "sam": 1.0,
            "gradient_norm_penalty": 0.8,
            "squared_gradient_norm": self.rho / self.small,
        }
        return shares[self.kind]


class Sampling(Part):
    """Resampling and reward shaping of a step's completions."""

    dynamic: bool = False
    """Whether to replace groups whose answers are all correct or all wrong by groups of new prompts, up to 10 times a step
    (DAPO: until the batch is full)."""
    pool: int | None = Field(None, ge=2, le=100)
    """Prompts that a step draws completions for, in units of those that it learns from: the ones with the highest `rank`; null: 1.
    Recorded rewards and accuracies are of the prompts that are learned from, so that they do not compare with those of runs without a pool."""
    rank: Literal["variance", "uncertainty"] = "variance"
    """variance: of the rewards within the prompt (METIS, arXiv 2605.11235, where the policy predicts it). uncertainty:
    (1 − 2·|share of correct answers − 1/2|)·(mean entropy of the 20 % of a completion's tokens with the most) (HEAL, arXiv
    2604.17928, for prompts of a second domain, once before training)."""
    overlong: float | None = Field(None, gt=0, le=1)
    """Share of the completion limit over which a soft penalty on the reward grows; published 4096/20480; null: no
    penalty."""

    @model_validator(mode="after")
    def _ranked(self) -> Self:
        if self.pool is None and self.rank != "variance":
            raise ValueError("rank needs pool: without one all prompts are learned from")
        return self


# -- selections of tokens ---------------------------------------------------------------------------------------------


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
    context: Share = Field(
        0.5, description="Share that is left out; the authors' schedule goes from 0.99 to 0."
    )


class BinTokens(Part):
    """Only some of four bins of tokens are in the surrogate: A > 0 or A < 0, and π ≥ Σ_v π_v² (peak) or below (valley).

    To first order, raising a peak's logit lowers the collision entropy −ln Σ_v π_v² and raising a valley's raises it
    (arXiv 2606.16154). Tokens with A = 0 are in no bin.
    """

    kind: Literal["bins"] = "bins"
    include: tuple[Literal["pos_peak", "pos_valley", "neg_peak", "neg_valley"], ...] = Field(
        min_length=1
    )
    """Bins that are kept."""


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
    max_objective: float = Field(
        0.01,
        gt=0,
        description="Bound of |m_H|; published 0.01 (Dr.CAPO 5e-4, ReinCAPO 0.1).",
    )
    max_kl: float = Field(
        1e-4,
        gt=0,
        description="Bound of m_F [nats]; published 1e-4 (Dr.CAPO 1e-3, ReinCAPO 1e-5).",
    )


class ClipCovTokens(Band):
    """Leave random tokens with covariance in (low, high) out of the surrogate (Clip-Cov, arXiv 2505.22617)."""

    kind: Literal["clip_cov"] = "clip_cov"
    share: float = Field(2e-4, gt=0, le=1)
    """Share of the step's loss tokens to leave out, at least one token; published 2e-4."""
    low: float = Field(
        1.0, description="Lower bound of the covariance [nats × advantage]; published 1."
    )
    high: float = Field(5.0, description="Upper bound of the covariance, > low; published 5.")


class ProbabilityTokens(Part):
    """Only tokens with π_old < 0.5 (`low`) or π_old ≥ 0.5 (`high`) are in the surrogate.

    Both divide by the full token count, so that the two gradients add up to that of all tokens.
    """

    kind: Literal["probability"] = "probability"
    side: Literal["low", "high"] = Field("low", description="Which tokens are kept.")


class AdvantageTokens(Part):
    """Only tokens with a positive advantage are in the surrogate, which divides by the full token count."""

    kind: Literal["advantage"] = "advantage"


class SpuriousTokens(Part):
    """Leave tokens with A > 0, π < 0.002 and H < h out of the surrogate (STAPO, arXiv 2602.15620).

    h is the 0.75 quantile (linearly interpolated) of the entropy over the step's loss tokens with A > 0 and π < 0.002 (the
    paper's later version), all under the policy at its start.
    """

    kind: Literal["stapo"] = "stapo"
    probability: ClassVar[float] = 0.002
    quantile: ClassVar[float] = 0.75


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


# -- the method -------------------------------------------------------------------------------------------------------


class Method(Part):
    """An objective as data: a named method is a value of this type, an ablation is the same value with one field replaced."""

    name: str = Field(description="Name of the method in runs, traces and plots.")
    label: str | None = Field(
        None, description="Name in tables and legends; null: the name and what was changed."
    )
    advantage: Advantage = Field(default_factory=GroupAdvantage)
    """How advantages are computed from rewards."""
    ratio: Ratio = Field(
        default_factory=TokenRatio, description="Importance ratio that is clipped."
    )
    weight: TokenWeight = Field(default_factory=UniformWeight)
    """Token weight w; no gradient flows through it."""
    weight_on: Literal["surrogate", "ratio"] = "surrogate"
    """surrogate: w·(clipped objective); ratio: w multiplies the ratio inside the clip."""
    clip: Clip | None = Field(
        default_factory=PpoClip, description="Clip of the ratio; null: r·A without a clip."
    )
    aggregate: Literal[
        "sequence_mean",
        "token_mean",
        "constant",
        "sequence_sum",
        "kept_mean",
        "kept_sequence_mean",
        "kept_groups",
    ] = "sequence_mean"
    """sequence_mean: mean over a completion's tokens, then over completions; token_mean: mean over all tokens;
    constant: sum divided by completions × completion limit; sequence_sum: sum over a completion's tokens, mean over
    completions; kept_mean: sum divided by the tokens that `tokens` leaves in the surrogate; kept_sequence_mean: mean
    over a completion's tokens that it leaves, then over completions; kept_groups: sum over a group divided by
    completions × completion limit, mean over groups with a token left."""
    correction: Correction | None = None
    """Factor of the surrogate for the difference between the sampler's policy and π_old."""
    kl: Kl = Field(default_factory=Kl, description="Divergence from the reference policy.")
    entropy: NonNegative | None = None
    """Weight of the mean entropy of an update's loss tokens, which is subtracted from the loss [loss per nat]; null: no
    bonus. It is no part of `loss_coef`: its gradient acts on all logits of a position."""
    tokens: Tokens | None = Field(None, description="Loss tokens in the surrogate; null: all.")
    penalty: Penalty | None = Field(None, description="Additional loss term on selected tokens.")
    proximal: AveragedProximal | None = Field(
        None, description="Policy that the clip is centered on; null: π_old."
    )
    passes: float | None = Field(None, gt=0, le=1)
    """Two optimizer passes over a mini-batch: tokens with π_old below this number first, then the others; both divide by
    the full token count. Low-probability token isolation (arXiv 2505.12929), published 0.4; null: one pass."""
    sharpness: Sharpness | None = Field(
        None, description="Sharpness-aware gradient of the optimizer step."
    )
    module_clip: Annotated[float, Field(gt=1)] | Schedule | None = None
    """Largest gradient norm of each type of module, in units of its moving average (AGGC, arXiv 2601.11864), before the
    clip of the global norm; null: no such clip."""
    sampling: Sampling = Field(default_factory=Sampling)
    """Resampling and reward shaping before the advantages."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        clip, ratio = self.clip, self.ratio
        if self.passes is not None and not isinstance(ratio, TokenRatio):
            raise ValueError(
                "passes needs ratio.kind=token: a sequence ratio couples the tokens of both passes"
            )
        if clip is not None:
            self._check_clip(clip)
        if getattr(ratio, "to", "old") == "sampler" and self.correction is not None:
            raise ValueError(
                "ratio.to=sampler needs correction=null: its ratio is already to the sampler"
            )
        if self.proximal is not None and getattr(ratio, "to", "old") == "sampler":
            raise ValueError("proximal needs ratio.to=old: it replaces the ratio's denominator")
        if self.at(0.0) is not self:
            self.at(1.0)  # schedules are monotone, so valid endpoints make all values valid
        return self

    def _check_clip(self, clip: Clip) -> None:
        """Refuse settings that the clip's surrogate is not defined for."""
        kind, ratio = clip.kind, self.ratio.kind
        if ratio not in clip.needs_ratio:
            needed = " or ".join(clip.needs_ratio)
            raise ValueError(f"clip.kind={kind} needs ratio.kind={needed}, not {ratio}")
        if self.passes is not None and clip.couples_tokens:
            raise ValueError(f"passes needs another clip than {kind}, which couples both passes")
        if self.weight_on == "ratio" and not clip.takes_weight:
            raise ValueError(
                f"weight_on=ratio needs clip null, ppo or cispo, not {kind}; set weight_on=surrogate"
            )
        if clip.has_correction and self.correction is not None and self.correction.level != "token":
            raise ValueError(
                f"clip.kind={kind} needs correction.level=token: the factors enter its product of ratios"
            )
        if self.proximal is not None and not clip.takes_proximal:
            raise ValueError(f"proximal needs clip null, ppo, cispo or dual, not {kind}")

    @property
    def weighted(self) -> bool:
        """Whether tokens have other weights than 1."""
        return not isinstance(self.weight, UniformWeight)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss or the reward uses log-probabilities of a reference policy."""
        return self.kl.coef > 0

    @property
    def needs_proxy(self) -> bool:
        """Whether the loss compares with π_old without its least likely tokens."""
        return isinstance(self.penalty, LpRegPenalty)

    @property
    def pass_count(self) -> int:
        """Number of optimizer passes over each mini-batch."""
        return 1 if self.passes is None else 2

    @property
    def unlabeled(self) -> Self:
        """The method without its label, to compare two methods by what they do."""
        return self.model_copy(update={"label": None})

    def with_preset(self, old: str, new: str) -> Self:
        """The same method with preset `new` of the token weight, also inside controls, where it has preset `old`."""
        return self.model_copy(update={"weight": self.weight.with_preset(old, new)})
