"""The examples in the docstrings of the public functions run and print what they say."""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import importlib
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import sharpscope
import sharpscope.config
import sharpscope.tasks.custom
from sharpscope.cli import app
from sharpscope.config import build_config, parse_methods, read_yaml
from sharpscope.sweeps import plan_sweep, read_sweep

ALIASES = {"__version__", "record"}


@pytest.fixture
def unregistered(monkeypatch):
    """Forgets the weights that an example registers."""
    weighting = sharpscope.config.weighting
    monkeypatch.setattr(weighting, "_REGISTRY", dict(weighting._REGISTRY))


@pytest.mark.parametrize("name", sorted(set(sharpscope.__all__) - ALIASES))
def test_public_function_has_an_example_that_runs(name, monkeypatch, unregistered):
    monkeypatch.chdir(Path(__file__).parents[1])
    (found,) = [
        test for test in doctest.DocTestFinder(recurse=False).find(getattr(sharpscope, name), name) if test.examples
    ]
    output: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(found, out=output.append)
    assert result.failed == 0, "".join(output)


# -- README and the pages under docs/: their commands are accepted, their code runs, their links and pictures are right

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(bash|python)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    return [body for _, kind, body in BLOCK.findall(page.read_text("utf-8")) if kind == language]


def commands() -> list[tuple[str, list[str]]]:
    """Every call of sharpscope in a bash block, with the page it is on."""
    found = []
    for page in PAGES:
        for body in blocks(page, "bash"):
            for line in body.replace("\\\n", " ").splitlines():
                for call in line.partition(" #")[0].split("&&"):
                    words = [word for word in shlex.split(call) if word != "…"]
                    start = next((i for i, word in enumerate(words) if word == "sharpscope"), None)
                    if start is not None and words[:2] != ["pip", "install"]:
                        found.append((page.relative_to(ROOT).as_posix(), words[start + 1 :]))
    return found


COMMANDS = commands()


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page}: {' '.join(words)}"[:90] for page, words in COMMANDS]
)
def test_a_documented_command_is_accepted(page: str, words: list[str], monkeypatch):
    """Its options exist, and the settings of a `run` are valid."""
    command, rest = typer.main.get_command(app), list(words)
    while hasattr(command, "commands") and rest:
        assert rest[0] in command.commands, f"{page}: no command '{rest[0]}'"
        command = command.commands[rest.pop(0)]
    if hasattr(command, "commands"):
        return  # `sharpscope` alone
    context = command.make_context(command.name, rest)
    if command.name == "run" and context.params["resume"] is None:
        from sharpscope.cli.running import SWEEP_FIELDS, command_values

        monkeypatch.chdir(ROOT)
        given = context.params
        file = None if given["config"] is None else Path(given["config"])
        if file is not None and SWEEP_FIELDS & set(read_yaml(file)):
            assert plan_sweep(read_sweep(file))
        elif not any(
            ":" in str(given[name]) for name in ("task", "method", "methods", "token_weights")
        ):  # the reader's modules
            values = {name: given[name] for name in ("method", "task", "model", "steps", "seed", "lr", "label")}
            build_config(file, given["set_"] or (), command_values(**values), given["token_weights"])
            parse_methods((given["methods"] or "grpo").split(","))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_documented_python_compiles_and_local_links_exist(page: Path):
    for body in blocks(page, "python"):
        lines = body.splitlines()
        indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        source = "\n".join(line[indent:] for line in lines)
        compile(source if "MethodNote(" not in source else f"({source})", str(page), "exec")
    generated = {
        "reference/commands.md",
        "reference/configuration.md",
        "reference/methods.md",
        "reference/trace.md",
        "changelog.md",
        "contributing.md",
        "symptoms.md",
    }
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        if "://" in target:
            continue
        path = (page.parent / target).resolve()
        own = path.is_relative_to(ROOT / "docs") and path.relative_to(ROOT / "docs").as_posix()
        figure = path.parent == ROOT / "docs" / "images" and (ROOT / "figures" / "paper" / path.name).exists()
        assert path.exists() or own in generated or figure, f"{page.name}: no file {target}"


