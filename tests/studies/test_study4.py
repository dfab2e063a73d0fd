"""The fourth study's measures decide planted truths rightly, and its verdicts follow the declared rule."""

from __future__ import annotations

import importlib

import numpy as np
import pandas as pd
import pytest
import torch

from sharpscope.policy.guard import guarded
from sharpscope.tokens.outcomes import Outcome
from sharpscope.tokens.rows import make_rows
from sharpscope.tokens.update_effects import UpdateEffects
from tests.loops import some
from tests.models import tiny_model

tokens = importlib.import_module("experiments.studies.4.tokens")
verdicts = importlib.import_module("experiments.studies.4.verdicts")

RATES = {"sgd": 1e-3, "adamw": 1e-4}


def planted(seed: int, kind: str, sign: float):
    """An update of a tiny policy whose unlikely tokens raise sharpness by their loss (`sign` 1), or lower it (−1); 0: neither.

    The coefficient of each token has the sign that makes its effect so.
    """
    torch.manual_seed(seed)
    model = tiny_model(seed=seed)
    vocabulary = model.config.vocab_size
    ids, probe = (torch.randint(2, vocabulary, (6, 10)) for _ in range(2))
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    made = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    optimizer = made(model.parameters(), lr=RATES[kind])
    for _ in range(3 if kind == "adamw" else 0):  # moments
        for p in model.parameters():
            p.grad = 1e-2 * torch.randn_like(p)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    for state in optimizer.state.values():
        state[
            "exp_avg"
        ].zero_()  # the step is this update's own, so that what is planted is the whole truth
    for group in optimizer.param_groups:
        group["lr"] = RATES[kind]
    optimizer.zero_grad()
    with guarded(model):
        rows = make_rows(model, ids, mask, None, 1.0)
        with torch.no_grad():
            logp = model(ids).logits[:, :-1].log_softmax(-1)
        p = torch.nn.functional.pad(logp.exp(), (0, 0, 1, 0))  # (N, S, V) of the token itself
        chosen = p.gather(2, ids[:, :, None])[:, :, 0]
        norm = (p.square().sum(2) - 2 * chosen + 1).clamp(min=0).sqrt()
        entropy = -(p * p.clamp(min=1e-30).log()).sum(2)
        size = mask * (0.5 + torch.rand(ids.shape, dtype=torch.float64)) / mask.sum()
        outcome = Outcome(kind="sharpness", radius=0.05, input_ids=probe, mask=mask)

        def update(coef):
            one = UpdateEffects(model, rows, coef, optimizer, (), 1.0)
            outcomes = {"kl": one.prepare("kl", Outcome(kind="kl"))}
            outcomes["sharpness"] = one.prepare("sharpness", outcome)
            found = tokens.Tokens.of(coef, chosen, norm, entropy)
            return (
                one,
                found,
                outcomes,
                tokens.make_step(one, found, optimizer, [*outcomes.values()]),
            )

        random = torch.where(torch.rand(ids.shape) < 0.5, 1.0, -1.0).double()
        coef = size * random
        if sign:
            _, found, _, step = update(size)
            unlikely = found.values["unlikely"]
            side = torch.where(unlikely > unlikely.median(), 1.0, -1.0).double()
            coef = coef.clone()
            coef[found.live] = size[found.live] * sign * side * step.effects["sharpness"].sign()
        yield update(coef)


