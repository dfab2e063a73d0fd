"""Named methods, their controls and labels, a user's own token weights, and what a method refuses."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from sharpscope.config import build_config, constants, control_names, describe, method_label, parse_methods
from sharpscope.config.method import SequenceRatio
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
from sharpscope.objective import Method, calibrate, method_names, named_method, token_weights
from tests.objective.data import make_case

SG = SigmoidWeight(percentiles="gradient")
OWN = "tests.toy_task:by_probability"


@pytest.mark.parametrize("name", [*method_names(), *control_names()])
def test_methods_survive_json_have_their_name_as_label_and_are_described(name: str):
    method = named_method(name)
    assert Method.model_validate_json(method.model_dump_json()) == method
    assert method.name == method_label(method) == name
    note = describe(name)
    assert note.method == method and "arXiv" in note.source
    assert min(len(text) for text in (note.title, note.loss, note.differs)) > 4


def test_published_constants():
    texts = {
        "ar": "weight.alpha 0.2, clip.low 0.2, clip.high 0.24, clip.bound 10",
        "lopti": "clip.low 0.2, clip.high 0.24, clip.bound 10, passes 0.4",
        "ar-lopti": "weight.alpha 0.3, clip.low 0.2, clip.high 0.24, clip.bound 10, passes 0.5",
        "clip-cov": "clip.low 1, clip.high 1, tokens.share 0.0002, tokens.low 1, tokens.high 5",
        "kl-cov": "penalty.share 0.0002",
        "gspo": "clip.low 0.0003, clip.high 0.0004",
        "cispo": "clip.low 1, clip.high 4",
        "dual-clip": "clip.low 0.2, clip.high 0.2, clip.bound 3",
        "gmpo": "clip.low 0.4, clip.high 0.4",
        "dppo": "clip.low 0.15, clip.high 0.15, clip.bound 20",
        "dppo-kl": "clip.low 0.05, clip.high 0.05, clip.bound 20",
        "luspo": "clip.low 0.002, clip.high 0.0025",
        "high-entropy": "tokens.share 0.2",
        "stapo": "clip.low 0.2, clip.high 0.28",
        "lp-reg": "clip.low 1, clip.high 9, penalty.share 0.01",
    }
    assert {name: constants(named_method(name)) for name in texts} == texts
    assert [named_method("holder").at(p).ratio.p for p in (0.0, 0.25, 1.0)] == [2.0, 1.0, -2.0]
    assert named_method("dapo").sampling.overlong == pytest.approx(4096 / 20480)
    assert named_method("tr-grpo").weight == named_method("grpo-sg").weight == SG
    assert [n for n in method_names() if named_method(n).weight.needs_calibration] == ["grpo-sg", "tr-grpo", "papo"]


CONTROLS = {
    "grpo-sg-shuffled": ShuffledWeight(of=SG, matched="gradient"),
    "grpo-sg-reverse": ReverseWeight(of=SG),
    "grpo-sg-constant": ConstantWeight(of=SG, matched="gradient"),
    "grpo-sg-mean-one": MeanOneWeight(of=SG, matched="gradient"),
    "grpo-sg-entropy": EntropyWeight(percentiles="gradient"),
    "ar-shuffled": ShuffledWeight(of=LinearWeight(alpha=0.2), matched="gradient"),
    "grpo-sg-reverse-shuffled": ShuffledWeight(of=ReverseWeight(of=SG), matched="gradient"),
    "grpo-sg-entropy-mean-one": MeanOneWeight(of=EntropyWeight(percentiles="gradient"), matched="gradient"),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_by_short_name(name: str):
    method, base = named_method(name), named_method("ar" if name.startswith("ar") else "grpo-sg")
    assert method == base.model_copy(update={"name": name, "weight": CONTROLS[name]})


def test_a_label_names_what_was_changed():
    method = named_method("grpo-sg")
    tau = method.model_copy(update={"weight": SG.model_copy(update={"tau": 4.0}), "weight_on": "ratio"})
    assert method_label(tau) == "grpo-sg+weight.tau=4+weight_on=ratio"
    wrapped = method.model_copy(update={"weight": ShuffledWeight(of=ReverseWeight(of=SigmoidWeight()))})
    assert method_label(wrapped) == "grpo-sg+weight=shuffled(reverse(sigmoid))"
    assert method_label(method.model_copy(update={"clip": None})) == "grpo-sg+clip=none"
    assert method_label(method.model_copy(update={"name": "mine"})) == "mine"
    assert method_label(tau.model_copy(update={"label": "sharp"})) == "sharp"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"ratio": SequenceRatio(), "passes": 0.4}, r"passes needs ratio\.kind=token"),
        ({"clip": {"kind": "gmpo"}}, r"clip\.kind=gmpo needs ratio\.kind=sequence, not token"),
        ({"clip": {"kind": "dppo"}, "ratio": {"kind": "holder"}}, r"clip\.kind=dppo needs ratio\.kind=token"),
        ({"clip": {"kind": "sapo"}, "weight_on": "ratio"}, "weight_on=ratio needs clip null, ppo or cispo"),
        ({"clip": {"kind": "dual", "high": 0.5, "bound": 1.4}}, "bound = 1.4 must be above"),
        ({"correction": {"kind": "mask", "low": 2.0, "high": 1.0}}, "must be below high"),
    ],
)
def test_combinations_without_a_meaning_are_refused(parts: dict, message: str):
    with pytest.raises(ValidationError, match=message):
        Method.model_validate({"name": "x"} | parts)


# -- methods as text, and token weights of the user's own --------------------------------------------------------------


def weights(method: Method) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weights on a step, with its mask and gradient mass."""
    step = make_case(named_method("grpo-sg"), garbage=False).step
    found = token_weights(calibrate(method.weight, step), step, torch.Generator().manual_seed(0))
    return found, step.mask, step.mass


