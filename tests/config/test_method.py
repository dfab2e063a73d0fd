"""The named methods, their controls, their descriptions, and what a method refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from sharpscope.config.method import DualClip, HolderRatio, Kl, LoptiPasses, SequenceRatio
from sharpscope.config.token_weights import (
    ConstantWeight,
    EntropyWeight,
    LinearWeight,
    MeanOneWeight,
    ReverseWeight,
    ShuffledWeight,
    SigmoidWeight,
    UniformWeight,
)
from sharpscope.errors import UserError
from sharpscope.objective import (
    Method,
    Schedule,
    control_names,
    describe,
    method_label,
    method_names,
    named_method,
    passes_of,
)

SG = SigmoidWeight(percentiles="gradient")
NAMES = [
    "grpo",
    "grpo-sg",
    "tr-grpo",
    "ar",
    "lopti",
    "ar-lopti",
    "cov-grpo",
    "cov-grpo-completion",
    "clip-cov",
    "kl-cov",
    "gspo",
    "holder",
    "dapo",
    "dr-grpo",
    "cispo",
    "bnpo",
    "dual-clip",
    "sapo",
    "gmpo",
    "dppo",
    "dppo-kl",
    "luspo",
    "vespo",
    "papo",
    "ppo-ewma",
    "high-entropy",
    "stapo",
    "lp-reg",
    "grpo-sam",
    "grpo-gnp",
    "lite-ppo",
    "rloo",
    "reinforce-pp",
    "reinforce-pp-baseline",
    "opo",
    "otb",
    "gdpo",
    "maxrl",
]


def test_all_methods_are_there():
    assert method_names() == NAMES
    assert all(named_method(name).name == name for name in [*NAMES, *control_names()])


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


def test_an_ablation_is_the_named_method_with_one_part_replaced():
    """Every named method but for what its description says is GRPO."""
    grpo = named_method("grpo").model_dump()
    different = {
        "grpo-sg": {"weight"},
        "tr-grpo": {"weight", "weight_on", "kl"},
        "ar": {"weight", "clip", "aggregate"},
        "lopti": {"passes", "clip", "aggregate"},
        "ar-lopti": {"weight", "passes", "clip", "aggregate"},
        "cov-grpo": {"weight"},
        "cov-grpo-completion": {"weight"},
        "stapo": {"clip", "tokens", "aggregate"},
        "lp-reg": {"clip", "penalty", "aggregate"},
        "clip-cov": {"tokens", "clip"},
        "kl-cov": {"clip", "penalty"},
        "gspo": {"ratio", "clip"},
        "holder": {"ratio"},
        "dapo": {"clip", "aggregate", "sampling"},
        "bnpo": {"aggregate"},
        "dual-clip": {"clip"},
        "sapo": {"clip"},
        "gmpo": {"ratio", "clip"},
        "dppo": {"clip"},
        "dppo-kl": {"clip"},
        "luspo": {"ratio", "clip", "aggregate"},
        "vespo": {"clip", "aggregate"},
        "dr-grpo": {"advantage", "aggregate"},
        "cispo": {"clip", "aggregate"},
        "papo": {"weight"},
        "ppo-ewma": {"proximal"},
        "high-entropy": {"tokens"},
        "grpo-sam": {"sharpness"},
        "grpo-gnp": {"sharpness"},
        "grpo": set(),
        "lite-ppo": {"advantage", "aggregate"},
        "rloo": {"advantage", "aggregate"},
        "reinforce-pp": {"advantage", "aggregate"},
        "reinforce-pp-baseline": {"advantage", "aggregate"},
        "opo": {"advantage", "aggregate"},
        "otb": {"advantage", "aggregate"},
        "gdpo": {"advantage"},
        "maxrl": {"advantage", "aggregate"},
    }
    for name in NAMES:
        value = named_method(name).model_dump()
        assert {key for key in value if key != "name" and value[key] != grpo[key]} == different[name], name


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


@pytest.mark.parametrize("name", [*NAMES, "grpo-sg-shuffled", "ar-mean-one"])
def test_descriptions_are_complete(name: str):
    note = describe(name)
    assert note.method == named_method(name)
    for text in (note.title, note.equation, note.constants, note.source, note.differs, note.ours):
        assert text.strip() == text
        assert len(text) >= 4
    assert "arXiv" in note.source


@pytest.mark.parametrize("name", [*NAMES, *control_names()])
def test_methods_survive_json(name: str):
    method = named_method(name)
    assert Method.model_validate_json(method.model_dump_json()) == method
    assert method_label(method) == name


def test_a_label_names_what_was_changed():
    method = named_method("grpo-sg")
    tau = method.model_copy(update={"weight": SG.model_copy(update={"tau": 4.0}), "weight_on": "ratio"})
    assert method_label(tau) == "grpo-sg+weight.tau=4+weight_on=ratio"
    wrapped = method.model_copy(update={"weight": ShuffledWeight(of=ReverseWeight(of=SigmoidWeight()))})
    assert method_label(wrapped) == "grpo-sg+weight=shuffled(reverse(sigmoid))"
    assert method_label(method.model_copy(update={"name": "mine"})) == "mine"


def test_schedules_are_resolved_everywhere_and_checked_at_both_ends():
    holder = named_method("holder")
    assert [holder.at(p).ratio.p for p in (0.0, 0.25, 1.0)] == [2.0, 1.0, -2.0]
    assert named_method("grpo").at(0.5) is not None
    deep = Method(name="x", weight=ShuffledWeight(of=LinearWeight(alpha=Schedule(start=0.0, end=1.0))))
    assert deep.at(0.5).weight.of.alpha == 0.5
    for ends in ((0.0, 1.5), (-0.5, 1.0)):
        with pytest.raises(ValidationError):
            Method(name="x", weight=LinearWeight(alpha=Schedule(start=ends[0], end=ends[1])))
    with pytest.raises(ValidationError, match="below"):
        Method(name="x", weight=SigmoidWeight(alpha=2.0, L=Schedule(start=0.5, end=2.0)))


def test_lopti_needs_token_ratios():
    for ratio in (SequenceRatio(), HolderRatio()):
        with pytest.raises(ValidationError, match=r"lopti needs ratio\.kind=token"):
            Method(name="x", ratio=ratio, passes=LoptiPasses())


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"clip": {"kind": "gmpo"}}, r"clip\.kind=gmpo needs ratio\.kind=sequence, not token"),
        ({"clip": {"kind": "dppo"}, "ratio": {"kind": "holder"}}, r"clip\.kind=dppo needs ratio\.kind=token"),
        ({"clip": {"kind": "vespo"}, "ratio": {"kind": "sequence"}}, r"clip\.kind=vespo needs ratio\.kind=token"),
        ({"clip": {"kind": "sapo"}, "weight_on": "ratio"}, "weight_on=ratio needs clip.kind none, ppo or cispo"),
        ({"clip": {"kind": "sapo"}, "proximal": {"kind": "ewma"}}, r"proximal\.kind=ewma needs clip\.kind"),
        ({"clip": {"kind": "dual", "high": 0.5, "bound": 1.4}}, "bound = 1.4 must be above"),
        ({"correction": {"kind": "mask", "low": 2.0, "high": 1.0}}, "must be below high"),
        ({"correction": {"kind": "geometric", "low": 2.0}}, "must be below high"),
        (
            {"kl": {"coef": 0.1, "estimator": "k3_corrected"}, "proximal": {"kind": "ewma"}},
            "k3_corrected needs proximal.kind=behavior",
        ),
        ({"kl": {"place": "reward", "weighted": True}}, "kl.place=reward needs"),
        ({"kl": {"place": "reward", "estimator": "k3_corrected"}}, "kl.place=reward needs"),
        (
            {"kl": {"place": "reward", "coef": 0.1}, "advantage": {"kind": "decoupled"}},
            "has no effect with advantage.kind=decoupled",
        ),
        (
            {"kl": {"place": "reward", "coef": 0.1}, "advantage": {"kind": "mean_scaled"}},
            "does not see the total reward",
        ),
        ({"entropy": {"kind": "adaptive", "low": 0.5, "high": 0.1}}, "must be below high"),
    ],
)
def test_combinations_without_a_meaning_are_refused(parts: dict, message: str):
    with pytest.raises(ValidationError, match=message):
        Method.model_validate({"name": "x"} | parts)


def test_what_the_trainer_asks_a_method():
    assert [n for n in NAMES if passes_of(named_method(n)) == 2] == ["lopti", "ar-lopti"]
    assert [n for n in NAMES if named_method(n).needs_proximal] == ["ppo-ewma"]
    assert not any(named_method(n).needs_reference for n in NAMES)
    assert Method(name="x", kl=Kl(coef=0.1)).needs_reference
    assert [n for n in NAMES if named_method(n).weight.needs_calibration] == ["grpo-sg", "tr-grpo", "papo"]
    assert [n for n in NAMES if named_method(n).sharpness.kind != "none"] == ["grpo-sam", "grpo-gnp"]
    assert isinstance(named_method("grpo").weight, UniformWeight)


def test_every_field_is_described():
    seen: set[type] = set()

    def visit(model: type) -> None:
        if model in seen:
            return
        seen.add(model)
        for name, info in model.model_fields.items():
            assert name == "kind" or info.description, f"{model.__name__}.{name}"

    from sharpscope.config import Spec, method, token_weight_kinds, token_weights

    for module in (method, token_weights):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Spec):
                visit(value)
    assert {Method, Schedule, *token_weight_kinds().values()} <= seen


def test_reading_methods_needs_no_torch():
    code = (
        "import sys; from sharpscope.config import describe, method_names, named_method; "
        "[describe(n) for n in method_names()]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
