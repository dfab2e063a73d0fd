"""prime-rl's token export (`enable_token_export`): step_*/rank_*.jsonl, a sequence on each line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpscope.errors import UserError
from sharpscope.integrations.importers.writing import Completion, Labels, json_lines, write

VERSION = 1
_FOLDER = re.compile(r"step_(\d+)")
_ARRAYS = ("position_ids", "loss_mask", "inference_logprobs", "trainer_logprobs")


@dataclass(frozen=True)
class Coefficients:
    """Constants of prime-rl's default loss, which its export leaves out: −adv_tau·A·r·M + kl_tau·(ln π − ln μ)²."""

    adv_tau: float
    kl_tau: float


def import_prime_rl(
    source: Path, out: Path, labels: Labels, coefficients: Coefficients | None = None
) -> dict[str, int]:
    """Write a trace from prime-rl's token export; returns the number of steps, rollouts and tokens.

    Log-probabilities, entropy, advantages, ratios r = π/μ, masks of the default loss and, where the export has them, rewards
    are known; prompts and completions as text with a tokenizer. With `coefficients`, loss_coef is
    w(−adv_tau·A·r·M + 2·kl_tau·(ln π − ln μ)) / (RL tokens of the step), w the token's weight `rl_weights`.

    Args:
        source: output folder of prime-rl, or its token_exports.
        out: folder of the new run.
        labels: what the export does not say.
        coefficients: constants of the default loss; None: loss_coef is null.

    Raises:
        UserError: there is no complete step, or a file cannot be read.
    """
    folder = source / "token_exports" if (source / "token_exports").is_dir() else source
    folders = sorted((int(m[1]), path) for path in folder.glob("step_*") if (m := _FOLDER.fullmatch(path.name)))
    steps = [(step, path) for step, path in folders if (path / "STABLE").exists()]
    if not steps:
        raise UserError(
            f"{source}: has no complete step (token_exports/step_N/STABLE); set enable_token_export in prime-rl"
        )
    notes = [f"imported from prime-rl's token export, {len(steps)} steps"]
    notes += [
        f"step {step} is not complete (no file STABLE) and is left out"
        for step, path in folders
        if (step, path) not in steps
    ]
    if coefficients is not None:
        notes.append(
            f"loss_coef: of the default loss with adv_tau = {coefficients.adv_tau:g}, kl_tau = {coefficients.kl_tau:g}"
        )
    # A first step 0 would stand for "before training".
    shift = 1 if steps[0][0] == 0 else 0
    if shift:
        notes.append("step numbers are one higher than prime-rl's, which begin at 0")
    each = ((step + shift, _step(path, coefficients)) for step, path in steps)
    return write(out, "prime-rl", source, each, labels, notes)


def _step(folder: Path, coefficients: Coefficients | None) -> list[Completion]:
    records = [
        (record, f"{path} line {line}")
        for path in sorted(folder.glob("rank_*.jsonl"), key=lambda path: (len(path.name), path.name))
        for line, record in json_lines(path)
    ]
    total = 0
    for record, where in records:
        _check(record, where)
        total += sum(weight is not None for weight in _weights(record))
    return [one for record, _ in records for one in _sequences(record, coefficients, total)]


def _check(record: dict[str, Any], where: str) -> None:
    if record.get("schema_version") != VERSION:
        raise UserError(
            f"{where}: schema_version {record.get('schema_version')}; this version reads {VERSION}: update sharpscope, or "
            f"export with a prime-rl that writes {VERSION}"
        )
    ids = record.get("token_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise UserError(f"{where}: token_ids is no list of integers; export the step again")
    for name in _ARRAYS:
        values = record.get(name)
        if not isinstance(values, list) or len(values) != len(ids):
            raise UserError(f"{where}: {name} is no list of {len(ids)} values like token_ids; export the step again")


def _weights(record: dict[str, Any]) -> list[float | None]:
    """Each token's weight in the RL loss; None outside it."""
    mask, size = record["loss_mask"], len(record["token_ids"])
    if record.get("losses") is not None:  # since 2026-09, in place of the weights
        own = [(losses or {}).get("rl") for losses in record["losses"]]
        return [1.0 if one is not None and one.get("mask") else None for one in own]
    given = record.get("rl_weights") or [None] * size
    return [
        (1.0 if weight is None else float(weight)) if keep else None for keep, weight in zip(mask, given, strict=True)
    ]


def _sequences(record: dict[str, Any], coefficients: Coefficients | None, total: int) -> Iterator[Completion]:
    """The samples of a packed sequence, in which positions begin anew."""
    starts = [i for i, position in enumerate(record["position_ids"]) if i == 0 or position == 0]
    for start, end in zip(starts, [*starts[1:], len(record["token_ids"])], strict=True):
        mask = record["loss_mask"][start:end]
        if any(mask):
            yield _sequence(record, start, end, coefficients, total)


def _sequence(
    record: dict[str, Any], start: int, end: int, coefficients: Coefficients | None, total: int
) -> Completion:
    places = [i for i in range(start, end) if record["loss_mask"][i]]
    first = places[0]

    def taken(name: str) -> list[Any]:
        values = record.get(name)
        return [None] * len(places) if values is None else [values[i] for i in places]

    high, low = taken("is_masked_high"), taken("is_masked_low")
    clipped = [
        None if h is None or lo is None else int(bool(h)) - int(bool(lo)) for h, lo in zip(high, low, strict=True)
    ]
    ratio = taken("importance_ratio")
    tokens = {
        "position": [i - first for i in places],
        "update": [0] * len(places),
        "token_id": taken("token_ids"),
        "logp": taken("trainer_logprobs"),
        "behavior_logp": taken("inference_logprobs"),
        "entropy": taken("entropy"),
        "advantage": taken("advantages"),
        "ratio": ratio,
        "clipped": clipped,
    }
    if coefficients is not None:
        weights = _weights(record)
        tokens["loss_coef"] = [
            _coefficient(weights[i], a, r, masked, lp, mu, coefficients, total)
            for i, a, r, masked, lp, mu in zip(
                places,
                tokens["advantage"],
                ratio,
                taken("is_masked"),
                tokens["logp"],
                tokens["behavior_logp"],
                strict=True,
            )
        ]
    keep = [i for i, logp in enumerate(tokens["logp"]) if logp is not None]  # a value that is not finite is null
    rewards = [value for value in taken("rewards") if value is not None]
    return Completion(
        ids=record["token_ids"][start:end],
        prompt_length=first - start,
        tokens={name: [values[i] for i in keep] for name, values in tokens.items()},
        reward=float(rewards[0]) if rewards else None,
        parts={"total": float(rewards[0])} if rewards else {},
    )


def _coefficient(
    weight: float | None,
    advantage: float | None,
    ratio: float | None,
    masked: bool | None,
    logp: float | None,
    sampler: float | None,
    constants: Coefficients,
    total: int,
) -> float | None:
    """∂L/∂ln π of one token; None where the export lacks a value (another loss, or one that is not finite)."""
    if weight is None:
        return 0.0
    if advantage is None or ratio is None or masked is None or logp is None or sampler is None:
        return None
    policy = 0.0 if masked else constants.adv_tau * advantage * ratio
    return weight * (2 * constants.kl_tau * (logp - sampler) - policy) / total
