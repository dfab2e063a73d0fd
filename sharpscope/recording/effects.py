"""Effects of an update's tokens for the tokens table; see `sharpscope.effects`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from sharpscope.errors import UserError
from sharpscope.recording.health import refusal
from sharpscope.recording.measurements import MeasuredUpdate, Measurement
from sharpscope.recording.probe_sets import SurfaceProbes
from sharpscope.recording.schedule import StepBudget, Timetable
from sharpscope.rules.judging import Event
from sharpscope.tokens import Effects, Outcome, effects
from sharpscope.tokens.update_effects import LIMIT

RADIUS = 0.05
"""Of the sharpness where the run has found none."""
EFFECTS = ("kl", "entropy", "heldout", "sharpness")
"""Outcomes, in the order of the columns `effect_…`."""


class TokenEffects(Measurement):
    """Effects of the measured tokens on outcomes of all rows of their update."""

    def __init__(self, times: Timetable, surface: SurfaceProbes, budget: StepBudget) -> None:
        super().__init__(times)
        self.surface, self.budget = surface, budget

    def due(self, step: int, spike: bool) -> bool:
        """Whether they are measured in `step`, as far as the budget goes."""
        return super().due(step, spike) and self.budget.take(step)

    def run(self, update: MeasuredUpdate) -> None:
        """Columns effect_…; those of groups without a gradient are known to be 0.

        Outcomes for which the probe set has no stored solutions are left out, and so is the first step of AdamW or Adam: it is the
        gradient's sign, on which single tokens have no effect.
        """
        run, values = update.run, update.values
        names = [name for name in EFFECTS if f"effect_{name}" not in run.refused]
        if not names or not update.update.grad_norm > 0:
            return
        try:
            found = self._measure(update, names)
        except UserError as problem:
            run.refused |= {f"effect_{name}" for name in names}
            values.events.append(refusal(values.step, "the effects of tokens", problem))
            return
        if found is None:
            return
        known = torch.zeros(len(update.inactive), update.mask.shape[1])
        for name, effect in found.values.items():
            update.put(f"effect_{name}", effect)
            values.put(f"effect_{name}", update.update, update.inactive, known)
            if found.checked.get(name, math.nan) <= LIMIT:
                run.checked.add(f"effect_{name}")
        # of this step only: where a step is far from linear in its gradient, later ones may not be
        for name, why in found.withheld.items():
            error = found.checked[name]
            text = f"effect_{name} is left out of this step: {why}"
            values.events.append(
                Event(values.step, "self_check", "warning", error, LIMIT, "left out", text)
            )

    def _measure(self, update: MeasuredUpdate, names: Sequence[str]) -> Effects | None:
        if update.sharded is not None:
            raise UserError("the model is in shards (FSDP2), whose effects cannot be computed")
        if update.update.clips is None:
            raise UserError(
                "the method gives the optimizer another gradient than the loss's (method.sharpness)"
            )
        view = update.view
        check = update.config.probes.check
        if check == "first":
            # the names are kept in checkpoints, so that a run that goes on checks what it would have checked
            passed = all(f"effect_{name}" in update.run.checked for name in names)
            check = "off" if passed else "always"
        if not any(view.optimizer.state.get(p) for p in view.parameters):
            return None
        return effects(
            view.model,
            update.part.input_ids,
            update.mask,
            update.coef,
            view.optimizer,
            self._outcomes(update, names),
            update.part.attention_mask,
            update.config.rollout.temperature,
            max_grad_norm=update.update.clips,
            gradient=[None if p.grad is None else p.grad.detach() for p in view.parameters],
            check=check,
        )

    def _outcomes(self, update: MeasuredUpdate, names: Sequence[str]) -> dict[str, Outcome]:
        """Of all rows of the update, and of the probe set's solutions."""
        whole = update.values.rollouts.rows(update.update.rows)
        # the prompts on which the surface is probed: with all of them, effects took a third of a short run
        probe_set = self.surface.probe_set
        mask = nn.functional.pad(whole.completion_mask, (whole.prompt_width, 0))
        ids, there = whole.input_ids, whole.attention_mask
        found = {
            "kl": Outcome(kind="kl", input_ids=ids, mask=mask, attention_mask=there),
            "entropy": Outcome(kind="entropy", input_ids=ids, mask=mask, attention_mask=there),
        }
        radius = math.nan if self.surface.radius is None else self.surface.radius.rho
        for name, split in (("heldout", "heldout"), ("sharpness", "train")):
            items = () if probe_set is None else probe_set.items
            if probe_set is None or not any(i.split == split and i.solution for i in items):
                continue
            batch = probe_set.solutions(split).to(whole.input_ids.device)
            columns = torch.arange(batch.input_ids.shape[1], device=batch.lengths.device)
            present = (columns < batch.lengths[:, None]).long()
            found[name] = Outcome(
                kind="heldout" if name == "heldout" else "sharpness",
                input_ids=batch.input_ids,
                mask=batch.scored.long(),
                attention_mask=present,
                radius=radius if math.isfinite(radius) else RADIUS,
            )
        return {name: outcome for name, outcome in found.items() if name in set(names)}
