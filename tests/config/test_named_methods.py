"""Named methods: their constants, controls and mistakes."""

from __future__ import annotations

import pytest

from sharpscope.config.method import DualClip, SequenceRatio
from sharpscope.config.token_weights import (
    ConstantWeight,
    EntropyWeight,
    LinearWeight,
    MeanOneWeight,
    ReverseWeight,
    ShuffledWeight,
    SigmoidWeight,
)
from sharpscope.errors import UserError
from sharpscope.objective import (
    named_method,
)

SG = SigmoidWeight(percentiles="gradient")


def test_published_constants():
    assert named_method("ar").weight == LinearWeight(alpha=0.2)
    assert named_method("lopti").passes.eta == 0.4
    for name in ("ar", "lopti", "ar-lopti"):
        one = named_method(name)
        assert (one.clip, one.aggregate) == (DualClip(low=0.2, high=0.24, bound=10.0), "token_mean")
    stapo = named_method("stapo")
    assert (stapo.tokens.probability, stapo.tokens.quantile, stapo.clip.high) == (0.002, 0.75, 0.28)
    reg = named_method("lp-reg")
    assert (reg.penalty.share, reg.penalty.coef, reg.penalty.min_p) == (0.01, 1.0, 0.02)
    assert (reg.clip.low, reg.clip.high, reg.aggregate) == (1.0, 9.0, "token_mean")
    both = named_method("ar-lopti")
    assert (both.weight.alpha, both.passes.eta) == (0.3, 0.5)
    cov = named_method("clip-cov").tokens
    assert (cov.share, cov.low, cov.high) == (2e-4, 1.0, 5.0)
    wide = named_method("clip-cov").clip  # r in [0, 2]
    assert (wide.low, wide.high) == (1.0, 1.0)
    gspo = named_method("gspo")
    assert (gspo.ratio, gspo.clip.low, gspo.clip.high) == (SequenceRatio(), 3e-4, 4e-4)
    dapo = named_method("dapo")
    assert (dapo.clip.low, dapo.clip.high, dapo.aggregate) == (0.2, 0.28, "token_mean")
    assert dapo.sampling.dynamic
    assert dapo.sampling.overlong.buffer == pytest.approx(4096 / 20480)
    dr = named_method("dr-grpo")
    assert (dr.advantage.scale, dr.aggregate) == ("none", "constant")
    dual, sapo, gmpo = (named_method(name).clip for name in ("dual-clip", "sapo", "gmpo"))
    assert (dual.low, dual.high, dual.bound) == (0.2, 0.2, 3.0)
    assert (sapo.tau_positive, sapo.tau_negative) == (1.0, 1.05)
    assert (gmpo.low, gmpo.high, named_method("gmpo").ratio) == (0.4, 0.4, SequenceRatio())
    for name, limit in (("dppo", 0.15), ("dppo-kl", 0.05)):
        mask = named_method(name).clip
        assert (mask.low, mask.high, mask.bound) == (limit, limit, 20.0)
    luspo = named_method("luspo")
    assert (luspo.ratio, luspo.clip.low, luspo.clip.high) == (SequenceRatio(), 2e-3, 2.5e-3)
    vespo = named_method("vespo").clip
    assert (vespo.k_positive, vespo.lambda_positive, vespo.k_negative, vespo.lambda_negative) == (2, 3, 3, 2)
    assert named_method("high-entropy").tokens.share == 0.2
    assert named_method("ppo-ewma").proximal.decay == 0.889
    tr = named_method("tr-grpo")
    assert (tr.weight_on, tr.kl.weighted, tr.weight) == ("ratio", True, SG)
    assert (named_method("grpo-sg").weight_on, named_method("grpo-sg").kl.weighted) == ("surrogate", False)


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("grpo-sg-shuffled", ShuffledWeight(of=SG, matched="gradient")),
        ("grpo-sg-reverse", ReverseWeight(of=SG)),
        ("grpo-sg-constant", ConstantWeight(of=SG, matched="gradient")),
        ("grpo-sg-mean-one", MeanOneWeight(of=SG, matched="gradient")),
        ("grpo-sg-entropy", EntropyWeight(percentiles="gradient")),
        ("ar-shuffled", ShuffledWeight(of=LinearWeight(alpha=0.2), matched="gradient")),
        ("grpo-sg-reverse-shuffled", ShuffledWeight(of=ReverseWeight(of=SG), matched="gradient")),
        ("grpo-sg-entropy-mean-one", MeanOneWeight(of=EntropyWeight(percentiles="gradient"), matched="gradient")),
    ],
)
def test_controls_by_short_name(name: str, weight: object):
    method = named_method(name)
    assert method.weight == weight
    assert method.name == name
    base = named_method(name.split("-", maxsplit=1)[0] if name.startswith("ar") else "grpo-sg")
    assert method.model_copy(update={"name": base.name, "weight": base.weight}) == base


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grpo-gs", "did you mean 'grpo-sg'"),
        ("grpo-shuffled", "whose weights are all 1"),
        ("cov-grpo-reverse", "whose weights have no bounds"),
        ("grpo-sg-shufled", "did you mean 'grpo-sg-shuffled'"),
        ("", "valid: "),
    ],
)
def test_unknown_names_are_one_line_with_the_nearest(name: str, message: str):
    with pytest.raises(UserError, match=message) as error:
        named_method(name)
    assert "\n" not in str(error.value)
