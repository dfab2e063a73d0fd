"""A hand-written GRPO loop: recorded with six lines, it makes the same weights, and each number is the loss's own."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import sharpscope
from sharpscope.cli import app
from sharpscope.errors import UserError
from sharpscope.integrations.importers import Options, import_files
from sharpscope.recording import measurements
from sharpscope.recording import schedule as price
from sharpscope.recording.core import Recorder
from sharpscope.recording.schedule import StepCost, measurement_plan
from tests.integrations.trainers import plain_trainer, small_model, tokenizer

PROMPTS = [[2, 3], [4], [5, 6, 7], [8, 9]]
GROUP, STEPS, EPOCHS, LENGTH = 4, 3, 2, 6
ALL = {"token_gradients_every": 1, "exact_tokens": 200}


def drawn(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """16 completions with rewards and advantages; prompts padded on the left, completions on the right (0)."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LENGTH + 1, (len(PROMPTS) * GROUP,), generator=draw)
    width = max(map(len, PROMPTS))
    ids = torch.zeros(len(lengths), width + LENGTH, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths.tolist()):
        prompt = PROMPTS[row // GROUP]
        ids[row, width - len(prompt) : width] = torch.tensor(prompt)
        ids[row, width : width + length] = torch.randint(2, 37, (length,), generator=draw)
        mask[row, width : width + length] = 1
    attention = ((ids > 0) | (mask > 0)).long()
    rewards = torch.rand(len(ids), generator=draw)
    grouped = rewards.view(-1, GROUP)
    advantages = (
        (grouped - grouped.mean(1, keepdim=True)) / grouped.std(1, keepdim=True)
    ).flatten()
    with torch.no_grad():
        old = logps(model, ids, attention)
    found = {
        "ids": ids,
        "mask": mask,
        "attention": attention,
        "rewards": rewards,
        "advantages": advantages,
    }
    return found | {"old": old, "groups": torch.arange(len(ids)) // GROUP}


def logps(model: Any, ids: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """(n, L - 1) of the tokens from the second on."""
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=attention, position_ids=positions).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def surrogate(
    logp: torch.Tensor, b: dict[str, torch.Tensor], rows: slice, total: float
) -> torch.Tensor:
    """PPO's clipped surrogate with bounds 0.05, a mean over the tokens of the whole batch."""
    width = logp.shape[1]  # the last columns
    ratio = (logp - b["old"][rows, -width:]).exp()
    a = b["advantages"][rows, None]
    each = -torch.minimum(a * ratio, a * ratio.clamp(0.95, 1.05))
    return (each * b["mask"][rows, -width:]).sum() / total


def loop(
    model: Any, out: Path | None = None, clip: float = 1e9, narrow: bool = False, **options: Any
) -> list[dict[str, torch.Tensor]]:
    """Two micro-batches an update, EPOCHS updates a step; returns the weights before each update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rec: Any = None
    if out is not None:
        options |= {"steps": STEPS, "updates_per_step": EPOCHS, "tokenizer": tokenizer()}
        rec = sharpscope.record(model, optimizer, out=out, **options)
    kept = []
    for step in range(STEPS):
        b = drawn(model, step)
        total = float(b["mask"][:, 1:].sum())
        for _ in range(EPOCHS):
            kept.append({name: value.clone() for name, value in model.state_dict().items()})
            losses = 0.0
            for rows in (slice(0, 8), slice(8, 16)):
                logp = logps(model, b["ids"][rows], b["attention"][rows])
                logp = logp[:, -LENGTH:] if narrow else logp  # only the columns of completions
                loss = surrogate(logp, b, rows, total)
                if rec is not None:
                    mask = b["mask"][rows][:, -LENGTH:] if narrow else b["mask"][rows]
                    known = {name: b[name][rows] for name in ("advantages", "rewards", "groups")}
                    rec.tokens(
                        logp,
                        b["ids"][rows],
                        mask,
                        old_logp=b["old"][rows][:, -logp.shape[1] :],
                        **known,
                    )
                loss.backward()
                losses += float(loss.detach())
            if rec is not None:

                def again(b: Any = b, total: float = total) -> torch.Tensor:
                    return surrogate(logps(model, b["ids"], b["attention"]), b, slice(0, 16), total)

                rec.step(losses, loss_fn=again)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    if rec is not None:
        rec.close()
    kept.append({name: value.clone() for name, value in model.state_dict().items()})
    return kept


def equal(one: list[dict[str, torch.Tensor]], two: list[dict[str, torch.Tensor]]) -> bool:
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, two, strict=True) for name in a)


@pytest.mark.parametrize("narrow", [False, True], ids=["all columns", "completions"])
def test_each_number_is_autograds_and_the_weights_are_the_same(
    tmp_path: Path, narrow: bool, monkeypatch
):
    monkeypatch.setattr(measurements, "TOLERANCE", 1 / 16)
    monkeypatch.setattr(measurements, "EVALUATIONS", 40)
    plain = loop(small_model(), clip=0.5)
    options = {"recording": ALL, "critical_sharpness": 1, "correct": 0.5}
    kept = loop(small_model(), tmp_path / "run", clip=0.5, narrow=narrow, **options)
    assert equal(plain, kept) and not torch.equal(
        kept[0]["lm_head.weight"], kept[-1]["lm_head.weight"]
    )
    run = sharpscope.load_run(tmp_path / "run")
    assert run.status == "finished" and run.steps["step"].tolist() == [1, 2, 3]
    assert (run.rollouts.groupby("step").size() == 16).all() and (
        run.steps["updates"] == EPOCHS
    ).all()
    assert "attribution_sum" not in set(run.events["rule"])
    model = small_model()
    model.load_state_dict(kept[0])
    for step in range(STEPS):
        at = step * EPOCHS
        model.load_state_dict(kept[at])
        b = drawn(model, step)
        total, inside = float(b["mask"][:, 1:].sum()), b["mask"][:, 1:].bool()
        tokens, rollouts = (
            run.tokens(steps=[step + 1]),
            run.rollouts[run.rollouts["step"] == step + 1],
        )
        np.testing.assert_allclose(rollouts["reward"], b["rewards"], rtol=1e-6)
        np.testing.assert_allclose(rollouts["advantage"], b["advantages"], rtol=1e-5)
        assert rollouts["group"].tolist() == b["groups"].tolist()
        assert rollouts["correct"].tolist() == (b["rewards"] > 0.5).tolist()
        assert tokens["token_id"].tolist() == b["ids"][:, 1:][inside].tolist()
        np.testing.assert_allclose(tokens["logp"], b["old"][inside], atol=1e-5)
        for update in range(EPOCHS):
            model.load_state_dict(kept[at + update])
            model.double().zero_grad()
            logp = logps(model, b["ids"], b["attention"])
            loss = surrogate(logp, {**b, "old": b["old"].double()}, slice(0, 16), total)
            logp.retain_grad()
            loss.backward(retain_graph=True)
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
            table = tokens if update == 0 else run.uses[run.uses["step"] == step + 1]
            assert (table["update"] == update).all() and len(table) == int(inside.sum())
            coef = logp.grad[inside].numpy()
            np.testing.assert_allclose(table["loss_coef"], coef, rtol=1e-3, atol=1e-7)
            ratio = (logp - b["old"]).exp()[inside].detach()
            np.testing.assert_allclose(table["ratio"], ratio, rtol=1e-4)
            gone = (coef == 0) & (
                b["advantages"][:, None].expand(inside.shape)[inside].numpy() != 0
            )
            assert ((table["clipped"] != 0) == gone).all() and (update == 0) == (not gone.any())
            row = run.updates.set_index(["step", "update"]).loc[(step + 1, update)]
            assert row["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-4)
            assert row["clip_factor"] == pytest.approx(
                min(1.0, 0.5 / float(gradient.norm())), rel=1e-4
            )
            assert row["loss"] == pytest.approx(float(loss), abs=1e-6)
            if update == 0:
                for place in (0, len(tokens) // 2):
                    where = tuple(int(i) for i in inside.nonzero()[place])
                    parts = torch.autograd.grad(
                        logp[where], list(model.parameters()), retain_graph=True
                    )
                    flat = torch.cat([part.flatten() for part in parts])
                    assert tokens["score_norm"].iloc[place] == pytest.approx(
                        float(flat.norm()), rel=1e-4
                    )
                    share = coef[place] * float(flat @ gradient / gradient.square().sum())
                    assert tokens["attribution"].iloc[place] == pytest.approx(share, abs=1e-4)
                assert tokens["attribution"].sum() == pytest.approx(1, abs=1e-3)
            model.float()
    critical = run.probes[run.probes["quantity"] == "critical_sharpness"]
    assert list(critical["step"]) == [1, 2, 3]
    for name in ("show", "tokens"):
        result = CliRunner().invoke(app, [name, str(run.path)])
        assert result.exit_code == 0, (result.output, result.exception)


def loop_with_reference(said: str, out: Path | None = None) -> list[torch.Tensor]:
    """A loss with a KL term, of which the loop says it `said`; two micro-batches an update; returns the weights at last."""
    model, reference = small_model(), small_model(model={"seed": 1})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rec: Any = None
    if out is not None:
        rec = sharpscope.record(model, optimizer, tokenizer=tokenizer(), out=out, recording=ALL)
    for step in range(2):
        b = drawn(model, step)
        for rows in (slice(0, 8), slice(8, 16)):
            logp = logps(model, b["ids"][rows], b["attention"][rows])
            with torch.no_grad():
                ref = logps(reference, b["ids"][rows], b["attention"][rows])
            mask = b["mask"][rows, 1:]
            each = (ref - logp).exp() - 1 - (ref - logp)
            mean = 0.3 * (each * mask).sum() / mask.sum()
            loss = -(logp * b["advantages"][rows, None] * mask).sum() / mask.sum() + mean
            if rec is not None:
                known = {"none": {}, "each": {"kl": each}, "mean": {"kl": mean}}[said]
                cut = [row % 3 == 0 for row in range(8)]
                known |= {name: b[name][rows] for name in ("advantages", "rewards", "groups")}
                rec.tokens(
                    logp, b["ids"][rows], b["mask"][rows], ref_logp=ref, truncated=cut, **known
                )
            (loss / 2).backward()
        if rec is not None:
            rec.step()
        optimizer.step()
        optimizer.zero_grad()
    if rec is not None:
        rec.close()
    return [value.detach().clone() for value in model.parameters()]


@pytest.mark.parametrize("said", ["none", "each", "mean"])
def test_the_kl_terms_part_of_the_coefficients_is_known_where_the_loop_says_it(
    said: str, tmp_path: Path
):
    plain, kept = loop_with_reference(said), loop_with_reference(said, tmp_path / "run")
    assert all(torch.equal(one, other) for one, other in zip(plain, kept, strict=True))
    run = sharpscope.load_run(tmp_path / "run")
    assert run.status == "finished" and run.rollouts["truncated"].tolist() == 4 * [
        row % 3 == 0 for row in range(8)
    ]
    tokens = run.tokens(steps=[1])
    assert len(tokens) > 20 and tokens["ref_logp"].notna().all()
    if said == "none":
        assert tokens["kl_coef"].isna().all()
        return
    count = tokens.groupby(tokens["rollout"] // 8)["logp"].transform("size")  # of the micro-batch
    expected = 0.3 / 2 / count * -np.expm1(tokens["ref_logp"] - tokens["logp"])
    np.testing.assert_allclose(tokens["kl_coef"], expected, rtol=1e-3, atol=1e-6)
    policy = -tokens["advantage"] / 2 / count
    np.testing.assert_allclose(
        tokens["loss_coef"] - tokens["kl_coef"], policy, rtol=1e-3, atol=1e-6
    )


@pytest.mark.may_stop
def test_a_kl_term_that_does_not_fit_is_named(tmp_path: Path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    b = drawn(model, 0)
    for number, (make, message) in enumerate(
        [
            (lambda logp: logp.sum(1), "kl .* does not fit logp"),
            (lambda logp: logp.detach(), "kl is not made from logp"),
            (lambda _: model.lm_head.weight.sum(), "kl is not made from logp"),
        ]
    ):
        rec = sharpscope.record(model, optimizer, tokenizer=tokenizer(), out=tmp_path / str(number))
        logp = logps(model, b["ids"], b["attention"])
        with pytest.warns(UserWarning, match=message):
            rec.tokens(logp, b["ids"], b["mask"], kl=make(logp))
        rec.close()


def test_a_spike_and_what_is_not_given(tmp_path: Path):
    """Only logp, ids and mask: a run of losses, norms and shares, with everything else null."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with sharpscope.record(
        model, optimizer, tokenizer=tokenizer(), out=tmp_path / "run", recording=ALL
    ) as rec:
        for step in range(3):
            b = drawn(model, step)
            logp = logps(model, b["ids"], b["attention"])
            rec.tokens(logp, b["ids"], b["mask"])
            loss = -(logp * b["mask"][:, 1:]).mean()
            loss.backward()
            rec.step(loss)
            optimizer.step()
            optimizer.zero_grad()
    run = sharpscope.load_run(tmp_path / "run")
    assert run.steps["loss"].notna().all() and run.steps["reward_mean"].isna().all()
    tokens = run.tokens()
    assert tokens[["advantage", "ratio", "clipped", "weight"]].isna().all(axis=None)
    np.testing.assert_allclose(tokens.groupby("step")["attribution"].sum(), 1, atol=1e-3)
    np.testing.assert_allclose(tokens["loss_coef"], -1 / logp.numel(), rtol=1e-5)
    assert set(run.events["rule"]) <= {"probe", "memory", "near_uniform"}


def half(tokens: Any) -> torch.Tensor:
    """Weights of 1/2."""
    return torch.full_like(tokens.logp, 0.5)


def test_rotation_by_weights_leaves_other_terms_of_the_loss_as_they_are(tmp_path: Path):
    model = small_model()
    optimizer, b = torch.optim.SGD(model.parameters(), lr=1e-3), drawn(model, 0)
    options = {"rotation": f"{__name__}:half", "recording": {"rotation_every": 1}}
    with sharpscope.record(
        model, optimizer, tokenizer=tokenizer(), out=tmp_path / "run", **options
    ) as rec:
        logp = logps(model, b["ids"], b["attention"])
        tokens = surrogate(logp, b, slice(0, 16), float(b["mask"][:, 1:].sum()))
        penalty = 1e-2 * sum(p.square().sum() for p in model.parameters())
        parts = [
            torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
            for loss in (tokens, penalty)
        ]
        of_tokens, of_penalty = (torch.cat([p.double().flatten() for p in part]) for part in parts)
        rec.tokens(
            logp,
            b["ids"],
            b["mask"],
            old_logp=b["old"],
            advantages=b["advantages"],
            groups=b["groups"],
        )
        (tokens + penalty).backward()
        rec.step()
        optimizer.step()
    (row,) = sharpscope.load_run(tmp_path / "run").updates.itertuples()
    turned, plain = 0.5 * of_tokens + of_penalty, of_tokens + of_penalty
    angle = np.degrees(np.arccos(float(turned @ plain / turned.norm() / plain.norm())))
    assert angle > 1 and row.gradient_rotation == pytest.approx(angle, rel=1e-3)
    assert row.gradient_scale == pytest.approx(float(turned.norm() / plain.norm()), rel=1e-4)


def test_each_row_has_its_probability_where_completions_come_with_the_second_update(tmp_path: Path):
    """A step that is measured before its last completions are known is written whole, another one in part."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    options = {"updates_per_step": 2, "recording": {"token_gradients_every": 3, "token_rows": 40}}
    with sharpscope.record(
        model, optimizer, tokenizer=tokenizer(), out=tmp_path / "run", **options
    ) as rec:
        for update in range(6):
            b = drawn(model, update)
            logp = logps(model, b["ids"], b["attention"])
            rec.tokens(logp, b["ids"], b["mask"], groups=b["groups"] + 4 * update)
            (-(logp * b["mask"][:, 1:]).mean()).backward()
            rec.step()
            optimizer.step()
            optimizer.zero_grad()
    run = sharpscope.load_run(tmp_path / "run")
    groups = run.rollouts[["step", "rollout", "group"]]
    tokens = run.tokens().merge(groups, on=["step", "rollout"]).groupby("step")
    written = tokens["group"].nunique() / groups.groupby("step")["group"].nunique()
    assert written[[1, 3]].tolist() == [1, 1] and written[2] < 0.8
    assert tokens["row_probability"].min().fillna(1).tolist() == written.tolist()
    assert (
        tokens["inclusion_probability"].min()[1] < 1
        and tokens["inclusion_probability"].count()[2] == 0
    )


def test_a_run_that_ends_with_the_process_says_how(tmp_path: Path, monkeypatch):
    model = small_model()
    for name, error, status in (("a", None, "finished"), ("b", RuntimeError("x"), "failed")):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        rec = sharpscope.record(model, optimizer, tokenizer=tokenizer(), out=tmp_path / name)
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        rec._at_exit()
        assert sharpscope.load_run(tmp_path / name).status == status


@pytest.mark.may_stop
@pytest.mark.parametrize(
    "name", ["_tokens", "_open", "_gradient", "before_update", "after_update", "observe_update"]
)
def test_a_recorder_that_fails_leaves_the_loop_alone(name: str, tmp_path: Path, monkeypatch):
    from sharpscope.integrations.record import LoopRecorder

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    plain = loop(small_model())
    monkeypatch.setattr(LoopRecorder, name, fail)
    with pytest.warns(UserWarning, match="stopped recording at step 1"):
        kept = loop(small_model(), tmp_path / "run", critical_sharpness=1)
    assert equal(plain, kept)
    assert sharpscope.load_run(tmp_path / "run").status == "interrupted"


@pytest.mark.may_stop
def test_mistakes_are_named(tmp_path: Path):
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match="a model needs its optimizer and tokenizer"):
        sharpscope.record(model, out=tmp_path / "a")
    with pytest.raises(UserError, match="name the folder"):
        sharpscope.record(object(), "runs/x")
    assert not (tmp_path / "a").exists()
    b = drawn(model, 0)
    for given, message in (
        ((logps(model, b["ids"], b["attention"])[:, :3], b["ids"], b["mask"]), "do not fit"),
        ((b["old"], b["ids"], b["mask"]), "logp does not require a gradient"),
    ):
        rec = sharpscope.record(model, optimizer, tokenizer=tokenizer(), out=tmp_path / "b")
        with pytest.warns(UserWarning, match=message):
            rec.tokens(*given)
        rec.tokens(*given)  # nothing more happens
        rec.close()


# -- What is measured by default: tokens at five steps or more, and 12 % of a training's passes, known before it begins.


def cost_of(plan: Any, work: StepCost, exact: int) -> float:
    """Passes of a plan's measurements, each counted by itself."""
    rows = max(work.rows, 1)
    part = round(plan.sample * rows) / rows
    cost = price.CHECK + price.EFFECTS_CHECK * bool(plan.effects)
    cost += plan.spikes * (price.OVERHEAD + price.SHARES)
    norms = price.NORMS + price.EXACT * exact / rows
    extra = {"norms": norms, "effects": price.OUTCOMES + price.EFFECTS}
    cost += plan.spikes * sum(extra[name] for name in plan.spikes_with)
    for step in plan.shares:
        whole = step in plan.whole
        cost += price.OVERHEAD + price.SHARES * (1 if whole else part) + norms * whole
        if step in plan.effects:
            cost += price.OUTCOMES + price.EFFECTS * (1 if whole else part)
    return cost + len(plan.critical) * price.CRITICAL * (1 + work.reference) / work.parts


def test_the_price_is_bounded():
    draw, bounded = random.Random(0), 0
    for _ in range(1000):
        steps, critical = round(math.exp(draw.uniform(0, 11))), draw.random() < 0.5
        sizes, flags = (
            [draw.randint(1, most) for most in (8, 8, 512)],
            [draw.random() < 0.5 for _ in range(2)],
        )
        work = StepCost(*sizes, *flags)
        exact = draw.choice([0, 2, 100])
        plan = measurement_plan(steps, work, critical=critical, exact=exact)
        whole = steps * (
            (price.TRAINING + work.reference) * work.epochs + price.GENERATION * work.generated
        )
        cost = cost_of(plan, work, exact)
        assert plan.price == pytest.approx(cost / whole, rel=1e-6)
        fewest = price.CHECK + min(5, (steps + 1) // 2) * (
            price.OVERHEAD + price.SHARES / work.rows
        )
        bounded += fewest <= price.MOST_SHARE * whole
        assert cost <= max(price.MOST_SHARE * whole, fewest) + 1e-6
        assert len(plan.shares) >= min(5, (steps + 1) // 2)
        assert plan.critical | plan.effects | plan.whole <= plan.shares <= set(range(1, steps + 1))
        assert {1, steps} <= plan.shares or steps < 3
    assert bounded > 800


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("rows", [8, 64])
def test_ten_steps_or_more_have_tokens_at_five_within_the_price(
    rows: int, generated: bool, reference: bool
):
    work = StepCost(rows=rows, generated=generated, reference=reference)
    for steps in [*range(10, 200), 1000, 5000]:
        plan = measurement_plan(steps, work, critical=True)
        gaps = [b - a for a, b in itertools.pairwise(sorted(plan.shares))]
        assert len(plan.shares) >= 5 and max(gaps) <= math.ceil(steps / 4)
        assert plan.price <= price.MOST_SHARE


def test_without_a_known_end_half_of_the_first_ten_steps_are_measured():
    for epochs in range(1, 9):
        for rows in (8, 200):
            work = StepCost(epochs, 1, rows)
            plan = measurement_plan(0, work, critical=True)
            assert {1, 3, 5, 7, 10} <= plan.shares and plan.spikes == 3 and plan.whole
            for end in sorted(plan.shares)[4:]:
                until = {
                    name: frozenset(s for s in getattr(plan, name) if s <= end)
                    for name in ("shares", "whole", "effects", "critical")
                }
                cost = cost_of(replace(plan, spikes=0, **until), work, 1)
                assert cost <= price.MOST_SHARE * price.TRAINING * epochs * end * (1 + 1e-9)


def test_a_short_training_has_tokens_at_five_steps(tmp_path: Path, capsys):
    """Those of a sample of rows, with the values that a recording of all rows at all steps has."""
    kept = {}
    for name, options in (("part", {}), ("all", {"every": 1, "critical_sharpness": False})):
        one = plain_trainer(tmp_path / name / "t", max_steps=10, gradient_accumulation_steps=4)
        sharpscope.record(one, out=tmp_path / name / "run", **options)
        one.train()
        kept[name] = sharpscope.load_run(tmp_path / name / "run").tokens()
    said = capsys.readouterr().err.splitlines()[0]
    assert said.startswith("sharpscope: recording to ")
    assert (
        ": tokens at steps 1, 3, 5, 8, 10; about 11% of the training's passes; no effects (every=1 measures them) (see"
        in said
    )
    key = ["step", "rollout", "position"]
    both = kept["part"].merge(kept["all"], on=key, suffixes=("", "_all"))
    found = both.dropna(subset=["attribution"])
    assert found.groupby("step")["rollout"].nunique().to_dict() == dict.fromkeys(
        (1, 3, 5, 8, 10), 1
    )
    np.testing.assert_allclose(found["inclusion_probability"], 1 / 8)
    np.testing.assert_allclose(found["attribution"], found["attribution_all"], rtol=1e-3, atol=1e-6)
    assert kept["all"]["attribution"].notna().all() and both["head_grad_norm"].notna().all()
    drawn = found.groupby("step")["rollout"].first().nunique()
    assert drawn > 1  # not the same row at each step


# -- The recipes of docs/trainers/recipes.md on stubs that call the losses as the trainers do.

PAGE = Path(__file__).parents[2] / "docs" / "trainers" / "recipes.md"


def recipe(title: str) -> dict[str, Any]:
    """What the code block of this title defines."""
    (code,) = re.findall(rf'```python title="{title}"\n(.*?)```', PAGE.read_text("utf-8"), re.S)
    names: dict[str, Any] = {}
    exec(code, names)  # our own page
    return names


def clipped(
    logp: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    ratio = (logp - old).exp()
    return (
        -(torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)) * mask).sum()
        / mask.sum()
    )


class PolicyLoss(nn.Module):
    """As OpenRLHF's (models/loss.py)."""

    def forward(
        self, log_probs, old_log_probs, advantages, action_mask=None, rollout_log_probs=None
    ):
        loss = clipped(log_probs, old_log_probs, advantages, action_mask)
        return loss, loss.detach(), loss.detach(), None


class Strategy:
    def optimizer_step(
        self, optimizer: Any, model: Any, scheduler: Any, name: str = "model"
    ) -> None:
        optimizer.step()
        optimizer.zero_grad()


class OpenRlhf:
    """As OpenRLHF's ActorPPOTrainer.training_step (trainer/ray/ppo_actor.py)."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.actor, self.actor_optim, self.tokenizer = (
            SimpleNamespace(model=model),
            optimizer,
            tokenizer(),
        )
        self.actor_loss_fn, self.strategy = PolicyLoss(), Strategy()

    def training_step(self, experience: Any, kl_ctl: float, step: int) -> None:
        logp = logps(self.actor.model, experience.sequences, experience.attention_mask)[:, -LENGTH:]
        known = {
            "action_mask": experience.action_mask,
            "rollout_log_probs": experience.rollout_log_probs,
        }
        loss, *_ = self.actor_loss_fn(
            logp, experience.action_log_probs, experience.advantages, **known
        )
        loss.backward()
        self.strategy.optimizer_step(self.actor_optim, self.actor, None, name="actor")


def openrlhf(model: Any, optimizer: Any, out: Path | None, patch: pytest.MonkeyPatch) -> None:
    trainer = OpenRlhf(model, optimizer)
    rec = recipe("openrlhf")["record_openrlhf"](trainer, out) if out else None
    for step in range(2):
        b = drawn(model, step)
        e = SimpleNamespace(
            sequences=b["ids"], attention_mask=b["attention"], action_mask=b["mask"][:, -LENGTH:]
        )
        e.action_log_probs = e.rollout_log_probs = b["old"][:, -LENGTH:]
        e.advantages = b["advantages"][:, None].expand(-1, LENGTH)
        trainer.training_step(e, 0.0, step)
    if rec:
        rec.close()


def skyrl(model: Any, optimizer: Any, out: Path | None, patch: pytest.MonkeyPatch) -> None:
    """As SkyRL's registry of policy losses and the worker's calls (skyrl_train/utils/ppo_utils.py)."""
    losses: dict[str, Any] = {}

    class PolicyLossRegistry:
        register = staticmethod(losses.__setitem__)
        get = staticmethod(losses.__getitem__)

    def regular(
        log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None
    ):
        return clipped(log_probs, old_log_probs, advantages, loss_mask), {}

    losses["regular"] = regular
    names = "skyrl skyrl.backends skyrl.backends.skyrl_train skyrl.backends.skyrl_train.utils"
    for name in (*names.split(), "skyrl.backends.skyrl_train.utils.ppo_utils"):
        patch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[
        "skyrl.backends.skyrl_train.utils.ppo_utils"
    ].PolicyLossRegistry = PolicyLossRegistry
    rec = recipe("skyrl")["record_skyrl"](model, optimizer, tokenizer(), out) if out else None
    for step in range(2):
        b = drawn(model, step)
        logp = logps(model, b["ids"], b["attention"])[:, -LENGTH:]
        old, advantage = b["old"][:, -LENGTH:], b["advantages"][:, None].expand(-1, LENGTH)
        compute = losses["recorded" if rec else "regular"]
        loss, _ = compute(
            logp,
            old,
            advantage,
            config=None,
            loss_mask=b["mask"][:, -LENGTH:],
            rollout_logprobs=old,
        )
        loss.backward()
        if rec:
            rec.step()
        optimizer.step()
        optimizer.zero_grad()
    if rec:
        rec.close()


def areal(model: Any, optimizer: Any, out: Path | None, patch: pytest.MonkeyPatch) -> None:
    """As AReaL's grpo_loss_fn (trainer/ppo/actor.py): sequences packed into one row, entry j of a value belongs to token j + 1."""
    actor: Any = ModuleType("areal.trainer.ppo.actor")

    def grpo_loss_fn(
        logprobs: Any, entropy: Any, input_data: Any, eps_clip: float, **_: Any
    ) -> Any:
        return clipped(
            logprobs, input_data["prox_logp"], input_data["advantages"], input_data["loss_mask"]
        )

    actor.grpo_loss_fn = grpo_loss_fn
    for name in ("areal", "areal.trainer", "areal.trainer.ppo"):
        patch.setitem(sys.modules, name, ModuleType(name))
    patch.setitem(sys.modules, "areal.trainer.ppo.actor", actor)
    sys.modules["areal.trainer.ppo"].actor = actor
    rec = recipe("areal")["record_areal"](model, optimizer, tokenizer(), out) if out else None
    for step in range(2):
        b = drawn(model, step)
        there = b["attention"].bool()
        rolled = torch.cat([logps(model, b["ids"], b["attention"]), torch.zeros(len(there), 1)], 1)
        mask = torch.cat([b["mask"][:, 1:], torch.zeros(len(there), 1)], 1)
        old = torch.cat([b["old"], torch.zeros(len(there), 1)], 1)
        data = {
            "input_ids": b["ids"][there],
            "loss_mask": mask[there],
            "logprobs": old[there],
            "prox_logp": old[there],
        }
        data["advantages"] = b["advantages"][:, None].expand_as(old)[there]
        data["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.long), there.sum(1).cumsum(0)])
        actor.grpo_loss_fn(rolled[there], None, data, eps_clip=0.2).backward()
        if rec:
            rec.step()
        optimizer.step()
        optimizer.zero_grad()
    if rec:
        rec.close()


@pytest.mark.parametrize("train", [openrlhf, skyrl, areal])
def test_a_recipe_records_the_loss_and_changes_nothing(train, tmp_path: Path, monkeypatch):
    plain, recorded, first = (small_model() for _ in range(3))
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), None, monkeypatch)
    train(
        recorded, torch.optim.AdamW(recorded.parameters(), lr=0.01), tmp_path / "run", monkeypatch
    )
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), recorded.parameters(), strict=True)
    )
    run = sharpscope.load_run(tmp_path / "run")
    assert run.status == "finished" and run.steps["step"].tolist() == [1, 2]
    b = drawn(first, 0)
    logp = logps(first, b["ids"], b["attention"]).detach().requires_grad_()
    clipped(logp, b["old"], b["advantages"][:, None], b["mask"][:, 1:]).backward()
    tokens = run.tokens(steps=[1])
    inside = b["mask"][:, 1:].bool()
    np.testing.assert_allclose(tokens["loss_coef"], logp.grad[inside], rtol=1e-4, atol=1e-8)
    assert tokens["token_id"].tolist() == b["ids"][:, 1:][inside].tolist()
    np.testing.assert_allclose(tokens["logp"], b["old"][inside], atol=1e-5)
    np.testing.assert_allclose(tokens["behavior_logp"], b["old"][inside], atol=1e-5)
    clipped(
        logps(first, b["ids"], b["attention"]), b["old"], b["advantages"][:, None], b["mask"][:, 1:]
    ).backward()
    norm = sum(float(p.grad.double().square().sum()) for p in first.parameters()) ** 0.5
    assert run.updates["grad_norm"][0] == pytest.approx(norm, rel=1e-5)


