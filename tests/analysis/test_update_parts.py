"""Parts of an update against separate backward passes in float64: reward components, kinds of group, turns, age of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import sharpscope
from sharpscope.analysis import token_sections
from sharpscope.analysis.update_parts import (
    KL,
    REST,
    reward_weights,
    step_parts,
    telling_sections,
)
from sharpscope.errors import UserError
from sharpscope.methods.loss import k3
from sharpscope.traces import TraceWriter, load_run
from tests.models import tiny_model
from tests.traces.synthetic import new_run, rows

GROUPS, EACH, P, T = 5, 4, 2, 5
N = GROUPS * EACH
NAMES = ("answer", "format", "brevity")
WEIGHTS = np.array([1.0, 0.5, 2.0])
SILENT, CANCELS = 1, 2
"""A group whose rewards are equal, and one in which two completions have components that cancel."""


def components(seed: int) -> np.ndarray:
    """(N, K) random components with the groups SILENT and CANCELS; the first is 0 or 1."""
    rng = np.random.default_rng(seed)
    parts = rng.normal(size=(N, len(NAMES)))
    parts[:, 0] = rng.random(N) < 0.5
    parts[SILENT * EACH : (SILENT + 1) * EACH] = [0.0, 0.25, -1.0]
    # totals 3, 1, 2 and 2, whose mean is 2
    parts[CANCELS * EACH : (CANCELS + 1) * EACH] = [
        [1, 0, 1.0],
        [1, 0, 0.0],
        [1, 2, 0.0],
        [0, 0, 1.0],
    ]
    return parts


def deviation(values: np.ndarray) -> float:
    return math.sqrt(sum((v - values.mean()) ** 2 for v in values) / (len(values) - 1))


def advantage_parts(parts: np.ndarray, how: str) -> np.ndarray:
    """(N, K) what each component gives to the advantage, one completion and component after the other."""
    reward, found = parts @ WEIGHTS, np.zeros_like(parts)
    for row, k in np.ndindex(*parts.shape):
        group = slice(row // EACH * EACH, row // EACH * EACH + EACH)
        pull = WEIGHTS[k] * (parts[row, k] - parts[group, k].mean())
        match how:
            case "group":
                found[row, k] = pull / (deviation(reward[group]) + 1e-4)
            case "batch":
                found[row, k] = pull / (deviation(reward) + 1e-4)
            case "none":
                found[row, k] = pull
            case "leave_one_out":
                found[row, k] = pull * EACH / (EACH - 1)
            case "normalize_then_sum":
                found[row, k] = pull / (deviation(parts[group, k]) + 1e-4)
    if how == "normalize_then_sum":
        found /= deviation(found.sum(axis=1)) + 1e-4
    if how == "group":  # 0 / (0 + 1e-4) of the silent group is its rounding
        found[SILENT * EACH : (SILENT + 1) * EACH] = 0
    return found


@dataclass
class Made:
    """A step on a tiny model; gradients are flat."""

    model: Any
    ids: Tensor
    mask: Tensor
    old: Tensor  # (N, T)
    reference: Tensor
    beta: float

    def logp(self) -> Tensor:
        logits = self.model(input_ids=self.ids).logits[:, P - 1 : -1]
        return logits.log_softmax(-1).gather(2, self.ids[:, P:, None])[..., 0]

    def flat(self, loss: Tensor) -> Tensor:
        found = torch.autograd.grad(loss, list(self.model.parameters()))
        return torch.cat([g.flatten() for g in found])

    def surrogate(self, logp: Tensor, advantage: Tensor, acts: Tensor) -> Tensor:
        """−Σ A·r over the tokens on which no clip acts, divided by their number."""
        ratio = (logp - self.old).exp()
        return -torch.where(acts, advantage[:, None] * ratio, 0.0).sum() / self.mask.sum()

    def divergence(self, logp: Tensor) -> Tensor:
        return self.beta * (k3(logp, self.reference) * self.mask).sum() / self.mask.sum()


def made_step(seed: int, beta: float) -> Made:
    torch.manual_seed(seed)
    model = tiny_model(seed=seed)
    ids = torch.randint(1, 37, (N, P + T))
    length = torch.randint(2, T + 1, (N,))
    mask = torch.arange(T) < length[:, None]
    made = Made(model, ids, mask, torch.zeros(N, T), torch.zeros(N, T), beta)
    with torch.no_grad():
        logp = made.logp()
    made.old, made.reference = (logp + 0.3 * torch.randn(N, T, dtype=logp.dtype) for _ in "ab")
    return made


def write(folder: Path, parts: np.ndarray, columns: dict[str, Any], **info: Any) -> Any:
    """A run of one step with these tokens (N, T) columns; `rollout` and `position` are of the mask."""
    run = new_run(folder, **info)
    mask, reward = columns.pop("mask"), columns.pop("reward", parts @ WEIGHTS)
    rollout, position = (index.numpy() for index in mask.nonzero(as_tuple=True))
    advantage = columns["advantage"].mean(1).numpy()
    completions = {
        "rollout": np.arange(N),
        "group": np.arange(N) // EACH,
        "reward": reward,
        "reward_parts": [dict(zip(NAMES, row, strict=True)) for row in parts.tolist()],
        "correct": parts[:, 0] == 1,
        "advantage": advantage,
    }
    completions |= {"group": columns.pop("group")} if "group" in columns else {}
    tokens = rows("tokens", 1, len(rollout))
    absent = ("effect_kl", "effect_entropy", "effect_heldout", "effect_sharpness", "entropy_coef")
    absent += ("attribution", "policy_version", "score_norm_by_layer")
    tokens["update"] = 0
    tokens |= dict.fromkeys(absent) | {"logp": -np.abs(tokens["logp"])}
    tokens |= {name: value[mask].detach().numpy() for name, value in columns.items()}
    tokens |= {"rollout": rollout, "position": position}
    with TraceWriter(run) as writer:
        writer.append("steps", rows("steps", 1, 1))
        writer.append("updates", rows("updates", 1, 1) | {"update": 0})
        writer.append("rollouts", rows("rollouts", 1, N) | completions)
        writer.append("tokens", tokens)
    return load_run(run)


@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("how", ["group", "batch", "none", "leave_one_out", "normalize_then_sum"])
def test_parts_are_those_of_separate_backward_passes(tmp_path: Path, how: str, beta: float):
    """Shares of ‖∇L‖², and ⟨∇L_k, u⟩ of an effect's direction u: of each component, the KL term, each kind of group."""
    made, parts = made_step(3, beta), components(4)
    each = torch.tensor(advantage_parts(parts, how))
    advantage = each.sum(1)
    if how != "normalize_then_sum":
        exact = (parts @ WEIGHTS).reshape(GROUPS, EACH)
        assert (exact[CANCELS] - exact[CANCELS].mean()).tolist() == [1, -1, 0, 0]
        advantage[CANCELS * EACH + 2 : (CANCELS + 1) * EACH] = 0.0
    with torch.no_grad():
        ratio = (made.logp() - made.old).exp()
    positive = advantage[:, None] >= 0
    acts = made.mask & ~torch.where(positive, ratio > 1.2, ratio < 0.8)
    assert 0 < int(acts.sum()) < int(made.mask.sum())
    whole = made.flat(made.surrogate(lp := made.logp(), advantage, acts) + made.divergence(lp))
    direction = torch.randn(len(whole), dtype=whole.dtype)
    # what a recorder stores
    leaf = made.logp().detach().requires_grad_()
    (policy,) = torch.autograd.grad(made.surrogate(leaf, advantage, acts), leaf)
    pull = torch.zeros_like(policy)
    if beta:
        (pull,) = torch.autograd.grad(made.divergence(leaf), leaf)
    coef, mask = (torch.nn.functional.pad(x, (P, 0)) for x in (policy + pull, made.mask.long()))
    sizes = [p.numel() for p in made.model.parameters()]
    split = [
        g.view_as(p) for g, p in zip(direction.split(sizes), made.model.parameters(), strict=True)
    ]
    share = sharpscope.attribute(made.model, made.ids, mask, coef)[:, P:]
    effect = sharpscope.attribute(made.model, made.ids, mask, coef, split)[:, P:]
    columns = {"loss_coef": policy + pull, "kl_coef": pull, "attribution": share}
    columns |= {"advantage": advantage[:, None].expand(N, T), "effect_kl": effect}
    trainer = {
        "arguments": {"reward_weights": WEIGHTS.tolist(), "multi_objective_aggregation": how}
    }
    run = write(tmp_path / "r", parts, columns | {"mask": made.mask}, trainer=trainer)
    # a completion whose components cancel has no gradient, and none of its components is counted
    gone = (advantage == 0)[:, None] & (each.abs().sum(1) > 0)[:, None]
    expected = {
        name: made.flat(made.surrogate(made.logp(), each[:, k], acts & ~gone))
        for k, name in enumerate(NAMES)
    }
    if beta:
        expected[KL] = made.flat(made.divergence(made.logp()))
    found = step_parts(run, 1)
    assert not found.why and list(found.components.index) == list(expected)
    for name, gradient in expected.items():
        row = found.components.loc[name]
        assert row["attribution"] == pytest.approx(
            float(gradient @ whole / (whole @ whole)), abs=1e-6
        )
        assert row["effect_kl"] == pytest.approx(float(gradient @ direction), rel=1e-5, abs=1e-6)
    assert found.components["attribution"].sum() == pytest.approx(1, abs=1e-6)
    assert found.components["attribution"].abs().min() > 1e-4
    # kinds of group
    right = parts[:, 0].reshape(GROUPS, EACH).mean(1).repeat(EACH)
    kinds = {"all wrong": right == 0, "mixed": (right > 0) & (right < 1), "all right": right == 1}
    kinds = {name: inside for name, inside in kinds.items() if inside.any()}
    assert set(found.kinds.index) == set(kinds) and len(kinds) > 1
    for name, inside in kinds.items():
        which = torch.tensor(inside)[:, None]
        part = made.surrogate(lp := made.logp(), advantage, acts & which)
        part = (
            part
            + made.beta * (k3(lp, made.reference) * (made.mask & which)).sum() / made.mask.sum()
        )
        gradient = made.flat(part)
        row = found.kinds.loc[name]
        assert row["attribution"] == pytest.approx(
            float(gradient @ whole / (whole @ whole)), abs=1e-6
        )
        assert row["groups"] == inside.sum() / EACH
    # the silent group gives a gradient by the KL term alone
    if beta:
        inside = slice(SILENT * EACH, (SILENT + 1) * EACH)
        said = "groups with equal rewards (1) should give nothing and have"
        assert said in found.phantom and found.phantom.endswith("the KL term acts on them too.")
        shown = 100 * float(share[inside].sum())
        assert f"and {shown:+.1f} % of ‖∇L‖²".replace("-", "−") in found.phantom
    else:
        assert not found.phantom
    if how != "normalize_then_sum":
        size = np.abs(WEIGHTS * (parts - parts.reshape(GROUPS, EACH, -1).mean(1).repeat(EACH, 0)))
        per_token = size.sum(1)[:, None] * made.mask.numpy()
        rows_gone = [CANCELS * EACH + 2, CANCELS * EACH + 3]
        assert found.cancelled == (2, pytest.approx(per_token[rows_gone].sum() / per_token.sum()))


