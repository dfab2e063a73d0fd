"""Tests mirror the package: a module is tested in the file of its name, and a test file names its module."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "sharpscope"

SMALL = 80
"""Lines of code up to which a module may be tested together with its package."""

ELSEWHERE = {
    "analysis/claims/registry": "analysis/claims/test_declaration",
    "analysis/completions": "analysis/html/test_page",
    "analysis/figures/draw": "analysis/figures/test_steps",
    "analysis/figures/study": "analysis/figures/test_steps",
    "analysis/frames": "analysis/figures/test_surface",
    "analysis/markdown": "analysis/html/test_page",
    "cli/app": "cli/test_cli",
    "cli/forking": "forks/test_experiment",
    "cli/importing": "integrations/importers/test_writing",
    "cli/rotating": "training/test_rotating",
    "cli/sweeping": "sweeps/test_execute",
    "config/policy": "config/test_run",
    "config/probes": "probes/test_probe_set",
    "config/tasks": "config/test_run",
    "config/training": "config/test_run",
    "config/warm_start": "warm_start/test_pretraining",
    "forks/state": "forks/test_outcomes",
    "integrations/hf_trainer/arguments": "integrations/hf_trainer/test_supervised",
    "integrations/hf_trainer/base": "integrations/hf_trainer/test_supervised",
    "integrations/hf_trainer/step": "integrations/hf_trainer/test_supervised",
    "integrations/hf_trainer/trace": "integrations/hf_trainer/test_supervised",
    "integrations/trl/arguments": "integrations/trl/test_recorder",
    "objective/values": "objective/test_token_weights",
    "policy/cache": "policy/test_forward",
    "policy/remote": "policy/test_servers",
    "policy/rollouts": "policy/test_generation",
    "policy/sharding": "training/test_loop_processes",
    "policy/shared_decoding": "policy/test_generation",
    "probes/hessian/dual": "probes/hessian/test_streamed",
    "probes/hessian/head": "probes/hessian/test_causal_lm",
    "probes/hessian/result": "probes/hessian/test_api",
    "probes/surface": "probes/test_perturbation",
    "probes/token_gradients/central": "probes/test_attribution",
    "probes/token_gradients/exact": "probes/token_gradients/test_token_gradients",
    "probes/token_gradients/forward_mode": "probes/test_attribution",
    "probes/token_gradients/local": "probes/token_gradients/test_token_gradients",
    "probes/token_gradients/structure": "probes/token_gradients/test_uses",
    "probes/token_gradients/tangents": "probes/token_gradients/test_sketch",
    "recording/step": "training/test_learner",
    "tasks/dataset_files": "tasks/test_dataset",
    "training/evaluate_model": "training/test_evaluate",
}
"""Modules that are tested through the module that uses them, with the file that does."""

OTHER = {"benchmarks", "faults", "frozen"}
"""Folders of tests of something else than the package: `experiments/benchmarks`, broken input, kept numbers."""


def _code_lines(path: Path) -> int:
    """Lines of a module that are neither blank nor comment nor docstring."""
    text = path.read_text(encoding="utf-8")
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            skipped.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and n not in skipped for n, line in lines)


def test_each_module_has_its_test_file():
    problems = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).with_suffix("").as_posix()
        if path.name.startswith("__") or _code_lines(path) <= SMALL:
            own = False
        else:
            own = not list((TESTS / name).parent.glob(f"test_{path.stem}*.py"))
        if own and name not in ELSEWHERE:
            problems.append(f"sharpscope/{name}.py: tests/{Path(name).parent}/test_{path.stem}.py is missing")
        if not own and name in ELSEWHERE:
            problems.append(f"ELSEWHERE: {name} needs no entry")
    problems += [f"tests/{file}.py is missing" for file in ELSEWHERE.values() if not (TESTS / f"{file}.py").is_file()]
    problems += [f"ELSEWHERE: {name} is no module" for name in ELSEWHERE if not (PACKAGE / f"{name}.py").is_file()]
    assert problems == []


def test_each_test_file_names_a_module():
    """`test_x.py` or `test_x_aspect.py` in the folder of module or package x; files at the top are of the project."""
    problems = []
    for path in sorted(TESTS.glob("*/**/test_*.py")):
        folder = path.relative_to(TESTS).parent
        if folder.parts[0] in OTHER:
            continue
        names = {entry.stem for entry in (PACKAGE / folder).glob("[!_]*")} | {folder.name}
        stem = path.stem.removeprefix("test_")
        if not any(stem == name or stem.startswith(f"{name}_") for name in names):
            problems.append(
                f"tests/{path.relative_to(TESTS).as_posix()}: sharpscope/{folder.as_posix()}/{stem}.py is no module"
            )
    assert problems == []
