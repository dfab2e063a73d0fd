"""Parts of an update: its shares of ‖∇L‖² and its effects by reward component, kind of group, turn and age of tokens.

The gradient is linear in the advantage. A token has the coefficient c = A·f + c_KL, whose factor f (normalizer, ratio, weight, 0 where
a clip acts) is the one that the loss used. Shares and effects are linear in c, so that a component k with the part A_k of the
advantage has share·(c − c_KL)/c·A_k/A of a token's share. Nothing is computed again: all of it follows from recorded columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from sharpscope.analysis.effects import OUTCOMES
from sharpscope.analysis.sections import Section
from sharpscope.analysis.spikes import step_shares
from sharpscope.analysis.study import per_run, recorded_steps
from sharpscope.analysis.text import number, percent
from sharpscope.analysis.tokens import (
    INCLUSION,
    check_recorded,
    inverse_inclusion,
    sample_text,
    sampled_by,
    sampling_error,
)
from sharpscope.causes.recorded import as_dict
from sharpscope.errors import UserError
from sharpscope.rules.judging import mismatch
from sharpscope.traces import Run

SHARE = "attribution"
MEASURED = {SHARE: "share of ‖∇L‖²", "effect_kl": "effect on KL"}
MEASURED |= {f"effect_{on}": f"effect on {on}" for on in OUTCOMES if on != "kl"}
"""Columns of the tokens table that are linear in a token's coefficient, and their titles."""
_READ = (
    "rollout",
    "position",
    "update",
    "logp",
    "behavior_logp",
    "policy_version",
    "advantage",
    "ratio",
    "clipped",
    "loss_coef",
    "kl_coef",
    *MEASURED,
    INCLUSION,
)
_OF_ROLLOUT = ["rollout", "group", "reward", "reward_parts", "advantage"]
STD_EPSILON = 1e-4
"""Added to a component's deviation where each is scaled by its own, as TRL does [reward]."""
EQUAL, CANCELLED = 1e-6, 1e-4
"""Differences of rewards below this part of the largest are rounding; sums of components below this part of their sizes are 0."""
UNEXPLAINED = 1e-3
"""Largest part of the largest advantage, or of all coefficients, that is not worth naming."""
FITTED = 5000
"""Completions from which the weights of components are found, the last."""
KL, REST = "(KL term)", "(no component)"


# -- Reward components


def reward_components(rollouts: pd.DataFrame) -> pd.DataFrame:
    """The components of the rewards, a column each, indexed as `rollouts`; NaN where a completion has no such component."""
    rows = [as_dict(cell) for cell in rollouts["reward_parts"]]
    return pd.DataFrame(rows, index=rollouts.index).astype(float)


@per_run
def reward_weights(run: Run) -> pd.Series:
    """Weight of each component in the total reward; empty where it is no weighted sum of them, or they cannot be told apart.

    The trainer's weights where run.json has them, else 1 each, else those of least squares, whichever gives every reward.
    """
    rows = run.frame("rollouts", columns=["reward", "reward_parts"]).tail(FITTED)
    rows = rows[np.isfinite(rows["reward"].astype(float))]
    parts = reward_components(rows).fillna(0.0)
    if parts.empty:
        return pd.Series(dtype=float)
    # a constant component or reward has no part in any advantage
    table = parts.to_numpy()  # (completions, components)
    values = table - table.mean(axis=0)
    reward = rows["reward"].to_numpy(float)
    reward = reward - reward.mean()
    trainer = run.info.get("trainer") or {}
    given = (trainer.get("arguments") or {}).get("reward_weights") or []
    count = values.shape[1]
    tried = [given if len(given) == count else [1.0] * count]
    fitted, _, rank, _ = np.linalg.lstsq(values, reward)
    vary = np.ptp(values, axis=0) > 0
    if rank == vary.sum():  # else several weights fit equally well
        tried.append(fitted)
    for weights in tried:
        if np.allclose(
            values @ weights,
            reward,
            rtol=1e-5,
            atol=EQUAL * np.abs(values).max(),
        ):
            return pd.Series(weights, index=parts.columns, dtype=float)
    return pd.Series(dtype=float)