def told(folder: Path, advantage: np.ndarray, parts: np.ndarray, **columns: Any) -> Any:
    """A run of one step of all tokens with these advantages (N,), c = −A unless given, and shares |c|/Σ|c|."""
    each = torch.tensor(advantage)[:, None] + columns.pop("advantage_of", torch.zeros(T))
    coef = columns.pop("loss_coef", -each)
    made = {
        "loss_coef": coef,
        "kl_coef": torch.zeros(N, T),
        "attribution": coef.abs() / coef.abs().sum(),
    }
    made |= {"advantage": each, "mask": torch.ones(N, T, dtype=torch.bool)}
    return write(folder, parts, made | columns)


def test_advantages_of_equal_rewards_are_a_phantom_gradient(tmp_path: Path):
    """Advantages less the batch's mean reach the silent group, and are no multiples of the group's differences."""
    parts = components(0)
    reward = parts @ WEIGHTS
    advantage = reward - reward.mean()
    run, inside = told(tmp_path / "r", advantage, parts), slice(SILENT * EACH, (SILENT + 1) * EACH)
    found = step_parts(run, 1)
    assert found.why.startswith("the advantages are no multiples") and found.components.empty
    size = 100 * np.abs(advantage[inside]).sum() / np.abs(advantage).sum()
    assert f"have {size:.1f} % of Σ|c| and +{size:.1f} % of ‖∇L‖²" in found.phantom
    assert f"their advantages are up to {abs(advantage[inside][0]):.3g}" in found.phantom
    # without rewards (supervised training) nothing is known to be equal
    unknown = told(tmp_path / "t", advantage, parts, reward=np.full(N, np.nan))
    assert not step_parts(unknown, 1).phantom and not telling_sections(unknown)
    assert "rewards differ" not in step_parts(unknown, 1).kinds.index
    # rounding of equal rewards, divided by its own deviation
    noise = np.where(np.arange(N) // EACH == SILENT, 1e-9 * np.arange(N), 0.0)
    scaled = advantage_parts(parts, "group").sum(1) + np.where(
        noise > 0, np.arange(N) % EACH - 1.5, 0
    )
    parts[:, 2] += noise
    found = step_parts(told(tmp_path / "s", scaled, parts), 1)
    assert not found.why and "their advantages are up to 1.5" in found.phantom
    expected = np.abs(scaled[inside]).sum() / np.abs(scaled).sum()
    assert found.components.loc[REST, "attribution"] == pytest.approx(expected, abs=1e-5)


def test_a_loop_without_groups_has_no_phantom_gradient(tmp_path: Path):
    """Each completion is then a group of its own, whose baseline is something else, such as a critic."""
    parts = components(0)
    advantage = parts @ WEIGHTS - 0.3
    run = told(tmp_path / "r", advantage, parts, group=np.arange(N))
    found = step_parts(run, 1)
    assert found.why == "no group has two completions"
    assert not found.phantom and not telling_sections(run)


def test_parts_need_the_completions_and_all_tokens(tmp_path: Path):
    """A damaged part of the rollouts is set aside; a reduced run has a sample of its tokens."""
    parts = components(0)
    run = told(tmp_path / "r", advantage_parts(parts, "none").sum(1), parts)
    assert telling_sections(run)
    for part in (tmp_path / "r").rglob("traces/rollouts/*.parquet"):
        part.write_bytes(b"PAR1 damaged")
    assert telling_sections(load_run(tmp_path / "r")) == []
    reduced = next(one for one in sharpscope.load_runs("data/reference") if one.token_steps)
    with pytest.raises(UserError, match=r"--by component: .* is reduced to a sample"):
        token_sections(reduced, reduced.token_steps[-1], "component")


def test_what_cannot_be_split_is_said(tmp_path: Path):
    parts = components(0)
    advantage = advantage_parts(parts, "none").sum(1)
    unknown = {"kl_coef": torch.full((N, T), torch.nan)}
    run = told(tmp_path / "a", advantage, parts, **unknown)
    why = "it is not recorded which part of the coefficients the KL term has"
    assert step_parts(run, 1).why == why
    (first, _) = token_sections(run, 1, "component")
    assert why in str(first.content)
    # advantages that differ within a completion, whose mean fits
    run = told(tmp_path / "b", advantage, parts, advantage_of=torch.arange(T) - 2.0)
    assert step_parts(run, 1).why.startswith("the advantages are no multiples")


def test_weights_of_the_reward_are_given_ones_or_fitted(tmp_path: Path):
    parts = components(0)
    fitted = reward_weights(told(tmp_path / "a", np.zeros(N), parts))
    np.testing.assert_allclose(fitted[list(NAMES)], WEIGHTS, rtol=1e-6)
    same = parts.copy()
    same[:, 1] = same[:, 0]  # its weight cannot be told from the first one's
    assert reward_weights(told(tmp_path / "b", np.zeros(N), same)).empty
    run = told(tmp_path / "c", np.zeros(N), parts, reward=parts.sum(1))
    assert (reward_weights(run) == 1).all()
    other = np.random.default_rng(0).normal(size=N)
    run = told(tmp_path / "d", np.zeros(N), parts, reward=other)
    assert reward_weights(run).empty
    assert "told apart" in step_parts(run, 1).why


def test_sums_of_a_sample_have_their_standard_error(tmp_path: Path):
    """Of the completions that were drawn with chance f: Σ/f, and √(m·(1 − f)·s²)/f of their sums."""
    parts, rng = components(0), np.random.default_rng(1)
    each = advantage_parts(parts, "none")
    share = torch.tensor(rng.normal(size=(N, T)))
    drawn = torch.tensor(np.arange(N) % 2 == 0)[:, None].expand(N, T)
    measured = {
        "attribution": torch.where(drawn, share, torch.nan),
        "inclusion_probability": torch.where(drawn, 0.5, torch.nan),
    }
    run = told(tmp_path / "r", each.sum(1), parts, **measured)
    run.info["sampled"] = "rows"
    found = step_parts(run, 1).components
    total = each.sum(1)
    total[np.abs(total) < 1e-9] = np.inf
    for k, name in enumerate(NAMES):
        of_rows = (
            (share.float().double() * torch.tensor(each[:, k] / total)[:, None]).sum(1).numpy()[::2]
        )
        spread = deviation(of_rows)
        error = math.sqrt(len(of_rows) * 0.5 * spread**2) / 0.5
        assert found.loc[name, "attribution"] == pytest.approx(of_rows.sum() / 0.5, rel=1e-5)
        assert found.loc[name, "attribution_error"] == pytest.approx(error, rel=1e-5)
    first, second = token_sections(run, None, "component")
    assert "a random 50 % of each update's completions" in first.note and " ± " in str(
        first.content
    )
    assert second.records[0]["tokens" if "tokens" in second.records[0] else "groups"] > 0


MASK = [[1, 1, 0, 0, 1], [1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [0, 1, 1, 0, 1]]
TURNS = [[1, 1, 2], [1, 1, 1, 1, 1], [1, 2, 3], [1, 1, 2]]
INSERTED = {1: 0, 2: 2 + 1 + 1, 3: 1}


def test_turns_are_runs_of_drawn_tokens(tmp_path: Path):
    """Tokens that were inserted end a turn; statistics and sums of each turn, one token after the other."""
    rng = np.random.default_rng(2)
    mask = torch.tensor(MASK * GROUPS, dtype=torch.bool)
    shape = (N, T)
    values = {name: torch.tensor(rng.normal(size=shape)) for name in ("attribution", "effect_kl")}
    values |= {name: -torch.tensor(rng.random(shape)) for name in ("logp", "behavior_logp")}
    values |= {"ratio": torch.tensor(rng.random(shape)) + 0.5, "mask": mask}
    values["clipped"] = torch.tensor(rng.integers(-1, 2, shape), dtype=torch.int8)
    parts = components(0)
    run = told(tmp_path / "r", advantage_parts(parts, "none").sum(1), parts, **values)
    (section,) = token_sections(run, None, "turn")
    table = pd.DataFrame(section.records).set_index("turn")
    turn = [one for each in TURNS * GROUPS for one in each]
    flat = {
        name: value[mask].float().double().numpy()
        for name, value in values.items()
        if name != "mask"
    }
    gap = flat["logp"] - flat["behavior_logp"]
    coef = np.repeat(advantage_parts(parts, "none").sum(1), mask.sum(1))
    assert sorted(table.index) == [1, 2, 3]
    for label, row in table.iterrows():
        inside = np.array(turn) == label
        assert row["tokens"] == inside.sum() and row["inserted before"] == GROUPS * INSERTED[label]
        expected = {
            "KL(μ‖π), k3": np.mean(np.exp(gap[inside]) - gap[inside] - 1),
            "|ln ratio|": np.mean(np.abs(np.log(flat["ratio"][inside]))),
            "clipped": np.mean(flat["clipped"][inside] != 0),
            "Σ|c|": np.abs(coef[inside]).sum(),
            "attribution": flat["attribution"][inside].sum(),
            "effect_kl": flat["effect_kl"][inside].sum(),
        }
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert any(one.title.endswith("by turn") for one in telling_sections(run))


def test_staleness_is_by_version_or_by_update(tmp_path: Path):
    parts, rng = components(0), np.random.default_rng(3)
    advantage = advantage_parts(parts, "none").sum(1)
    version = torch.tensor(rng.integers(5, 8, (N, T)), dtype=torch.int32)
    ratio = torch.tensor(rng.random((N, T))) + 0.5
    run = told(tmp_path / "r", advantage, parts, policy_version=version, ratio=ratio)
    (section,) = token_sections(run, 1, "staleness")
    table = pd.DataFrame(section.records).set_index("age")
    assert sorted(table.index) == [0, 1, 2]
    for age, row in table.iterrows():
        inside = (version == 7 - age).numpy()
        assert row["tokens"] == inside.sum()
        assert row["|ln ratio|"] == pytest.approx(
            np.abs(np.log(ratio.numpy()[inside])).mean(), rel=1e-5
        )
    # without versions: the updates before its first use
    update = torch.tensor(rng.integers(0, 3, (N, T)), dtype=torch.int32)
    run = told(tmp_path / "s", advantage, parts, ratio=ratio, update=update)
    (section,) = token_sections(run, 1, "staleness")
    table = pd.DataFrame(section.records).set_index("age")
    assert sorted(table.index) == [0, 1, 2]
    for age, row in table.iterrows():
        inside = (update == age).numpy()
        size = np.abs(np.repeat(advantage, T)[inside.flatten()]).sum()
        assert row["tokens"] == inside.sum()
        assert row["Σ|c|"] == pytest.approx(size, rel=1e-5)
