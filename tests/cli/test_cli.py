"""The command line as a person meets it: exit codes, one-line errors, nothing written by a mistake."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from sharpscope import training
from sharpscope.cli import app, main
from sharpscope.cli.app import PANELS, REPLACED
from sharpscope.cli.describe import BASIC
from sharpscope.config import RunConfig
from sharpscope.errors import UserError
from sharpscope.settings import settings_of
from sharpscope.traces import update_run_info
from sharpscope.training.evaluate import evaluate_model
from tests.loops import some

ROOT = Path(__file__).resolve().parents[2]


def sharpscope(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sharpscope", *arguments]
    path = {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


TINY = ["--task", "tests.toy_task:vowels", "--steps", "2", "--quiet"]
SMALL = [
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=4",
    "evaluation.prompts=2",
    "threads=1",
]
SETS = [part for value in SMALL for part in ("--set", value)]


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple]:
    """Run a command in `tmp_path` in this process, which has imported torch; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return int(ended.value.code or 0), *capfd.readouterr()

    return run


def test_run_show_and_resume_from_an_empty_folder(tiny_policy: Path, tmp_path: Path, here):
    done = sharpscope(
        "run", "--model", str(tiny_policy), *TINY, *SETS, "--out", "runs/first", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no loading bar, no warning
    assert "finished: 2 steps" in done.stdout and "sharpscope show runs/first" in done.stdout
    code, _, error = here("run", "--model", str(tiny_policy), *TINY, *SETS, "--out", "runs/first")
    assert code == 2 and error.endswith("is not overwritten; use --out runs/first-2\n")
    code, _, error = here("run", "--resume", "runs/first")
    assert code == 2 and "all of its steps are done (steps = 2)" in error
    update_run_info(tmp_path / "runs/first", status="interrupted")
    shutil.rmtree(tmp_path / "runs/first/checkpoints")
    code, output, error = here("run", "--resume", "runs/first")
    assert code == 0 and "2 steps" in output, error
    assert "is kept in runs/first/.traces.aborted-1" in output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--method", "grop"], "did you mean 'grpo'"),
        (["run", "--seeds", "0,one"], "--seeds 0,one: must be whole numbers separated by commas"),
        (["run", "--methods", ","], "--methods: names nothing"),
        (["fork", "--set", "fork.model=x"], "--set fork.model: unknown"),
        (["run", "--task", "datset"], "did you mean 'dataset'"),
        (["run", "--model", "/no/such/model"], "no such folder"),
        (["run", "--resume", "x", "--steps", "3"], "--resume uses the settings of the run"),
        (["run", "--stepps", "3"], "No such option: --stepps"),
        (["run", "--task", "dataset", "--set", "task.path=none.parquet"], "none.parquet"),
        (["eval", "runs/none"], "no such folder, and as a hub id it cannot be loaded"),
        (["config", "rolout"], "did you mean 'rollout'"),
        (["fork", "runs/x", "--step", "10"], "compare methods from a checkpoint: --checkpoint 10"),
        (["fork", "--without", "top:3"], "needs a run, --step and tokens"),
        (["frobnicate"], "No such command 'frobnicate'"),
    ],
)
def test_a_mistake_is_one_line_exit_code_two_and_nothing_written(
    arguments, says, tmp_path: Path, here
):
    code, _, error = here(*arguments)
    assert code == 2, error
    assert says in error and error.startswith("error: ") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mistake", [["--method", "grop"], ["--set", "stepps=3"]])
def test_settings_are_checked_before_torch_is_loaded(mistake, tmp_path: Path):
    """A typing mistake costs the start of Python: no torch, transformers or pandas, and at most half a second of CPU."""
    code = (
        "import sys, time\n"
        "from sharpscope.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n"
        "    heavy = [m for m in ('torch', 'transformers', 'pandas', 'pyarrow') if m in sys.modules]\n"
        "    print(end.code, heavy, time.process_time())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, "run", *mistake],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
    )
    status, heavy, seconds = done.stdout.rsplit(maxsplit=2)
    assert (status, heavy) == ("2", "[]"), done.stdout + done.stderr
    assert float(seconds) < 1.0  # about 0.45 s; twice that on a busy machine


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        ("finished", 0, "finished: 3 steps"),
        ("interrupted", 130, "resume: sharpscope run --resume runs/x"),
        ("failed", 1, "failed: 3 steps, a reason"),
    ],
)
def test_the_exit_code_says_how_a_run_ended(status, code, says, here, monkeypatch):
    """So that a loop in a shell ends with Ctrl-C."""
    outcome = training.Outcome(Path("runs/x"), status, 3, "a reason", ("continues after step 2",))
    monkeypatch.setattr(training, "train", lambda *arguments, **options: outcome)
    found, output, _ = here("run", "--quiet", "--out", "runs/x")
    assert found == code and says in output and "continues after step 2" in output


def test_every_command_has_help_with_an_example_and_its_place():
    runner = CliRunner()
    listing = runner.invoke(app, ["--help"], terminal_width=200).output
    commands = re.findall(r"^│ ([a-z][a-z-]+) {2,}", listing, flags=re.MULTILINE)
    listed = [name for names in PANELS.values() for name in names]
    assert len(listed) == 19 and commands == listed
    for command in some(listed):
        shown = runner.invoke(app, [command, "--help"], terminal_width=200)
        assert shown.exit_code == 0 and f"sharpscope {command}" in shown.output, command