def test_gradients_that_are_kept_elsewhere_are_not_zero(tmp_path: Path):
    """As with DeepSpeed: coefficients are known, norms are not."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rec = sharpscope.record(model, optimizer, tokenizer=tokenizer(), out=tmp_path / "run")
    b = drawn(model, 0)
    logp = logps(model, b["ids"], b["attention"])
    rec.tokens(logp, b["ids"], b["mask"], advantages=b["advantages"])
    (logp * b["mask"][:, 1:]).sum().backward()
    model.zero_grad()
    rec.step()
    optimizer.step()
    rec.close()
    run = sharpscope.load_run(tmp_path / "run")
    assert (
        np.isnan(run.steps["grad_norm"][0])
        and set(run.events["rule"]) >= {"no_gradient"}
        and run.status == "finished"
    )
    assert (run.tokens()["loss_coef"] == 1).all() and "zero_gradient" not in set(run.events["rule"])


def test_tinkers_writer_makes_a_table(tmp_path: Path):
    def datum(ids: list[int], mask: list[int]) -> Any:
        inputs = {"target_tokens": ids[1:], "mask": mask, "logprobs": [-0.5 * m for m in mask]}
        inputs |= {"advantages": [2.0 * m for m in mask]}
        tensors = {name: torch.tensor(values) for name, values in inputs.items()}
        return SimpleNamespace(
            model_input=SimpleNamespace(to_ints=lambda: ids[:-1]), loss_fn_inputs=tensors
        )

    data = [datum([3, 4, 5, 6], [0, 1, 1]), datum([7, 8, 9, 5, 4], [0, 0, 1, 1])]
    logp = [[0.0, -0.6, -0.4], [0.0, 0.0, -0.5, -0.7]]
    recipe("tinker")["write"](tmp_path / "t.jsonl", 1, data, logp)
    import_files("jsonl", tmp_path / "t.jsonl", tmp_path / "run", Options())
    run = sharpscope.load_run(tmp_path / "run")
    assert [json.loads(ids) for ids in run.rollouts["token_ids"]] == [[3, 4, 5, 6], [7, 8, 9, 5, 4]]
    tokens = run.tokens()
    assert tokens["token_id"].tolist() == [5, 6, 5, 4] and run.rollouts[
        "prompt_tokens"
    ].tolist() == [2, 3]
    np.testing.assert_allclose(
        tokens["loss_coef"], -2 * np.exp(tokens["logp"] - tokens["behavior_logp"]), rtol=1e-6
    )


def test_hooks_that_cannot_be_removed_do_not_end_the_training(tmp_path, monkeypatch, capsys):
    """The first removal is of what an earlier recorder left, the second at the end of the loop."""
    plain, original, calls = loop(small_model()), Recorder.unhook, []

    def broken(recorder: Recorder) -> None:
        calls.append(recorder)
        if len(calls) > 1:
            raise OSError("a fault")
        original(recorder)

    monkeypatch.setattr(Recorder, "unhook", broken)
    recorded = loop(small_model(), tmp_path / "run")
    assert len(calls) > 1 and equal(plain, recorded)
    assert "a fault" in capsys.readouterr().err  # it is said


def test_detach_restores_the_trainer_and_every_hook_though_one_raises(tmp_path):
    removed = []

    def broken() -> None:
        raise OSError("a fault")

    trainer = plain_trainer(tmp_path)
    recorder = sharpscope.record(trainer, out=tmp_path / "run")
    recorder._hooks = [
        SimpleNamespace(remove=broken),
        SimpleNamespace(remove=lambda: removed.append(1)),
    ]
    with pytest.raises(OSError, match="a fault"):
        recorder.detach()
    assert removed == [1] and not hasattr(trainer, "_sharpscope")
