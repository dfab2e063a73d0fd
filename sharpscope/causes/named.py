"""Causes by name: what the violation of an identity means, by where it occurs.

A rule looks at violated identities and gives the facts of its sentence, or None. Rules stand in the order in which causes are
named: what is wrong by itself comes before what may follow from it. The words are in causes.yaml.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sharpscope.causes.identity import Facts, Result, spans
from sharpscope.causes.recorded import Recorded
from sharpscope.causes.sampling import ROUNDING
from sharpscope.packaged import package_yaml


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause that a run shows.

    Attributes:
        name: of the cause, such as `sampling_temperature`.
        sentence: what is wrong.
        step: the first step that shows it.
        evidence: the numbers that show it.
        show: the command that shows the tokens, rows, layers or prompts that carry it.
        wrong: how often the identity behind it is violated in healthy runs.
        change: what to change, in the trainer's words.
        check: what tells it from another cause that fits, or confirms it.
        identity: the violated identity.
    """

    name: str
    sentence: str
    step: int
    evidence: str
    change: str
    check: str
    show: str = ""  # these three are empty for a log
    wrong: str = ""
    identity: str = ""

    @property
    def details(self) -> tuple[str, ...]:
        """The lines below the sentence."""
        names = ("evidence", "show", "wrong", "change", "check")
        return tuple(f"{name:<9}{text}" for name in names if (text := getattr(self, name)))


Found = Mapping[str, Facts]
"""Violated identity -> its facts, with its value."""
_Rule = Callable[[Found], Facts | None]
RULES: dict[str, tuple[str, _Rule]] = {}
"""Cause -> the identity that shows it and its rule, in the order of naming."""
_TEXTS = package_yaml("sharpscope.causes", "causes.yaml")


def _rule(shown_by: str) -> Callable[[_Rule], _Rule]:
    """Register a rule for a cause that an identity shows; it is asked only where that identity is violated."""

    def keep(rule: _Rule) -> _Rule:
        """Register it under its name."""
        RULES[rule.__name__] = shown_by, rule
        return rule

    return keep


def _when(cause: str, shown_by: str, condition: Callable[[Facts], bool] = lambda _: True) -> None:
    """Register a cause that the violation of one identity shows where its facts fulfill a condition."""
    RULES[cause] = shown_by, lambda found: found[shown_by] if condition(found[shown_by]) else None


def _shown(cause: str, found: Found) -> Facts | None:
    """The facts of a cause, where the violated identities show it."""
    shown_by, rule = RULES[cause]
    return rule(found) if shown_by in found else None


# -- Data and rewards

_when("reward_not_finite", "reward_finite")


_when("labels_shifted", "labels", lambda facts: facts["moved"])


_when("labels_of_other_tokens", "labels", lambda facts: not facts["moved"])


_when("masked_inf", "finite", lambda facts: "masked" in facts["message"])


_when("float16_overflow", "finite", lambda facts: "float16" in facts["message"])


_when(  # another operation, or none that was found
    "not_finite",
    "finite",
    lambda facts: "masked" not in facts["message"] and "float16" not in facts["message"],
)


_when("mixed_groups", "one_prompt_a_group")


_when(  # most groups, not a few whose prompts have one likely answer
    "equal_completions",
    "equal_completions",
    lambda facts: facts["share"] > 0.5,
)


_when(
    "rewards_of_other_rows",
    "reward_of_completion",
    lambda facts: facts["moved"] < facts["value"] / 4,
)


_when("advantages_of_other_rows", "group_mean", lambda facts: facts["offset"] != 0)


_when("baseline_of_other_rows", "group_mean", lambda facts: facts["offset"] == 0)


_when("reward_constant", "reward_varies")
_when("cut_rewarded", "cut_reward")
_when("kl_rewarded", "reward_of_distance")
_when("wrong_end_token", "special_tokens")

# -- The tokens in the loss


_when(
    "mask_shifted",
    "end_in_loss",
    lambda facts: facts["before"] > 1,
)  # and one common token before


