"""Demonstrations are true, the warm start learns and comes back the same, Muon does what it says."""

from __future__ import annotations

import json
import re
from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from experiments.warm_start import demonstrations as room
from experiments.warm_start import pretraining, warm_start
from experiments.warm_start.__main__ import main
from experiments.warm_start.pretraining import (
    MOMENTUM,
    accumulate,
    muon_step,
    orthogonal,
    settings_of,
    tokenized,
)
from sharpscope.errors import UserError
from sharpscope.policy import embedded_policy
from sharpscope.tasks import KnightsKnavesSpec, MathSpec, ToolQaSpec, make_task
from sharpscope.tasks.knights_knaves import roles_of, score_logic_rl, truth
from tests.loops import some
from tests.models import tiny_model

SMALL = {"corpus": 10, "batch": 8, "micro_tokens": 400, "questions": 20}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy") / "new"
    return folder, warm_start("math", folder, **SMALL, steps=30)


def test_what_is_written_loads_and_says_how_it_was_made(made):
    folder, summary = made
    assert 0 < summary["loss"] < 5  # the mean of all; ln of the vocabulary is 5.7
    model = AutoModelForCausalLM.from_pretrained(folder)
    shipped = {file.name for file in embedded_policy("math").iterdir()} | {"generation_config.json"}
    assert {file.name for file in folder.iterdir()} == shipped
    written = json.loads((folder / "warm_start.json").read_text())
    assert written["spec"] == json.loads(json.dumps(settings_of("math") | SMALL | {"steps": 30}))
    assert written["parameters"] == model.num_parameters() == summary["parameters"] == 179_200
    assert (folder / "tokenizer.json").read_bytes() == (
        embedded_policy("math") / "tokenizer.json"
    ).read_bytes()


def test_the_same_seed_gives_the_same_weights_bit_for_bit(made, tmp_path):
    folder, _ = made
    warm_start("math", tmp_path / "again", **SMALL, steps=30)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        pretraining,
        "settings_of",
        lambda name: settings_of(name) | SMALL | {"steps": 2, "worlds": 1},
    )
    main(["tool_qa", "--out", str(tmp_path / "new"), "--threads", "1"])
    assert "update 2 of 2: loss " in capsys.readouterr().out
    with pytest.raises(UserError, match="not an empty folder"):
        main(["--out", str(tmp_path)])
    with pytest.raises(UserError, match="stepz: no setting of math"):
        warm_start("math", tmp_path / "other", stepz=2)


def test_the_gradient_is_that_of_the_mean_loss_however_the_batch_is_cut():
    rows = [
        ([5, 6, 7, 8, 9, 1], [-100, -100, -100, 8, 9, 1]),
        ([5, 6, 1], [-100, 6, 1]),
        ([9, 8, 7, 6, 5, 1], [-100, -100, -100, -100, 5, 1]),
        (
            [3, 4, 10, 11, 12, 13, 1],
            [-100, -100, 10, -100, -100, 13, 1],
        ),  # 11 and 12 are what an environment said
    ]
    model = tiny_model("qwen2")
    tokens = wanted = 0
    for ids, labels in rows:  # one row at a time, no padding
        logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for place, label in enumerate(labels):
            if label >= 0:
                wanted = wanted - logp[place - 1, ids[place]]
                tokens += 1
    (wanted / tokens).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for most in (1, 12, 100):
        model.zero_grad()
        assert accumulate(model, rows, most) == pytest.approx(
            float(wanted.detach() / tokens), rel=1e-12
        )
        for name, parameter in some(model.named_parameters()):
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-12)


# -- Muon's step by hand


def test_orthogonal_keeps_singular_vectors_and_evens_out_singular_values():
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 5, 9, generator=generator, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    # (3, 5, 5), diagonal if the singular vectors are kept
    inside = left.mT @ orthogonal(matrices) @ right.mT
    off = inside - torch.diag_embed(inside.diagonal(dim1=1, dim2=2))
    assert off.abs().max() < 1e-9
    flat = inside.diagonal(dim1=1, dim2=2)
    assert flat.min() > 0.6 and flat.max() < 1.3
    assert (values.amax(1) / values.amin(1)).min() > 2  # they were not even before


@pytest.mark.parametrize("shape", [(4, 4), (3, 6), (6, 3)])
def test_a_muon_step_by_hand(shape):
    generator = torch.Generator().manual_seed(1)
    start, first, second = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    matrix, found = start.clone().requires_grad_(), torch.zeros(shape, dtype=torch.float64)
    expected, average = start.clone(), torch.zeros(shape, dtype=torch.float64)
    for gradient in (first, second):
        matrix.grad = gradient.clone()
        muon_step(matrix, found, lr=0.1, weight_decay=0.5)
        average = MOMENTUM * average + (1 - MOMENTUM) * gradient
        direction = (1 - MOMENTUM) * gradient + MOMENTUM * average
        wide = direction if shape[0] <= shape[1] else direction.T
        update = orthogonal(wide[None])[0]
        update = update if shape[0] <= shape[1] else update.T
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * max(1.0, shape[0] / shape[1]) ** 0.5 * update
        torch.testing.assert_close(matrix.detach(), expected)


# -- Demonstrations of knights and knaves are right, and come from the training side


