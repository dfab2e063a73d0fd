"""What is measured beside training: values, schedules, and that training does not notice."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

import sharpscope
from sharpscope import memory
from sharpscope.analysis.headline import layer_norms
from sharpscope.errors import CheckError, UserError
from sharpscope.methods import Method, named_method, reference_method
from sharpscope.methods.advantages import estimate_advantages
from sharpscope.methods.method import GroupAdvantage
from sharpscope.policy import load_policy
from sharpscope.recording import measurements, observers, schedule
from sharpscope.recording.norms import clip_factor
from sharpscope.surface import runner
from sharpscope.tokens import norms
from sharpscope.training import train
from sharpscope.training.checkpoint import STATE, checkpoints
from tests.faults.conftest import assert_same, tables
from tests.loops import some
from tests.models import keep_double_precision
from tests.training.test_learner import learn, learner_of, method_of, world  # noqa: F401 - a fixture
from tests.training.test_loop import StopAfter

RECORD = {
    "recording__token_gradients_every": 2,
    "recording__exact_tokens": 3,
    "recording__heldout_influence_every": 2,
    "probes__heldout_prompts": 4,
    "probes__prompts": 4,
    "probes__check": "first",
    "evaluation__every": 0,
    "steps": 4,
}
SURFACE = {
    "probes__preset": "standard",
    "probes__every": 2,
    "probes__functionals": ["expected_failure"],
    "probes__rho": 0.05,
    "probes__curvature_prompts": 4,
    "probes__kinds": ["sam"],
    "probes__samples": 2,
}


@pytest.fixture(scope="module")
def recorded(tiny_policy, tmp_path_factory):
    """One run with everything recorded, and the same run with nothing recorded."""
    from sharpscope.config import build_config
    from tests.conftest import TOY

    out = tmp_path_factory.mktemp("observed")
    base = {**TOY, "policy.model": str(tiny_policy), "method": "grpo"}
    full = {path.replace("__", "."): value for path, value in (RECORD | SURFACE).items()}
    nothing = full | {
        "recording.token_gradients_every": 0,
        "recording.heldout_influence_every": 0,
        "probes.every": 0,
    }
    train(build_config(values=base | full | {"out": str(out / "full")}))
    train(build_config(values=base | nothing | {"out": str(out / "nothing")}))
    return out / "full", out / "nothing"


def test_training_does_not_notice(recorded):
    full, nothing = recorded
    one, two = (
        AutoModelForCausalLM.from_pretrained(checkpoints(folder)[-1]) for folder in (full, nothing)
    )
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    a, b = tables(full), tables(nothing)
    pd.testing.assert_frame_equal(a["steps"], b["steps"], check_exact=True)
    pd.testing.assert_frame_equal(a["rollouts"], b["rollouts"], check_exact=True)


def test_shares_of_a_gradient_sum_to_one_at_the_scheduled_steps(recorded):
    run = sharpscope.load_run(recorded[0])
    tokens = run.tokens()
    found = tokens.dropna(subset=["attribution"]).groupby("step")["attribution"].sum()
    assert found.index.tolist() == [1, 2, 4]  # every second step, the first and the last
    np.testing.assert_allclose(found, 1.0, atol=1e-3)
    assert tokens[tokens["step"] == 3]["score_norm_local"].isna().all()
    assert tokens[tokens["step"].isin([1, 2, 4])]["score_norm_local"].notna().all()
    assert tokens.dropna(subset=["heldout_influence"])["step"].unique().tolist() == [2, 4]
    surface = run.probes[run.probes["probe"].isin(["curvature", "perturbation"])]
    # both splits
    assert sorted(surface["step"].unique()) == [0, 2, 4] and len(surface["probe_set"].unique()) == 2


def test_exact_norms_are_those_of_autograd(toy_config):
    """At the first recorded step the policy is the initial one, so that its norms can be computed afresh."""
    config = toy_config(
        **(
            RECORD
            | {
                "recording__token_gradients_every": 1,
                "recording__heldout_influence_every": 0,
                "steps": 1,
            }
        )
    )
    train(config)
    run = sharpscope.load_run(config.run_dir)
    model = AutoModelForCausalLM.from_pretrained(config.policy.model)
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(config.policy.model)
    exact = run.tokens().dropna(subset=["score_norm"])
    for row in some(exact.itertuples()):
        rollout = run.rollouts[run.rollouts["rollout"] == row.rollout].iloc[0]
        whole = (
            run.tokens()[run.tokens()["rollout"] == row.rollout]
            .sort_values("position")["token_id"]
            .tolist()
        )
        ids = torch.tensor([tokenizer(rollout["prompt"])["input_ids"] + whole[: row.position + 1]])
        logp = torch.log_softmax(model(input_ids=ids).logits[0, -2], dim=-1)[row.token_id]
        grads = torch.autograd.grad(logp, list(model.parameters()))
        assert row.score_norm == pytest.approx(
            float(torch.cat([g.flatten() for g in grads]).norm()), rel=1e-3
        )


def test_at_most_so_many_spikes_are_measured(toy_config, monkeypatch):
    monkeypatch.setattr(observers, "robust_z", lambda recent, value: 99.0)
    monkeypatch.setattr(schedule, "MOST_SPIKES", 2)
    changes = {
        "recording__token_gradients_every": 0,
        "recording__heldout_influence_every": 0,
        "steps": 5,
    }
    config = toy_config(**(RECORD | changes), recording__group_share=0.25, checkpoint__every=1)
    train(config, StopAfter(2))
    train(config, resume=True)
    tokens = sharpscope.load_run(config.run_dir).tokens()
    known = tokens.dropna(subset=["score_norm_local"])
    measured = sorted(known["step"].unique())
    assert len(measured) == 2 and (known["inclusion_probability"] == 1).all()  # of all groups
    state = json.loads((checkpoints(config.run_dir)[-1] / STATE).read_text())
    assert state["measuring"]["spikes"] == measured


def test_a_sample_of_the_groups_with_a_gradient_is_measured_with_its_probability(toy_config):
    changes = {
        "steps": 1,
        "rollout__prompts_per_step": 8,
        "task__factory": "tests.toy_task:half_flat",
    }
    config = toy_config(**(RECORD | changes), recording__group_share=0.5)
    train(config)
    run = sharpscope.load_run(config.run_dir)
    moving = run.rollouts.groupby("group")["advantage"].apply(lambda values: values.ne(0).any())
    tokens = run.tokens().merge(run.rollouts[["rollout", "group"]], on="rollout")
    known = tokens.dropna(subset=["attribution"])
    drawn, moves = max(2, round(0.5 * moving.sum())), known["group"].map(moving)
    assert 2 < moving.sum() < 8 and known[moves]["group"].nunique() == drawn
    np.testing.assert_allclose(known[moves]["inclusion_probability"], drawn / moving.sum())
    assert tokens["score_norm_local"].notna().equals(tokens["group"].isin(known[moves]["group"]))
    # Tokens of groups without a gradient are no part of the sample: their share is known to be 0.
    still = ~tokens["group"].map(moving)
    assert (tokens[still][["attribution", "inclusion_probability"]] == (0, 1)).all(axis=None)


@pytest.mark.parametrize(
    ("share", "groups"), [(0.1, 12), (0.25, 12), (0.6, 12), (1.0, 12), (0.6, 8)]
)
def test_sums_over_sampled_groups_are_unbiased(share, groups):
    """Divided by the probability, their mean over many draws is the sum over all groups of what is 0 without a gradient.

    Also where eight of twelve groups are written and may be measured.
    """
    random = torch.Generator().manual_seed(0)
    group = torch.arange(12).repeat_interleave(3)
    # in some of their rows
    moved = torch.isin(group, torch.tensor([1, 4, 5, 7, 10])) & (torch.arange(36) % 3 != 0)
    values = torch.where(moved, torch.randn(36, generator=random, dtype=torch.float64), 0.0)
    found = []
    for _ in range(3000):
        written = torch.isin(group, torch.randperm(12, generator=random)[:groups])
        rows, probability = measurements.sample_groups(group, moved, share, random, written)
        assert bool(written[rows].all()) and bool(moved[rows].any())
        found.append(float(values[rows].sum()) / probability)
    error = np.std(found) / math.sqrt(len(found))
    assert np.mean(found) == pytest.approx(float(values.sum()), abs=4 * error + 1e-12)


def test_large_steps_are_written_in_part_and_spikes_whole(toy_config, monkeypatch):
    """The rows that are written are those of the whole run; the shares at a spike are all tokens'."""
    record = RECORD | {"recording__heldout_influence_every": 0, "steps": 6}
    whole = sharpscope.load_run(
        train(toy_config(name="whole", method="grpo", **record)).run_dir
    ).tokens()
    limit = int(whole.groupby("step").size().min()) // 2
    monkeypatch.setattr(observers, "robust_z", lambda recent, _: 10.0 if len(recent) == 4 else 0.0)
    found = sharpscope.load_run(
        train(toy_config(name="part", method="grpo", **record, recording__token_rows=limit)).run_dir
    )
    groups = found.rollouts[["step", "rollout", "group"]]
    tokens = found.tokens().merge(groups, on=["step", "rollout"])
    share = tokens.groupby("step")["group"].nunique() / groups.groupby("step")["group"].nunique()
    spike = share == 1
    assert spike.sum() == 1 and share[~spike].max() < 0.8
    part, full = (tokens[tokens["step"].map(spike) == at] for at in (False, True))
    np.testing.assert_allclose(part["row_probability"], part["step"].map(share))
    assert full["row_probability"].isna().all() and (full["inclusion_probability"] == 1).all()
    assert full["attribution"].sum() == pytest.approx(1, abs=1e-4)
    assert part["score_norm_local"].notna().any()
    keys, same = (
        ["step", "rollout", "position"],
        ["token_id", "logp", "entropy", "weight", "loss_coef"],
    )
    pd.testing.assert_frame_equal(
        tokens.set_index(keys)[same],
        whole.set_index(keys)[same].loc[pd.MultiIndex.from_frame(tokens[keys])],
        check_exact=True,
    )


