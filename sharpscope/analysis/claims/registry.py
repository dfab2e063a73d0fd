"""All claims by name and their verdicts; declarations: the rules, frozen with a date and a hash; what is written of verdicts; power.

Power is in closed form: by Student's t with the spread of runs that exist.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import chi2, nct, t

from sharpscope import __version__
from sharpscope.analysis.claims import accuracy, gradients, sharpness, tokens
from sharpscope.analysis.claims.base import FEWEST, Claim, Verdict, clusters_needed, decide, shown
from sharpscope.analysis.claims.gradients import BOUNDS, Check, logit_bounds
from sharpscope.analysis.claims.planning import FACTOR, MEASURED, Pairs, pairs_of
from sharpscope.analysis.measures import dose_of
from sharpscope.analysis.sections import Section
from sharpscope.analysis.study import Study, flat
from sharpscope.analysis.text import escape_markdown, listed, number, printable
from sharpscope.config import ClaimsSpec
from sharpscope.errors import UserError, nearest
from sharpscope.traces import Run, Runs, output_folder, write_atomic
from sharpscope.traces.files import now

_CLAIMS = (
    tokens.C2,
    tokens.C3,
    sharpness.C4,
    sharpness.C6,
    accuracy.C7,
    gradients.C8,
    tokens.C9,
    accuracy.C10,
    gradients.C12,
    gradients.C13,
    accuracy.C14,
)
CLAIMS: dict[str, Claim] = {claim.name: claim for claim in _CLAIMS}
VERSIONS = {
    version.key: version
    for claim in _CLAIMS
    for version in (claim, claim.other)
    if version is not None
}
REDUCERS = (BOUNDS, *(reducer for claim in _CLAIMS for reducer in claim.reducers))
"""Everything that claims need of whole token tables, and that a reduced copy of a run keeps in their place."""


def judge(study: Study, names: Sequence[str] | None = None) -> tuple[list[Verdict], list[Check]]:
    """The verdicts on the claims `names` (None: all) and the check C1 of the recording, if asked for; the tokens are read once.

    The primary claims (C7, C4, C10) have a fixed order, and all of them are tested whichever are asked for, so that a verdict does
    not depend on what else was asked. A primary verdict is confirmatory if every claim before it in the order has the same verdict:
    testing in a fixed order and stopping at the first claim that is not rejected keeps the chance of any wrong rejection at the level
    (Maurer, Hothorn and Lehmacher 1995), for `supported` and for `refuted` separately.
    """
    names = claim_names(names)
    order = study.terms.order
    claims = {
        n: c for n, c in CLAIMS.items() if n in names or (n in order and set(names) & set(order))
    }
    checked = [BOUNDS] if "C1" in names else []
    # one pass over all token tables for all claims
    study.read_tokens(
        [*checked, *(reducer for claim in claims.values() for reducer in claim.reducers)]
    )
    left = [name for name in study.runs if name not in study.finished]
    first = listed(left, 5)
    unfinished = (f"{len(left)} unfinished runs are left out: {first}",) if left else ()

    def verdict(claim: Claim | None) -> Verdict | None:
        """The verdict on one version of a claim."""
        if claim is None:
            return None
        found = claim.measure(study)
        if claim.compares and found.dose is None:
            found = replace(
                found, dose=dose_of(study.alike(study.treatment).values(), study.treatment)
            )
        found = replace(found, notes=(*found.notes, *unfinished))
        return replace(decide(claim, found, study.terms), other=verdict(claim.other))

    result = {
        name: found for name, claim in claims.items() if (found := verdict(claim)) is not None
    }
    largest = 0.0
    before = set[str]()
    # the adjusted p of a claim is the largest so far: stopping at the first that is not rejected keeps the level
    for name in order:
        if name in result:
            found = result[name]
            before.add(found.verdict)
            largest = max(largest, 1.0 if found.p_value is None else found.p_value)
            adjusted = None if found.p_value is None else largest
            alike = before in ({"supported"}, {"refuted"})
            result[name] = replace(found, p_adjusted=adjusted, confirmatory=alike)
    return [result[name] for name in names if name in result], [
        logit_bounds(study) for _ in checked
    ]


def study_of(
    runs: Runs,
    baseline: str = "grpo",
    treatment: str | None = None,
    terms: ClaimsSpec | None = None,
) -> Study:
    """The runs laid out for comparing two methods, by their names in run.json; `terms` None: the rules' margins, level and order.

    Treatment None: grpo-sg where it was run, or else the other method with the most finished runs.

    Raises:
        UserError: a method compared with itself, or one that no finished run has; it lists those that are there.
    """
    if baseline == treatment:
        raise UserError(f"treatment {treatment}: the same as the baseline; give another method")
    study = Study(runs.by_name, baseline, treatment or "grpo-sg")
    there = {method: len(study.of(method)) for method in study.methods}
    if treatment is None and study.treatment not in there:
        others = [method for method in there if method != baseline]
        study.treatment = max(others, key=lambda method: there[method], default=study.treatment)
    methods = {"baseline": baseline, "treatment": study.treatment}
    study.terms = (terms or ClaimsSpec()).model_copy(update=methods)
    arms = {arm for run in runs.by_name.values() for arm in run.forks.get("arm", ())} | set(there)
    for field, method in methods.items():
        if treatment is not None and there and method not in arms:
            listed = ", ".join(f"{name} ({count})" for name, count in there.items())
            raise UserError(f"{field} {method}: no finished run of it; there are runs of {listed}")
    return study


def claim_names(claims: Sequence[str] | None) -> list[str]:
    """The claims asked for, in order and upper case; None: all. C1 is a check of the recording and among them.

    Raises:
        UserError: an unknown claim.
    """
    known = ["C1", *CLAIMS]
    wanted = (
        known
        if claims is None
        else [name.upper() for name in ([claims] if isinstance(claims, str) else claims)]
    )
    for name in wanted:
        if name not in known:
            raise UserError(f"claim {name}: no such claim{nearest(name, known)}")
    return [name for name in known if name in wanted]


# -- Declarations


def declared_rules(terms: ClaimsSpec, radius: float | None = None) -> dict[str, object]:
    """Everything that decides a verdict besides the data: methods, level, order, least dose, radius and each claim's rule."""
    claims = {
        key: {
            "title": claim.title_text(terms),
            "rule": claim.rule_text(terms),
            "unit_of_n": claim.unit,
            "minimal_n": FEWEST,
            "margin": claim.margin_in(terms),
            "least_rotation": terms.least_rotation if claim.compares else None,
        }
        for key, claim in VERSIONS.items()
    }
    rules = {
        "baseline": terms.baseline,
        "treatment": terms.treatment,
        "level": terms.level,
        "order": list(terms.order),
    }
    return {
        **rules,
        **({} if radius is None else {"radius": radius}),
        "claims": claims,
    }


