"""Demonstrations are true, the warm start learns and comes back the same from the same seed, Muon does what it says."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from sharpscope.errors import UserError
from sharpscope.policy.loading import build_tokenizer
from sharpscope.tasks import MathSpec, ToolQaSpec, make_task
from sharpscope.tasks.knights_knaves import roles_of, score_logic_rl, truth
from sharpscope.warm_start import demonstrations as room
from sharpscope.warm_start.__main__ import main
from sharpscope.warm_start.pretraining import (
    WARM_STARTS,
    Muon,
    Row,
    WarmStartSpec,
    _accumulate,
    _dataset,
    _row,
    orthogonal,
    warm_start,
)
from tests.models import tiny_model

SMALL = {"layers": 2, "width": 32, "feed_forward": 48, "corpus": 60, "batch": 8, "micro_tokens": 400}
TINY = WarmStartSpec(weights={2: 0.5, 3: 0.5}, vocabulary=600, questions=20, steps=60, **SMALL)
TINY_MATH = replace(WARM_STARTS["math"], **SMALL, steps=3, questions=20)
TINY_TOOL = replace(WARM_STARTS["tool_qa"], **SMALL, steps=3, worlds=1, questions=6)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    reports = []
    folder = tmp_path_factory.mktemp("policy") / "new"
    summary = warm_start(TINY, folder, lambda *report: reports.append(report))
    return folder, summary, reports


def test_what_is_written_loads_and_says_how_it_was_made(made):
    folder, summary, reports = made
    assert (
        reports == [(60, summary["loss"])] and 0 < summary["loss"] < 5.5
    )  # the mean of all; ln of the vocabulary of 600 is 6.4
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen2"
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "warm_start.json",
    ]
    written = json.loads((folder / "warm_start.json").read_text())
    assert written["spec"] == json.loads(json.dumps(asdict(TINY)))
    assert written["parameters"] == model.num_parameters() == summary["parameters"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = "Ava is a knight ≠ 漢字 🙂 <think>x</think>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_same_seed_gives_the_same_weights_bit_for_bit(made, tmp_path):
    folder, _, _ = made
    again = tmp_path / "again"
    warm_start(TINY, again)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (again / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    other = tmp_path / "other"
    warm_start(replace(TINY, seed=1, steps=1), other)
    assert (other / "tokenizer.json").read_bytes() != (folder / "tokenizer.json").read_bytes()


def test_the_gradient_is_that_of_the_mean_loss_however_the_batch_is_cut():
    rows = [
        Row([5, 6, 7], [8, 9, 1], [1, 1, 1]),
        Row([5], [6, 1], [1, 1]),
        Row([9, 8, 7, 6], [5, 1], [1, 1]),
        Row([3, 4], [10, 11, 12, 13, 1], [1, 0, 0, 1, 1]),  # 11 and 12 are what an environment said
    ]
    model = tiny_model("qwen2")
    tokens = wanted = 0
    for row in rows:  # one row at a time, no padding
        ids = torch.tensor([row.prompt + row.completion])
        logp = model(ids).logits[0].log_softmax(-1)
        for place in range(len(row.prompt), ids.shape[1]):
            if not row.mask[place - len(row.prompt)]:
                continue
            wanted = wanted - logp[place - 1, ids[0, place]]
            tokens += 1
    (wanted / tokens).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for most in (1, 12, 100):
        model.zero_grad()
        assert _accumulate(model, rows, most) == pytest.approx(float(wanted.detach() / tokens), rel=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-12)


def test_the_command(tmp_path, capsys):
    settings = asdict(TINY_TOOL)
    sets = [part for name, value in settings.items() if name != "policy" for part in ("--set", f"{name}={value}")]
    main(["tool_qa", "--out", str(tmp_path / "new"), "--threads", "1", *sets])
    assert "update 3 of 3: loss " in capsys.readouterr().out
    assert json.loads((tmp_path / "new" / "warm_start.json").read_text())["spec"]["policy"] == "tool_qa"
    for wrong in ("--set step=3", "--set steps=many", f"--out {tmp_path}"):
        with pytest.raises(UserError):
            main(wrong.split())


# -- Muon's step by hand


def test_orthogonal_keeps_singular_vectors_and_evens_out_singular_values():
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 5, 9, generator=generator, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    inside = left.mT @ orthogonal(matrices) @ right.mT  # (3, 5, 5), diagonal if the singular vectors are kept
    off = inside - torch.diag_embed(inside.diagonal(dim1=1, dim2=2))
    assert off.abs().max() < 1e-9
    flat = inside.diagonal(dim1=1, dim2=2)
    assert flat.min() > 0.6
    assert flat.max() < 1.3
    assert (values.amax(1) / values.amin(1)).min() > 2  # they were not even before


@pytest.mark.parametrize("shape", [(4, 4), (3, 6), (6, 3)])
def test_a_muon_step_by_hand(shape):
    generator = torch.Generator().manual_seed(1)
    start, first, second = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    matrix, idle = start.clone().requires_grad_(), torch.zeros(2, 2, requires_grad=True)
    optimizer = Muon([matrix, idle], lr=0.1, momentum=0.9, weight_decay=0.5)
    expected, average = start.clone(), torch.zeros(shape, dtype=torch.float64)
    for gradient in (first, second):
        matrix.grad = gradient.clone()
        optimizer.step()
        average = 0.9 * average + 0.1 * gradient
        direction = 0.1 * gradient + 0.9 * average
        wide = direction if shape[0] <= shape[1] else direction.T
        update = orthogonal(wide[None])[0]
        update = update if shape[0] <= shape[1] else update.T
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * max(1.0, shape[0] / shape[1]) ** 0.5 * update
        torch.testing.assert_close(matrix.detach(), expected)
    assert not idle.any()


# -- Demonstrations of knights and knaves are right, and come from the training side


@pytest.fixture(scope="module")
def pools():
    """Puzzles by number of people."""
    return {people: room.puzzles(people, 15, seed=4) for people in (2, 3, 4)}


@pytest.mark.parametrize(
    ("statement", "text", "value"),
    [
        (("telling-truth", 0), "Ava knight yes", True),
        (("->", ("telling-truth", 0), ("lying", 1)), "Ava knight yes then Leo knave yes", True),
        (("<=>", ("lying", 0), ("telling-truth", 1)), "Ava knave no iff Leo knight no", True),
        (("or", ("lying", 0), ("telling-truth", 1)), "Ava knave no or Leo knight no", False),
        (("not", ("or", ("lying", 0), ("telling-truth", 1))), "not (Ava knave no or Leo knight no)", True),
        (
            ("and", ("not", ("not", ("lying", 1))), ("telling-truth", 0)),
            "Leo knave yes and Ava knight yes",
            True,
        ),
    ],
)
def test_a_statement_is_judged_claim_by_claim(statement, text, value):
    assert truth(statement, (True, False), True) is value
    assert room.evaluated(statement, ("Ava", "Leo"), (True, False)) == text


@pytest.mark.parametrize("chat_share", [0.0, 1.0])
def test_every_demonstration_earns_the_full_reward_and_its_reasoning_ends_at_the_solution(pools, chat_share):
    stream = room.puzzle_demonstrations(pools, {2: 1, 3: 1, 4: 1}, guess_share=0.5, chat_share=chat_share, seed=0)
    styles = set()
    for demonstration in islice(stream, 60):
        prefill = room.OPENING if chat_share else ""
        assert demonstration.prompt.endswith(prefill or "\n")
        whole = prefill + demonstration.completion
        thought, _, rest = whole.removeprefix(room.OPENING).partition("</think><answer>")
        truth = roles_of(rest)
        assert score_logic_rl(whole, truth).total == 3
        for name in truth:
            assert f" {name}" in demonstration.prompt or f'"{name}' in demonstration.prompt
        styles.add(thought == room.GUESS)
        if thought != room.GUESS:
            last = thought.rpartition("no. ")[2].partition(":")[0]
            assert last == ", ".join(f"{name} {role}" for name, role in truth.items())
            assert thought.endswith(", yes.")
    assert styles == {True, False}


# -- Mathematical demonstrations are right.


@pytest.mark.parametrize(
    ("family", "question", "wanted"),
    [
        ("arithmetic", "3 + 4 = ?", "3 + 4 = 7"),
        ("arithmetic", "(3 + 4) * 17 = ?", "3 + 4 = 7; 7 * 17 = 119"),
        ("arithmetic", "2 - (3 - 9) * 2 = ?", "3 - 9 = -6; -6 * 2 = -12; 2 - -12 = 14"),
        ("linear", "Solve for x: x - 20 = -13", "-13 + 20 = 7; x = 7"),
        ("linear", "Solve for x: 2x - 9 = 3x - 11", "-11 + 9 = -2; 2 - 3 = -1; -1x = -2; x = 2"),
        ("linear", "Solve for x: 4x + 1 = x + 13", "13 - 1 = 12; 4 - 1 = 3; 3x = 12; x = 4"),
        ("modular", "(10 + 16) mod 11 = ?", "10 + 16 = 26; 11 * 2 = 22; 26 - 22 = 4"),
        ("modular", "(5 * 6 + 3) mod 7 = ?", "5 * 6 = 30; 30 + 3 = 33; 7 * 4 = 28; 33 - 28 = 5"),
    ],
)
def test_work_by_hand(family, question, wanted):
    assert room.work(family, question) == wanted


def test_every_line_of_work_is_true_and_ends_at_the_answer():
    pool = room.questions(("arithmetic", "linear", "modular"), (1, 2, 3), 60, seed=3)
    assert {key: len(examples) for key, examples in pool.items()} == {
        (family, level): 60 for family in ("arithmetic", "linear", "modular") for level in (1, 2, 3)
    }
    for (family, _), examples in pool.items():
        for example in examples:
            lines = room.work(family, example.meta["question"]).split("; ")
            for line in lines:
                sides = re.fullmatch(r"(-?\d+) ([+*-]) (-?\d+) = (-?\d+)", line)
                if sides:
                    a, sign, b, c = int(sides[1]), sides[2], int(sides[3]), int(sides[4])
                    assert {"+": a + b, "-": a - b, "*": a * b}[sign] == c
            assert lines[-1].rpartition("= ")[2] == example.answer


# -- Conversations with searches are what the task would have said


@pytest.fixture(scope="module")
def asked():
    pytest.importorskip("bm25s", reason="needs the optional library bm25s")
    return room.search_questions((1, 2, 3), 2, 8, seed=0)


def test_conversations_are_what_the_task_would_have_said(asked):
    task = make_task(ToolQaSpec(hops=(1, 2, 3), train_size=8, heldout_size=0, seed=room.FIRST_WORLD))
    assert {hops: len(questions) for hops, questions in asked.items()} == {1: 16, 2: 16, 3: 16}
    for hops, questions in asked.items():
        for question in questions[:8]:  # those of the first world
            for searches in range(hops + 1):
                first, later = room.conversation(question, searches)
                text = first
                for reply, turn in later:
                    assert task.respond(question.example, text) == reply
                    text += reply + turn
                assert len(later) == searches
                assert task.respond(question.example, text) is None
                reward = task.score(question.example, text)
                assert reward.total == (searches == hops) and reward.parts["format"] == 1.0
                assert reward.parts["searches"] == searches


def test_rows_are_tokenized_turn_by_turn_and_replies_are_not_imitated(asked):
    stream = room.tool_demonstrations({2: asked[2]}, {2: 1}, guess_share=0.0, seed=0)
    seen = [question for questions in asked.values() for question in questions]
    examples = list(islice(stream, 20))
    tokenizer = build_tokenizer([d.text for d in examples], room.tool_phrases(seen), 600)
    for demonstration in examples:
        row = _row(tokenizer, demonstration)
        assert row.prompt == tokenizer(demonstration.prompt)["input_ids"]
        assert tokenizer.decode(row.prompt + row.completion[:-1]) == demonstration.text
        assert row.completion[-1] == tokenizer.eos_token_id
        own = [token for token, kept in zip(row.completion, row.mask, strict=True) if kept]
        heard = [token for token, kept in zip(row.completion, row.mask, strict=True) if not kept]
        assert tokenizer.decode(heard) == "".join(reply for reply, _ in demonstration.later)
        turns = [demonstration.completion, *(turn for _, turn in demonstration.later)]
        assert tokenizer.decode(own[:-1]) == "".join(turns)


@pytest.mark.parametrize("spec", [TINY_MATH, TINY_TOOL])
def test_what_is_held_out_is_never_shown(spec, asked):
    train = {d.prompt for d in islice(_dataset(spec)[0], 300)}
    held = MathSpec(families=("arithmetic", "linear", "modular"), seed=7) if spec.policy == "math" else ToolQaSpec()
    assert not train & {example.prompt for example in make_task(held).splits()["heldout"]}