def test_an_interrupted_run_with_probes_goes_on_as_if_it_had_not_been(recorded, toy_config):
    broken = toy_config(name="broken", method="grpo", **(RECORD | SURFACE))
    train(broken, StopAfter(3))
    train(broken, resume=True)
    assert_same(recorded[0], broken.run_dir)


def test_influence_needs_held_out_examples(toy_config):
    config = toy_config(
        recording__heldout_influence_every=2, task__factory="tests.toy_task:only_train"
    )
    with pytest.raises(UserError, match="heldout"):
        train(config)
    assert not config.run_dir.exists()


def test_entropy_at_fixed_tokens_is_that_of_the_stored_solutions(toy_config):
    """Before training it is the mean of −Σ p ln p over the solutions' tokens, one unpadded solution at a time; one row per interval."""
    from sharpscope.surface import ProbeSet

    nothing = {
        "recording__token_gradients_every": 0,
        "recording__heldout_influence_every": 0,
        "probes__every": 0,
    }
    config = toy_config(
        **(
            RECORD
            | nothing
            | {"recording__probe_entropy_every": 2, "steps": 3, "rollout__max_new_tokens": 120}
        )
    )
    train(config)
    run = sharpscope.load_run(config.run_dir)
    rows, spent = run.probes, run.info["measuring"]["seconds"]["entropy"]
    assert list(rows["step"]) == [0, 2] and set(rows["quantity"]) == {"entropy"}
    assert spent == pytest.approx(float(rows["seconds"].sum()), abs=1e-3) and spent > 0
    model = AutoModelForCausalLM.from_pretrained(config.policy.model).double()
    items = [
        item
        for item in ProbeSet.load(config.run_dir / "probe_set.parquet").split("train")
        if item.solution
    ]
    entropies = []
    for item in items:
        ids = torch.tensor([list(item.prompt_ids) + list(item.solution)])
        logits = (
            model(input_ids=ids).logits[0, len(item.prompt_ids) - 1 : -1]
            / config.rollout.temperature
        )
        entropies.append(torch.distributions.Categorical(logits=logits).entropy())
    assert rows["value"].iloc[0] == pytest.approx(
        float(torch.cat(entropies).mean().detach()), rel=1e-5
    )
    assert rows["prompts"].iloc[0] == len(items) and "/train@" in rows["probe_set"].iloc[0]


