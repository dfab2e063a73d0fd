"""The code lines of README and of the pages under docs/ run, with tiny settings, on files like those that they name."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import typer.main

import sharpscope
from sharpscope.analysis.plots import PLOTS
from sharpscope.cli import app, main
from sharpscope.config import build_config
from sharpscope.training import train
from tests.conftest import TOY, pair
from tests.integrations.test_importers import (
    packed,
    rows_of,
    truth,
    write_lines,
    write_nemo_rl,
    write_table,
)
from tests.loops import some

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(bash|python)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
NAMES = {page.relative_to(ROOT).as_posix(): page for page in PAGES}

NOT_RUN = {  # start of a line -> why no test runs it; a command of sharpscope is parsed instead
    "pip install": "installs: .ci/run does",
    "python -m venv": "installs",
    "source .venv": "installs",
    "pre-commit install": "installs",
    "pytest": "tests",
    "bash .ci/run": "the tests themselves",
    "python -m experiments.real_models.get": "downloads a model",
    "accelerate launch": "several processes: tests/test_distributed.py",
    "export SHARPSCOPE_VERL": "verl, which needs GPUs for its rollouts: tests/integrations/test_verl.py",
    "python -m verl.trainer.main_ppo": "verl",
    "python -m experiments.smollm2.sums": "the example's questions, with its scorer: tests/tasks",
    "sharpscope compare smollm2 runs/": "two checkpoints of a real model: tests/surface",
    "sharpscope fork runs/trl": "a checkpoint of TRL with its optimizer: tests/forks",
    "sharpscope run --methods grpo,flat": "two processes; README's line is the same with other methods",
    "sharpscope analyze runs/ --figures": "ten seconds: tests/analysis",
    "sharpscope study claims data/studies/2/runs": "ten seconds; docs/agents.md has the same of data/reference",
    "python experiments/studies/2/corrected.py": "checks its own pages",
    "python experiments/studies/4/verdicts.py": "rewrites a page; its rules: tests/studies",
}
SMALLER = {  # what the lines name -> what the test has, or does less of
    r"\b(path/or/hub-id|HUB_ID|CHECKPOINT|MODEL)\b": "smollm2",
    r"\bDIR\b": "logs/exp_001",
    r"--checkpoint 50": "--checkpoint 2",
    r"--step (37|40)": "--step 2",
    r"top:12": "top:2",
    r"--step 10": "--step 8",
    r"--from 20 --to 40": "--from 1 --to 2",
    r"--without prompt:3": "--without prompt:0",
    r"(?<!--out )runs/sums": "runs/first",
    r"--steps \d+": "--steps 1",
    r"--seeds [\d,]+": "--seeds 0",
    r"--samples \d+ -k 1 -k 8": "--samples 2 -k 1 -k 2",
}
FEW = {
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 4,
    "evaluation.every": 0,
    "evaluation.prompts": 2,
    "probes.preset": "off",
    "probes.prompts": 2,
    "probes.heldout_prompts": 0,
    "recording.token_gradients_every": 0,
    "recording.rotation_every": 0,
}


def sets(**values: object) -> list[str]:
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


ADDED = {  # what a command gets in addition
    "run": ["--steps", "1", "--quiet", *sets(**FEW)],
    "rotate": [
        "--batches",
        "1",
        *sets(**{"rollout.prompts_per_step": 6, "rollout.max_new_tokens": 64}),
    ],
    "fork": sets(
        **{"fork.prompts": 2, "fork.warm_up": 1}, **{name: FEW[name] for name in list(FEW)[:3]}
    ),
    "probe": sets(curvature_prompts=1, check="off", prompts=2),
    "eval": ["--prompts", "2", *sets(**{"rollout.max_new_tokens": 4})],
    "demo": ["--steps", "2"],
}


DEMO = {
    "rollout.prompts_per_step": 2,
    "evaluation.prompts": 4,
    "probes.prompts": 2,
    "probes.heldout_prompts": 0,
}


def lines(page: Path) -> list[str]:
    """The commands of a page's bash blocks, without their comments."""
    found = []
    for _, kind, body in BLOCK.findall(page.read_text("utf-8")):
        for line in body.replace("\\\n", " ").splitlines() if kind == "bash" else ():
            found += [call.strip() for call in line.partition(" #")[0].split("&&") if call.strip()]
    return [line for line in found if not line.startswith("#")]


def blocks(page: str, language: str = "python") -> list[str]:
    return [
        body for _, kind, body in BLOCK.findall(NAMES[page].read_text("utf-8")) if kind == language
    ]


def not_run(line: str) -> str | None:
    return next((start for start in NOT_RUN if line.startswith(start)), None)