@dataclass(frozen=True, kw_only=True)
class SplitAdvantages:
    """The advantages of a step's completions by component of the reward, or by nothing but the total.

    Attributes:
        parts: (completions, components) A_k, which sum to the advantage; 0 where the components cancel.
        pulls: (completions, components) the same before the division by a deviation [reward].
        silent: (completions,) whether the advantages of its group of two or more should be 0, since all that they are made of is equal.
        cancelled: (completions,) whether components differ from the group's mean and their sum does not.
        grouped: (completions,) whether its group has two or more completions.
        apart: whether each component is divided by its own deviation, not by that of the total.
    """

    parts: pd.DataFrame
    pulls: pd.DataFrame
    silent: pd.Series
    cancelled: pd.Series
    grouped: pd.Series
    apart: bool


def split_advantages(run: Run, step: int) -> SplitAdvantages:
    """Split the advantages of a step, A_k = κ·w_k·(r_k − mean of the group) with the κ of the group that gives the total's.

    The deviation of the *total* reward divides every component, so that the parts sum to the whole; under TRL's
    `normalize_then_sum`, and `advantage.kind=decoupled`, each component is first divided by its own.
    """
    rows = run.frame("rollouts", step, _OF_ROLLOUT).set_index("rollout")
    reward = rows["reward"].astype(float)
    each = rows["group"].fillna(-1)
    method = (run.config.get("method") or {}).get("advantage") or {}
    arguments = (run.info.get("trainer") or {}).get("arguments") or {}
    own = method.get("weights") if method.get("kind") == "decoupled" else None
    apart = own or arguments.get("multi_objective_aggregation") == "normalize_then_sum"
    weights = pd.Series(own, dtype=float) if own else reward_weights(run)
    if weights.empty:  # the total is the only component
        weights = pd.Series({"reward": 1.0})
        values = reward.to_frame()
    else:
        values = reward_components(rows).reindex(columns=weights.index)
    if not apart:
        values = values.fillna(0.0).where(reward.notna())

    def of_group(table: pd.DataFrame, what: Literal["mean", "max", "std", "sum"]) -> pd.DataFrame:
        """A statistic of each row's group."""
        return table.groupby(each).transform(what)

    # equal rewards of a group differ from their mean by rounding, which a division would blow up
    pulls = values - of_group(values, "mean")
    rounding = EQUAL * of_group(values.abs(), "max")
    pulls = pulls.where(pulls.abs() > rounding, 0.0)
    if apart:
        deviation = of_group(values, "std").fillna(0.0)
        pulls = pulls / (deviation + STD_EPSILON)
    pulls = pulls * weights
    sums = pd.DataFrame(
        {
            "total": pulls.sum(axis=1),
            "size": pulls.abs().sum(axis=1),
            "advantage": rows["advantage"].astype(float),
        }
    )
    total = sums["total"]
    size = sums["size"]
    largest = of_group(sums.abs(), "max")
    silent = largest["total"] <= EQUAL * largest["size"]
    # κ: least squares of the group's advantages on its totals
    products = pd.DataFrame({"product": total * sums["advantage"], "square": total**2})
    of_products = of_group(products, "sum")
    scale = of_products["product"] / of_products["square"].mask(silent)
    # components that cancel have parts of any size and a sum of 0: no κ tells them
    cancelled = (total.abs() <= CANCELLED * size) & (size > 0)
    parts = pulls.mul(scale.fillna(0.0), axis=0).mask(cancelled, 0.0)
    # a loop without groups has one completion in each, whose baseline is something else
    grouped = each.groupby(each).transform("size") > 1
    return SplitAdvantages(
        parts=parts,
        pulls=pulls,
        silent=silent & reward.notna() & grouped,
        cancelled=cancelled,
        grouped=grouped,
        apart=bool(apart),
    )


# -- Tokens and their sums


@per_run
def tokens_of_step(run: Run, step: int) -> pd.DataFrame:
    """The tokens that updates of a step used, with `group` and `unit`, by which samples were drawn.

    Shares are those of one update, see `step_shares`.
    """
    tokens = run.tokens(steps=[step], columns=_READ).dropna(subset=["update"])
    shares = step_shares(run, step)
    if len(shares):
        tokens[SHARE] = tokens[SHARE].where(tokens["update"] == shares["update"].iloc[0])
    # A damaged part of the rollouts is set aside, with a warning, when its damaged column is read.
    group = run.frame("rollouts", step, _OF_ROLLOUT).set_index("rollout")["group"]
    tokens = tokens[tokens["rollout"].isin(group.index)]
    tokens = tokens.astype(dict.fromkeys(_READ[2:], float))
    tokens = tokens.assign(group=tokens["rollout"].map(group))
    tokens = tokens.sort_values(["rollout", "position"], ignore_index=True)
    return tokens.assign(unit=tokens[sampled_by(run)])