def test_the_documented_probes_run():
    """The code of docs/guides/probes.md, with the names it presumes."""
    from tests.probes.small_lm import small_model

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
    (code,) = blocks(ROOT / "docs" / "guides" / "probes.md", "python")
    exec(compile(code, "probes.md", "exec"), names)
    largest = names["norms"].values.max().item()
    for shown, text in (
        (names["norms"], f"<td>{largest:.4g}</td>"),
        (names["found"], "eigenvalue 1</th><td>48 "),
        (names["rise"], "<td>1.612</td>"),  # 0.05·√(4² + 32²)
    ):
        assert text in shown._repr_html_()
    assert names["shares"].sum().item() == pytest.approx(1, abs=1e-4)
    assert names["found"].largest == pytest.approx(48, rel=1e-3)  # of Σ θ⁴: 12 θ² at −2
    at = torch.tensor([4.0, -32.0], dtype=torch.float64)
    assert names["rise"].first_order == pytest.approx(0.05 * at.norm().item(), rel=1e-6)
    # AdamW's first step is the sign of the gradient: (1 − η)⁴ + (2 − η)⁴ = 17 at η = 3.
    assert names["critical"].lr == pytest.approx(3, rel=1 / 16)


def test_readme_is_short_and_its_terminal_picture_is_current():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < 130
    spec = importlib.util.spec_from_file_location("screenshots", ROOT / "docs" / "screenshots.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = (ROOT / "docs" / "images" / "tokens.svg").read_text("utf-8")
    assert module.terminal() == made, (
        "the output has changed; run `python docs/screenshots.py` and look at the pictures"
    )
    assert 'url("http' not in made  # fonts of another host


def test_the_page_of_claims_lists_them_with_their_margins():
    from sharpscope.analysis.claims.base import margin_text
    from sharpscope.analysis.claims.registry import CLAIMS

    page = (ROOT / "docs/explanations/claims.md").read_text("utf-8")
    names = {"treatment": "the treatment", "baseline": "the baseline"}
    rows = [f"| {c.name} | {c.title.format(**names)} | {margin_text(c.margin, c.scale)} |" for c in CLAIMS.values()]
    assert "\n".join(rows) + "\n\n" in page


# -- Every notebook under docs/tutorials runs from top to bottom on the example traces

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


SHORT = ("does_my_weighting_act", "how_sharp_is_my_checkpoint")
"""Run with the first layer of the policy alone."""


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In this process, which has imported torch: starting a kernel takes longer than most of them."""
    shutil.copytree(ROOT / "data" / "example", tmp_path / "data" / "example")
    (tmp_path / "data" / "reference").symlink_to(ROOT / "data" / "reference")  # large, and only read
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", functools.partial(here, subprocess.run))
    if notebook.stem in SHORT:
        load = AutoModelForCausalLM.from_pretrained

        def cut(*args: Any, **options: Any) -> Any:
            found = load(*args, **options)
            model = found[0] if isinstance(found, tuple) else found
            del model.model.layers[1:]
            model.config.num_hidden_layers = 1
            return found

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", cut)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            run_cell("".join(cell["source"]), names)


def here(elsewhere: Any, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """What `sharpscope …` prints, without a process of its own."""
    if command[0] != "sharpscope":
        return elsewhere(command, **options)
    with contextlib.chdir(options["cwd"]):
        done = CliRunner().invoke(app, command[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return subprocess.CompletedProcess(command, done.exit_code, done.stdout)


def run_cell(source: str, names: dict[str, Any]) -> None:
    """Run a cell and, as a notebook does, make the HTML or the text of what its last line gives."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        getattr(value, "_repr_html_", value.__repr__)()