ALL = [(name, line) for name, page in NAMES.items() for line in lines(page)]
FIRST = {line: name for name, line in reversed(ALL) if not not_run(line)}
RUN = {
    page: [line for line, first in FIRST.items() if first == page][::-1]
    for page in dict.fromkeys(FIRST.values())
}
"""Page -> its commands, but for those that an earlier page has."""


def test_the_list_of_lines_that_do_not_run_is_current():
    assert {not_run(line) for _, line in ALL} - {None} == set(NOT_RUN)
    assert {"README.md", "docs/index.md", "docs/guides/methods.md", "docs/trainers/dumps.md"} <= {
        p for p, _ in ALL
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory, tiny_policy):
    """A folder with the files that the pages name: runs, a model, dumps of trainers, questions, logs, Python files."""
    here = tmp_path_factory.mktemp("docs")
    for name, source in {
        "x": "grpo-s0",
        "sft": "grpo-s0",
        "loop": "grpo-s0",
        "grpo-s0": "grpo-s0",
        "mine-s0": "grpo-sg-s0",
    }.items():
        shutil.copytree(pair() / source, here / "runs" / name)
    for name in ("data", "experiments"):
        (here / name).symlink_to(ROOT / name)
    (here / "outputs").mkdir()
    for name in ("smollm2", "outputs/checkpoint-39"):
        shutil.copytree(tiny_policy, here / name)
    values = {
        **TOY,
        "policy.model": str(tiny_policy),
        "out": str(here / "runs" / "first"),
        "steps": 2,
    }
    values |= {
        "checkpoint.every": 1,
        "evaluation.every": 0,
        "optimizer.lr": 1e-4,
        "recording.token_gradients_every": 1,
    }
    assert train(build_config(values=values)).status == "finished"
    dump = rows_of(sharpscope.load_run(here / "runs" / "first"), tiny_policy)
    write_table(here / "dumped", dump[: len(dump) // 2])
    (here / "dumped" / "batch.jsonl").rename(here / "dumped" / "step_40.jsonl")
    rows = truth(rng := np.random.default_rng(0))
    write_nemo_rl(here / "logs" / "exp_001", rows)
    table = [
        {"ids": r["ids"], "logprobs": r["theta"], "adv": r["advantage"], "loss_mask": r["mask"]}
        for r in rows[:4]
    ]
    write_lines(here / "tokens.jsonl", table)
    exported = here / "outputs" / "token_exports" / "step_1"
    write_lines(exported / "rank_0.jsonl", [packed(rng, 1)])
    (exported / "STABLE").touch()
    write_lines(
        here / "completions.jsonl",
        [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(4)],
    )
    asked = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    write_lines(here / "questions.jsonl", asked)
    write_lines(
        here / "train.jsonl",
        [{"instruction": row["prompt"], "target": row["answer"]} for row in asked],
    )
    write_lines(
        here / "nq.jsonl",
        [{"question": row["prompt"], "golden_answers": [row["answer"]]} for row in asked],
    )
    for name in ("puzzles", "test"):
        pd.DataFrame(asked).to_parquet(here / f"{name}.parquet")
    log = [
        {"step": n, "loss": 0.1, "grad_norm": 0.3, "reward": 0.5, "entropy": 0.4}
        for n in range(1, 30)
    ]
    (here / "output").mkdir()
    (here / "output" / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    (here / "mine.py").write_text(blocks("docs/guides/methods.md")[0])
    riddles, rgym = blocks("docs/guides/model-and-task.md")
    (here / "riddles.py").write_text(riddles)
    (here / "rgym.py").write_text(rgym)
    return here


@pytest.fixture
def folder(files, tmp_path, monkeypatch):
    """A copy of the files as working folder, in which no browser starts and the demo is small."""
    shutil.copytree(files, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("typer.launch", lambda _: 0)
    return tmp_path


@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run(page, folder, monkeypatch):
    for line in some(RUN[page]):
        if "rgym:" in line and find_spec("reasoning_gym") is None:
            continue
        for pattern, text in SMALLER.items():
            line = re.sub(pattern, text, line)
        words = shlex.split(line)
        assert words[0] == "sharpscope", f"{page}: {line}: run it here, or say in NOT_RUN why not"
        more = ADDED.get(words[1], [])
        if words[1] == "demo":  # has no --set
            monkeypatch.setattr(
                "sharpscope.config.build_config", lambda values: build_config(values=values | DEMO)
            )
        if "--rollouts" in words:  # of another policy than the one at hand
            more = [*more, "--force"]
        if words[1] == "fork" and not {"--without", "--without-tokens"} & set(words):
            more = [*more, "--batches", "1"]
        if "--out" in words:  # of the page's earlier command, or of the files
            shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
        elif words[1] == "run":
            more = [*more, "--out", f"new/{len(list(folder.glob('new/*')))}"]
        with pytest.raises(SystemExit) as ended:
            main([*words[1:], *more])
        assert ended.value.code in (None, 0), line


COMMANDS = [
    (name, line)
    for name, line in ALL
    if not_run(line) and re.match(r"sharpscope |accelerate ", line)
]
HELP = [
    ("--help", line.strip())
    for path in sorted((ROOT / "sharpscope" / "cli").glob("*.py"))
    for line in path.read_text("utf-8").splitlines()
    if line.startswith("      sharpscope ")
]
INLINE = [
    (name, call.strip())
    for name, page in NAMES.items()
    for calls in re.findall(r"`(sharpscope [a-z][^`\n]* [^`\n]*)`", page.read_text("utf-8"))
    for call in calls.split("&&")
]


def test_commands_that_do_not_run_and_those_in_the_text_are_accepted():
    """Those of NOT_RUN, of the examples in --help and between backticks: command and options exist."""
    wrong = []
    for page, line in [*COMMANDS, *HELP, *INLINE]:
        words = shlex.split(re.sub(r"\b(N|STEP)\b", "1", line))
        words = [word for word in words[words.index("sharpscope") + 1 :] if word != "…"]
        command = typer.main.get_command(app)
        try:
            while hasattr(command, "commands") and words:
                command = command.commands[words.pop(0)]
            if words:
                command.make_context(command.name, words)
        except Exception as error:
            # the text leaves it out
            if not re.match("Missing parameter|Option .* requires an argument", str(error)):
                wrong.append(f"{page}: {line}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", NAMES)
def test_local_links_exist(page):
    generated = ("commands", "configuration", "methods", "trace")
    generated = {*(f"reference/{name}.md" for name in generated), "changelog.md", "contributing.md"}
    generated |= {
        "gallery.md",
        *(f"images/gallery/{name}-{only}.png" for name in PLOTS for only in ("light", "dark")),
    }
    broken = []
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", NAMES[page].read_text("utf-8")):
        path = (NAMES[page].parent / target).resolve()
        own = (
            path.relative_to(ROOT / "docs").as_posix()
            if path.is_relative_to(ROOT / "docs")
            else None
        )
        figure = (
            path.parent == ROOT / "docs" / "images"
            and (ROOT / "figures" / "paper" / path.name).exists()
        )
        if not ("://" in target or path.exists() or own in generated or figure):
            broken.append(target)
    assert broken == [], page


# -- The Python of the pages

ELSEWHERE = {  # page -> the test that runs its Python
    "CONTRIBUTING.md": "tests/test_extending.py",
    "docs/causes.md": "tests/recording/test_live.py",
    "docs/guides/methods.md": "tests/test_extending.py",
    "docs/guides/model-and-task.md": "tests/tasks/test_datasets.py",
    "docs/trainers/recipes.md": "tests/integrations/test_loop.py",
}
HERE = {
    "README.md",
    "docs/fork.md",
    "docs/guides/probes.md",
    "docs/guides/report.md",
    "docs/trainers/loop.md",
}
HERE |= {"docs/guides/model-and-task.md", "docs/trainers/supervised.md", "docs/trainers/trl.md"}


def test_the_python_of_every_page_is_run_somewhere():
    pages = {page for page in NAMES if blocks(page)}
    assert pages <= HERE | set(ELSEWHERE), (
        "run the new page's code here, or name the test that runs it"
    )
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text("utf-8")


@pytest.mark.parametrize(
    "page", ["README.md", "docs/trainers/supervised.md", "docs/trainers/trl.md"]
)
def test_the_lines_for_trainers_record_a_run(page, tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="TRL is not installed (test extra)")
    from tests.integrations.trainers import plain_trainer

    monkeypatch.chdir(tmp_path)
    (code,) = blocks(page)
    exec(code, {"trainer": plain_trainer(tmp_path / "trainer")})
    (run,) = sharpscope.load_runs("runs").by_name.values()
    assert run.status == "finished" and run.steps["grad_norm"].gt(0).all()


def test_the_loop_of_the_guide_is_recorded(tmp_path, monkeypatch):
    from tests.integrations.trainers import small_model, tokenizer

    monkeypatch.chdir(tmp_path)
    model, advantages = small_model(), torch.tensor([1.0, -1.0])
    input_ids, mask = torch.randint(2, 13, (2, 6)), torch.tensor([[0, 0, 1, 1, 1]] * 2)
    names = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "tokenizer": tokenizer(),
    }
    names |= {
        "batches": range(2),
        "input_ids": input_ids,
        "completion_mask": mask,
        "advantages": advantages,
    }
    names |= {"rewards": advantages + 1, "groups": [0, 0], "old": torch.full((2, 5), -2.5)}
    names["score"] = lambda: (
        model(input_ids).logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
    )
    names["your_loss"] = lambda logp: -(logp * mask * advantages[:, None]).mean()
    (code,) = blocks("docs/trainers/loop.md")
    assert "logp = ...  #" in code
    exec(code.replace("logp = ...  #", "logp = score()  #"), names)
    run = sharpscope.load_run("runs/loop")
    assert run.status == "finished" and len(run.steps) == 2
    # 1 / (2 · 5) of a mean
    assert run.tokens(steps=[1])["loss_coef"].abs().tolist() == pytest.approx([0.1] * 6)


def test_the_guide_to_the_report_reads_a_run(folder):
    (folder / "runs" / "x").rename(folder / "runs" / "grpo-sg-knights_knaves-s0")
    names: dict = {}
    for code in blocks("docs/guides/report.md"):
        exec(code, names)
    assert len(names["run"].tokens(steps=[10]))


def test_the_fork_of_the_guide(folder):
    (code,) = blocks("docs/fork.md")
    names = {"sharpscope": sharpscope}
    exec(
        code.replace("checkpoint=[50]", "checkpoint=[2]").replace("batches=30", "batches=1"), names
    )
    assert set(names["run"].forks["arm"]) == {"grpo", "ar"}


def test_the_documented_probes_run():
    """The code of docs/guides/probes.md, with the names it presumes."""
    from tests.models import small_model

    torch.manual_seed(0)
    model = small_model()
    input_ids = torch.randint(1, 13, (2, 6))
    mask = torch.zeros_like(input_ids)
    mask[:, 3:] = 1
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    weight.grad = 4 * weight.detach() ** 3
    names = {
        "optimizer": torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0),
        "lr": 0.1,
        "model": model,
        "input_ids": input_ids,
        "mask": mask,
        "coef": mask * 0.1,
        "attention_mask": torch.ones_like(input_ids),
        "parameters": [weight],
        "loss_fn": lambda: (weight**4).sum(),
    }
    (code,) = blocks("docs/guides/probes.md")
    exec(compile(code, "probes.md", "exec"), names)
    assert names["shares"].sum().item() == pytest.approx(1, abs=1e-4)
    assert names["found"].largest == pytest.approx(48, rel=1e-3)  # of Σ θ⁴: 12 θ² at −2
    at = torch.tensor([4.0, -32.0], dtype=torch.float64)
    assert names["rise"].first_order == pytest.approx(0.05 * at.norm().item(), rel=1e-6)
    # AdamW's first step is the sign of the gradient: (1 − η)⁴ + (2 − η)⁴ = 17 at η = 3.
    assert names["critical"].lr == pytest.approx(3, rel=1 / 16)


TRANSCRIPT = re.compile(r"```bash\n(sharpscope [^\n]* --json)\n```\s+```json\n(.*?)```", re.DOTALL)


def contains(whole, part):
    """Whether `part` is in `whole`: of objects some keys, of lists elements in this order."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            key in whole and contains(whole[key], value) for key, value in part.items()
        )
    if isinstance(part, list):
        rest = iter(whole)
        return all(any(contains(one, value) for one in rest) for value in part)
    return whole == part


@pytest.mark.parametrize("number", range(4))
def test_the_transcripts_of_agents_are_what_the_commands_print(number, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = TRANSCRIPT.findall(NAMES["docs/agents.md"].read_text("utf-8"))
    assert len(found) == 4
    command, answer = found[number]
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(command)[1:])
    assert ended.value.code == 0
    assert contains(json.loads(capsys.readouterr().out), json.loads(answer))


def test_the_skill_names_commands_that_are_there(tmp_path, capsys):
    out = str(tmp_path / "here")
    with pytest.raises(SystemExit) as ended:
        main(["skill", "--out", out])
    assert ended.value.code == 0
    text = (tmp_path / "here" / "SKILL.md").read_text("utf-8")
    named = set(re.findall(r"`sharpscope ([a-z]+)", text))
    assert {"diagnose", "show", "tokens", "fork", "rotate", "probe", "compare"} == named
    assert named <= set(typer.main.get_command(app).commands)
    with pytest.raises(SystemExit) as ended:
        main(["skill", "--out", out])
    assert ended.value.code == 2 and "has a SKILL.md already" in capsys.readouterr().err


def test_the_architecture_page_names_files_that_exist():
    text = (ROOT / "docs" / "explanations" / "architecture.md").read_text("utf-8")
    named = set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", text))
    assert len(named) > 25
    assert [name for name in sorted(named) if not (ROOT / "sharpscope" / name).is_file()] == []