def unlikely_slope(seed: int, kind: str, sign: float) -> float:
    """The change by weights 1 + z of 1 − π over that if all tokens had its sign, so that seeds of all sizes count alike."""
    for _, found, _, step in planted(seed, kind, sign):
        rows = pd.DataFrame(tokens.slopes(found, step, "sharpness", {}))
        row = rows[
            (rows["kind"] == "equal KL")
            & (rows["side"] == "all")
            & (rows["regressor"] == "unlikely")
        ]
        x, share = found.values["unlikely"], found.mass / found.mass.sum()
        z = x - (share * x).sum()
        z = z / (share * z * z).sum().sqrt()
        return float(row["alone"].iloc[0]) / float((z * step.at_equal_kl("sharpness")).abs().sum())
    raise AssertionError


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_planted_truths_are_decided_rightly(kind: str) -> None:
    seeds = range(5)
    decided = {}
    sizes = {}
    for sign in (1.0, -1.0, 0.0):
        values = np.array([unlikely_slope(seed, kind, sign) for seed in seeds])
        half = verdicts.half_width([values], 0.05)
        sizes[sign] = values.mean()
        decided[sign] = verdicts.decide(values.mean(), half, 0.0)
    assert decided == {1.0: "above 0", -1.0: "below 0", 0.0: ""}, sizes


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_slope_is_the_derivative_of_the_measured_change_at_equal_kl(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "TOLERANCE", 1e-10)
    for one, found, outcomes, step in some(planted(1, kind, 1.0)):
        rows = pd.DataFrame(tokens.slopes(found, step, "sharpness", {}))
        rows = rows[(rows["kind"] == "equal KL") & (rows["side"] == "all")].set_index("regressor")
        share = found.mass / found.mass.sum()
        for name in tokens.REGRESSORS:
            x = found.values[name]
            z = x - (share * x).sum()
            z = z / (share * z * z).sum().sqrt()
            size = 1e-3
            weights = {"more": 1 + size * z, "less": 1 - size * z}
            made = pd.DataFrame(
                tokens.weightings(one, found, {kind: step}, outcomes, weights)
            ).set_index("weighting")
            measured = (made.loc["more", "measured"] - made.loc["less", "measured"]) / (2 * size)
            assert measured == pytest.approx(rows.loc[name, "alone"], rel=0.02)
            assert made.loc["more", "predicted"] == pytest.approx(
                size * rows.loc[name, "alone"], rel=1e-6
            )


def test_classes_of_probability_sum_to_the_effects() -> None:
    for _, found, _, step in some(planted(2, "sgd", 1.0)):
        rows = pd.DataFrame(tokens.bins(found, step, "sharpness", {})).set_index(["side", "bin"])
        effect = step.at_equal_kl("sharpness")
        order = found.values["unlikely"].argsort(descending=True)
        mass = np.cumsum((found.mass[order] / found.mass.sum()).numpy())
        assert len(rows) == 30
        for at in range(tokens.BINS):
            chosen = order[(mass > at / 10 + 1e-10) & (mass <= (at + 1) / 10 + 1e-10)]
            assert rows.loc[("all", at), "effect"] == pytest.approx(
                float(effect[chosen].sum()), abs=1e-12
            )
            right = chosen[found.coef[chosen] < 0]
            assert rows.loc[("right", at), "effect"] == pytest.approx(
                float(effect[right].sum()), abs=1e-12
            )


def test_declared_rule() -> None:
    assert verdicts.decide(0.4, 0.1, 0.5) == "above 0"
    assert verdicts.decide(0.3, 0.1, 0.5) == "above 0, smaller than the margin"
    assert verdicts.decide(-0.1, 0.3, 0.5) == "smaller than the margin"
    assert verdicts.decide(-0.1, 0.6, 0.5) == ""
    assert verdicts.decide(0.1, 0.0, 0.5).startswith("no verdict")


def test_no_verdict_before_a_look_is_reached() -> None:
    group = np.linspace(0.9, 1.1, 19)
    assert (
        verdicts.read_at([group], (20, 40), 0.5)
        == "not finished: 19 of 40 seeds, next look at 20; no verdict"
    )
    assert verdicts.read_at([np.append(group, 1.0)], (20, 40), 0.5).startswith(
        "above 0 (look at 20 seeds: +1 "
    )
    # seeds after the look that decides have no part in it
    later = np.append(group, [1.0, 50.0])
    assert verdicts.read_at([later], (20, 40), 0.5).startswith("above 0 (look at 20 seeds: +1 ")


def test_interval_is_welchs() -> None:
    from scipy.stats import ttest_ind

    generator = np.random.default_rng(0)
    one, other = generator.normal(0, 1, 7), generator.normal(2, 3, 11)
    interval = ttest_ind(one, -other, equal_var=False).confidence_interval(0.95)
    half = (interval.high - interval.low) / 2
    assert verdicts.half_width([one, other], 0.05) == pytest.approx(half / 2)