_when("end_not_in_loss", "end_in_loss", lambda facts: facts["before"] <= 1)


_when("padding_in_loss", "padding_in_loss")


_when("prompt_in_loss", "prompt_outside_loss")  # the first prompt token of a padded row


@_rule("common_beginning")
def prompt_tokens_in_loss(found: Found) -> Facts | None:
    """Beginnings that differ between groups: a prefilled answer would not."""
    facts = found["common_beginning"]
    several = facts["tokens"] >= 2 and facts["beginnings"] > 1
    known = any(_shown(cause, found) for cause in ("equal_completions", "mask_shifted"))
    return facts if several and not known else None


_when(  # one token, at the ends of rows
    "inserted_end",
    "improbable_tokens",
    lambda facts: facts["last"] > 0.8 and facts["same"] > 0.8,
)


@_rule("improbable_tokens")
def inserted_token(found: Found) -> Facts | None:
    """One token, inside rows, in which nothing else is odd."""
    facts = found["improbable_tokens"]
    known = found.keys() & {
        *("common_beginning", "sampler_mismatch", "surprise_at_start", "padding_in_loss")
    }
    return facts if facts["last"] <= 0.8 and facts["same"] > 0.5 and not known else None


# -- Sampler and trainer


@_rule("equal_prefixes")
def dropout(found: Found) -> Facts | None:
    """Equal prefixes with different ratios: a pass is random. Where it is that of the loss, shares do not sum to 1."""
    passes = "the loss's pass" if "shares" in found else "the loss's pass or that of π_old"
    return {**found["equal_prefixes"], "passes": passes}


@_rule("first_ratio")
def old_logp_differs(found: Found) -> Facts | None:
    """A ratio that is not 1 before the first update, where neither sampler nor a random pass tells why."""
    facts = found["first_ratio"]
    if "equal_prefixes" in found or facts["of_sampler"] or facts["first"] < ROUNDING:
        return None
    return {**facts, "how": _old_policy(facts)}


def _old_policy(facts: Facts) -> str:
    """What π_old is, as far as it can be told."""
    if facts["moved"] < 0.2:
        return "it belongs to the token beside: the columns are shifted by one"
    if facts["r2"] > 0.5:
        return f"it is at {facts['temperature']:.2f} times the temperature of the loss"
    return "other weights, another template or other columns are possible, and which it is is open"


@_rule("surprise_at_start")
def other_template(found: Found) -> Facts | None:
    """The first position only: later ones have the new beginning in their context."""
    facts = found["surprise_at_start"]
    if "trainer_logp" in found:  # what is recorded is not what the trainer computes
        return None
    mismatch = found.get("sampler_mismatch")
    if facts["mean"] < 3 * found.get("surprise", {"mean": 0.0})["mean"]:
        return None  # a sampler that is flatter everywhere
    if "common_beginning" in found and found["common_beginning"]["tokens"] >= 2:
        return None
    if mismatch is not None and mismatch["at_start"] < 3 * mismatch["inside"]:
        return None
    return facts if facts["position"] == 0 and facts["mean"] > 0 else None


@_rule("trainer_logp")
def loss_pass_differs(found: Found) -> Facts | None:
    """A forward pass of the loss that is not the model's on the tokens without padding."""
    facts = found["trainer_logp"]
    if "padding_in_loss" in found:  # what is compared is then a loss of other tokens
        return None
    how = "the attention mask, positions, another model or kernels are possible, and which it is is open"
    if "padding stands between" in facts["message"]:
        how = (
            "prompts are padded on the right, so that padding stands between prompt and completion"
        )
    elif "without padding" in facts["message"]:
        how = "the attention mask or the positions count padding, since rows without padding agree"
    return {**facts, "how": how}


@_rule("sampler_mismatch")
def stale_sampler(found: Found) -> Facts | None:
    """None at the first step, then growing."""
    facts = found["sampler_mismatch"]
    grows = facts["first"] < 0.02 and facts["last"] > 0.1 and facts["trend"] > 0.5
    return facts if grows else None


