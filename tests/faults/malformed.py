"""Malformed configurations and files through the command line: one line with the place, exit code 2, nothing written.

The cases are drawn by hypothesis; every one is wrong by construction, so that one which is accepted counts as a failure.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from sharpscope.errors import UserError
from tests.faults.setting import Tried

LIMIT_S = 60


class Accepted(BaseException):
    """What was given passed every check: the run's folder would have been made now."""


class Hung(BaseException):
    """A command took longer than a minute."""


@dataclass(frozen=True)
class Called:
    """What a command did: exit code (None: it got through every check), both outputs."""

    code: int | None
    out: str
    err: str


def call(arguments: Sequence[str], folder: Path) -> Called:
    """The command line in this process and in `folder`; a run that gets through every check is stopped there."""
    from sharpscope.cli import main
    from sharpscope.training import loop

    def stop(*_: Any) -> None:
        raise Accepted

    def hang(*_: Any) -> None:
        raise Hung

    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    code: int | None = 0
    old = signal.signal(signal.SIGALRM, hang)
    signal.alarm(LIMIT_S)
    os.chdir(folder)
    try:
        with (
            mock.patch.object(loop, "create_run_dir", stop),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except Accepted:
        code = None
    finally:
        os.chdir(before)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    return Called(code, out.getvalue(), err.getvalue())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder and what it holds; folders as empty."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def verdict(arguments: Sequence[str], folder: Path, names: str, strict: bool = True) -> str:
    """What is wrong with the way a command takes a mistake; empty if nothing is.

    Args:
        arguments: the command line.
        folder: where it runs; nothing in it may change.
        names: what the message must name, such as the file or the field.
        strict: whether it must be refused. Otherwise it may be accepted too, but not fail in another way.
    """
    before = contents(folder)
    try:
        called = call(arguments, folder)
    except Hung:
        return "it hung"
    except BaseException as error:
        return f"it raised {type(error).__name__}: {error}"
    if not strict and called.code in (None, 0):
        return ""
    if called.code != 2:
        return f"exit code {called.code}: {(called.err or called.out)[-300:]!r}"
    errors = [line for line in called.err.splitlines() if line.startswith("error: ")]
    if len(errors) != 1 or "Traceback" in called.err:
        return f"not one line: {called.err[-300:]!r}"
    if names not in errors[0]:
        return f"it does not name {names!r}: {errors[0]!r}"
    changed = {name for name, content in contents(folder).items() if before.get(name) != content} | {
        name for name in before if not (folder / name).exists()
    }
    return f"it changed {sorted(changed)[:3]}" if changed else ""


def try_configs(policy: Path, run_dir: Path, folder: Path, count: int, seed: int = 0) -> Tried:
    """`count` configuration files, wrong in a field, a key or their YAML."""
    from tests.faults.bad_configs import configs

    tried = Tried("a malformed configuration", "one line with place and fix, exit code 2, nothing started or written")
    started = time.monotonic()
    for number, bad in enumerate(_drawn(configs(), count, seed)):
        here = folder / str(number)
        here.mkdir()
        (here / "config.yaml").write_bytes(bad.content)
        failure = verdict(["run", "config.yaml", "--quiet"], here, bad.names)
        tried.count(failure and f"{bad.what}: {failure}")
        shutil.rmtree(here)
    tried.seconds = time.monotonic() - started
    return tried


def try_files(policy: Path, run_dir: Path, folder: Path, count: int, seed: int = 0) -> Tried:
    """`count` data sets, models, tokenizers, run folders and sweeps that are damaged, incomplete or of another kind."""
    from tests.faults.bad_files import KINDS, Material, files

    tried = Tried(f"a malformed file ({len(KINDS)} kinds)", "the same")
    started = time.monotonic()
    for number, (kind, draw) in enumerate(_drawn(files(), count, seed)):
        here = folder / str(number)
        here.mkdir()
        case = KINDS[kind](Material(here, policy, run_dir, draw))
        failure = verdict(case.arguments, here, case.names, case.strict)
        tried.count(failure and f"{kind}, {draw}: {failure}")
        shutil.rmtree(here)
    tried.seconds = time.monotonic() - started
    return tried


def _drawn(strategy: Any, count: int, seed: int) -> Iterator[Any]:
    """`count` examples of a hypothesis strategy, the same for a seed."""
    try:
        import hypothesis
    except ImportError:
        raise UserError("malformed cases are drawn by hypothesis; pip install 'sharpscope[test]'") from None
    found: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def collect(case: Any) -> None:
        found.append(case)

    run: Callable[[], None] = collect
    run()
    yield from found[:count]
