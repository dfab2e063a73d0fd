"""Token weights as functions of logit or probability, and on the tokens of a recorded step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from sharpscope.config import method_rotation_bound
from sharpscope.config.method import PpoClip
from sharpscope.errors import UserError
from sharpscope.objective import (
    Method,
    StepTensors,
    calibrate,
    gradient_killed,
    gradient_mass,
    named_method,
    summarize_weights,
    token_weights,
)
from sharpscope.traces import Run

if TYPE_CHECKING:
    import torch

DEFAULT = ("grpo-sg", "tr-grpo", "ar", "grpo-sg-reverse", "grpo-sg-entropy")
LOGITS = np.linspace(-5.0, 35.0, 401)
PROBABILITIES = np.linspace(0.001, 0.999, 500)


def published(method: Method) -> Method:
    """Return the method with preset `auto` replaced by `paper`."""
    return method.with_preset("auto", "paper")


def function_curves(methods: Sequence[Method]) -> pd.DataFrame:
    """Evaluate the weights of methods on grids of the logit and of the probability, with published constants.

    Returns:
        Columns method, axis (logit | probability), x and weight. Methods whose weight also depends on other values have
        no rows.
    """
    import torch

    rows = []
    for method in methods:
        for axis, x in (("logit", LOGITS), ("probability", PROBABILITIES)):
            values = torch.from_numpy(x)
            step = (
                StepTensors.from_columns(logit=values)
                if axis == "logit"
                else StepTensors.from_columns(logp=values.log())
            )
            try:
                shaping = (
                    calibrate(published(method).weight, step) if method.weight.needs_calibration else method.weight
                )
                weight = token_weights(shaping, step, torch.Generator().manual_seed(0))[:, 0].numpy()
            except (UserError, ValueError):
                continue  # the weight depends on other values
            rows += [(method.name, axis, a, b) for a, b in zip(x, weight, strict=True)]
    return pd.DataFrame(rows, columns=["method", "axis", "x", "weight"])


def step_of(run: Run, step: int) -> StepTensors:
    """Load the loss tokens of a recorded step as (N, T) tensors; `gradient_mass` has the run's aggregation.

    Raises:
        UserError: The step's tokens or rollouts were not recorded, or the run is a reduced one.
    """
    import torch

    if run.reduced is not None:
        raise UserError(
            f"--run {run.path}: is a reduced run without rollouts and with a sample of the tokens; give the full run"
        )
    names = ["rollout", "position", "logp", "logit", "entropy", "collision", "polarity", "logit_grad_norm", "advantage"]
    tokens = run.tokens(steps=[step], columns=["step", *names])
    if tokens.empty:
        raise UserError(f"--step {step}: run '{run.path}' has no tokens of this step; choose another step")
    rollouts, row = np.unique(tokens["rollout"], return_inverse=True)
    column = tokens.groupby("rollout").cumcount().to_numpy().copy()  # the array of pandas is read-only
    shape = (len(rollouts), int(column.max()) + 1)

    def to_matrix(values: np.ndarray) -> torch.Tensor:
        """Values of the tokens (M,) as (N, T), 0 elsewhere."""
        out = torch.zeros(shape, dtype=torch.float64)
        out[row, column] = torch.tensor(values.tolist(), dtype=torch.float64)
        return out

    stats = {name: to_matrix(tokens[name].to_numpy()) for name in names[2:7]}
    norm = to_matrix(tokens["logit_grad_norm"].to_numpy())
    mask = to_matrix(np.ones(len(tokens))).bool()
    # Null where no update used the token: there it has the value of its completion's other tokens.
    given = tokens["advantage"].fillna(tokens.groupby("rollout")["advantage"].transform("first")).fillna(0.0)
    advantage = to_matrix(given.to_numpy())  # (N, T)
    groups = run.rollouts.query("step == @step").set_index("rollout")["group"]
    if not set(rollouts) <= set(groups.index):
        raise UserError(
            f"--step {step}: run '{run.path}' has tokens but no rollouts of this step (recording.rollouts_every); choose a "
            "step with both"
        )
    group = torch.from_numpy(groups.loc[rollouts].to_numpy().copy())
    configured = (run.info.get("config") or {}).get("method") or {}
    aggregate = configured.get("aggregate", "sequence_mean")
    mass = gradient_mass(named_method("grpo").model_copy(update={"aggregate": aggregate}), mask, advantage, norm)
    return StepTensors(
        mask=mask,
        group=group,
        advantage=advantage,
        behavior_logp=stats["logp"],
        gradient_mass=mass,
        **stats,  # type: ignore[arg-type]
    )


def observed(
    methods: Sequence[Method], run: Run, step: int, preset: str = "calibrated"
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compute the weights of methods on a recorded step, calibrated on that step.

    Args:
        methods: Methods to evaluate.
        run: Run with tokens and rollouts of the step.
        step: The step.
        preset: Preset of weights that have none, `paper` or `calibrated`.

    Returns:
        A frame with the weight of each token under each method, and one with a row of statistics per method: `at L` and
        `at U` are shares of the tokens, the next two those of the gradient (`gradient_mass`); `bound [°]` is the largest
        rotation of the gradient by the weights alone; `killed` is the share of tokens whose gradient the clip removes at ratio 1,
        for weights inside a PPO clip.
    """
    import torch

    data = step_of(run, step)
    tokens, shares = [], []
    for method in methods:
        shaping = calibrate(method.weight.with_preset("auto", preset), data)
        weight = token_weights(shaping, data, torch.Generator().manual_seed(0))
        summary = summarize_weights(shaping, weight, data.mask)
        carried = summarize_weights(shaping, weight, data.mask, mass=data.mass)
        killed = None
        if method.weight_on == "ratio" and isinstance(method.clip, PpoClip):
            without_gradient = gradient_killed(method.clip, weight, data.token_advantage)
            killed = float((without_gradient[data.mask] != 0).double().mean())
        shares.append(
            {
                "method": method.name,
                "mean": summary.mean,
                "min": summary.minimum,
                "max": summary.maximum,
                "at L": summary.saturation_low,
                "at U": summary.saturation_high,
                "gradient at L": carried.saturation_low,
                "gradient at U": carried.saturation_high,
                "bound [°]": method_rotation_bound(method.model_copy(update={"weight": shaping}).at(data.progress)),
                "killed": killed,
            }
        )
        tokens.append(
            pd.DataFrame(
                {
                    "method": method.name,
                    "probability": data.logp[data.mask].exp().numpy(),
                    "logit": data.logit[data.mask].numpy(),
                    "weight": weight[data.mask].numpy(),
                }
            )
        )
    return pd.concat(tokens, ignore_index=True), pd.DataFrame(shares)