def sums_of(tokens: pd.DataFrame, factors: pd.DataFrame) -> pd.DataFrame:
    """Sums of every column of MEASURED that the tokens have, times each column (n,) of `factors`, a row each.

    `factors` of labels are dummies. Of a sample of tokens sums are estimates (Horvitz and Thompson), with standard errors in columns `…_error`.
    """
    made = {}
    for name in MEASURED:
        known = tokens[tokens[name].notna()]
        if known.empty:
            continue
        chance = 1 / inverse_inclusion(known)
        values = factors.loc[known.index].mul(known[name], axis=0)
        made[name] = values.div(chance, axis=0).sum()
        if (chance < 1).any():
            columns = values.to_numpy().T  # (factors, tokens)
            errors = [sampling_error(one, known["unit"], chance) for one in columns]
            made[f"{name}_error"] = pd.Series(errors, index=factors.columns)
    return pd.DataFrame(made, index=factors.columns)


def component_factors(tokens: pd.DataFrame, split: SplitAdvantages) -> pd.DataFrame:
    """(tokens, components and terms): which part of a token's coefficient each has; they sum to 1 where it is not 0.

    Terms: KL, the loss's KL term, and REST, what no component explains (an advantage in a group whose rewards are equal).
    """
    coef = tokens["loss_coef"].where(tokens["loss_coef"] != 0)
    kl = (tokens["kl_coef"] / coef).fillna(0.0)
    policy = (1 - kl).mask(coef.isna(), 0.0)
    advantage = tokens["advantage"].where(tokens["advantage"] != 0)
    parts = split.parts.loc[tokens["rollout"]].set_index(tokens.index)
    each = parts.div(advantage, axis=0).fillna(0.0)  # A_k/A
    rest = policy * (1 - each.sum(axis=1))
    return each.mul(policy, axis=0).assign(**{KL: kl, REST: rest})


# -- Sections


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """An update by component and by kind of group; `components` is empty with the reason `why`.

    `cancelled`: how many completions have components that cancel, and their part of Σ |w·(r − mean)| over tokens and components.
    """

    components: pd.DataFrame
    kinds: pd.DataFrame
    cancelled: tuple[int, float]
    phantom: str
    why: str


@per_run
def step_parts(run: Run, step: int) -> StepParts:
    """The sums of a step by component and by kind of group, with the groups that should give nothing and do."""
    tokens = tokens_of_step(run, step)
    split = split_advantages(run, step)
    places = tokens["rollout"]
    size = split.pulls.abs().sum(axis=1).loc[places].to_numpy()  # (tokens,)
    gone = split.cancelled.loc[places].to_numpy()
    why = _why_not(run, tokens, split)
    sums = pd.DataFrame()
    if not why:
        factors = component_factors(tokens, split)
        # rounding of the recorded float32 values is no term
        weights = tokens["loss_coef"].abs() / max(tokens["loss_coef"].abs().sum(), 1e-300)
        used = factors.abs().mul(weights, axis=0).sum() > UNEXPLAINED
        empty = [name for name in (KL, REST) if not used[name]]
        sums = sums_of(tokens, factors.drop(columns=empty))
    return StepParts(
        components=sums,
        kinds=_kinds(run, step, tokens, split),
        cancelled=(int(split.cancelled.sum()), size[gone].sum() / max(size.sum(), 1e-300)),
        phantom=_phantom(tokens, split),
        why=why,
    )


def _why_not(run: Run, tokens: pd.DataFrame, split: SplitAdvantages) -> str:
    """Why the coefficients of tokens cannot be split by component; empty if they can."""
    if not split.grouped.any():
        return "no group has two completions"
    if reward_weights(run).empty and "reward" in split.parts:
        return "the rewards are no weighted sum of recorded components that can be told apart"
    if tokens["kl_coef"].isna().any():
        return "it is not recorded which part of the coefficients the KL term has"
    places = tokens["rollout"]
    told = ~(split.silent | split.cancelled).loc[places].to_numpy()
    explained = split.parts.sum(axis=1).loc[places].to_numpy()
    left = (tokens["advantage"] - explained)[told].abs()
    if (left <= UNEXPLAINED * tokens["advantage"].abs().max()).all():
        return ""
    return "the advantages are no multiples of the rewards' differences from their group"