def test_own_weights_are_a_method_wherever_methods_are_named():
    """The same value in `run --method`, `run --methods`, YAML, `rotate --methods` and `fork --methods`."""
    own = named_method(OWN)
    assert own == named_method("grpo").model_copy(update={"name": OWN, "weight": own.weight})
    assert own.weight.function == OWN and method_label(own) == OWN
    methods = parse_methods(["grpo", OWN, f"flat={OWN}+clip.high=0.3"])
    assert list(methods) == ["grpo", OWN, "flat"] and methods[OWN] == own
    assert method_label(methods["flat"]) == "flat" and methods["flat"].clip.high == 0.3
    assert build_config(values={"method": OWN}).method == own
    labeled = build_config(values={"method": f"flat={OWN}"})
    assert labeled.method == own.model_copy(update={"label": "flat"})
    assert labeled.run_dir.name == "flat-knights_knaves-s0"
    shuffled = named_method(f"{OWN}-shuffled")
    assert shuffled.weight == ShuffledWeight(of=own.weight, matched="gradient") and OWN in describe(OWN).source


def test_token_weights_replace_those_of_a_method_and_of_its_controls():
    plain = weights(named_method(OWN))[0]
    for text in (f"grpo-sg {OWN}", f"grpo {OWN}"):
        method = parse_methods([text.split()[0]], text.split()[1]).popitem()[1]
        assert torch.equal(weights(method)[0], plain)
    controls = parse_methods(["grpo", *(f"grpo-sg-{name}" for name in ("reverse", "constant", "mean-one"))], OWN)
    assert isinstance(controls["grpo"].weight, UniformWeight)  # of several methods, those with weights get the new ones
    reverse, mask, mass = weights(controls["grpo-sg-reverse"])
    torch.testing.assert_close(reverse[mask], 2.0 - plain[mask])  # bounds 0.5 and 1.5
    mean = (mass * plain)[mask].sum() / mass[mask].sum()
    torch.testing.assert_close(weights(controls["grpo-sg-constant"])[0][mask], mean.expand(int(mask.sum())))
    torch.testing.assert_close(weights(controls["grpo-sg-mean-one"])[0][mask], plain[mask] / mean)
    shuffled = parse_methods(["grpo-sg-shuffled+weight.matched=tokens"], OWN).popitem()[1]
    moved = weights(shuffled)[0]
    assert not torch.equal(moved, plain)
    for row, (one, other) in enumerate(zip(plain, moved, strict=True)):
        assert torch.equal(one[mask[row]].sort().values, other[mask[row]].sort().values)
    paper = parse_methods(["grpo-sg-shuffled", "grpo-sg+weight.tau=4"], "paper")
    assert paper["grpo-sg-shuffled"].weight.of.preset == paper["grpo-sg+weight.tau=4"].weight.preset == "paper"
    assert paper["grpo-sg+weight.tau=4"].weight.tau == 4.0


def test_token_weights_in_a_configuration(tmp_path):
    assert build_config(None, ["method.weight.tau=4"], {"method": "grpo-sg"}, "paper").method.weight.tau == 4.0
    for place in ("method=grpo-sg-shuffled", "method.name=grpo-sg-shuffled"):
        assert build_config(None, [place], {"method": "grpo"}, OWN).method.weight.of.function == OWN
    file = tmp_path / "run.yaml"
    file.write_text("method: {name: grpo-sg, weight: {kind: shuffled, of: {kind: sigmoid, tau: 3.0}}}")
    assert build_config(file, (), None, OWN).method.weight.of.function == OWN
    assert build_config(None, (), None, OWN).method.weight.function == OWN


MISTAKES = [
    ("grpo-gs", None, "did you mean 'grpo-sg'"),
    ("grpo-shuffled", None, "whose weights are all 1"),
    ("cov-grpo-reverse", None, "whose weights have no bounds"),
    ("", None, "must have the form [label=]name"),
    ("no_such_module:f", None, "importing 'no_such_module' failed with ModuleNotFoundError"),
    ("math:no_such", None, "module 'math' has no function 'no_such'"),
    ("grpo-sg+weight.taw=3", None, "method.weight.taw: unknown field; did you mean 'tau'"),
    ("grpo-sg+weight.tau=-1", None, "weight.tau = -1"),
    ("grpo+clip.kind=none", None, "or set method.clip to null"),
    ("grpo-sg-entropy", OWN, "method grpo-sg-entropy, whose weights depend on the entropy"),
    ("ar-shuffled", "paper", "those of method ar-shuffled are linear"),
    ("grpo-sg-reverse", "math:sqrt", "reverse needs a weighting with bounds"),
    ("grpo-sg", "papr", "--token-weights papr: must be paper, calibrated, or module:function"),
]


@pytest.mark.parametrize(("text", "token_weights", "says"), MISTAKES)
def test_a_mistake_in_a_method_is_one_line(text: str, token_weights: str | None, says: str):
    with pytest.raises(UserError) as error:
        parse_methods([text], token_weights)
    assert says in str(error.value) and "\n" not in str(error.value)
