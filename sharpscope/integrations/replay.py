"""A batch that another trainer has dumped, measured at a checkpoint as a recorded step would have been."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from sharpscope.config.method import Method
from sharpscope.config.probes import Check
from sharpscope.errors import UserError
from sharpscope.integrations.completions import Labels
from sharpscope.integrations.importers import Options, import_files, recognize
from sharpscope.policy import Policy
from sharpscope.recording.from_checkpoint import Probed, probe_trace
from sharpscope.traces import Run, load_run

WRITES = {
    "jsonl": "write `prompt_ids` (or `prompt_length`), `token_id`, `logp` and `advantage` on each line",
    "nemo-rl": "NeMo-RL writes them in train_data_stepN.jsonl unless env.should_log_nemo_gym_responses is set",
    "slime": "run slime with --save-debug-train-data (or --dump-details)",
    "verifiers": "verifiers stores token IDs with its TrainClient, not with vf-eval's EvalClient; prime-rl's rollouts have them",
    "open-instruct": "run open-instruct with --save_traces",
    "prime-rl": "run prime-rl with its token export, or give its rollouts/step_N folder",
    "verl": "verl's rollout files (trainer.rollout_data_dir) have text only, from which IDs cannot be restored; record the training "
    "with sharpscope's recorder for verl",
}
"""Format -> what makes its trainer write the IDs, log-probabilities and advantages of a batch."""


def probe_rollouts(
    source: Path,
    policy: Policy,
    out: Path,
    *,
    method: Method | None = None,
    kind: str | None = None,
    options: Options | None = None,
    temperature: float | None = None,
    steps: Sequence[int] | None = None,
    check: Check = "first",
    on_step: Callable[[Probed], None] | None = None,
    force: bool = False,
) -> list[Probed]:
    """Read a dump of another trainer and write it as a run with shares, norms, layers and rotation at a checkpoint.

    Args:
        source: file or folder; see `sharpscope.integrations.importers.read`.
        policy: the checkpoint that drew the batch, or the one that the first update of the step changed.
        out: folder of the new run.
        method: whose loss gives the tokens' coefficients; None: those in the files.
        kind: format; None: recognized.
        options: of the format.
        temperature: of the log-probabilities; None: 1, or what the files say.
        steps, check, on_step, force: see `probe_trace`.

    Raises:
        UserError: IDs, log-probabilities or advantages are missing (the message says what makes the trainer write them), or the
            checkpoint does not fit.
    """
    kind = kind or recognize(source)
    labels = Labels(method=method.name if method is not None and method.name else "unknown", temperature=temperature)
    with tempfile.TemporaryDirectory() as folder:
        import_files(kind, source, Path(folder) / "imported", labels, options)
        run = load_run(Path(folder) / "imported")
        _check(run, kind, source, method)
        return probe_trace(run, policy, out, steps=steps, method=method, check=check, on_step=on_step, force=force)


def _check(run: Run, kind: str, source: Path, method: Method | None) -> None:
    """Raise UserError if the run lacks what a replay needs."""
    rollouts = run.rollouts
    without = int(rollouts["token_ids"].isna().sum())
    if without or not run.token_steps:
        ids = "prompt and completion" if not run.token_steps else "the prompt"
        raise UserError(
            f"--rollouts {source}: {without or len(rollouts)} of {len(rollouts)} completions have no token IDs of {ids}; {WRITES[kind]}"
        )
    tokens = run.tokens(columns=["loss_coef", "advantage"])
    if method is None and tokens["loss_coef"].isna().any():
        raise UserError(
            f"--rollouts {source}: has no coefficients (loss_coef); give the method that trained on it, such as --method grpo"
        )
    rewarded = rollouts["reward"].notna().all() and rollouts["group"].notna().all()
    if method is not None and tokens["advantage"].isna().any() and not rewarded:
        raise UserError(
            f"--rollouts {source}: has neither advantages nor rewards with groups, from which {method.name} makes them; {WRITES[kind]}"
        )
