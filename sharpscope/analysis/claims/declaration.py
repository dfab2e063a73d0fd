"""Declarations: the rules of a study's claims, frozen with a date and a hash, and checked when the claims are tested."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sharpscope.analysis.claims.base import Claim
from sharpscope.analysis.claims.registry import CLAIMS
from sharpscope.config import ClaimsSpec
from sharpscope.errors import UserError
from sharpscope.traces import Run, write_atomic
from sharpscope.traces.files import now as clock


def declared_rules(terms: ClaimsSpec, radius: float | None = None) -> dict[str, Any]:
    """Everything that decides a verdict besides the data: methods, level, order, least dose, radius and each claim's rule."""
    claims = {
        key: {
            "title": claim.title_text(terms),
            "rule": claim.rule_text(terms),
            "unit_of_n": claim.unit,
            "minimal_n": claim.minimal_n,
            "margin": terms.margin(key, claim.margin),
            "least_rotation": terms.least_rotation if claim.compares else None,
        }
        for key, claim in _versions().items()
    }
    rules = {"baseline": terms.baseline, "treatment": terms.treatment, "level": terms.level, "order": list(terms.order)}
    return {**rules, **({} if radius is None else {"radius": radius}), "claims": claims}


def _versions() -> dict[str, Claim]:
    return {v.key: v for claim in CLAIMS.values() for v in (claim, claim.other) if v is not None}


def check_terms(terms: ClaimsSpec) -> None:
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


def declare(study: Path, rules: Mapping[str, Any], version: str, why: str = "", now: str = "") -> tuple[str, list[str]]:
    """Freeze `rules` beside the study file. A declaration with other rules is added, with its reason; none is removed.

    Args:
        study: the study file.
        rules: of `declared_rules`.
        version: of sharpscope.
        why: reason of a change; needed if there is a declaration with other rules.
        now: ISO 8601; empty: the time in UTC.

    Returns:
        What was done, with the hash, and what changed, one line each.

    Raises:
        UserError: the rules changed and no reason was given, or the file's hash does not fit its rules.
    """
    file, digest = declaration_file(study), rules_hash(rules)
    states = _states(file) if file.exists() else []
    if states and states[-1]["hash"] == digest:
        return f"unchanged since it was declared; SHA-256 {digest}", []
    changed = list(differences(states[-1]["rules"], rules)) if states else []
    if states and not why:
        raise UserError(f"{file}: declared on {states[-1]['declared']} with other rules ({_few(changed)}); give --why")
    state = {"declared": now or clock(), "version": version, "hash": digest, "rules": dict(rules)}
    states.append(state | ({"why": why, "changed": changed} if why else {}))
    write_atomic(file, json.dumps(states, indent=2, ensure_ascii=False) + "\n")
    return f"{'declared' if len(states) == 1 else 'changed'}; SHA-256 {digest}", changed


def quote(study: Path, rules: Mapping[str, Any], runs: Iterable[Run]) -> str:
    """What is known of the declaration of `rules`: when, what changed since and why, and how many runs started before it.

    Raises:
        UserError: the file's hash does not fit its rules.
    """
    file = declaration_file(study)
    if not file.exists():
        return f"Not declared: {file.name} does not exist (sharpscope study declare {study.name})."
    states = _states(file)
    last = states[-1]
    parts = [f"Declared on {states[0]['declared']}"]
    parts += [f"changed on {s['declared']}: {'; '.join(s['changed'])} (why: {s['why']})" for s in states[1:]]
    if last["hash"] != rules_hash(rules):
        parts.append(f"NOT the rules used here: {_few(list(differences(last['rules'], rules)))}")
    elif len(states) == 1:
        parts.append(f"unchanged (SHA-256 {last['hash'][:16]})")
    started = [str(run.info.get("started")) for run in runs if run.info.get("started")]
    early = sum(_seconds(value) < _seconds(str(last["declared"])) for value in started)
    which = "last " if len(states) > 1 else ""
    return f"{'; '.join(parts)}. {early} of {len(started)} runs started before the {which}declaration."


def differences(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """One line for each field that differs."""
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{path}{key}.")
        elif old != new:
            texts = ("absent" if value is None else str(value) for value in (old, new))
            yield f"{path}{key}: {' → '.join(text if len(text) <= 60 else text[:57] + '…' for text in texts)}"


def _few(lines: list[str]) -> str:
    return "; ".join(lines[:3]) + (f" and {len(lines) - 3} more" if len(lines) > 3 else "")


def _states(file: Path) -> list[dict[str, Any]]:
    """The declarations in a file; refused where one does not fit its hash."""
    try:
        states = json.loads(file.read_text(encoding="utf-8"))
        intact = bool(states) and all(state["hash"] == rules_hash(state["rules"]) for state in states)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: is not a declaration; restore it") from error
    if not intact:
        raise UserError(f"{file}: the rules do not fit their hash, so they were edited; restore the file")
    return list(states)


def _seconds(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