def test_columns_of_a_token_belong_to_the_update_that_first_used_it(toy_config):
    """Lopti's two updates: the shares of each one's gradient sum to 1, and each one's exact tier is drawn from its own tokens."""
    changes = {"method": "lopti", "recording__token_gradients_every": 1}
    config = toy_config(**(RECORD | changes | {"method__passes": 0.02, "steps": 1}))
    train(config)
    tokens = sharpscope.load_run(config.run_dir).tokens()
    assert sorted(tokens["update"].unique()) == [0, 1]
    for _, part in some(tokens.groupby("update")):
        assert part["attribution"].sum() == pytest.approx(1.0, abs=1e-3)
        exact = part.dropna(subset=["score_norm"])
        certain, drawn = (
            exact[(exact["draw_probability"] == 1.0) == is_top] for is_top in (True, False)
        )
        assert (len(certain), len(drawn)) == (3, 3)
        np.testing.assert_allclose(drawn["draw_probability"], 3 / (len(part) - 3), rtol=1e-6)
        assert (
            certain["score_norm_local"].min() >= part.drop(certain.index)["score_norm_local"].max()
        )


def test_under_sam_shares_are_those_of_the_gradient_whose_coefficients_are_recorded(toy_config):
    changes = {"recording__token_gradients_every": 1, "steps": 2}
    sharp = toy_config(
        name="sharp", **(RECORD | changes), method="grpo-sam", method__sharpness__rho=2.0
    )
    plain = toy_config(name="plain", **(RECORD | changes))
    train(sharp)
    train(plain)
    tokens, others = (sharpscope.load_run(config.run_dir).tokens() for config in (sharp, plain))
    np.testing.assert_allclose(
        tokens.groupby(["step", "update"])["attribution"].sum(), 1.0, atol=1e-3
    )
    first, other = (frame.loc[frame["step"] == 1, "attribution"] for frame in (tokens, others))
    np.testing.assert_allclose(first, other, atol=1e-6)
    # The spike rule compares the norms of these gradients; the steps table has the norm that the optimizer got.
    norms = sharpscope.load_run(plain.run_dir).steps["grad_norm"]
    state = json.loads((checkpoints(sharp.run_dir)[-1] / STATE).read_text())
    assert state["recent_log_grad_norms"][0] == pytest.approx(math.log(norms.iloc[0]), rel=1e-5)
    assert sharpscope.load_run(sharp.run_dir).steps["grad_norm"].iloc[0] != pytest.approx(
        norms.iloc[0], rel=0.01
    )