def check_terms(terms: ClaimsSpec) -> None:
    """Refuse terms that name no claim, and margins in points that are not shares.

    Raises:
        UserError: names the field.
    """
    for field, given, known in (
        ("order", terms.order, CLAIMS),
        ("margins", tuple(terms.margins), VERSIONS),
    ):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise UserError(
                f"claims.{field}: {unknown[0]} is no claim; give one of {', '.join(known)}"
            )
    for name, margin in terms.margins.items():
        if VERSIONS[name].scale == "points" and margin >= 1:
            raise UserError(
                f"claims.margins: {name} is {margin:g}; give a share below 1: 0.02 is two points"
            )


def rules_hash(rules: Mapping[str, object]) -> str:
    """SHA-256 of the rules as canonical JSON."""
    text = json.dumps(
        rules,
        sort_keys=True,
        ensure_ascii=False,
        separators=(",", ":"),
    )
    return hashlib.sha256(text.encode()).hexdigest()


def declaration_file(study: Path) -> Path:
    """Path of a study file's declaration: `study.yaml` → `study.declared.json`."""
    return study.with_suffix(".declared.json")


def declare(study: Path, rules: Mapping[str, object], why: str = "") -> tuple[str, list[str]]:
    """Freeze `rules` beside the study file. A declaration with other rules is added, with its reason; none is removed.

    Returns:
        What was done, with the hash, and what changed, one line each.

    Raises:
        UserError: the rules changed and no reason was given, or the file's hash does not fit its rules.
    """
    file = declaration_file(study)
    digest = rules_hash(rules)
    states = _states(file) if file.exists() else []
    if states and states[-1]["hash"] == digest:
        return f"unchanged since it was declared; SHA-256 {digest}", []
    changed = differences(states[-1]["rules"], rules) if states else []
    if states and not why:
        raise UserError(
            f"{file}: declared on {states[-1]['declared']} with other rules ({_few(changed)}); give --why"
        )
    state = {
        "declared": now(),
        "version": __version__,
        "hash": digest,
        "rules": dict(rules),
    }
    states.append(state | ({"why": why, "changed": changed} if why else {}))
    write_atomic(file, json.dumps(states, indent=2, ensure_ascii=False) + "\n")
    return f"{'declared' if len(states) == 1 else 'changed'}; SHA-256 {digest}", changed