@_rule("sampler_follows")
def lagging_sampler(found: Found) -> Facts | None:
    """Behind from the second step on, without moving further away."""
    return None if _shown("stale_sampler", found) else found["sampler_follows"]


@_rule("sampler_temperature")
def sampling_temperature(found: Found) -> Facts | None:
    """A slope from the first step on, at all positions."""
    facts = found["sampler_temperature"]
    mismatch = found.get("sampler_mismatch", {"first": 1.0, "at_start": 0.0, "inside": 1.0})
    if mismatch["first"] < 0.02 or mismatch["at_start"] > 3 * mismatch["inside"]:
        return None
    return facts


@_rule("sampler_mismatch")
def sampler_differs(found: Found) -> Facts | None:
    """A mismatch that none of the other causes explains."""
    known = {"equal_prefixes", "sampler_temperature", "sampler_follows", "trainer_logp"}
    told = known & found.keys() or _shown("other_template", found) or _shown("stale_sampler", found)
    return None if told else found["sampler_mismatch"]


def _sharper(found: Found) -> Facts | None:
    """The facts of tokens that are less surprising than the policy says, where the sampler's own values do not tell why."""
    facts = found["surprise"]
    others = {"sampler_temperature", "sampler_mismatch", "sampler_follows", "common_beginning"}
    known = found.keys() & others
    return None if facts["mean"] >= 0 or known else facts


@_rule("surprise")
def truncated_sampling(found: Found) -> Facts | None:
    """What is missing does not depend on how sure the policy is."""
    facts = _sharper(found)
    return facts if facts and facts["rare"] > 0.25 * facts["usual"] else None


@_rule("surprise")
def sharper_sampling(found: Found) -> Facts | None:
    """The surer the policy is, the more is missing."""
    facts = _sharper(found)
    return facts if facts and not facts["rare"] > 0.25 * facts["usual"] else None


@_rule("surprise")
def flatter_sampling(found: Found) -> Facts | None:
    """Tokens that are more surprising than the policy says from the first step on, at all positions."""
    facts = found["surprise"]
    known = {"sampler_mismatch", "sampler_follows", "common_beginning", "padding_in_loss"}
    known |= {"special_tokens", "first_ratio", "trainer_logp"}
    if found.keys() & known or _shown("other_template", found):
        return None
    one = found.get("improbable_tokens", {"same": 0.0})["same"] > 0.5  # a token that was put there
    return None if facts["first"] <= 0 or facts["mean"] <= 0 or one else facts


# -- The loss


@_rule("advantage_sign")
def advantage_sign(found: Found) -> Facts | None:
    """All rows, or those of a micro-batch."""
    facts = found["advantage_sign"]
    where = "all rows" if facts["all"] else f"rows {spans(facts['rows'])}"
    return {**facts, "where": where if facts["rows"] else "single tokens"}


_when("kl_sign", "kl_coefficient")
_when("reference_moves", "reference_stays")
_when("reference_differs", "reference_at_start")
_when("ratio_detached", "later_ratio")


@_rule("shares")
def gradient_not_cleared(found: Found) -> Facts | None:
    """Right at the first step, and not later."""
    facts = found["shares"]
    grows = facts["first_step"] == 1 and abs(facts["first"] - 1) < 0.02 and facts["steps"] > 1
    return facts if grows and "equal_prefixes" not in found else None


@_rule("shares")
def entropy_sign(found: Found) -> Facts | None:
    """Wrong from the first step on, while the entropy falls."""
    facts = found["shares"]
    falls = len(facts["entropy"]) == 2 and facts["entropy"][1] < 0.8 * facts["entropy"][0]
    known = found.keys() & {"equal_prefixes", "trainer_logp", "padding_in_loss"}
    if known or abs(facts["first"] - 1) < 0.02 or not falls:
        return None
    return {**facts, "before": facts["entropy"][0], "after": facts["entropy"][1]}


# -- Updates