def test_a_probe_that_fails_its_check_is_left_out_and_the_run_goes_on(toy_config, monkeypatch):
    """A fault in local norms and one in Hessian products: events, no such numbers, the others as they were."""
    own = norms.local_squares
    monkeypatch.setattr(
        norms, "local_squares", lambda use, g: [(name, 0.8 * found) for name, found in own(use, g)]
    )

    def wrong(*args, **rest):
        raise CheckError("products differ", "hessian", 0.5, 0.01)

    monkeypatch.setattr(runner, "curvature", wrong)
    values = RECORD | SURFACE | {"method": "grpo"}
    outcome = train(toy_config(name="faulty", **values))
    assert outcome.status == "finished"
    run = sharpscope.load_run(outcome.run_dir)
    events = run.events[run.events["rule"] == "self_check"]
    assert events["step"].tolist() == [1] and events["action"].tolist() == ["left out"]
    (event,) = events.to_dict("records")
    assert event["message"].startswith("score_norm_local is left out from here on: ")
    assert event["value"] > event["threshold"] > 0
    assert any(
        "left out: products differ" in text
        for text in run.events[run.events["rule"] == "probe"]["message"]
    )
    assert run.probes[run.probes["probe"] == "curvature"]["value"].isna().all()
    tokens = run.tokens()
    assert "score_norm_local" not in tokens or tokens["score_norm_local"].isna().all()
    recorded = tokens[tokens["step"].isin([2, 4])]
    assert recorded["attribution"].notna().any()
    # random ones: none is known to be large
    assert recorded.groupby("step")["score_norm"].count().tolist() == [
        3,
        3,
    ]
    assert "perturbation" in set(run.probes["probe"])


CRITICAL = {
    "method": "grpo",
    "evaluation__every": 0,
    "probes__preset": "light",
    "probes__functionals": [],
    "probes__every": 1,
    "recording__token_gradients_every": 0,
    "recording__rotation_every": 0,
}


