"""The named methods with their equations, constants, sources, differences from GRPO and choices of this project."""

from __future__ import annotations

from dataclasses import dataclass

from sharpscope.config import method as spec
from sharpscope.config.method import Method
from sharpscope.config.token_weights import (
    CovarianceGaussianWeight,
    LinearWeight,
    PolarityWeight,
    Schedule,
    SigmoidWeight,
)


@dataclass(frozen=True)
class MethodNote:
    """A named method and its description.

    Attributes:
        method: The method's value.
        title: Full name.
        equation: The loss.
        constants: Default constants.
        source: arXiv identifiers.
        differs: Difference from GRPO.
        ours: Choices that the source leaves open.
    """

    method: Method
    title: str
    equation: str
    constants: str
    source: str
    differs: str
    ours: str


_SG_WEIGHT = SigmoidWeight(percentiles="gradient")
_SG_CONSTANTS = "alpha 2, mu 0.25, L 1, U 1.4; tau 9, u0 0 (preset paper) or from the first step (preset calibrated)"
_SG_OURS = (
    "u is the sampled token's logit before division by the temperature: with u = π every weight would be L. The location u0 and the preset "
    "calibrated, whose percentiles count tokens by the gradient they carry: counted alike, the 10th to 90th percentile of u spans "
    "tokens that carry almost none (docs/guides/methods.md). w is computed from the policy at the start of the step and stays "
    "fixed over its updates."
)
_STATISTICS_OURS = "Statistics are over all loss tokens of the step, under the policy at its start."

_AR_CLIP = spec.DualClip(low=0.2, high=0.24, bound=10.0)
_AR_OURS = (
    "The mean is over the mini-batch of an update (the authors': over a micro-batch). β is 0 unless set (the authors': 0.001 with "
    "k3). method.aggregate=sequence_mean with PPO's clip of 0.2 gives the method on plain GRPO, as in version 0.1."
)