_when("zero_learning_rate", "update_follows_gradient", lambda facts: facts["lr"] == 0)


_when(
    "learning_rate_ends",
    "update_follows_gradient",
    lambda facts: facts["lr"] > 0 and facts["stopped"] > 0.9 and facts["last"],
)


_when(
    "not_in_optimizer",
    "update_follows_gradient",
    lambda facts: facts["value"] > 0.5 and facts["stopped"] < 0.1,
)


_when("accumulation_not_divided", "loss_scale")
_when("length_twice", "loss_length")


_when(  # one layer, whose gradient is not the largest
    "layer_update",
    "update_bound",
    lambda facts: facts["share"] > 0.8 and facts["gradient_share"] < 0.5,
)


_when(  # all layers, with a weight decay that is known
    "weight_decay",
    "update_bound",
    lambda facts: facts["share"] <= 0.8 and (facts["weight_decay"] or 0.0) >= 1,
)


@_rule("update_bound")
def update_too_long(found: Found) -> Facts | None:
    """All layers, and nothing is known of the weight decay."""
    known = any(_shown(cause, found) for cause in ("layer_update", "weight_decay"))
    return None if known else found["update_bound"]


# -- Rows, pairs and prompts

_when("prompt_scale", "prompt_scale")
_when("reward_feature", "reward_feature")


_when(  # rows of one length only, the longest
    "rows_cut",
    "row_ends",
    lambda facts: facts["at_limit"] > 0.9 and facts["lengths"] == 1,
)


_when(  # all rows, of many lengths
    "no_end_token",
    "row_ends",
    lambda facts: facts["value"] > 0.9 and facts["lengths"] > 1,
)


_when("bad_rows", "row_loss")
_when("pairs_swapped", "pair_margins")


@_rule("first_divergence")
def update_too_large(found: Found) -> Facts | None:
    """A large divergence that no other violation explains."""
    known = found.keys() & {"update_bound", "kl_coefficient", "shares", "advantage_sign"}
    return None if known else found["first_divergence"]


ALIASES = {"prompt_tokens_in_loss": "prompt_in_loss"}
"""Rules that name a cause of another name."""


def name_causes(results: Mapping[str, Result], recorded: Recorded) -> list[Cause]:
    """The causes that the results show, in the order of naming."""
    found = {n: {**r.facts, "value": r.value} for n, r in results.items() if not r.holds}
    causes: dict[str, Cause] = {}
    for name, (shown_by, _) in RULES.items():
        facts = _shown(name, found)
        cause = ALIASES.get(name, name)
        if facts is not None and cause not in causes:
            causes[cause] = _cause(cause, name, results[shown_by], facts, recorded)
    return list(causes.values())


def _cause(
    name: str,
    rule: str,
    result: Result,
    facts: Facts,
    recorded: Recorded,
) -> Cause:
    """A cause with its words."""
    texts, healthy = _TEXTS[rule], result.identity.healthy
    step = int(facts.get("step", facts.get("onset", 1)) or 1)
    rows = ", ".join(
        f"({', '.join(map(str, row))})" for row in facts.get("rows", ()) if isinstance(row, list)
    )
    values = {name: _text(value) for name, value in facts.items()}
    values |= {"run": shlex.quote(recorded.path), "step": step, "carriers": rows}
    changes = texts["change"]
    if not isinstance(changes, str):
        changes = changes.get(recorded.trainer, changes["else"])
    wrong = (
        f"in {healthy.runs} healthy runs this number was at most {healthy.largest:.2g} "
        f"(limit {result.identity.threshold:g})"
    )
    said = {part: text.format_map(values) for part, text in (texts | {"change": changes}).items()}
    return Cause(
        name=name,
        step=step,
        wrong=wrong,
        identity=result.identity.name,
        **said,
    )


def _text(value: object) -> object:
    """A fact as a sentence has it: names and pairs of numbers joined."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        pairs = (f"{name} {low:.2g} → {high:.2g}" for name, (low, high) in value.items())
        return ", ".join(pairs)
    return value
