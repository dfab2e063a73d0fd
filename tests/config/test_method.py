"""The named methods, their controls, their descriptions, and what a method refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from sharpscope.config.method import HolderRatio, Kl, LoptiPasses, SequenceRatio
from sharpscope.config.token_weights import (
    ReverseWeight,
    ShuffledWeight,
    SigmoidWeight,
    UniformWeight,
)
from sharpscope.objective import (
    Method,
    Schedule,
    control_names,
    method_label,
    method_names,
    named_method,
    passes_of,
)

SG = SigmoidWeight(percentiles="gradient")


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
    for name in method_names():
        value = named_method(name).model_dump()
        assert {key for key in value if key != "name" and value[key] != grpo[key]} == different[name], name


@pytest.mark.parametrize("name", [*method_names(), *control_names()])
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
    assert [n for n in method_names() if passes_of(named_method(n)) == 2] == ["lopti", "ar-lopti"]
    assert [n for n in method_names() if named_method(n).needs_proximal] == ["ppo-ewma"]
    assert not any(named_method(n).needs_reference for n in method_names())
    assert Method(name="x", kl=Kl(coef=0.1)).needs_reference
    assert [n for n in method_names() if named_method(n).weight.needs_calibration] == ["grpo-sg", "tr-grpo", "papo"]
    assert [n for n in method_names() if named_method(n).sharpness.kind != "none"] == ["grpo-sam", "grpo-gnp"]
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