def test_no_critical_sharpness_of_losses_with_a_factor_held_constant(toy_config):
    config = toy_config(**CRITICAL | {"method": "cispo", "steps": 2})
    train(config)
    run = sharpscope.load_run(config.run_dir)
    assert run.steps["grad_norm"].gt(0).any() and run.probes.empty
    text = run.events.loc[run.events["message"].str.contains("critical"), "message"].tolist()
    assert len(text) == 1 and "method.clip.kind = cispo" in text[0] and "constant" in text[0]


def test_leading_tokens_have_their_local_norms_by_layer(recorded):
    """The eight largest |c|·local norm of a measured update, and the layers of an update whose squares are its norm's."""
    run = sharpscope.load_run(recorded[0])
    tokens = run.tokens(steps=[2])
    kept = tokens.dropna(subset=["score_norm_by_layer"])
    size = (tokens["loss_coef"].abs() * tokens["score_norm_local"]).nlargest(8)
    assert set(kept.index) == set(size[size > 0].index)
    for row in some(kept.to_dict("records")):
        values = json.loads(row["score_norm_by_layer"])
        # the last norm is in no layer
        assert 0.5 < math.hypot(*values.values()) / row["score_norm_local"] <= 1 + 1e-5
    layers = layer_norms(run)
    for _, update in some(run.updates.iterrows()):
        own = layers[(layers["step"] == update["step"]) & (layers["update"] == update["update"])]
        assert math.hypot(*own["grad_norm"]) == pytest.approx(update["grad_norm"], rel=1e-5)
        assert math.hypot(*own["update_norm"]) == pytest.approx(update["update_norm"], rel=1e-5)


# -- Measures of sharded models that need a whole copy of the weights.


def test_a_copy_that_does_not_fit_is_refused_at_the_start(toy_config, monkeypatch):
    config = toy_config(
        method="grpo", recording__rotation_every=0, recording__heldout_influence_every=2
    )
    policy = load_policy(config.policy)
    monkeypatch.setattr(observers, "is_sharded", lambda model: True)
    monkeypatch.setattr(memory, "free_memory", lambda device: 10.0)
    with pytest.raises(UserError, match=r"GiB are free; set recording\.heldout_influence_every=0"):
        observers.Observers(config, policy, view=None)


# -- Rotation of gradients and updates, against gradients and AdamW steps made by plain loops in float64

LOPTI = named_method("lopti").model_copy(update={"name": "two passes", "passes": 0.01})


def plain_gradient(model, rollouts, rows, counted, advantage, old_logp, reference) -> np.ndarray:
    """∇ of the clipped surrogate with all weights 1, over the rows `rows` of which only `counted` contribute."""
    parameters = list(model.parameters())
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    tokens = sum(int(rollouts.lengths[row]) for row in rows)
    # no ratio comes near the bound of a dual clip
    low, high = (
        reference.clip.low,
        reference.clip.high,
    )
    for row in counted:
        length, first = int(rollouts.lengths[row]), int(rollouts.prompt_lengths[row])
        ids = rollouts.input_ids[row][rollouts.attention_mask[row].bool()][None]
        logp = torch.log_softmax(model(input_ids=ids).logits[0], -1)
        loss = torch.zeros((), dtype=torch.float64)
        for place in range(length):
            ratio = (logp[first + place - 1, ids[0, first + place]] - old_logp[row, place]).exp()
            share = 1 / tokens if reference.aggregate == "token_mean" else 1 / (len(rows) * length)
            a = float(advantage[row])
            loss = loss - share * torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
        gradient = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        total += torch.cat([g.flatten() for g in gradient])
    return total.numpy()


def plain_step(model, optimizer, gradient: np.ndarray, limit: float | None) -> np.ndarray:
    """Δθ of AdamW in the state of `optimizer`, by making the step on a copy."""
    copied = copy.deepcopy(model)
    before = flat(copied)
    groups, members = [], dict(zip(model.parameters(), copied.parameters(), strict=True))
    for group in optimizer.param_groups:
        groups.append({**group, "params": [members[p] for p in group["params"]]})
    other = torch.optim.AdamW(groups)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    factor = 1.0 if limit is None else min(1.0, limit / (np.linalg.norm(gradient) + 1e-6))
    parts = torch.from_numpy(gradient * factor).split([p.numel() for p in copied.parameters()])
    for parameter, part in zip(copied.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)
    other.step()
    return flat(copied) - before


def flat(model) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()


