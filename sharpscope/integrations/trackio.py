"""Export to Trackio, on this machine: curves, alerts of what was found, the leading tokens as traces, and the page as an artifact."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pandas as pd

from sharpscope.analysis import analyze
from sharpscope.causes import verdict
from sharpscope.errors import UserError
from sharpscope.traces import Run, load_run
from sharpscope.untrusted import visible

if TYPE_CHECKING:
    from trackio.run import Run as Logged

ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL")
"""Variables with which Trackio sends to another machine."""
LEVELS = {"info": "info", "warning": "warn", "error": "error"}
"""Severity of an event -> level of an alert."""
LEADING = 8
"""Tokens that a trace lists."""


def open_run(
    stack: ExitStack, out: Path, name: str, run: Run, project: str
) -> Callable[[int, dict[str, float]], object]:
    """Begin a run of Trackio in the folder `out`; what is not a curve is written when the stack closes.

    Returns:
        What writes the scalars of a step.

    Raises:
        UserError: a variable of the environment would send data away, or Trackio writes to another folder.
    """
    for variable in ELSEWHERE:
        if os.environ.get(variable):
            raise UserError(f"--to trackio: {variable} is set and would send data away; unset it")
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TRACKIO_DIR", str(out.resolve()))  # read when it is imported
    trackio = importlib.import_module("trackio")
    if Path(trackio.TRACKIO_DIR).resolve() != out.resolve():
        raise UserError(f"--out {out}: TRACKIO_DIR is {trackio.TRACKIO_DIR}; give that folder")
    with redirect_stdout(StringIO()):
        logged = trackio.init(
            project=project,
            name=name,
            config=run.config,
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
    # several runs are open at once, and `_close` ends each: Trackio would end this one at the next `init`
    trackio.context_vars.current_run.set(None)
    stack.callback(lambda: _close(trackio, logged, run, out))
    return lambda step, row: logged.log(row, step=step)


def _close(trackio: ModuleType, logged: Logged, run: Run, out: Path) -> None:
    """Write alerts, traces and the page, and end the run."""
    run = load_run(run.path)  # it may have gone on
    with redirect_stdout(StringIO()):
        for title, text, level in alerts(run):
            logged.alert(title, text, level=trackio.AlertLevel(level))
        for step, messages, metadata in token_traces(run):
            logged.log({"tokens": trackio.Trace(messages, metadata)}, step=step)
        page = analyze([run.path], out / f"{logged.name}-report").page
        logged.log_artifact(page, name=f"{logged.name}-report", type="report")
        logged.finish()


def alerts(run: Run) -> list[tuple[str, str, str]]:
    """Title, text and level (info, warn, error) of the causes and of the events of a run."""
    found = [
        (visible(cause.sentence), visible(f"step {cause.step}: {cause.evidence}"), "error")
        for cause in verdict(run).causes
    ]
    for event in run.events.itertuples():
        text = f"step {event.step}: {event.message}"
        found.append((visible(str(event.rule)), visible(text), LEVELS[str(event.severity)]))
    return found


def token_traces(run: Run) -> Sequence[tuple[int, list[dict[str, str]], Mapping[str, object]]]:
    """Step, messages (a prompt and its completion) and the leading tokens, for each step with measured tokens.

    The completion is the one with the token of the largest |effect| on KL, or, where effects were not measured, of the largest
    |share of ‖∇L‖²|.
    """
    found = []
    for step in run.token_steps:
        tokens = run.tokens(step)
        by = next(
            (c for c in ("effect_kl", "attribution") if tokens.get(c, _NONE).notna().any()), None
        )
        if by is None:
            continue
        size = tokens[by].astype(float).abs()
        of = tokens["rollout"][size.argmax()]
        rows = run.rollouts[(run.rollouts["step"] == step) & (run.rollouts["rollout"] == of)]
        row = rows.iloc[0]
        inside = tokens[tokens["rollout"] == of]
        leading = inside.loc[size[inside.index].nlargest(LEADING).index]
        listed = [
            {"token": visible(str(t)), "position": int(p), by: float(value)}
            for t, p, value in zip(leading["text"], leading["position"], leading[by], strict=True)
        ]
        messages = [
            {"role": "user", "content": visible(str(row["prompt"]))},
            {"role": "assistant", "content": visible(str(row["completion"]))},
        ]
        found.append((int(step), messages, {"score": by, "leading_tokens": listed}))
    return found


_NONE = pd.Series(dtype=float)
