"""The commands of README and the Python of the pages run, with small settings and the names that they presume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import sharpscope
from sharpscope.cli import main
from sharpscope.config import build_config
from sharpscope.training import train
from tests.test_examples import PAGES, ROOT, blocks, commands

PAIR = ROOT / "tests" / "data" / "pair"
FEW = (
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=8",
    "evaluation.every=0",
    "probes.preset=off",
)
SMALL = {  # what a command gets in addition
    "run": [*(word for field in (*FEW, "steps=1") for word in ("--set", field)), "--quiet"],
    "rotate": [
        word for field in ("rollout.prompts_per_step=6", "rollout.max_new_tokens=96") for word in ("--set", field)
    ],
    "probe": [
        "--set",
        "curvature_prompts=1",
        "--set",
        "max_products=4",
        "--set",
        "trace_probes=0",
        "--set",
        "check=off",
    ],
}
CALLS = [words for page, words in commands() if page == "README.md"]
ELSEWHERE = {  # page -> the test that runs its Python
    "CONTRIBUTING.md": "tests/test_extending.py",
    "docs/guides/methods.md": "tests/test_extending.py",
    "docs/guides/model-and-task.md": "tests/tasks/test_custom.py",
    "docs/guides/probes.md": "tests/test_examples.py",
    "docs/trainers/recipes.md": "tests/integrations/test_recipes.py",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the files that README's commands name, in which no browser starts."""
    for name in ("x", "grpo-s0"):
        shutil.copytree(PAIR / "grpo-s0", tmp_path / "runs" / name)
    shutil.copytree(PAIR / "grpo-sg-s0", tmp_path / "runs" / "grpo-sg-s0")
    texts = (ROOT / "data" / "example" / "completions.jsonl").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "completions.jsonl").write_text("".join(texts[:4]))
    questions = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    log = [{"step": n, "loss": 0.1, "grad_norm": 0.3, "reward": 0.5, "entropy": 0.4} for n in range(1, 30)]
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda *_: True)
    return tmp_path


@pytest.mark.parametrize("words", CALLS, ids=[" ".join(words)[:70] for words in CALLS])
def test_a_command_of_readme_runs(folder, words, monkeypatch):
    command, rest = words[0], list(words[1:])
    if command == "demo":
        rest += ["--steps", "2"]
        few = {"rollout.prompts_per_step": 2, "evaluation.prompts": 4, "probes.prompts": 2, "probes.heldout_prompts": 0}
        monkeypatch.setattr("sharpscope.config.build_config", lambda values: build_config(values=values | few))
    rest = ["1" if before == "--batches" else word for before, word in zip([command, *rest], rest, strict=False)]
    rest = [word.replace("path/or/hub-id", "embedded:math") for word in rest]
    if command == "fork":  # settings of the run and of the fork
        rest += [word for field in ("fork.prompts=4", *FEW[:3]) for word in ("--set", field)]
    if command == "run" and "--methods" in rest:
        rest[rest.index("--seeds") + 1] = "0"
        rest += ["--out", "sweep"]
    with pytest.raises(SystemExit) as ended:
        main([command, *rest, *SMALL.get(command, [])])
    assert ended.value.code in (None, 0)


def test_the_python_of_every_page_is_run_somewhere():
    own = {
        "README.md",
        "docs/trainers/supervised.md",
        "docs/trainers/trl.md",
        "docs/guides/report.md",
        "docs/fork.md",
        "docs/trainers/loop.md",
    }
    pages = {page.relative_to(ROOT).as_posix() for page in PAGES if blocks(page, "python")}
    assert pages <= own | set(ELSEWHERE), "run the new page's code here, or name the test that runs it"
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text("utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/trainers/supervised.md", "docs/trainers/trl.md"])
def test_the_lines_for_trainers_record_a_run(page, tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="TRL is not installed (test extra)")
    from tests.integrations.trainers import plain_trainer

    monkeypatch.chdir(tmp_path)
    (code,) = blocks(ROOT / page, "python")
    exec(code, {"trainer": plain_trainer(tmp_path / "trainer")})
    (run,) = sharpscope.load_runs("runs").by_name.values()
    assert run.status == "finished" and run.steps["grad_norm"].gt(0).all()


def test_the_guide_to_the_report_reads_a_run(folder):
    (folder / "runs" / "x").rename(folder / "runs" / "grpo-sg-knights_knaves-s0")
    names: dict = {}
    for code in blocks(ROOT / "docs" / "guides" / "report.md", "python"):
        exec(code, names)
    assert len(names["run"].tokens(steps=[10]))


def test_the_fork_of_the_guide(toy_config, tmp_path, monkeypatch):
    config = toy_config(steps=2, checkpoint__every=2, name="runs/first")
    train(config)
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(ROOT / "docs" / "fork.md", "python")
    names = {"sharpscope": sharpscope}
    exec(code.replace("checkpoint=[50]", "checkpoint=[2]").replace("batches=30", "batches=1"), names)
    assert set(names["run"].forks["arm"]) == {"grpo", "ar"}
