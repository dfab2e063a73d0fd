"""Demonstrations are true, the warm start learns and comes back the same from the same seed, Muon does what it says."""

from __future__ import annotations

import json
import random
import re
from itertools import islice, product
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from sharpscope.cli import app
from sharpscope.config.warm_start import KnightsKnavesWarmStart
from sharpscope.errors import UserError
from sharpscope.policy.embedded import embedded_policy, load_tokenizer
from sharpscope.tasks import DatasetSpec, KnightsKnavesSpec, make_task
from sharpscope.tasks.logic_rl import roles_of, score_logic_rl
from sharpscope.tasks.statements import solve
from sharpscope.warm_start.knights_knaves import (
    OPENING,
    chat,
    demonstrations,
    evaluated,
    holds,
    longer_wording,
    phrases,
    puzzles,
    renamed,
    trials,
)
from sharpscope.warm_start.muon import Muon, orthogonal
from sharpscope.warm_start.pretraining import Row, _accumulate, _row, exactness, schedule, warm_start
from tests.models import tiny_model

TINY = KnightsKnavesWarmStart(
    layers=2,
    width=32,
    feed_forward=48,
    heads=2,
    vocabulary=600,
    corpus=60,
    weights={2: 0.5, 3: 0.5},
    puzzles=20,
    steps=25,
    batch=8,
    micro_tokens=300,
    lr=2e-2,
    muon_lr=0.05,
    warmup=5,
    probe_every=10,
    probe_size=10,
)


