"""Declarations: the rules of a study's claims, frozen with a date and a hash, and checked when the claims are tested."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sharpscope.analysis.claims.base import Claim
from sharpscope.analysis.claims.registry import CLAIMS
from sharpscope.analysis.study import Terms
from sharpscope.errors import UserError
from sharpscope.traces import Run, write_atomic


def declared_rules(terms: Terms, baseline: str, treatment: str) -> dict[str, Any]:
    """Everything that decides a verdict besides the data: methods, level, order, least dose and each claim's rule."""
    names = {"{baseline}": baseline, "{treatment}": treatment}
    claims: dict[str, Any] = {}
    for key, claim in _versions().items():
        title = claim.title
        for field, method in names.items():
            title = title.replace(field, method)
        claims[key] = {
            "title": title,
            "rule": claim.rule_text(terms),
            "unit_of_n": claim.unit,
            "minimal_n": claim.minimal_n,
            "margin": terms.margin(key, claim.margin),
            "least_rotation": terms.least_rotation if claim.compares else None,
        }
    rules = {"baseline": baseline, "treatment": treatment, "level": terms.level, "order": list(terms.order)}
    return {**rules, "claims": claims}


def _versions() -> dict[str, Claim]:
    return {v.key: v for claim in CLAIMS.values() for v in (claim, claim.other) if v is not None}


def check_terms(terms: Terms) -> None:
    """Refuse terms that name no claim, and margins in points that are not shares.

    Raises:
        UserError: names the field.
    """
    versions = _versions()
    for field, given, known in (("order", terms.order, CLAIMS), ("margins", tuple(terms.margins), versions)):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise UserError(f"claims.{field}: {unknown[0]} is no claim; give one of {', '.join(known)}")
    for name, margin in terms.margins.items():
        if versions[name].scale == "points" and margin >= 1:
            raise UserError(f"claims.margins: {name} is {margin:g}; give a share below 1: 0.02 is two points")


def rules_hash(rules: Mapping[str, Any]) -> str:
    """SHA-256 of the rules as canonical JSON."""
    text = json.dumps(rules, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def declaration_file(study: Path) -> Path:
    """Path of a study file's declaration: `study.yaml` → `study.declared.json`."""
    return study.with_suffix(".declared.json")


class Declared(NamedTuple):
    """The outcome of declaring: what changed since the declaration before, and whether there was none (`new`)."""

    file: Path
    hash: str
    changed: tuple[str, ...]
    new: bool


def declare(study: Path, rules: Mapping[str, Any], date: str, version: str, why: str = "") -> Declared:
    """Freeze `rules` beside the study file. A second declaration with other rules is added, with its reason; none is removed.

    Args:
        study: the study file.
        rules: of `declared_rules`.
        date: now, in UTC, ISO 8601.
        version: of sharpscope.
        why: reason of a change; needed if there is a declaration with other rules.

    Raises:
        UserError: the rules changed and no reason was given, or the file's hash does not fit its rules.
    """
    file, digest = declaration_file(study), rules_hash(rules)
    states = _states(file) if file.exists() else []
    if states and states[-1]["hash"] == digest:
        return Declared(file, digest, (), False)
    changed = tuple(differences(states[-1]["rules"], rules)) if states else ()
    if states and not why:
        raise UserError(
            f"{file}: declared on {states[-1]['declared']} with other rules ({'; '.join(changed[:3])}); give --why"
        )
    state = {"declared": date, "version": version, "hash": digest, "rules": dict(rules)}
    states.append(state | ({"why": why, "changed": list(changed)} if why else {}))
    write_atomic(file, json.dumps(states, indent=2, ensure_ascii=False) + "\n")
    return Declared(file, digest, changed, len(states) == 1)


def quote(study: Path, rules: Mapping[str, Any], runs: Iterable[Run]) -> str:
    """What is known of the declaration of `rules`, for the head of the verdicts.

    "declared on …; unchanged", what changed and why, or that the rules used are not the declared ones; and how many runs started
    before the last declaration.

    Raises:
        UserError: the file's hash does not fit its rules.
    """
    file = declaration_file(study)
    if not file.exists():
        return f"Not declared: {file.name} does not exist (sharpscope study declare {study.name})."
    states = _states(file)
    first, last = states[0], states[-1]
    text = f"Declared on {first['declared']}"
    if len(states) == 1 and last["hash"] == rules_hash(rules):
        text += f"; unchanged (SHA-256 {last['hash'][:16]})."
    else:
        text += "".join(
            f"; changed on {s['declared']}: {'; '.join(s['changed'])} (why: {s['why']})" for s in states[1:]
        )
        if last["hash"] != rules_hash(rules):
            text += f"; NOT the rules used here: {'; '.join(differences(last['rules'], rules))}"
        text += "."
    started = [str(run.info.get("started")) for run in runs if run.info.get("started")]
    early = sum(_seconds(value) < _seconds(str(last["declared"])) for value in started)
    return f"{text} {early} of {len(started)} runs started before the {'last ' if len(states) > 1 else ''}declaration."


def differences(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """One line for each field that differs."""
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{path}{key}.")
        elif old != new:
            shown = ("absent" if value is None else str(value) for value in (old, new))
            yield f"{path}{key}: {' → '.join(text if len(text) <= 60 else text[:57] + '…' for text in shown)}"


def _states(file: Path) -> list[dict[str, Any]]:
    try:
        states = json.loads(file.read_text(encoding="utf-8"))
        intact = bool(states) and all(state["hash"] == rules_hash(state["rules"]) for state in states)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: is not a declaration; restore it") from error
    if not intact:
        raise UserError(f"{file}: the rules do not fit their hash, so they were edited; restore the file")
    return list(states)


def _seconds(text: str) -> float:
    from datetime import UTC, datetime

    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