def compared(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Angle [degrees] and ratio of lengths; a zero vector has no angle."""
    lengths = np.linalg.norm(a), np.linalg.norm(b)
    if lengths[0] == 0:
        return math.nan, 0.0
    return math.degrees(math.acos(np.clip(a @ b / (lengths[0] * lengths[1]), -1, 1))), lengths[
        0
    ] / lengths[1]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo-sg", {}),
        (
            "grpo-sg",
            {"mini_batches": 2, "inner_epochs": 2, "microbatch_tokens": 64, "max_grad_norm": 0.05},
        ),
        ("cov-grpo", {"share_prompt": False, "microbatch_tokens": 64}),
        ("high-entropy", {"inner_epochs": 2}),
        ("dapo", {"mini_batches": 3}),
        ("gspo", {"inner_epochs": 3}),
        ("lopti", {}),  # every token is in the first pass: the second has no gradient
        (LOPTI, {"inner_epochs": 2}),
        ("grpo-sam", {}),
    ],
    ids=lambda value: (
        value
        if isinstance(value, str)
        else value.name
        if isinstance(value, Method)
        else "-".join(value)
    ),
)
def test_rotations_are_those_of_explicit_vectors(world, name, changes):  # noqa: F811
    policy, drawn = world
    keep_double_precision(policy.model)
    learner, model, rollouts = learner_of(policy, **changes), policy.model, drawn.rollouts
    rows_of, wanted, old = [], [], policy_logp(policy, drawn)
    plain = reference_method(method_of(name))

    def before(*_):
        rows = rows_of[-1][0].tolist()
        # unclipped
        own = torch.cat([p.grad.flatten() for p in model.parameters()]).numpy() / rows_of[-1][1]
        groups = sorted({int(rollouts.group[row]) for row in rows})
        inside = [
            [r for r in rows if int(rollouts.group[r]) in half]
            for half in (groups[::2], groups[1::2])
        ]
        halves = [
            plain_gradient(model, rollouts, rows, half, drawn.advantage, old, plain)
            for half in inside
        ]
        reference = sum(halves)
        share = len(groups[::2]) / len(groups)
        noise = math.nan
        if len(groups) > 1:
            squared = max(halves[0] @ halves[1], 0.0) / (
                share * (1 - share) * (reference @ reference)
            )
            noise = math.degrees(math.acos(math.sqrt(min(squared, 1.0))))
        steps = [
            plain_step(model, learner.optimizer, g, learner.max_grad_norm) for g in (own, reference)
        ]
        wanted.append((*compared(own, reference), *compared(*steps), noise))

    learner.optimizer.register_step_pre_hook(before)
    learned = learn(
        learner,
        drawn,
        name,
        before_step=lambda update: rows_of.append(
            (update.rows, clip_factor(update.grad_norm, learner.max_grad_norm))
        ),
        rotations=True,
    )
    assert len(learned.updates) == len(wanted) > 0
    for update, (angle, scale, step_angle, step_scale, noise) in zip(
        learned.updates, wanted, strict=True
    ):
        found = update.rotation
        assert found.gradient.angle == pytest.approx(angle, abs=1e-5, nan_ok=True)
        assert found.gradient.scale == pytest.approx(scale, rel=1e-7)
        assert found.update.angle == pytest.approx(step_angle, abs=1e-3)
        assert found.update.scale == pytest.approx(step_scale, rel=1e-5)
        assert found.noise == pytest.approx(noise, abs=1e-4, nan_ok=True)
    turned = {
        "dapo": 1.0,
        "high-entropy": 1.0,
        "grpo-sam": 1e-3,
        "grpo-sg": 0.1,
        "cov-grpo": 0.1,
        LOPTI: 1.0,
    }
    assert np.nanmax([u.rotation.gradient.angle for u in learned.updates]) >= turned.get(name, 0.0)
    if name == "gspo":  # ratio 1 at the first update
        assert learned.updates[0].rotation.gradient.angle < 1e-4


def policy_logp(policy, drawn) -> torch.Tensor:
    return learner_of(policy).scorer.statistics(drawn.rollouts).logp


@pytest.mark.parametrize("name", ["grpo-sg", "lopti", "grpo-gnp"])
def test_measuring_changes_nothing(world, name):  # noqa: F811
    policy, drawn = world
    first = flat(policy.model)
    results = []
    for rotations in (False, True):
        learned = learn(
            learner_of(policy, inner_epochs=2, microbatch_tokens=64),
            drawn,
            name,
            rotations=rotations,
        )
        results.append(
            (flat(policy.model), [u.grad_norm for u in learned.updates], learned.tokens.loss_coef)
        )
        assert all((u.rotation is not None) is rotations for u in learned.updates)
        torch.nn.utils.vector_to_parameters(torch.from_numpy(first), policy.model.parameters())
    assert np.array_equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    assert torch.equal(results[0][2], results[1][2])


def test_a_reward_that_is_not_finite_leaves_its_group_out_of_the_reference(world):  # noqa: F811
    policy, drawn = world
    drawn.rollouts.reward[1] = math.nan
    drawn.advantage[:] = 0.0
    fine = drawn.rollouts.group != drawn.rollouts.group[1]
    given = (
        drawn.rollouts.reward[fine].double(),
        drawn.rollouts.group[fine],
        drawn.rollouts.completion_mask[fine],
    )
    drawn.advantage[fine] = estimate_advantages(GroupAdvantage(), *given)
    # its reference has advantages of its own
    learned = learn(learner_of(policy), drawn, "gspo", rotations=True)
    assert learned.updates[0].rotation.gradient.angle < 1e-3


def test_a_run_records_rotations_on_schedule(toy_config):
    config = toy_config(
        method="grpo-sg",
        method__weight__preset="calibrated",
        steps=5,
        recording__rotation_every=2,
        recording__token_gradients_every=4,
        evaluation__every=0,
        update__mini_batches=2,
    )
    train(config)
    run = sharpscope.load_run(config.run_dir)
    steps = run.steps.set_index("step")
    for name in (
        "gradient_rotation",
        "gradient_scale",
        "update_rotation",
        "update_scale",
        "noise_rotation",
    ):
        assert steps.index[steps[name].notna()].tolist() == [1, 2, 4]
    assert (steps["gradient_rotation"].dropna() > 0.1).all() and steps[
        "gradient_scale"
    ].dropna().between(1, 1.4).all()
    assert steps["weight_mean_gradient"].notna().all()
    measured = run.updates.dropna(subset="gradient_rotation")
    assert measured[["step", "update"]].to_numpy().tolist() == [
        [s, u] for s in (1, 2, 4) for u in (0, 1)
    ]
    means = measured.groupby("step")[["gradient_rotation", "update_scale"]].mean()
    np.testing.assert_allclose(means, steps.loc[[1, 2, 4], means.columns], rtol=1e-12)


def test_effects_of_a_large_model_are_measured_as_often_as_they_are_paid_for(
    toy_config, monkeypatch
):
    """12 % of 60 steps of a forward and backward pass and a generation, 28.8 passes, less the check's 8 / 2: one of 33 / 2."""
    monkeypatch.setattr(schedule, "SMALL", 0)
    changes = {"recording__token_gradients_every": 2, "update__mini_batches": 2, "steps": 4}
    seen = {}
    for choice in ("auto", "always", "never"):
        config = toy_config(**changes, recording__effects=choice, name=choice)
        longer = config.model_copy(update={"steps": 60})
        most = schedule.affordable_effects(longer, 1)
        assert most == {"auto": 1, "always": None, "never": 0}[choice]
        monkeypatch.setattr(observers, "affordable_effects", lambda config, size, most=most: most)
        assert train(config).status == "finished"
        run = sharpscope.load_run(config.run_dir)
        tokens = run.tokens().dropna(subset=["effect_kl"])
        seen[choice] = sorted(tokens["step"].unique())
        told = run.events["message"].str.contains("effects of tokens are measured at 1 updates")
        assert told.any() == (choice == "auto")
    assert seen == {"auto": [2], "always": [2, 4], "never": []}


@pytest.mark.parametrize(
    ("steps", "places"), [(9, [1]), (12, [1, 2, 4, 6, 8, 10, 12]), (40, [1, 8, 16, 24, 32, 40])]
)
def test_tokens_are_measured_five_times_in_a_run_of_ten_steps(toy_config, steps, places):
    config = toy_config(recording__token_gradients_every=None, steps=steps)
    times = schedule.MeasurementSchedule(config).shares
    assert [step for step in range(1, steps + 1) if times.due(step)] == places