@pytest.fixture(scope="module")
def pools():
    return {people: puzzles(people, 15, seed=4) for people in (2, 3, 4)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    reports = []
    folder = tmp_path_factory.mktemp("policy") / "new"
    summary = warm_start(TINY, folder, reports.append)
    return folder, summary, reports


def test_trials_by_hand():
    # Ava: Leo is a knave. Leo: Ava is a knave or Leo is not a knave.
    statements = (("lying", 1), ("or", ("lying", 0), ("not", ("lying", 1))))
    assert trials(("Ava", "Leo"), statements) == (
        "Ava knight, Leo knight: Ava says Leo knave no, no. "
        "Ava knight, Leo knave: Ava says Leo knave yes, Leo says Ava knave no or Leo knight no, yes."
    )


@pytest.mark.parametrize(
    ("statement", "text", "value"),
    [
        (("telling-truth", 0), "Ava knight yes", True),
        (("not", ("telling-truth", 0)), "Ava knave no", False),
        (("->", ("telling-truth", 0), ("lying", 1)), "Ava knight yes then Leo knave yes", True),
        (("->", ("lying", 0), ("telling-truth", 1)), "Ava knave no then Leo knight no", True),
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
    assert holds(statement, (True, False)) is value
    assert evaluated(statement, ("Ava", "Leo"), (True, False)) == text


def test_holds_agrees_with_the_solver_on_what_solves_a_puzzle(pools):
    for pool in pools.values():
        for example in pool:
            statements = example.meta["statements"]
            fitting = [
                roles
                for roles in product((True, False), repeat=len(statements))
                if all(holds(statement, roles) == role for statement, role in zip(statements, roles, strict=True))
            ]
            assert fitting == solve(statements)


def test_an_unknown_operator_and_a_puzzle_without_solution_are_errors():
    with pytest.raises(ValueError, match="unknown operator 'xor'"):
        holds(("xor", ("lying", 0), ("lying", 1)), (True, True))
    with pytest.raises(ValueError, match="no solution"):
        trials(("Ava",), (("lying", 0),))


@pytest.mark.parametrize("chat_share", [0.0, 1.0])
def test_every_demonstration_earns_the_full_reward_and_its_reasoning_ends_at_the_solution(pools, chat_share):
    stream = demonstrations(pools, {2: 1, 3: 1, 4: 1}, guess_share=0.5, chat_share=chat_share, seed=0)
    styles = set()
    for demonstration in islice(stream, 60):
        prefill = OPENING if chat_share else ""
        assert demonstration.prompt.endswith(prefill or "\n")
        whole = prefill + demonstration.completion
        thought, _, rest = whole.removeprefix(OPENING).partition("</think><answer>")
        truth = roles_of(rest)
        assert len(truth) == demonstration.level
        assert score_logic_rl(whole, truth).total == 3
        for name in truth:
            assert f" {name}" in demonstration.prompt or f'"{name}' in demonstration.prompt
        styles.add(demonstration.style)
        if demonstration.style == "reason":
            last = thought.rpartition("no. ")[2].partition(":")[0]
            assert last == ", ".join(f"{name} {role}" for name, role in truth.items())
            assert thought.endswith(", yes.")
        else:
            assert thought == "a guess."
    assert styles == {"reason", "guess"}


def test_demonstrations_come_from_the_training_side_and_probes_from_the_held_out_side():
    spec = KnightsKnavesSpec(people=3, train_size=1, heldout_size=60, seed=9)
    held_out = {example.meta["content"] for example in make_task(spec).splits()["heldout"]}
    assert not held_out & {example.meta["content"] for example in puzzles(3, 150, seed=1)}
    probe = {example.meta["content"] for example in puzzles(3, 60, seed=1, split="heldout")}
    assert not probe & {example.meta["content"] for example in puzzles(3, 150, seed=2)}


def test_a_stream_repeats_from_its_seed_and_gives_puzzles_new_names(pools):
    def first(seed):
        return list(islice(demonstrations(pools, {3: 1.0}, guess_share=0.3, chat_share=0.3, seed=seed), 30))

    assert first(1) == first(1)
    assert first(1) != first(2)
    assert len({demonstration.prompt for demonstration in first(1)}) == 30  # twice through 15 puzzles
    assert {demonstration.level for demonstration in first(1)} == {3}


def test_names_are_exchanged_as_whole_words_all_at_once():
    assert renamed("Jack, Ella: Jackson is Jack.", ("Jack", "Ella"), ("Ella", "Jack")) == "Ella, Jack: Jackson is Ella."


def test_the_longer_wording_says_the_same():
    quiz = (
        "Ava said that if Leo is a knight then Ava is a knave. "
        '"Ava is a knave," Leo claimed. Mia said, "Leo is a knight".'
    )
    seen = {longer_wording(quiz, random.Random(seed)) for seed in range(20)}
    head = "Ava said that If Leo is a knight then Ava is a knave. "
    assert seen == {
        head + f'"Ava is {leo}," Leo claimed. Mia said, "Leo is {mia}".'
        for leo in ("a knave", "not a knight")
        for mia in ("a knight", "not a knave")
    }


def test_chat_prompts_end_in_an_opened_think_and_keep_the_puzzle():
    for seed in range(30):
        text = chat("THE PUZZLE", "Ava", random.Random(seed))
        assert text.startswith("<|im_start|>system\n")
        assert text.endswith("<|im_start|>user\nTHE PUZZLE\n<|im_end|>\n<|im_start|>assistant\n<think>")


def test_no_published_prompt_is_a_demonstration(pools):
    file = Path(__file__).parents[3] / "shared/data/knights_knaves/3people.parquet"
    if not file.exists():
        pytest.skip("the published puzzles are not beside the checkout")
    splits = make_task(DatasetSpec(path=str(file))).splits()
    published = {example.prompt for split in splits.values() for example in split}
    stream = demonstrations(pools, {3: 1.0}, guess_share=0.5, chat_share=1.0, seed=0)
    assert len(published) == 900
    assert not published & {demonstration.prompt for demonstration in islice(stream, 300)}


def test_phrases_are_tokens_of_the_shipped_policy():
    vocabulary = load_tokenizer(embedded_policy("knights_knaves").path).get_vocab()
    assert set(phrases()) <= set(vocabulary)


def test_the_loss_falls_and_reports_come(made):
    _, summary, reports = made
    assert [report.step for report in reports] == [10, 20, 25]
    assert reports[0].loss > reports[1].loss > reports[2].loss == summary.loss
    assert reports[0].loss > 1.5 * summary.loss
    assert set(summary.exact) == {"guess", "reason"}
    assert all(0 <= share <= 1 for share in summary.exact.values())


def test_what_is_written_loads_and_says_how_it_was_made(made):
    folder, summary, _ = made
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
    assert KnightsKnavesWarmStart(**written["spec"]) == TINY
    assert written["parameters"] == model.num_parameters() == summary.parameters
    tokenizer = load_tokenizer(folder)
    text = "Ava is a knight ≠ 漢字 🙂 <think>x</think>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_the_same_seed_gives_the_same_weights_bit_for_bit(made, tmp_path):
    folder, _, _ = made
    again = tmp_path / "again"
    warm_start(TINY, again)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (again / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    other = tmp_path / "other"
    warm_start(TINY.model_copy(update={"seed": 1, "steps": 1}), other)
    assert (other / "tokenizer.json").read_bytes() != (folder / "tokenizer.json").read_bytes()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        warm_start(TINY, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("weights", [{}, {1: 1.0}, {8: 1.0}, {3: -1.0}, {3: 0.0}])
def test_impossible_sizes_are_refused(weights):
    with pytest.raises(ValidationError, match="must map numbers of people from 2 to 7 to shares of at least 0"):
        KnightsKnavesWarmStart(weights=weights)


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


def test_exactness_is_one_for_what_the_model_itself_would_write(made, pools):
    folder, _, _ = made
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    stream = demonstrations(pools, {2: 1.0}, guess_share=0.5, chat_share=0.5, seed=0)
    probe = list(islice(stream, 8))
    slow = {"guess": [], "reason": []}
    for demonstration in probe:
        row = _row(tokenizer, demonstration)
        prompt, completion = row.prompt, row.completion
        with torch.no_grad():
            best = model(torch.tensor([prompt + completion])).logits[0].argmax(-1).tolist()
        skipped = 2 if demonstration.completion.startswith(OPENING) else 1
        guesses = best[len(prompt) - 1 + skipped : -1]
        slow[demonstration.style].append(guesses == completion[skipped:])
    expected = {style: sum(right) / len(right) for style, right in slow.items() if right}
    for most in (1, 4000):
        assert exactness(model, tokenizer, probe, most) == expected


def test_the_schedule_rises_stays_and_falls():
    spec = KnightsKnavesWarmStart(steps=100, warmup=10, cooldown=0.5)
    shares = [schedule(step, spec) for step in range(1, 101)]
    assert shares[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert set(shares[10:50]) == {1.0}
    assert shares[50:] == pytest.approx([(100 - step) / 50 for step in range(50, 100)])
    assert schedule(1, KnightsKnavesWarmStart(warmup=0, cooldown=0.0)) == 1.0


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


def test_the_command_prints_a_line_at_each_probe_where_there_is_no_terminal(tmp_path):
    settings = TINY.model_dump(mode="json", exclude={"weights"}) | {"steps": 5, "probe_every": 2, "probe_size": 2}
    sets = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    sets += ["--set", "weights={2: 1.0}"]
    result = CliRunner().invoke(app, ["warm-start", "--out", str(tmp_path / "new"), "--threads", "1", *sets])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("update ")]
    assert [line.split(":")[0] for line in lines] == [f"update {step} of 5" for step in (2, 4, 5)]
    assert all(re.search(r": loss \d+\.\d{3} nats/token, exact on held-out: .*; \d+ s left$", line) for line in lines)
    quiet = CliRunner().invoke(app, ["warm-start", "--out", str(tmp_path / "two"), "--threads", "1", "--quiet", *sets])
    assert quiet.exit_code == 0 and not quiet.stderr