def _kinds(run: Run, step: int, tokens: pd.DataFrame, split: SplitAdvantages) -> pd.DataFrame:
    """Sums by kind of group: all wrong, mixed, all right; without answers that are right or wrong, whether rewards differ."""
    names = ["rollout", "group", "correct", "reward"]
    rows = run.frame("rollouts", step, names).set_index("rollout")
    right = rows["correct"].astype(float).groupby(rows["group"]).transform("mean")
    kind = right.map({0.0: "all wrong", 1.0: "all right"}).fillna("mixed")
    if right.isna().any():
        kind = split.silent.map({True: "equal rewards", False: "rewards differ"})
        kind = kind.where(rows["reward"].notna())
    sums = sums_of(tokens, pd.get_dummies(tokens["rollout"].map(kind), dtype=float))
    return sums.assign(groups=rows["group"].groupby(kind).nunique())


def _phantom(tokens: pd.DataFrame, split: SplitAdvantages) -> str:
    """A sentence on the groups whose advantages should be 0 and that have a gradient; empty without one."""
    silent = split.silent.loc[tokens["rollout"]].to_numpy()
    moved = tokens[silent & (tokens["loss_coef"] != 0)]
    coefficients = moved["loss_coef"].abs()
    size = coefficients.sum() / max(tokens["loss_coef"].abs().sum(), 1e-300)
    if size < UNEXPLAINED:  # rounding of equal rewards
        return ""
    policy = moved["loss_coef"] - moved["kl_coef"].fillna(0.0)
    largest = moved["advantage"].abs().max()
    cause = "the loss has a term without advantages"
    if (policy.abs() <= UNEXPLAINED * coefficients).all():
        cause = "the KL term acts on them too"
    elif largest > 0:
        cause = f"their advantages are up to {number(largest)}, by a baseline or scale that is not the group's, or by rounding"
    share = sums_of(tokens, pd.DataFrame({"silent": silent.astype(float)})).get(SHARE)
    carried = "" if share is None else f" and {percent(share.iloc[0], 1, sign=True)} of ‖∇L‖²"
    count = moved["group"].nunique()
    return f"Phantom gradient: groups with equal rewards ({count}) should give nothing and have {percent(size, 1)} of Σ|c|{carried}: {cause}."


def component_sections(run: Run, step: int) -> list[Section]:
    """A step's update by reward component and by kind of group."""
    parts, split = step_parts(run, step), split_advantages(run, step)
    sample = sample_text(run, tokens_of_step(run, step))
    sampled = f"Estimated from {sample}: shares need not sum to 100 %. " if sample else ""
    title = f"{run.name}, step {step}: by reward component"
    first = Section(title, f"Not split: {parts.why}.")
    if not parts.why:
        divided = "Each component is divided by its own deviation in the group"
        if not split.apart:
            divided = "The deviation of the total reward divides every component"
        note = f"{sampled}{divided}; the parts sum to the whole."
        count, size = parts.cancelled
        if count:
            note += f" Left out: {count} completions whose components cancel, {percent(size, 1)} of Σ|w·(r − mean)|; their parts sum to 0."
        first = _section(title, "component", parts.components, note)
    if len(parts.kinds) < 2 and not parts.phantom:
        return [first]
    return [first, _section("By kind of group", "groups that are", parts.kinds, parts.phantom)]


def _section(title: str, name: str, sums: pd.DataFrame, note: str) -> Section:
    """A table of sums by their index."""
    numbers = sums.rename_axis(name).reset_index()
    names = [str(one) for one in sums if SHARE in str(one)]
    shares = {one: numbers[one].map(lambda x: percent(x, 1)) for one in names}
    titles = MEASURED | {f"{one}_error": "± SE" for one in MEASURED}
    table = numbers.assign(**shares).rename(columns=titles)
    return Section(title, table, note, records=numbers.to_dict("records"))  # type: ignore[arg-type]