@pytest.fixture(scope="module")
def pools():
    """Puzzles by number of people."""
    specs = {
        people: KnightsKnavesSpec(people=people, train_size=15, heldout_size=0, seed=4)
        for people in (2, 3, 4)
    }
    return {people: make_task(spec).splits()["train"] for people, spec in specs.items()}


@pytest.mark.parametrize(
    ("statement", "text", "value"),
    [
        (("<=>", ("lying", 0), ("telling-truth", 1)), "Ava knave no iff Leo knight no", True),
        (("or", ("lying", 0), ("telling-truth", 1)), "Ava knave no or Leo knight no", False),
        (
            ("not", ("or", ("lying", 0), ("telling-truth", 1))),
            "not (Ava knave no or Leo knight no)",
            True,
        ),
        (("not", ("not", ("lying", 1))), "Leo knave yes", True),
    ],
)
def test_a_statement_is_judged_claim_by_claim(statement, text, value):
    assert truth(statement, (True, False), True) is value
    assert room.evaluated(statement, ("Ava", "Leo"), (True, False)) == text


@pytest.mark.parametrize("chat_share", [0.0, 1.0])
def test_every_demonstration_earns_the_full_reward_and_its_reasoning_ends_at_the_solution(
    pools, chat_share
):
    spec = {"weights": {2: 1, 3: 1, 4: 1}, "guess_share": 0.5, "chat_share": chat_share, "seed": 0}
    stream = room.puzzle_demonstrations(pools, spec)
    styles = set()
    for demonstration in some(islice(stream, 60)):
        prefill = room.OPENING if chat_share else ""
        assert demonstration.prompt.endswith(prefill or "\n")
        whole = prefill + demonstration.turns[0]
        thought, _, rest = whole.removeprefix(room.OPENING).partition("</think><answer>")
        truth = roles_of(rest)
        assert score_logic_rl(whole, truth).total == 3
        for name in some(truth):
            assert f" {name}" in demonstration.prompt or f'"{name}' in demonstration.prompt
        styles.add(thought == room.GUESS)
        if thought != room.GUESS:
            last = thought.rpartition("no. ")[2].partition(":")[0]
            assert last == ", ".join(f"{name} {role}" for name, role in truth.items())
            assert thought.endswith(", yes.")
    assert styles == {True, False}


# -- Mathematical demonstrations are right


def test_every_line_of_work_is_true_and_ends_at_the_answer():
    pool = room.questions(("arithmetic", "linear", "modular"), (1, 2, 3), 60, seed=3)
    for (family, _), examples in some(pool.items()):
        for example in some(examples):
            lines = room.work(family, example.meta["question"]).split("; ")
            for line in some(lines):
                sides = re.fullmatch(r"(-?\d+) ([+*-]) (-?\d+) = (-?\d+)", line)
                if sides:
                    a, sign, b, c = int(sides[1]), sides[2], int(sides[3]), int(sides[4])
                    assert {"+": a + b, "-": a - b, "*": a * b}[sign] == c
                else:  # a linear equation, with the solution put in
                    factor, c = re.fullmatch(r"(-?\d*)x = (-?\d+)", line).groups()
                    assert int(factor or 1) * int(example.answer) == int(c)
            assert lines[-1].rpartition("= ")[2] == example.answer


# -- Conversations with searches are what the task would have said


def test_conversations_are_what_the_task_would_have_said():
    pytest.importorskip("bm25s", reason="needs the optional library bm25s")
    task = make_task(ToolQaSpec(train_size=8, heldout_size=0, seed=room.FIRST_WORLD))
    asked = room.search_questions(2, 8, seed=0)
    assert len(asked) == 16
    examples = {example.prompt: example for example, _ in asked[:8]}  # those of the first world
    tokenizer = PreTrainedTokenizerFast.from_pretrained(embedded_policy("tool_qa"))
    styles = set()
    for demonstration in islice(
        room.tool_demonstrations(asked[:8], {"guess_share": 0.5, "seed": 0}), 40
    ):
        example, (first, *later) = examples[demonstration.prompt], demonstration.turns
        text = first
        for reply, turn in zip(later[::2], later[1::2], strict=True):
            assert task.respond(example, text) == reply
            text += reply + turn
        assert task.respond(example, text) is None
        reward = task.score(example, text)
        assert (
            reward.total == reward.parts["searches"] == bool(later)
            and reward.parts["format"] == 1.0
        )
        styles.add(bool(later))
        # turns are tokenized one by one, and replies are not imitated
        ids, labels = tokenized(tokenizer, demonstration)
        assert tokenizer.decode(ids) == demonstration.prompt + text + tokenizer.eos_token
        assert tokenizer.decode([label for label in labels if label >= 0][:-1]) == "".join(
            [first, *later[1::2]]
        )
        assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    assert styles == {True, False}


@pytest.mark.parametrize("name", ["math", "tool_qa"])
def test_what_is_held_out_is_never_shown(name):
    train = {d.prompt for d in islice(room.demonstrations(name, settings_of(name) | SMALL), 300)}
    held = (
        MathSpec(families=("arithmetic", "linear", "modular"), seed=7)
        if name == "math"
        else ToolQaSpec()
    )
    assert not train & {example.prompt for example in make_task(held).splits()["heldout"]}