_NOTES = (
    MethodNote(
        method=Method(name="grpo"),
        title="Group relative policy optimization",
        equation=(
            "L = −(1/N) Σ_i (1/|o_i|) Σ_t min(r_t·A_i, clip(r_t, 1 − ε, 1 + ε)·A_i) + β·k3_t; r_t = π(y_t)/π_old(y_t), "
            "A_i = (R_i − mean R)/(std R + 1e-4) within the group of one prompt"
        ),
        constants="ε 0.2; β 0 (kl.coef)",
        source="arXiv 2402.03300",
        differs="The reference point.",
        ours="The std divides by n − 1 as in TRL; groups whose rewards are all equal have advantage 0. β is 0 unless set.",
    ),
    MethodNote(
        method=Method(name="grpo-sg", weight=_SG_WEIGHT),
        title="Sharpness-guided GRPO",
        equation="GRPO with w_t·min(r_t·A, clip(r_t)·A), w = clip(alpha·[sigmoid((u − u0)/tau) − mu], L, U)",
        constants=_SG_CONSTANTS,
        source="arXiv 2511.00066, v3 and v4",
        differs="A weight that grows with the token's logit multiplies its clipped surrogate, but not the KL term.",
        ours=_SG_OURS,
    ),
    MethodNote(
        method=Method(name="tr-grpo", weight=_SG_WEIGHT, weight_on="ratio", kl=spec.Kl(weighted=True)),
        title="Token-regulated GRPO",
        equation="GRPO with min(w_t·r_t·A, clip(w_t·r_t, 1 − ε, 1 + ε)·A) + β·w_t·k3_t, w as in grpo-sg",
        constants=_SG_CONSTANTS + "; ε 0.2",
        source="arXiv 2511.00066, v1 and v2",
        differs=(
            "The weight multiplies the ratio inside the clip, and the KL term. "
            "Caution: at r = 1 a token with A > 0 and w > 1 + ε has no gradient."
        ),
        ours=_SG_OURS,
    ),
    MethodNote(
        method=Method(name="ar", weight=LinearWeight(alpha=0.2), clip=_AR_CLIP, aggregate="token_mean"),
        title="Advantage reweighting",
        equation="L = −(1/Σ|o_i|) Σ_i Σ_t S(r_t, A_t), A_t = (alpha·π_old(y_t) + 1 − alpha)·A_i, S as in dual-clip",
        constants="alpha 0.2; ε 0.2 below, 0.24 above, bound 10",
        source="arXiv 2505.12929; clip and aggregation from the authors' scripts",
        differs=(
            "Advantages of unlikely tokens are reduced by up to alpha; the factor is recorded as the token's weight. Mean over "
            "tokens, dual clip."
        ),
        ours=_AR_OURS,
    ),
    MethodNote(
        method=Method(name="lopti", passes=spec.LoptiPasses(eta=0.4), clip=_AR_CLIP, aggregate="token_mean"),
        title="Low-probability token isolation",
        equation=(
            "L = −(1/Σ|o_i|) Σ_i Σ_t S(r_t, A_i), S as in dual-clip, in two optimizer passes: tokens with π_old < eta first, the "
            "rest after"
        ),
        constants="eta 0.4; negative reverses the order; ε 0.2 below, 0.24 above, bound 10",
        source="arXiv 2505.12929; clip and aggregation from the authors' scripts",
        differs=(
            "Two updates instead of one; both divide by the full token count, π_old is not recomputed. Mean over tokens, dual "
            "clip."
        ),
        ours=_AR_OURS + " A token's KL term is in the same pass as the token.",
    ),
    MethodNote(
        method=Method(
            name="ar-lopti",
            weight=LinearWeight(alpha=0.3),
            passes=spec.LoptiPasses(eta=0.5),
            clip=_AR_CLIP,
            aggregate="token_mean",
        ),
        title="Advantage reweighting with Lopti",
        equation="ar and lopti together",
        constants="alpha 0.3, eta 0.5; ε 0.2 below, 0.24 above, bound 10",
        source="arXiv 2505.12929; clip and aggregation from the authors' scripts",
        differs="See ar and lopti.",
        ours="See ar and lopti.",
    ),
    MethodNote(
        method=Method(name="cov-grpo", weight=CovarianceGaussianWeight()),
        title="Covariance-aware GRPO, normalized over the step",
        equation="GRPO with A_t ← A_i·exp(−(c_t − mean c)²/(2·std(c)²)), c_t = (ln π_t − mean ln π)·(A_t − mean A)",
        constants="none",
        source="arXiv 2605.11538",
        differs="Tokens with an extreme covariance of log-probability and advantage have less weight.",
        ours=(
            "The kernel is published, the tokens over which c is normalized are not: this is one of two readings, the other is "
            "cov-grpo-completion. " + _STATISTICS_OURS
        ),
    ),
    MethodNote(
        method=Method(name="cov-grpo-completion", weight=CovarianceGaussianWeight(over="completion")),
        title="Covariance-aware GRPO, normalized over the completion",
        equation=(
            "cov-grpo with mean c and std c over the tokens of each completion; as A_i is the same for all of them, the weight is "
            "exp(−z_t²/2), z_t the standardized ln π_t of the completion"
        ),
        constants="none",
        source="arXiv 2605.11538",
        differs="Tokens that are much less or more likely than the completion's others have less weight, whatever the advantage.",
        ours=(
            "The second reading of the kernel's normalization (see cov-grpo). The mean weight of a completion is about 0.7 where "
            "its ln π_t are normally distributed. Statistics are under the policy at the start of the step."
        ),
    ),
    MethodNote(
        method=Method(name="clip-cov", clip=spec.PpoClip(low=1.0, high=1.0), tokens=spec.ClipCovTokens()),
        title="Clip-Cov",
        equation="GRPO without the surrogate of max(⌊share·tokens⌋, 1) random tokens with c_t in (low, high); "
        "c_t as in cov-grpo; r_t clipped to [0, 2]",
        constants="share 2e-4, low 1, high 5; ε 1 below (no lower bound), 1 above",
        source="arXiv 2505.22617; ε from the authors' script",
        differs="A few tokens with a high covariance are left out of the surrogate (not the KL term); the ratio's clip is wide.",
        ours=(
            "Sampled once per step from all tokens (the authors sample at each update from the unclipped tokens). "
            "Mean per completion as in GRPO (their script: over tokens). " + _STATISTICS_OURS
        ),
    ),
    MethodNote(
        method=Method(name="kl-cov", clip=spec.NoClip(), penalty=spec.KlCovPenalty()),
        title="KL-Cov",
        equation="−r_t·A_i, + coef·|ln r_t| on the max(⌊share·tokens⌋, 1) tokens with the largest c_t; c_t as in "
        "cov-grpo",
        constants="share 2e-4 (7 B models: 2e-3), coef 1",
        source="arXiv 2505.22617",
        differs="No clip; a divergence from π_old on a few tokens instead.",
        ours=(
            "|ln r| as in the authors' code: no gradient where r is exactly 1. Tokens tied with the last one are included. "
            "Mean per completion as in GRPO. " + _STATISTICS_OURS
        ),
    ),
    MethodNote(
        method=Method(name="gspo", ratio=spec.SequenceRatio(), clip=spec.PpoClip(low=3e-4, high=4e-4)),
        title="Group sequence policy optimization",
        equation="GRPO with s_i = exp(mean_t ln r_t) in place of r_t",
        constants="ε 3e-4 below, 4e-4 above",
        source="arXiv 2507.18071",
        differs="Ratio and clip are per completion; a token's loss_coef depends on the other tokens.",
        ours="None.",
    ),
    MethodNote(
        method=Method(name="holder", ratio=spec.HolderRatio(p=Schedule(kind="linear", start=2.0, end=-2.0))),
        title="Hölder policy optimization",
        equation="GRPO with s_i = (mean_t r_t^p)^(1/p) in place of r_t; p = 1 arithmetic mean, p → 0 GSPO",
        constants="p linear from 2 to −2 over training; ε 0.2",
        source="arXiv 2605.12058; p and ε from the authors' script for mathematics (their agent runs: 1 to −1)",
        differs="Ratio and clip are per completion; p is annealed.",
        ours="The schedule spans the whole run.",
    ),
    MethodNote(
        method=Method(
            name="dapo",
            clip=spec.PpoClip(low=0.2, high=0.28),
            aggregate="token_mean",
            sampling=spec.Sampling(dynamic=True, overlong=spec.Overlong()),
        ),
        title="Decoupled clip and dynamic sampling policy optimization",
        equation="L = −(1/Σ|o_i|) Σ_i Σ_t min(r_t·A_i, clip(r_t, 1 − ε_low, 1 + ε_high)·A_i)",
        constants="ε 0.2 / 0.28; overlong penalty over the last 20 % of the completion limit, up to −1",
        source="arXiv 2503.14476",
        differs="Higher upper bound, mean over tokens, no KL, groups all correct or all wrong resampled, overlong penalty.",
        ours="At most 10 resampling rounds per step. The buffer is a share of the limit (published: 4096 of 20480).",
    ),
    MethodNote(
        method=Method(name="dr-grpo", advantage=spec.GroupAdvantage(scale="none"), aggregate="constant"),
        title="GRPO done right",
        equation="L = −(1/(N·limit)) Σ_i Σ_t min(r_t·A_i, clip(r_t)·A_i), A_i = R_i − mean R",
        constants="ε 0.2; limit = the completion limit in tokens",
        source="arXiv 2503.20783",
        differs="No division by the reward's std or by the completion's length.",
        ours="None.",
    ),
    MethodNote(
        method=Method(name="cispo", clip=spec.CispoClip(), aggregate="token_mean"),
        title="Clipped importance-sampling policy optimization",
        equation="L = −(1/Σ|o_i|) Σ_i Σ_t sg[clip(r_t, 1 − low, 1 + high)]·A_i·ln π_t",
        constants="low 1 (no lower bound), high 4 (r at most 5)",
        source="arXiv 2506.13585; the upper bound from arXiv 2510.13786",
        differs="The clipped ratio is a constant factor of ln π: no token loses its gradient. Mean over tokens.",
        ours="The default bound: the first source gives no number.",
    ),
    MethodNote(
        method=Method(name="bnpo", aggregate="token_mean"),
        title="GRPO with the mean over the batch's tokens (TRL's loss_type bnpo)",
        equation="L = −(1/Σ|o_i|) Σ_i Σ_t min(r_t·A_i, clip(r_t, 1 − ε, 1 + ε)·A_i)",
        constants="ε 0.2",
        source="TRL, loss_type bnpo; the normalizer is that of arXiv 2503.14476",
        differs="Mean over tokens: long completions count more.",
        ours=(
            "The mean is over the mini-batch of an update (TRL: over a micro-batch). This is not the reward normalization by a "
            "beta distribution of arXiv 2506.02864, which has the same name."
        ),
    ),
    MethodNote(
        method=Method(name="dual-clip", clip=spec.DualClip()),
        title="GRPO with dual clip",
        equation="GRPO with max(min(r_t·A_i, clip(r_t)·A_i), bound·A_i) where A_i < 0",
        constants="ε 0.2, bound 3",
        source="arXiv 1912.09729; as delta arXiv 2505.07291",
        differs="A token with A < 0 and r > bound has no gradient; plain GRPO has no bound there.",
        ours="Group advantages instead of a critic. bound > 1 + ε is required: there verl's clip_ratio_c and TRL's delta agree.",
    ),
    MethodNote(
        method=Method(name="sapo", clip=spec.SapoClip()),
        title="Soft adaptive policy optimization",
        equation="GRPO with (4/τ)·sigmoid(τ·(r_t − 1))·A_i in place of the clipped surrogate; τ by the sign of A_i",
        constants="τ 1 for A > 0, 1.05 for A < 0",
        source="arXiv 2511.20347",
        differs=(
            "The gradient falls smoothly with |r − 1|: the coefficient is −A·r·4p(1 − p), p = sigmoid(τ(r − 1)), as GRPO's at "
            "r = 1. Values of the loss are not comparable with GRPO's."
        ),
        ours="None.",
    ),
    MethodNote(
        method=Method(name="gmpo", ratio=spec.SequenceRatio(), clip=spec.GmpoClip()),
        title="Geometric-mean policy optimization",
        equation="L = −(1/N) Σ_i exp(mean_t x_t)·A_i, x_t = min(ln r_t, high) for A_i > 0 and max(ln r_t, −low) for A_i < 0",
        constants="low 0.4, high 0.4 (in ln r)",
        source="arXiv 2507.20673",
        differs="Geometric mean of token ratios, each clipped before the mean; a clipped token still counts in the mean.",
        ours="The recorded ratio is the geometric mean without the clip.",
    ),
    MethodNote(
        method=Method(name="dppo", clip=spec.DppoMask()),
        title="Divergence proximal policy optimization, total variation",
        equation=(
            "L = −mean sg[min(r_t, bound)]·M_t·A_i·ln π_t; M_t = 0 where |π − π_old| > δ and A_i·(r_t − 1) > 0, else 1"
        ),
        constants="δ 0.15 on both sides, bound 20",
        source="arXiv 2602.04879; δ from verl's example, the bound from verl and TRL",
        differs="The trust region is in probability instead of ratio: rare tokens may change their ratio much.",
        ours="Mean per completion as in GRPO (verl's default: over tokens).",
    ),
    MethodNote(
        method=Method(name="dppo-kl", clip=spec.DppoMask(divergence="kl", low=0.05, high=0.05)),
        title="Divergence proximal policy optimization, KL",
        equation=(
            "As dppo, with q·ln(q/p) + (1 − q)·ln((1 − q)/(1 − p)) > δ in place of |p − q| > δ; p = π(y_t), q = π_old(y_t)"
        ),
        constants="δ 0.05 nats on both sides, bound 20",
        source="arXiv 2602.04879; δ from verl's example, the bound from verl and TRL",
        differs="See dppo.",
        ours="See dppo. The binary divergence of the sampled token, without verl's 1e-8 inside the logarithm.",
    ),
    MethodNote(
        method=Method(
            name="luspo", ratio=spec.SequenceRatio(), clip=spec.PpoClip(low=2e-3, high=2.5e-3), aggregate="sequence_sum"
        ),
        title="Length-unbiased sequence policy optimization",
        equation="L = −(1/N) Σ_i |o_i|·min(s_i·A_i, clip(s_i)·A_i), s_i = exp(mean_t ln r_t)",
        constants="ε 2e-3 below, 2.5e-3 above",
        source="arXiv 2602.05261; ε as TRL quotes it",
        differs="GSPO with each completion multiplied by its length.",
        ours="The KL term, if any, is summed over a completion too, as in TRL.",
    ),
    MethodNote(
        method=Method(name="vespo", clip=spec.VespoGate(), aggregate="token_mean"),
        title="Variational sequence-level soft policy optimization",
        equation="L = −(1/Σ|o_i|) Σ_i Σ_t sg[φ(W_i)]·A_i·ln π_t, φ(W) = W^k·exp(λ·(1 − W)), W_i = Π_t r_t",
        constants="k 2, λ 3 for A ≥ 0; k 3, λ 2 for A < 0",
        source="arXiv 2602.10693; constants and bounds from TRL",
        differs="A smooth weight of the whole completion's product of ratios instead of a clip; φ(1) = 1.",
        ours="None. A sampler correction per token enters W, as in TRL.",
    ),
    MethodNote(
        method=Method(name="papo", weight=PolarityWeight()),
        title="Polarity-aware policy optimization",
        equation=(
            "GRPO with A_t ← A_i·(1 + alpha·phase·sign ΔH_t), ΔH_t = −A_i·[π(ln π + H) − Σ_j p_j²(ln p_j + H)], "
            "phase = clip((H* − mean H)/H*, −1, 1)"
        ),
        constants="alpha 0.5; H* the first step's mean entropy",
        source="arXiv 2605.11775",
        differs="Below the target entropy, tokens whose update raises the entropy weigh more; above it, the others.",
        ours="The paper defines polarity, both branches and the entropy as phase signal; this formula is ours.",
    ),
    MethodNote(
        method=Method(name="ppo-ewma", proximal=spec.EwmaProximal()),
        title="GRPO with PPO-EWMA's decoupled objective",
        equation="(π_prox/π_behavior)·min(r_t·A_i, clip(r_t)·A_i), r_t = π/π_prox, π_prox an average of past weights: "
        "Σ_i β^(n−i)·θ_i / Σ_i β^(n−i) after n updates",
        constants="ε 0.2; decay β 0.889",
        source="arXiv 2110.00641; for language models arXiv 2605.12070",
        differs="The clip is centered on an average of past policies instead of the behavior policy.",
        ours="Group advantages instead of a critic; the decay (8 updates on average); no bound on π_prox/π_behavior.",
    ),
    MethodNote(
        method=Method(name="high-entropy", tokens=spec.HighEntropyTokens()),
        title="High-entropy tokens only",
        equation="GRPO's surrogate on the 20 % of the step's loss tokens with the highest entropy",
        constants="share 0.2",
        source="arXiv 2506.01939",
        differs="The other tokens have no surrogate (but keep the KL term); the normalizer counts all tokens.",
        ours="On GRPO instead of DAPO. Tokens tied with the last one are kept. " + _STATISTICS_OURS,
    ),
    MethodNote(
        method=Method(
            name="stapo", clip=spec.PpoClip(low=0.2, high=0.28), tokens=spec.SpuriousTokens(), aggregate="kept_mean"
        ),
        title="Spurious-token-aware policy optimization",
        equation=(
            "L = −(1/Σ I_t) Σ_i Σ_t I_t·min(r_t·A_i, clip(r_t, 1 − ε_low, 1 + ε_high)·A_i), I_t = 0 where A_i > 0, π_t < p and "
            "H_t < h, else 1; h the q-quantile of H over the tokens with A_i > 0 and π_t < p"
        ),
        constants="p 0.002, q 0.75; ε 0.2 / 0.28",
        source="arXiv 2602.15620 as several readers quote it (no public code); the clip is DAPO's",
        differs="Rare tokens in good completions, drawn where the policy was rather certain, are left out; mean over the other tokens.",
        ours=(
            "tokens.over=all with quantile=0.8 is the paper's first version. The quantile is over the step (published: over a "
            "mini-batch). The KL term, if any, is divided by Σ I_t too. " + _STATISTICS_OURS
        ),
    ),
    MethodNote(
        method=Method(
            name="lp-reg", clip=spec.PpoClip(low=1.0, high=9.0), penalty=spec.LpRegPenalty(), aggregate="token_mean"
        ),
        title="Low-probability regularization",
        equation=(
            "L = −(1/Σ|o_i|) Σ_i Σ_t [min(r_t·A_i, clip(r_t, 0, 10)·A_i) − coef·1[t chosen, π_t < q_t]·k3_t], k3_t = q_t/π_t − 1 − "
            "ln(q_t/π_t), q = π_old without tokens below κ·max_j π_old(j), renormalized"
        ),
        constants="coef 1, share 0.01 of the tokens with A < 0, κ 0.02; r clipped to [0, 10]",
        source="arXiv 2510.03222; constants, k3 and aggregation from the authors' code",
        differs="The least likely tokens of bad completions are pulled towards a policy without its noise; the ratio's clip is wide.",
        ours=(
            "k3 on the sampled token as in the authors' code (the paper: KL(q‖π) over the vocabulary). Tokens are chosen once a "
            "step by π_old (the code: in each micro-batch by π). No clip acts where A < 0, as in the code. One more forward pass a "
            "step. " + _STATISTICS_OURS
        ),
    ),
    MethodNote(
        method=Method(name="grpo-sam", sharpness=spec.Sam()),
        title="GRPO with sharpness-aware minimization",
        equation="gradient of GRPO's loss at θ + rho·g/‖g‖₂, applied at θ",
        constants="rho 0.05 (to be swept)",
        source="arXiv 2010.01412 on arXiv 2402.03300",
        differs="Penalizes sharpness directly, with a second forward and backward pass.",
        ours="The combination. Weights, masks and advantages are computed at θ.",
    ),
    MethodNote(
        method=Method(name="grpo-gnp", sharpness=spec.GradientNormPenalty()),
        title="GRPO with a gradient-norm penalty",
        equation="gradient of L + penalty·‖∇L‖₂ as (1 − κ)·∇L(θ) + κ·∇L(θ + radius·g/‖g‖₂), κ = penalty/radius",
        constants="penalty 0.04, radius 0.05 (to be swept)",
        source="arXiv 2202.03599 on arXiv 2402.03300",
        differs="Penalizes sharpness directly, with a second forward and backward pass.",
        ours="The combination and the default constants.",
    ),
    MethodNote(
        method=Method(name="lite-ppo", advantage=spec.GroupAdvantage(scale="batch"), aggregate="token_mean"),
        title="Lite PPO",
        equation="L = −(1/Σ|o_i|) Σ_i Σ_t min(r_t·A_i, clip(r_t)·A_i), A_i = (R_i − mean R of the group)/(std of all R + 1e-4)",
        constants="ε 0.2",
        source="arXiv 2508.08221",
        differs="Divided by the std of all rewards of the step instead of the group's; mean over tokens.",
        ours="The std is that of the rewards with n − 1 plus 1e-4, as in TRL (scale_rewards=batch).",
    ),
    MethodNote(
        method=Method(name="rloo", advantage=spec.LeaveOneOutAdvantage(), aggregate="sequence_sum"),
        title="REINFORCE leave-one-out",
        equation="L = −(1/N) Σ_i Σ_t min(r_t·A_i, clip(r_t)·A_i), A_i = R_i − mean of the group's other rewards",
        constants="ε 0.2",
        source="arXiv 2402.14740",
        differs="The baseline leaves the completion's own reward out; no division by std or length.",
        ours=(
            "PPO's clip on tokens for several updates per step (TRL clips the ratio of the completion); at ratio 1 the gradient "
            "is the source's. No KL in the reward. A group of one has advantage 0 (verl: R)."
        ),
    ),
    MethodNote(
        method=Method(name="reinforce-pp", advantage=spec.WhitenedAdvantage(), aggregate="token_mean"),
        title="REINFORCE++",
        equation=(
            "L = −(1/Σ|o_i|) Σ_i Σ_t min(r_t·A_t, clip(r_t)·A_t), A_t = (G_t − mean G)/√(var G + 1e-8) over all loss tokens of "
            "the step, G_t = gamma^(tokens after t)·R_i"
        ),
        constants="ε 0.2; gamma 1",
        source="arXiv 2501.03262",
        differs=(
            "Normalized over the step instead of the group, each completion counted by its length. Groups with equal rewards "
            "have a gradient. Mean over tokens."
        ),
        ours="No KL in the reward; variance with n − 1 as in verl (OpenRLHF: n). Text of the environment does not discount.",
    ),
    MethodNote(
        method=Method(
            name="reinforce-pp-baseline", advantage=spec.WhitenedAdvantage(baseline="group"), aggregate="token_mean"
        ),
        title="REINFORCE++ with the group's mean as baseline",
        equation="reinforce-pp with R_i − mean R of the group in place of R_i",
        constants="ε 0.2; gamma 1",
        source="arXiv 2501.03262",
        differs=(
            "Divided by the std over all loss tokens of the step. The mean over tokens is not 0 where lengths differ, so groups "
            "with equal rewards have a small gradient."
        ),
        ours="No KL term unless set; variance with n − 1 as in verl. A group of one has baseline R (verl: 0).",
    ),
    MethodNote(
        method=Method(name="opo", advantage=spec.LengthBaselineAdvantage(), aggregate="token_mean"),
        title="On-policy RL with optimal reward baseline",
        equation="L = −(1/Σ|o_i|) Σ_i Σ_t min(r_t·A_i, clip(r_t)·A_i), A_i = R_i − Σ_j |o_j|·R_j / Σ_j |o_j| over the group",
        constants="ε 0.2, without effect in exact on-policy training (update.mini_batches=1, update.inner_epochs=1)",
        source="arXiv 2505.23585",
        differs="The baseline weights rewards by length; no division by std; mean over tokens.",
        ours="The mean over tokens is verl's default. A group of one has advantage 0 (verl: R).",
    ),
    MethodNote(
        method=Method(name="otb", advantage=spec.TokenBaselineAdvantage(), aggregate="token_mean"),
        title="Optimal token baseline",
        equation=(
            "L = −(1/Σ|o_i|) Σ_i Σ_t min(r_t·A_t, clip(r_t)·A_t), A_t = R_i − Σ_j R_j·V_jt/(Σ_j V_jt + 1e-8) over the group, "
            "V_jt = Σ_{s ≤ t} (1 − 2π_s + Σ_v π_v²)"
        ),
        constants="ε 0.2",
        source="arXiv 2602.07078; implementation in verl",
        differs=(
            "Each token has its own baseline, weighted by the squared norm of the logit gradient so far; no division by std; "
            "mean over tokens. Tokens beyond the group's second longest completion have A = R, also in groups with equal "
            "rewards."
        ),
        ours=(
            "Probabilities are those at the temperature of sampling, under the policy at the start of the step. The t-th token "
            "is the t-th loss token, as in verl's variant for tools. Aggregation is verl's default."
        ),
    ),
    MethodNote(
        method=Method(name="gdpo", advantage=spec.DecoupledAdvantage()),
        title="Group reward-decoupled normalization policy optimization",
        equation=(
            "GRPO with S_i = Σ_k weight_k·(R_ik − mean R_k)/(std R_k + 1e-4) within the group, "
            "A_i = (S_i − mean S)/(std S + 1e-4) over the step"
        ),
        constants="weights 1 for the parts answer and format of the reward",
        source="arXiv 2601.05242",
        differs="The parts of the reward are normalized one by one, then summed; the sum is normalized over the step.",
        ours=(
            "Completions count once in the second normalization, as in TRL (normalize_then_sum); verl weights them by length. A "
            "task must have the weighted parts."
        ),
    ),
    MethodNote(
        method=Method(name="maxrl", advantage=spec.MeanScaledAdvantage(), aggregate="token_mean"),
        title="Maximum likelihood reinforcement learning",
        equation="L = −(1/Σ|o_i|) Σ_i Σ_t min(r_t·A_i, clip(r_t)·A_i), A_i = (R_i − mean R)/mean R, 0 if mean R = 0; "
        "R_i = 1 for a correct answer, else 0",
        constants="ε 0.2",
        source="arXiv 2602.02710; ε and aggregation (verl's default) from the authors' script",
        differs="Correctness instead of the reward, divided by the group's success rate instead of a std: prompts that are rarely solved "
        "weigh more.",
        ours="Nothing is added to the mean (SkyRL: 1e-6). advantage.of=reward takes the reward, as prime-rl and SkyRL.",
    ),
)
NOTES: dict[str, MethodNote] = {note.method.name: note for note in _NOTES}