def test_help_keeps_its_brackets_and_cuts_nothing_at_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    commands = typer.main.get_command(app).commands
    for name, command in some(commands.items()):
        shown = CliRunner().invoke(app, [name, "--help"]).output
        lines = [line.rstrip() for line in shown.splitlines()]
        assert max(map(len, lines)) == 80  # those of its tables
        for parameter in command.params:
            if (text := getattr(parameter, "help", None)) is not None:
                assert Text.from_markup(text).plain == text  # rich takes [label=] for a style
            if parameter.param_type_name == "option":
                assert not [option for option in parameter.opts if option not in shown], name
        paragraphs = command.help.split("\n\n")
        flowing = [part for part in paragraphs if not part.startswith("Example")]
        assert flowing and not [part for part in flowing if "\n" in part], name


@pytest.mark.parametrize("command", REPLACED)
def test_an_old_command_says_what_replaced_it(command, here):
    code, _, error = here(command, "x")
    assert (
        code == 2
        and error == f"error: sharpscope {command}: removed in 0.3; use: {REPLACED[command]}\n"
    )


def test_config_lists_the_common_settings_all_and_those_of_a_part():
    def paths(*arguments: str) -> list[str]:
        output = CliRunner().invoke(app, ["config", *arguments], env={"COLUMNS": "300"}).output
        return re.findall(r"^([a-z_]+(?:\.\w+)*)(?: =|  \[)", output, flags=re.MULTILINE)

    assert paths() == [row.path for row in settings_of(RunConfig) if row.path in BASIC]
    assert set(paths()) == set(BASIC)
    assert {"task.people", "task.path", "task.factory"} <= set(paths("tasks"))
    assert {"method.weight.tau", "method.weight.function", "method.weight.of"} <= set(
        paths("method.weight")
    )
    assert len(paths("--all")) > 5 * len(BASIC)


CHANGES = [
    "task.kind=custom",
    "task.factory=tests.toy_task:vowels",
    "rollout.max_new_tokens=8",
    "threads=1",
]


@pytest.fixture
def place(tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command with a small model and task, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    sets = [part for change in CHANGES for part in ("--set", change)]
    return ["eval", str(tiny_policy), *sets, "--prompts", "2", "--temperature", "0"]


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_mistakes_are_found_before_anything_is_drawn(place, tiny_policy, tmp_path: Path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    for arguments, says in (
        (["--out", "taken"], "taken is not empty and is not overwritten; use --out taken-2"),
        (["--split", "heldout", "--split", "unseem"], "split unseem: the task has "),
        (["--split", "all"], "split all: the task has train, heldout; choose one of them"),
    ):
        result = invoke(*place, *arguments)
        assert isinstance(result.exception, UserError) and says in str(result.exception)
        assert result.stdout == ""
    for option in ("--prompts", "--samples"):
        # refused as an option, before anything is loaded
        assert invoke(*place, option, "0").exit_code == 2
        with pytest.raises(UserError, match=f"evaluation.{option.strip('-')}"):
            evaluate_model(str(tiny_policy), overrides=CHANGES, **{option.strip("-"): 0})


def test_the_table_has_an_interval_at_zero_and_the_folder_of_out_is_made(place):
    """The toy policy gets none of the 2 greedy puzzles of a level right: 0 % with an upper end of z²/(2 + z²) = 65.76 %."""
    result = invoke(*place, "--out", "new/results", "-k", "1")
    assert result.exit_code == 0, result.output
    frame = pd.read_csv("new/results/eval.csv")
    row = frame.iloc[0]
    assert set(frame["split"]) == {"heldout"}  # of the default splits the task has this one
    assert (
        row["accuracy"] == 0.0
        and "0.00% [0.00, 65.76]" in result.stdout
        and "pass@1 [95 %]" in result.stdout
    )
    assert (row["accuracy_low"], row["accuracy_high"]) == (0.0, pytest.approx(0.6576, abs=1e-4))
    assert (row["pass_at_1_low"], row["pass_at_1_high"]) == (
        row["accuracy_low"],
        row["accuracy_high"],
    )


def test_every_row_of_a_file_is_evaluated_on_request(tiny_policy: Path, tmp_path: Path):
    """40 rows, some of which the content hash holds out."""
    rows = [
        {"prompt": f"What is {i} + 1?", "answer": str(i + 1), "data_source": "numeric"}
        for i in range(40)
    ]
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    changes = [f"task.path={file}", "rollout.max_new_tokens=2", "threads=1"]
    asked = {"task": "dataset", "temperatures": (0.0,), "overrides": changes}
    (some,) = evaluate_model(str(tiny_policy), **asked)
    (every,) = evaluate_model(str(tiny_policy), splits=("all",), **asked)
    assert some["split"] == "heldout" and 0 < some["n"] < every["n"] == 40


def test_imports_without_torch():
    """One process imports them in turn and names the first after which torch is there."""
    modules = ("config", "traces", "cli", "sweeps", "analysis.output", "analysis.reduction")
    code = (
        "import importlib, sys\n"
        f"for module in {modules}:\n"
        "    importlib.import_module('sharpscope.' + module)\n"
        "    if {'torch', 'transformers'} & set(sys.modules): sys.exit(module)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_imports_without_modules_of_posix_alone():
    """Traces can be read and configurations checked where there is no fcntl and no resource; nothing imports them at its top."""
    code = (
        "import sys; sys.modules |= {'fcntl': None, 'resource': None}\n"
        "import sharpscope, sharpscope.cli, sharpscope.analysis, sharpscope.sweeps\n"
        "print(sharpscope.load_run('data/example/sums').status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "finished\n", done.stderr
    package = ROOT / "sharpscope"
    modules = [ast.parse(path.read_text("utf-8")) for path in package.rglob("*.py")]
    tops = {ast.unparse(node) for tree in modules for node in tree.body}
    assert "import json" in tops and not {"import fcntl", "import resource"} & tops
