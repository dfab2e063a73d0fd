"""Named methods, their controls and labels, token weights of a user's own, and what a method is compared with."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sharpscope.config import build_config
from sharpscope.errors import UserError
from sharpscope.methods import (
    Method,
    constants,
    control_names,
    describe,
    method_label,
    method_names,
    method_rotation_bound,
    named_method,
    parse_methods,
    reference_method,
    rotation_bound,
)
from sharpscope.methods.method import Kl, SequenceRatio
from sharpscope.methods.plan import calibrate, token_weights
from sharpscope.methods.token_weights import (
    ConstantWeight,
    EntropyWeight,
    LinearWeight,
    MeanOneWeight,
    ReverseWeight,
    ShuffledWeight,
    SigmoidWeight,
)
from sharpscope.traces import load_run
from sharpscope.training import train
from tests.methods.data import make_case

SG = SigmoidWeight(percentiles="gradient")
OWN = "tests.toy_task:by_probability"


@pytest.mark.parametrize("name", [*method_names(), *control_names()])
def test_every_method_and_control_is_described_and_has_a_reference(name: str):
    method, note = named_method(name), describe(name)
    assert Method.model_validate_json(method.model_dump_json()) == method == note.method
    assert method.name == method_label(method) == name
    assert (
        "arXiv" in note.source
        and min(len(text) for text in (note.title, note.loss, note.differs)) > 4
    )
    reference = reference_method(method)
    removed = ("tokens", "passes", "sharpness", "penalty", "correction", "entropy")
    assert not reference.weighted and not any(getattr(reference, part) for part in removed)
    assert not reference.kl.weighted and Method.model_validate(reference.model_dump()) == reference
    if method.weighted:  # the weights alone are compared
        kept = ("advantage", "ratio", "clip", "aggregate")
        assert all(getattr(reference, field) == getattr(method, field) for field in kept)


def test_published_constants():
    """Those that the comparison with the equations replaces."""
    texts = {
        "ar-lopti": "weight.alpha 0.3, clip.low 0.2, clip.high 0.24, clip.bound 10, passes 0.5",
        "clip-cov": "clip.low 1, clip.high 1, tokens.share 0.0002, tokens.low 1, tokens.high 5",
        "kl-cov": "penalty.share 0.0002",
        "dual-clip": "clip.low 0.2, clip.high 0.2, clip.bound 3",
        "lp-reg": "clip.low 1, clip.high 9, penalty.share 0.01",
        "dapo": "clip.low 0.2, clip.high 0.28, sampling.overlong 0.2",
    }
    assert {name: constants(named_method(name)) for name in texts} == texts
    stapo = named_method("stapo").tokens
    assert (stapo.probability, stapo.quantile, named_method("stare").weight.share) == (
        0.002,
        0.75,
        0.1,
    )
    assert named_method("tr-grpo").weight == named_method("grpo-sg").weight == SG


CONTROLS = {
    "grpo-sg-shuffled": ShuffledWeight(of=SG, matched="gradient"),
    "grpo-sg-constant": ConstantWeight(of=SG, matched="gradient"),
    "ar-shuffled": ShuffledWeight(of=LinearWeight(alpha=0.2), matched="gradient"),
    "grpo-sg-reverse-shuffled": ShuffledWeight(of=ReverseWeight(of=SG), matched="gradient"),
    "grpo-sg-entropy-mean-one": MeanOneWeight(
        of=EntropyWeight(percentiles="gradient"), matched="gradient"
    ),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_by_short_name(name: str):
    method, base = named_method(name), named_method("ar" if name.startswith("ar") else "grpo-sg")
    assert method == base.model_copy(update={"name": name, "weight": CONTROLS[name]})


def test_a_label_names_what_was_changed():
    method = named_method("grpo-sg")
    tau = method.model_copy(
        update={"weight": SG.model_copy(update={"tau": 4.0}), "weight_on": "ratio"}
    )
    assert method_label(tau) == "grpo-sg+weight.tau=4+weight_on=ratio"
    wrapped = method.model_copy(
        update={"weight": ShuffledWeight(of=ReverseWeight(of=SigmoidWeight()))}
    )
    assert method_label(wrapped) == "grpo-sg+weight=shuffled(reverse(sigmoid))"
    assert method_label(method.model_copy(update={"clip": None})) == "grpo-sg+clip=none"
    assert method_label(tau.model_copy(update={"label": "sharp"})) == "sharp"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"ratio": SequenceRatio(), "passes": 0.4}, r"passes needs ratio\.kind=token"),
        ({"clip": {"kind": "gmpo"}}, r"clip\.kind=gmpo needs ratio\.kind=sequence, not token"),
        (
            {"clip": {"kind": "sapo"}, "weight_on": "ratio"},
            "weight_on=ratio needs clip null, ppo or cispo",
        ),
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
    labeled = build_config(values={"method": f"flat={OWN}"})
    assert labeled.method == own.model_copy(update={"label": "flat"})
    assert labeled.run_dir.name == "flat-knights_knaves-s0"
    shuffled = named_method(f"{OWN}-shuffled")
    assert (
        shuffled.weight == ShuffledWeight(of=own.weight, matched="gradient")
        and OWN in describe(OWN).source
    )


def test_own_weights_by_module_or_by_file_are_one_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "shapes").mkdir()
    for name in ("mine_here.py", "shapes/mine_below.py"):
        (tmp_path / name).write_text("def half(step):\n    return step.logp * 0 + 0.5\n")
    monkeypatch.chdir(tmp_path)
    for file, module in (
        ("mine_here.py", "mine_here"),
        ("./mine_here.py", "mine_here"),
        ("shapes/mine_below.py", "shapes.mine_below"),
    ):
        for suffix in ("", "-shuffled"):
            found = named_method(f"{file}:half{suffix}")
            assert found == named_method(f"{module}:half{suffix}")
            assert list(parse_methods([f"{file}:half{suffix}"])) == [f"{module}:half{suffix}"]
            assert build_config(values={"method": f"{file}:half{suffix}"}).method == found
        weight = {"kind": "custom", "function": f"{file}:half"}
        by_weight = Method.model_validate({"name": "x", "weight": weight})
        assert by_weight.weight == named_method(f"{module}:half").weight


def test_a_method_has_one_name_in_runs_and_in_forks():
    """The label of an arm without one is the name that its run has: numbers and order as in `method_label`."""
    texts = [
        "grpo-sg-mean-one",
        "grpo-sg-mean-one+weight.of.U=4.0",
        "grpo-sg + weight.tau=4".replace(" ", ""),
    ]
    found = parse_methods(texts)
    assert list(found) == [
        "grpo-sg-mean-one",
        "grpo-sg-mean-one+weight.of.U=4",
        "grpo-sg+weight.tau=4",
    ]
    assert list(found) == [method_label(build_config(values={"method": t}).method) for t in texts]
    with pytest.raises(UserError, match="given twice"):
        parse_methods(["grpo-sg+weight.U=4", "grpo-sg+weight.U=4.0"])


def test_controls_of_own_weights():
    plain, mask, mass = weights(named_method(OWN))
    # bounds 0.5 and 1.5
    torch.testing.assert_close(weights(named_method(f"{OWN}-reverse"))[0][mask], 2.0 - plain[mask])
    mean = (mass * plain)[mask].sum() / mass[mask].sum()
    torch.testing.assert_close(
        weights(named_method(f"{OWN}-constant"))[0][mask], mean.expand(int(mask.sum()))
    )


MISTAKES = [
    ("grpo-gs", "did you mean 'grpo-sg'"),
    ("gpro", "did you mean 'grpo'?"),
    ("gpsO", "did you mean 'gspo'?"),
    ("covgrpo", "did you mean 'cov-grpo'?"),
    ("no_such.py:function", "importing 'no_such' failed with ModuleNotFoundError"),
    ("grpo-shuffled", "whose weights are all 1"),
    ("cov-grpo-reverse", "whose weights have no bounds"),
    ("", "must have the form [label=]name"),
    ("math:no_such", "module 'math' has no function 'no_such'"),
    ("grpo-sg+weight.taw=3", "method.weight.taw: unknown field; did you mean 'tau'"),
    ("grpo+clip.kind=none", "or set method.clip to null"),
]


@pytest.mark.parametrize(("text", "says"), MISTAKES)
def test_a_mistake_in_a_method_is_one_line(text: str, says: str):
    with pytest.raises(UserError) as error:
        parse_methods([text])
    assert says in str(error.value) and "\n" not in str(error.value)


LOOP = ("grpo-flat", "lopti", "holder", "dapo", "lp-reg", "grpo-sam", "otb", "gdpo", "maxrl")
"""Methods that ask something else of the training loop than plain GRPO."""


@pytest.mark.parametrize("method", LOOP)
def test_a_method_trains_one_step(method: str, toy_config):
    config = toy_config(
        method=method, steps=1, update__mini_batches=2, evaluation__every=0, probes__preset="off"
    )
    if method == "gdpo":
        advantage = config.method.advantage.model_copy(update={"weights": {"vowels": 1.0}})
        config = config.model_copy(
            update={"method": config.method.model_copy(update={"advantage": advantage})}
        )
    run = load_run(train(config).run_dir)
    assert run.status == "finished" and float(run.steps["grad_norm"].iloc[0]) > 0
    assert run.steps["updates"].iloc[0] == 2 * config.method.pass_count
    assert bool((run.tokens()["weight"] >= 0).all())


# -- what a method is compared with, and the largest rotation that bounded weights allow -------------------------------


@pytest.mark.parametrize("name", ["gspo", "dapo", "rloo", "grpo"])
def test_methods_without_weights_are_compared_with_plain_grpo(name):
    kl = Kl(coef=0.02, estimator="k1")
    reference = reference_method(named_method(name).model_copy(update={"kl": kl}))
    assert reference == named_method("grpo").model_copy(update={"kl": kl})


def rotated(weight: np.ndarray, mass: np.ndarray) -> float:
    """Angle [degrees] between Σ g_t and Σ w_t·g_t for orthogonal g_t with squared norms `mass`."""
    cosine = (weight * mass).sum() / math.sqrt((weight**2 * mass).sum() * mass.sum())
    return math.degrees(math.acos(min(cosine, 1.0)))


@given(st.floats(0.01, 5.0), st.floats(1.0, 50.0), st.integers(0, 10_000))
def test_no_weights_turn_orthogonal_gradients_beyond_the_bound_which_is_reached(low, factor, seed):
    high = low * factor
    generator = np.random.default_rng(seed)
    bound = rotation_bound(low, high)
    for _ in range(20):
        weight = generator.choice([low, high, generator.uniform(low, high)], size=6)
        assert rotated(weight, generator.exponential(size=6) ** 4) <= bound + 1e-5
    assert rotated(np.array([low, high]), np.array([high, low])) == pytest.approx(bound, abs=1e-5)


def test_bounds_of_the_methods():
    sg, ar = (
        math.degrees(math.atan(0.4 / (2 * math.sqrt(1.4)))),
        math.degrees(math.atan(0.2 / (2 * math.sqrt(0.8)))),
    )
    for name, degrees in {"grpo-sg": sg, "grpo-sg-reverse": sg, "ar": ar}.items():
        assert method_rotation_bound(named_method(name)) == pytest.approx(degrees)
    for name in ("grpo", "cov-grpo", "grpo-sg-shuffled", "tr-grpo", "ar-lopti"):
        assert method_rotation_bound(named_method(name)) is None
