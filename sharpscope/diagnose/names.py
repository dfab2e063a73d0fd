"""Which key of a log is which quantity: by the trainer's own names, else by the words of the key and the values that it has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from sharpscope.diagnose.quantities import BY_NAME, QUANTITIES, Quantity, listed
from sharpscope.diagnose.tables import Table
from sharpscope.diagnose.trainers import (
    BY_TRAINER,
    Trainer,
    forms,
    keys_of,
    trainer_of,
)
from sharpscope.errors import UserError, nearest
from sharpscope.rules.measures import Values

NOISE = frozenset(
    listed(
        "train, training, trainer, actor, critic, policy, rollout, rollouts, metric, metrics, env",
        "all, mean, avg, average, mu, step, batch, global, model, stats, stat, data, agg",
        "aggregate, overall, total, raw, final, task, episode, ep, opt, optim, optimizer, log, logs",
        "val, value, current, running, smoothed, sampled, per, sample, objective, the, of",
    )
)
"""Words that say where a quantity was measured, or that it is a mean, and do not change what it is."""
_EVALUATION = frozenset(listed("eval, evaluation, valid, validation, test, heldout, holdout, dev"))
_OF_POLICIES = frozenset(
    listed(
        "reward, rewards, completion, completions, response, responses, rollout, kl, advantage",
        "advantages, policy, clip, group, generation",
    )
)
"""Words of keys that only a training by rewards has."""
_RATES = frozenset(
    {
        ("accuracy",),
        ("acc",),
        ("correct",),
        ("pass", "rate"),
        ("rate", "success"),
        ("rate", "solve"),
    }
)
"""Words that are the reward of a log that has no other."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
DROPPED = "none"
"""`--map kl=none` leaves a quantity out."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """A quantity found in a log."""

    keys: tuple[str, ...]  # whose values are added up (held-out accuracies: averaged)
    complement: bool = False  # whether one minus their sum is meant
    reason: str = ""  # why these keys are taken; empty where the trainer's source says so


@dataclass(frozen=True, kw_only=True)
class Naming:
    """All quantities of a log."""

    trainer: Trainer | None
    quantities: dict[str, Named] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # key -> why it is not what it is called


def words_of(key: str) -> tuple[str, ...]:
    """The words and numbers of a key, in lower case: "avg_responseLen" -> ("avg", "response", "len")."""
    return tuple(word.lower() for word in _WORDS.findall(key))


def _spelled(quantities: Iterable[Quantity]) -> dict[tuple[str, ...], str]:
    """Sorted words of each spelling, and those that are not NOISE -> quantity."""
    found: dict[tuple[str, ...], str] = {}
    for quantity in quantities:
        for spelling in quantity.spellings:
            words = sorted(spelling.split())
            for part in (words, (word for word in words if word not in NOISE)):
                found.setdefault(tuple(part), quantity.name)
    return found


_TRAINING = _spelled(quantity for quantity in QUANTITIES if not quantity.held_out)
_HELD_OUT = _spelled(quantity for quantity in QUANTITIES if quantity.held_out)


def is_evaluation(key: str) -> bool:
    """Whether a key is of an evaluation by its words.

    Args:
        key: of a log, such as "eval_loss" or "val/reward".
    """
    words = words_of(key)
    return bool(_EVALUATION & set(words)) or words[:1] == ("val",)


def by_words(key: str) -> str | None:
    """The quantity that a key names by its words, None if it names none.

    Args:
        key: of a log, such as "train/mean_reward".

    Returns:
        The canonical quantity, such as "reward". Words of NOISE do not matter, those of an evaluation ask for a
        quantity that is held out.
    """
    words = words_of(key)
    rest = tuple(sorted(word for word in words if word not in NOISE | _EVALUATION))
    if is_evaluation(key):
        return _HELD_OUT.get(rest)
    return _TRAINING.get(tuple(sorted(words))) or _TRAINING.get(rest)


def name_columns(
    table: Table,
    mapping: Mapping[str, str] | None = None,
    trainer: str | None = None,
) -> Naming:
    """Name the columns of a table; `mapping`: quantity -> key that the user names, `trainer`: who wrote it, if that is known.

    Raises:
        UserError: a mapped quantity or key does not exist.
    """
    mapping = mapping or {}
    _check(table, mapping)
    logged = forms(table.columns)
    known = BY_TRAINER[trainer] if trainer else trainer_of(logged)
    plain = {form.removeprefix("train/"): key for form, key in reversed(logged.items())}
    of_plain = trainer_of(plain)
    if of_plain is not None and (known is None or known.name == "HF Trainer"):
        # TensorBoard and W&B show the keys of transformers' trainers with "train/" in front of them.
        known, logged = of_plain, plain
    naming = Naming(trainer=known)
    for quantity in QUANTITIES:
        if quantity.name in mapping:
            continue
        keys = keys_of(known, quantity.name, logged) if known else ()
        if keys:
            complement = known is not None and quantity.name not in known.keys
            naming.quantities[quantity.name] = Named(
                keys=keys,
                complement=complement,
            )
    if trainer is None:
        _guess(table, naming, mapping)
    for name, key in mapping.items():
        if key != DROPPED:
            naming.quantities[name] = Named(
                keys=(key,),
                reason="named by --map",
            )
    return naming


def _check(table: Table, mapping: Mapping[str, str]) -> None:
    for name, key in mapping.items():
        if name not in BY_NAME:
            known = ", ".join(BY_NAME)
            raise UserError(
                f"--map {name}={key}: unknown quantity{nearest(name, BY_NAME)}; known: {known}"
            )
        if key not in table.columns and key != DROPPED:
            raise UserError(
                f"--map {name}={key}: the log has no such key{nearest(key, list(table.columns))}"
            )


def _guess(table: Table, naming: Naming, mapping: Mapping[str, str]) -> None:
    """Name the quantities that are still missing by the words and the values of the other keys."""
    used = {key for named in naming.quantities.values() for key in named.keys}
    candidates: dict[str, list[str]] = {}
    of_policies = False
    for key in table.columns:
        words = words_of(key)
        of_policies = of_policies or bool(_OF_POLICIES & set(words))
        name = by_words(key)
        if name and key not in used and name not in naming.quantities and name not in mapping:
            candidates.setdefault(name, []).append(key)
    if of_policies and not {"reward", "chosen"} & (candidates.keys() | naming.quantities.keys()):
        rates = [k for k in table.columns if _rest(k) in _RATES and not is_evaluation(k)]
        if rates and "reward" not in mapping:
            candidates["reward"] = rates
    if naming.trainer is None:
        _add_canonical(table, candidates)
    for name, keys in candidates.items():
        quantity = BY_NAME[name]
        fitting = []
        for key in sorted(keys, key=lambda key: _preference(key, quantity, table)):
            problem = _problem(quantity, table.columns[key].numbers())
            if problem:
                naming.refused[key] = f"not taken as {quantity.title}: {problem}"
            else:
                fitting.append(key)
        if fitting:
            others = f"; also there: {', '.join(fitting[1:3])}" if len(fitting) > 1 else ""
            reason = f"by its words and values{others}"
            naming.quantities[name] = Named(
                keys=(fitting[0],),
                reason=reason,
            )


def _add_canonical(table: Table, candidates: dict[str, list[str]]) -> None:
    """Add the keys, or last parts of keys, that are names of quantities here. "accuracy" is held out beside a reward only."""
    has_reward = "reward" in candidates and _rest(candidates["reward"][0]) not in _RATES
    for key in table.columns:
        name = key.rpartition("/")[2]
        if name in BY_NAME and name not in candidates and (name != "accuracy" or has_reward):
            candidates[name] = [key]


def _rest(key: str) -> tuple[str, ...]:
    return tuple(sorted(word for word in words_of(key) if word not in NOISE))


def _preference(key: str, quantity: Quantity, table: Table) -> tuple[int, bool, int, int, str]:
    """Sorts the keys of one quantity.

    First come those with more values (within a factor of two), those of a divergence that are never negative, the earlier
    spellings, and the shorter keys.
    """
    values = table.columns[key].numbers()
    negative = quantity.name == "kl" and bool((values < 0).any())
    words = sorted(_rest(key))
    spelled = [sorted(set(spelling.split()) - NOISE) for spelling in quantity.spellings]
    place = spelled.index(words) if words in spelled else len(spelled)
    return -len(values).bit_length(), negative, place, len(words_of(key)), key


def _problem(quantity: Quantity, values: Values) -> str:
    """Why values cannot be those of a quantity; empty if they can."""
    known = values[np.isfinite(values)]
    if not len(known):
        return ""
    low = float(known.min())
    high = float(known.max())
    if low < quantity.lowest - 1e-9:
        return f"it has values down to {low:.3g}"
    if high > quantity.highest * (1 + 1e-6):
        return f"it has values up to {high:.3g}"
    if quantity.name == "length" and high < 1:
        return f"it is at most {high:.3g} tokens"
    if quantity.name == "kl" and np.median(known) < -1:
        return f"its median is {np.median(known):.3g}"
    return ""
