"""A batch that another trainer has dumped, measured at a checkpoint as a recorded step would have been."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from sharpscope.config.method import Method
from sharpscope.errors import UserError
from sharpscope.integrations.completions import Labels
from sharpscope.integrations.importers import FORMATS, import_files, recognize
from sharpscope.policy import Policy
from sharpscope.recording.from_checkpoint import Probed, probe_trace
from sharpscope.traces import Run, load_run


def probe_rollouts(
    source: Path,
    policy: Policy,
    out: Path,
    *,
    method: Method | None = None,
    temperature: float | None = None,
    **options: Any,
) -> list[Probed]:
    """Read a dump of another trainer and write it as a run with shares, norms, layers and rotation at a checkpoint.

    Args:
        source: file or folder; see `sharpscope.integrations.importers.read`.
        policy: the checkpoint that drew the batch, or the one that the first update of the step changed.
        out: folder of the new run.
        method: whose loss gives the tokens' coefficients; None: those in the files.
        temperature: of the log-probabilities; None: 1, or what the files say.
        options: further ones of `probe_trace`.

    Raises:
        UserError: IDs, log-probabilities or advantages are missing (the message says what makes the trainer write them), or the
            checkpoint does not fit.
    """
    kind = recognize(source)
    labels = Labels(method=method.name if method is not None and method.name else "unknown", temperature=temperature)
    with tempfile.TemporaryDirectory() as folder:
        import_files(kind, source, Path(folder) / "imported", labels)
        run = load_run(Path(folder) / "imported")
        _check(run, kind, source, method)
        return probe_trace(run, policy, out, method=method, **options)


def _check(run: Run, kind: str, source: Path, method: Method | None) -> None:
    """Raise UserError if the run lacks what a replay needs."""
    rollouts, written = run.rollouts, FORMATS[kind].written
    without = int(rollouts["token_ids"].isna().sum())
    if without or not run.token_steps:
        ids = "prompt and completion" if not run.token_steps else "the prompt"
        count = f"{without or len(rollouts)} of {len(rollouts)}"
        raise UserError(f"--rollouts {source}: {count} completions have no token IDs of {ids}; {written}")
    tokens = run.tokens(columns=["loss_coef", "advantage"])
    if method is None and tokens["loss_coef"].isna().any():
        missing = "has no coefficients (loss_coef); give the method that trained on it, such as --method grpo"
        raise UserError(f"--rollouts {source}: {missing}")
    rewarded = rollouts["reward"].notna().all() and rollouts["group"].notna().all()
    if method is not None and tokens["advantage"].isna().any() and not rewarded:
        missing = f"has neither advantages nor rewards with groups, from which {method.name} makes them; {written}"
        raise UserError(f"--rollouts {source}: {missing}")