def quote(study: Path, rules: Mapping[str, object], runs: Iterable[Run]) -> str:
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
    parts += [
        f"changed on {s['declared']}: {'; '.join(s['changed'])} (why: {s['why']})"
        for s in states[1:]
    ]
    if last["hash"] != rules_hash(rules):
        parts.append(f"NOT the rules used here: {_few(differences(last['rules'], rules))}")
    elif len(states) == 1:
        parts.append(f"unchanged (SHA-256 {last['hash'][:16]})")
    started = [str(run.info.get("started")) for run in runs if run.info.get("started")]
    declared = datetime.fromisoformat(str(last["declared"])).timestamp()
    # runs that were there before the rules could have shaped them
    early = sum(datetime.fromisoformat(moment).timestamp() < declared for moment in started)
    which = "last " if len(states) > 1 else ""
    return (
        f"{'; '.join(parts)}. {early} of {len(started)} runs started before the {which}declaration."
    )


def differences(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """One line for each field that differs."""
    old = flat(before)
    new = flat(after)
    fields = [field for field in dict.fromkeys([*old, *new]) if old.get(field) != new.get(field)]
    return [
        f"{field}: {' → '.join(printable(one.get(field, 'absent'), 60) for one in (old, new))}"
        for field in fields
    ]


def _few(lines: list[str]) -> str:
    return "; ".join(lines[:3]) + (f" and {len(lines) - 3} more" if len(lines) > 3 else "")


def _states(file: Path) -> list[dict[str, Any]]:
    """The declarations in a file; refused where one does not fit its hash."""
    try:
        states = json.loads(file.read_text(encoding="utf-8"))
        intact = bool(states) and all(
            state["hash"] == rules_hash(state["rules"]) for state in states
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: is not a declaration; restore it") from error
    if not intact:
        raise UserError(
            f"{file}: the rules do not fit their hash, so they were edited; restore the file"
        )
    return list(states)


# -- What is written

LIMITS = (
    "Small scale refutes nothing about large models: each verdict is about the runs named under it. `supported` needs a two-sided p of "
    "no effect below the level, `refuted` a one-sided p of an effect as large as the margin. Primary claims are tested in a fixed order; "
    "where all up to one have the same verdict it is confirmatory. p-values come from sign flips and are exact for values that are "
    "symmetric when there is no effect; a method that rarely collapses is not symmetric, so look at the median and the worst pair."
)
UNDECLARED = "Whether margins, level and order were fixed before the data was not checked (`sharpscope study declare`)."


def versions_of(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Each verdict, followed by that on the claim's second version if it has one."""
    return [version for verdict in verdicts for version in verdict.versions]


def verdict_table(verdicts: Iterable[Verdict]) -> pd.DataFrame:
    """A row for each verdict, those on second versions included."""
    rows = []
    for verdict in versions_of(verdicts):
        effect = verdict.effect
        mark = (
            ""
            if not verdict.primary
            else " (primary, confirmatory)"
            if verdict.confirmatory
            else " (primary)"
        )
        rows.append(
            {
                "claim": verdict.name,
                "verdict": verdict.verdict,
                "title": verdict.title + mark,
                "effect": "–" if effect is None else effect.text,
                "95 % interval": "–"
                if effect is None
                else effect.ends(effect.interval or effect.t) or "–",
                "p": number(verdict.p_value),
                "n": verdict.n,
            }
        )
    return pd.DataFrame(rows)


def claims_json(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as a JSON array (see `Verdict.to_dict`); no NaN in it."""
    values = [verdict.to_dict() for verdict in verdicts]
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def claims_markdown(
    verdicts: Sequence[Verdict], checks: Sequence[Check] = (), declared: str = UNDECLARED
) -> str:
    """The verdicts as Markdown: one table, then each claim with rule and numbers; `declared`: what is known of the rules."""
    table = verdict_table(verdicts).map(escape_markdown)
    rows = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    lines = [
        "# Claims",
        "",
        LIMITS,
        "",
        escape_markdown(declared),
        "",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    for verdict in versions_of(verdicts):
        lines += [
            "",
            f"## {verdict.name}: {escape_markdown(verdict.title)}",
            "",
            f"**{verdict.verdict}**",
            "",
        ]
        lines += [f"- {escape_markdown(line)}" for line in verdict.details()]
    if checks:
        lines += [
            "",
            "## Checks of the recording",
            "",
            *(f"- {escape_markdown(check.line())}" for check in checks),
        ]
    return "\n".join(lines) + "\n"


def write_claims(
    verdicts: Sequence[Verdict],
    out: str | Path,
    checks: Sequence[Check] = (),
    declared: str = UNDECLARED,
) -> list[Path]:
    """Write claims.json and claims.md into `out`; returns both paths.

    Raises:
        UserError: if the folder cannot be made.
    """
    folder = output_folder(out)
    texts = {
        "claims.json": claims_json(verdicts),
        "claims.md": claims_markdown(verdicts, checks, declared),
    }
    for name, text in texts.items():
        write_atomic(folder / name, text)
    return [folder / name for name in texts]


def claim_sections(runs: Runs) -> list[Section]:
    """The verdicts on all claims with their figures, the checks of the recording, and what the tests can decide."""
    from sharpscope.analysis.plots import (
        paired_dots,  # matplotlib, which `study claims` does not need
    )

    verdicts, checked = judge(study_of(runs))
    sections = [
        Section("Claims", verdict_table(verdicts), f"{LIMITS} {UNDECLARED}", "Claims", "claims")
    ]
    sections.append(
        Section(
            "Checks of the recording", "\n".join(check.line() for check in checked), "", "Claims"
        )
    )
    for verdict in versions_of(verdicts):
        sections.append(
            Section(
                f"{verdict.name}: {verdict.verdict}", "\n".join(verdict.details()), "", "Claims"
            )
        )
        if (
            verdict.claim.direction is not None
            and verdict.finding.parts
            and not verdict.finding.missing
        ):
            name = f"{verdict.claim.name.lower()}{'' if verdict.claim.key == verdict.claim.name else '_2'}"
            caption = f"{verdict.title}: {verdict.verdict}. A dot for each of {verdict.n} {verdict.claim.unit}; dashed: the margin."
            sections.append(Section("", paired_dots(verdict), caption, "Claims", name))
    if powers := powers_of(verdicts):
        sections.append(Section("Power", pd.DataFrame(powers), NOTE, "Claims", "power"))
    return sections


# -- Power

TARGET = 0.8
RECOMMENDED = 8
"""Pairs below which the normal model of power is worst: sign flips of six pairs need near unanimity."""
MOST = 1_000
NOTE = (
    "n: pairs of runs with one seed, or the claim's own unit. SD: its 90 % interval in brackets. Power here: chance of supported with the "
    "effect at the margin / of refuted without an effect, by Student's t. n for 80 % of both: at this SD, and at its interval's upper end. "
    f"At least {RECOMMENDED} pairs are advised: sign flips of fewer need near unanimity."
)


def student_power(
    deviation: float, margin: float, n: int, level: float, parts: int = 1
) -> tuple[float, float]:
    """(chance of `supported` with the effect at the margin, of `refuted` without an effect) for n ≥ 2 pairs, deviation > 0.

    Two-sided at `level` and one-sided at level/parts; several parts must all support, as if they were independent.
    """
    shift = margin / deviation * math.sqrt(n)  # noncentrality of t
    support = float(nct.sf(t.ppf(1 - level / 2, n - 1), n - 1, shift))
    return support**parts, float(nct.sf(t.ppf(1 - level / parts, n - 1), n - 1, shift))


def pairs_needed(deviation: float, margin: float, level: float, parts: int = 1) -> int | None:
    """The fewest pairs, at least RECOMMENDED, at which both chances reach TARGET; None if more than MOST."""
    sizes = range(max(RECOMMENDED, clusters_needed(level, parts)), MOST + 1)
    return next(
        (n for n in sizes if min(student_power(deviation, margin, n, level, parts)) >= TARGET), None
    )


def deviation_interval(deviation: float, n: int) -> tuple[float, float]:
    """90 % interval of a standard deviation estimated from n ≥ 2 normal values."""
    low, high = chi2.ppf([0.95, 0.05], n - 1)
    return deviation * math.sqrt((n - 1) / low), deviation * math.sqrt((n - 1) / high)


def powers_of(verdicts: Iterable[Verdict]) -> list[dict[str, str]]:
    """What the paired claims need whose parts have at least two values that vary, as rows of a table."""
    rows = []
    for verdict in versions_of(verdicts):
        if verdict.claim.direction is None:
            continue
        claim, found, level = verdict.claim, verdict.finding.parts.values(), verdict.terms.level
        deviation = max(
            (float(frame["difference"].astype(float).std(ddof=1)) for frame in found), default=0.0
        )
        if not deviation > 0 or (pilot := min(map(len, found))) < 2:
            continue
        parts, margin = (
            len(found) + len(verdict.finding.evidence),
            claim.margin_of_parts(verdict.terms),
        )
        unit = {"points": "points", "percent": "%", "log": "% (ln)"}.get(claim.scale, "")
        low, high = deviation_interval(deviation, pilot)
        ends = [
            f"{(1 if claim.scale == 'plain' else 100) * value:.3g}"
            for value in (deviation, low, high)
        ]
        chances = student_power(deviation, margin, pilot, level, parts)
        needed = [pairs_needed(value, margin, level, parts) for value in (deviation, high)]
        pairs = dict.fromkeys(f"over {MOST:,}" if n is None else f"{n:,}" for n in needed)
        rows.append(
            {
                "claim": verdict.name,
                "n": str(pilot),
                "SD of a value": f"{ends[0]} [{ends[1]}, {ends[2]}] {unit}".rstrip(),
                "margin": f"{shown(margin, claim.scale, signed=False)} {unit.split(' ')[0]}".rstrip(),
                "power": " / ".join(f"{chance:.0%}" for chance in chances),
                "n for 80 %": " to ".join(pairs),
            }
        )
    return rows


def options_of(verdicts: Iterable[Verdict], study: Study) -> list[dict[str, str]]:
    """What would help each claim most beside more pairs: its part of a pair's variance, the pairs that then do, and the cost."""
    rows = []
    for verdict in verdicts:
        claim = verdict.claim.name
        parts = verdict.finding.parts
        for name, frame in parts.items() if claim in MEASURED else ():
            if len(frame) > 1 and frame["difference"].std() > 0:
                title = f"{verdict.name}{f' against {name}' if name else ''}"
                pairs = pairs_of(study, claim, name, frame)
                rows += [{"claim": title, **row} for row in _option_rows(verdict, pairs)]
    return rows


def _option_rows(verdict: Verdict, pairs: Pairs) -> Iterator[dict[str, str]]:
    """Pairs alone first, then the options by their parts, then what pairing by seed does."""
    claim, terms, parts = verdict.claim, verdict.terms, len(verdict.finding.parts)

    def row(name: str, part: str, deviation: float, cost: str) -> dict[str, str]:
        """What one change leaves of the standard deviation, the pairs that it then takes, and its cost."""
        needed = pairs_needed(deviation, claim.margin_of_parts(terms), terms.level, parts)
        return {
            "more of": name,
            "part of the variance": part,
            "SD then": f"{100 * deviation:.3g}",
            "pairs for 80 %": f"over {MOST:,}" if needed is None else f"{needed:,}",
            "cost of a pair": cost,
        }

    runs = f"{pairs.seconds:.3g} s" if pairs.seconds else "not recorded"
    yield row("pairs (seeds) alone", "–", pairs.deviation(0.0), runs)
    for name, part in pairs.options().items():
        share = f"at most {part / pairs.variance:.0%}"
        cost = f"+ {2 * (FACTOR - 1)} × {pairs.cost}"
        yield row(name, share, pairs.deviation(part), cost)
    if not math.isnan(pairs.correlation):
        # of runs with seeds of their own the variances would add up
        apart = math.sqrt(pairs.values.var(axis=0, ddof=1).sum())
        shared = f"correlation {pairs.correlation:+.2f}"
        yield row("common random numbers: without", shared, apart, runs)


OPTIONS_NOTE = (
    f"Each row changes one thing: {FACTOR} times as many prompts or questions, or the mean of {FACTOR} late checkpoints. Its part of a "
    "pair's variance is at most the one shown, since runs of a pair share their prompts. Common random numbers, the prompts and "
    "draws that runs of a seed share, are in use; a negative correlation of the two runs over seeds means that pairing does not help here."
)