def turns(tokens: pd.DataFrame) -> pd.Series:
    """(tokens,) turn of each drawn token in its completion, from 1: a new one where positions leave out inserted tokens.

    `tokens` are those of whole completions, in order.
    """
    begins = tokens.groupby("rollout")["position"].diff() > 1
    return begins.groupby(tokens["rollout"]).cumsum() + 1


def statistics_by(tokens: pd.DataFrame, labels: pd.Series) -> pd.DataFrame:
    """By label: tokens, mean k3 of KL(μ‖π) [nats], mean |ln ratio|, clipped (share), Σ|c|, and the sums of MEASURED."""
    differences = mismatch(tokens["logp"].to_numpy(), tokens["behavior_logp"].to_numpy())
    values = pd.DataFrame(
        {
            "KL(μ‖π), k3": differences["k3"],
            "|ln ratio|": np.log(tokens["ratio"]).abs(),
            "clipped": tokens["clipped"].abs(),
        },
        index=tokens.index,
    )
    means = values.groupby(labels).mean().dropna(axis=1, how="all")
    sizes = tokens["loss_coef"].abs().groupby(labels)
    means.insert(0, "tokens", sizes.size())
    size = sizes.sum(min_count=1).rename("Σ|c|")
    sums = sums_of(tokens, pd.get_dummies(labels, dtype=float))
    return pd.concat([means, size, sums], axis=1)


def turn_sections(run: Run, step: int) -> list[Section]:
    """A step's tokens by turn; a single turn is a row too."""
    tokens = tokens_of_step(run, step)
    turn = turns(tokens)
    found = statistics_by(tokens, turn)
    skipped = tokens.groupby("rollout")["position"].diff().fillna(1) - 1
    found.insert(1, "inserted before", skipped.groupby(turn).sum())
    note = "A turn begins where tokens that were not drawn (of a tool or a template) lie before it; π is the trainer's policy, μ the sampler's."
    return [_section(f"{run.name}, step {step}: by turn", "turn", found, note)]


def staleness_sections(run: Run, step: int) -> list[Section]:
    """A step's tokens by how far the policy had moved on between their draw and their first use."""
    tokens = tokens_of_step(run, step)
    version, age = tokens["policy_version"], tokens["update"]
    note = "Age: updates of the step before the one that uses the token first; the trainer gives no version of the sampler's policy."
    if version.notna().any():
        age = version.max() - version
        note = "Age: versions of the sampler's policy before the newest of the step, as the trainer counts them."
    tokens, age = tokens[age.notna()], age.dropna().astype(int)
    found = statistics_by(tokens, age)
    return [_section(f"{run.name}, step {step}: by staleness", "age", found, note)]


BY = {
    "component": component_sections,
    "turn": turn_sections,
    "staleness": staleness_sections,
}
"""Values of `tokens --by` that are of parts of an update."""


def part_sections(run: Run, by: str, step: int | None = None) -> list[Section]:
    """The parts of a step's update by a key of BY.

    Args:
        run: whose tokens are read.
        by: component, turn or staleness.
        step: of the run; None: the last one with shares, else with tokens.

    Raises:
        UserError: no token of the step was recorded, or the run is reduced.
    """
    if run.reduced is not None:
        raise UserError(
            f"--by {by}: {run.name} is reduced to a sample of its tokens; use the run that it was made from"
        )
    there = run.token_steps
    last = (recorded_steps(run, SHARE) or there)[-1:]
    chosen = step if step is not None or not last else last[0]
    check_recorded(by, chosen, there)
    return BY[by](run, int(chosen or 0))


def telling_sections(run: Run, step: int | None = None) -> list[Section]:
    """The parts of a step, by default the last, that say more than a list of its tokens; empty where nothing does.

    Several components, groups with a phantom gradient, several turns.
    """
    measured = [] if run.reduced is not None else recorded_steps(run, SHARE)
    step = measured[-1] if measured and step is None else step
    if step not in measured or tokens_of_step(run, int(step)).empty:
        return []
    parts = step_parts(run, step)
    found = component_sections(run, step) if len(parts.components) > 1 or parts.phantom else []
    if turns(tokens_of_step(run, step)).max() > 1:
        found = [*found, *turn_sections(run, step)]
    return found
