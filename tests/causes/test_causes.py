"""Identities against slow formulas, causes on tables in which they are planted, and healthy tables."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sharpscope.analysis import path_sections
from sharpscope.causes import REGISTRY, check_recorded, name_causes, verdict
from sharpscope.causes.identity import beyond_chance, spans
from sharpscope.causes.named import _TEXTS, RULES
from sharpscope.causes.recorded import Recorded
from sharpscope.causes.temperature import GRID, drawn_temperature, log_partition
from sharpscope.causes.verdict import Verdict
from sharpscope.diagnose import diagnose
from sharpscope.traces import load_run
from tests.causes import planted
from tests.causes.planted import END, GROUPS, LR, PARAMETERS, SIZE, STEPS
from tests.loops import some

EXAMPLE = Path(__file__).parents[2] / "data" / "example" / "sums"


@pytest.fixture(scope="module")
def healthy() -> Recorded:
    return planted.healthy()


def named(recorded: Recorded, without: frozenset[str] = frozenset()) -> list[str]:
    results = check_recorded(recorded, without)
    return [cause.name for cause in name_causes(results, recorded)]


def with_tokens(recorded: Recorded, **columns: object) -> Recorded:
    return replace(recorded, tokens=recorded.tokens.assign(**columns))


def with_rows(recorded: Recorded, **columns: object) -> Recorded:
    return replace(recorded, rollouts=recorded.rollouts.assign(**columns))


def with_updates(recorded: Recorded, **columns: object) -> Recorded:
    return replace(recorded, updates=recorded.updates.assign(**columns))


def event(recorded: Recorded, rule: str, message: str, **values: float) -> Recorded:
    row = {"step": 1, "value": math.nan, "rule": rule, "message": message} | values
    return replace(recorded, events=pd.DataFrame([row]))


# -- Healthy


@pytest.mark.parametrize("seed", range(3))
def test_every_identity_holds_in_healthy_tables(seed):
    results = check_recorded(planted.healthy(seed))
    assert len(results) >= 20
    assert {name: r.value for name, r in results.items() if not r.holds} == {}


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_every_identity_holds_in_healthy_supervised_tables(method):
    results = check_recorded(planted.supervised(method))
    assert "row_ends" in results
    assert {name: r.value for name, r in results.items() if not r.holds} == {}


def test_a_column_that_was_not_recorded_is_not_judged(healthy):
    bare = with_tokens(healthy, behavior_logp=math.nan, ref_logp=math.nan, advantage=math.nan)
    results = check_recorded(bare)
    gone = {"sampler_mismatch", "sampler_temperature", "reference_at_start", "advantage_sign"}
    assert not gone & results.keys() and "surprise" in results


# -- Values


def test_surprise_is_the_mean_of_surprisal_minus_entropy(healthy):
    gaps = [-row.logp - row.entropy for row in healthy.tokens.itertuples() if row.position >= 4]
    assert len(gaps) > 200
    result = check_recorded(healthy)["surprise"]
    assert result.facts["mean"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-9)


def test_beyond_chance_subtracts_five_standard_errors():
    values = np.array([1.0, 2.0] * 8)
    error = math.sqrt(sum((v - 1.5) ** 2 for v in values) / 15) / 4
    assert beyond_chance(values) == pytest.approx(1.5 - 5 * error)
    assert beyond_chance(-values) == beyond_chance(values)
    assert beyond_chance(values - 1.5) == 0
    assert beyond_chance(values[:7]) == 0


def test_prefix_numbers_are_equal_exactly_where_the_prefixes_are(healthy):
    tokens = healthy.drawn.assign(key=healthy.prefix)
    seen: dict[int, tuple] = {}
    for (step, _), part in some(tokens.groupby(["step", "rollout"])):
        ids = part.sort_values("position")["token_id"].tolist()
        for row in some(part.itertuples()):
            prefix = (step, row.group, *ids[: row.position + 1])
            assert seen.setdefault(row.key, prefix) == prefix
    assert len(seen) == len(set(seen.values())) > 500


def at_temperature(recorded: Recorded, heat: float) -> list[float]:
    """ln μ of the tokens for a sampler at `heat` times the policy's temperature."""
    ids = recorded.tokens.groupby(["step", "rollout"])["token_id"].agg(list)
    found = []
    for row in recorded.tokens.itertuples():
        prompt = 100 * row.step + row.rollout // SIZE
        before = ids[row.step, row.rollout][: row.position]
        p = planted.distribution((prompt, *before), 1 / heat)
        found.append(math.log(p[row.token_id]))
    return found


@pytest.mark.parametrize("heat", [0.4, 0.6, 0.8, 1.25, 1.6])
def test_the_temperature_is_found_from_the_sampler(heat):
    sampler = planted.healthy(0, sharp=1 / heat)
    recorded = with_tokens(sampler, behavior_logp=at_temperature(sampler, heat))
    assert named(recorded)[0] == "sampling_temperature"
    cause = name_causes(check_recorded(recorded), recorded)[0]
    found = float(cause.sentence.split("about ")[1].split(" times")[0])
    assert found == pytest.approx(heat, rel=0.03)


@pytest.mark.parametrize("heat", [0.5, 0.7, 1.0, 1.4])
def test_the_temperature_is_found_from_drawn_tokens(heat):
    drawn = pd.concat([planted.healthy(seed, sharp=1 / heat).drawn for seed in range(2)])
    assert drawn_temperature(drawn) == pytest.approx(heat, rel=0.15)


@pytest.mark.parametrize("heat", [0.3, 0.6, 1.0, 1.5])
def test_the_temperature_is_the_likeliest_of_the_whole_grid(heat):
    drawn = planted.healthy(7, sharp=1 / heat).drawn

    def likelihood(tried):
        return ((1 / tried - 1) * drawn["logp"] - log_partition(drawn, 1 / tried)).sum()

    assert drawn_temperature(drawn) == max(GRID, key=likelihood)


@pytest.mark.parametrize("power", [0.5, 1.5, 2.5])
def test_the_partition_of_two_levels_is_exact(power):
    random = np.random.default_rng(0)
    rows = []
    for others in some([1, 4, 30]):
        p = random.uniform(0.5, 0.99)
        levels = np.array([p, *[(1 - p) / others] * others])
        facts = {"entropy": -(levels * np.log(levels)).sum(), "collision": (levels**2).sum()}
        rows.append(facts | {"exact": math.log((levels**power).sum())})
    frame = pd.DataFrame(rows)
    np.testing.assert_allclose(log_partition(frame, power), frame["exact"], atol=2e-3)


def test_beginnings_are_those_of_a_slow_loop(healthy):
    recorded = prompt_in_rows(healthy)
    found = recorded.beginnings
    expected = []
    for _, part in some(recorded.drawn.groupby(["step", "group"])):
        rows = [r.sort_values("position") for _, r in part.groupby("rollout")]
        common = 0
        while len({tuple(r["token_id"][: common + 1]) for r in rows}) == 1:
            common += 1
        nats = -np.mean([r["logp"][:common].sum() for r in rows])
        expected.append((common, (len(rows) - 1) * nats, max(r["length"].iloc[0] for r in rows)))
    assert found["tokens"].tolist() == [common for common, *_ in expected]
    np.testing.assert_allclose(found["evidence"], [nats for _, nats, _ in expected], rtol=1e-9)
    assert found["longest"].tolist() == [longest for *_, longest in expected]


def test_the_kl_coefficient_is_read_from_tokens_without_advantage(healthy):
    wrong = healthy.tokens["loss_coef"] - 2 * healthy.tokens["kl_coef"]
    flat = with_tokens(healthy, loss_coef=wrong, kl_coef=math.nan)
    result = check_recorded(flat)["kl_coefficient"]
    assert result.facts["beta"] == pytest.approx(-planted.BETA, rel=1e-6)
    assert named(flat)[0] == "kl_sign"


def test_the_update_is_compared_with_the_learning_rate(healthy):
    long = with_updates(healthy, update_norm=3 * LR * math.sqrt(PARAMETERS))
    assert check_recorded(long)["update_bound"].value == pytest.approx(3.0)
    assert named(long) == ["update_too_long"]


def test_rows_are_told_as_spans():
    assert spans([16, 17, 18, 3, 20]) == "3, 16 to 18, 20"


# -- Causes


def sharper(recorded: Recorded) -> Recorded:
    return with_tokens(planted.healthy(0, sharp=1.8), behavior_logp=math.nan)


def from_two(recorded: Recorded) -> Recorded:
    """Only the two likeliest tokens are drawn: the odds of others are moved to the second."""
    random = np.random.default_rng(0)
    rows = []
    for (step, rollout), _ in recorded.tokens.groupby(["step", "rollout"]):
        prompt, ids = 100 * step + rollout // SIZE, []
        while len(ids) < planted.LENGTH and (not ids or ids[-1] != END):
            p = planted.distribution((prompt, *ids))
            best = np.argsort(p)[-2:]
            ids.append(int(random.choice(best, p=p[best] / p[best].sum())))
        rows += planted.token_rows(step, rollout, prompt, ids)
    tokens = pd.DataFrame(rows).assign(behavior_logp=math.nan)
    return planted.with_loss(replace(recorded, tokens=tokens))


def random_ratio(recorded: Recorded) -> Recorded:
    noise = np.random.default_rng(0).normal(size=len(recorded.tokens))
    return with_tokens(recorded, ratio=np.exp(0.5 * noise))


def stale(recorded: Recorded) -> Recorded:
    steps = recorded.tokens["step"] - 1
    noise = np.random.default_rng(0).normal(size=len(recorded.tokens))
    return with_tokens(recorded, behavior_logp=recorded.tokens["logp"] + 0.2 * steps * noise)


def lagging(recorded: Recorded) -> Recorded:
    behind = recorded.tokens["step"] > 1
    noise = np.random.default_rng(0).normal(size=len(recorded.tokens))
    return with_tokens(recorded, behavior_logp=recorded.tokens["logp"] + 0.05 * behind * noise)


def other_start(recorded: Recorded) -> Recorded:
    first = recorded.tokens["position"] == 0
    logp = recorded.tokens["logp"] - 6.0 * first
    behavior = recorded.tokens["behavior_logp"]
    return planted.with_loss(with_tokens(recorded, logp=logp, behavior_logp=behavior))


def prompt_in_rows(recorded: Recorded) -> Recorded:
    """The prompt's number, in digits, precedes each completion in the loss."""
    tokens = recorded.tokens.assign(position=recorded.tokens["position"] + 4)
    rows = recorded.rollouts[["step", "rollout", "group"]]
    start = []
    for row in rows.itertuples():
        digits = np.random.default_rng(100 * row.step + row.group).integers(2, 7, size=4)
        start += [
            {
                "step": row.step,
                "rollout": row.rollout,
                "position": at,
                "token_id": int(digit),
                "logp": -4.0,
                "entropy": 1.0,
                "collision": 0.3,
                "ratio": 1.0,
                "update": 0,
            }
            for at, digit in enumerate(digits)
        ]
    joined = pd.concat([pd.DataFrame(start), tokens], ignore_index=True)
    longer = with_rows(recorded, length=recorded.rollouts["length"] + 4)
    joined["behavior_logp"] = math.nan
    return planted.with_loss(replace(longer, tokens=joined))


def forced_end(recorded: Recorded) -> Recorded:
    last = recorded.tokens["position"] == planted.LENGTH - 1
    tokens = recorded.tokens
    return with_tokens(
        recorded,
        token_id=tokens["token_id"].where(~last, END),
        logp=tokens["logp"].where(~last, -9.0),
        behavior_logp=math.nan,
    )


def inserted(recorded: Recorded) -> Recorded:
    inside = recorded.tokens["position"] == 9
    tokens = recorded.tokens
    return with_tokens(
        recorded,
        token_id=tokens["token_id"].where(~inside, 5),
        logp=tokens["logp"].where(~inside, -9.0),
        behavior_logp=math.nan,
    )


def flipped(recorded: Recorded) -> Recorded:
    tokens = recorded.tokens
    policy = tokens["loss_coef"] - tokens["kl_coef"]
    wrong = tokens["rollout"].between(8, 15)
    return with_tokens(recorded, loss_coef=tokens["loss_coef"] - 2 * policy * wrong)


def with_shares(*sums: float, entropy: float = 1.0) -> object:
    def plant(recorded: Recorded) -> Recorded:
        known = pd.Series(sums, index=range(1, len(sums) + 1))
        factor = recorded.tokens["step"].map(known).fillna(known.iloc[-1])
        fall = np.linspace(1.0, entropy, STEPS)
        shares = recorded.tokens["attribution"] * factor
        steps = recorded.steps.assign(entropy_mean=fall)
        return replace(with_tokens(recorded, attribution=shares), steps=steps)

    return plant


def one_layer(recorded: Recorded) -> Recorded:
    moved = json.dumps({"0.mlp": 9.0, "1.mlp": 0.3})
    pulled = json.dumps({"0.mlp": 0.2, "1.mlp": 0.3})
    return with_updates(
        recorded,
        update_norm=5 * LR * math.sqrt(PARAMETERS),
        update_norm_by_layer=moved,
        grad_norm_by_layer=pulled,
    )


def decayed(recorded: Recorded) -> Recorded:
    long = with_updates(recorded, update_norm=5 * LR * math.sqrt(PARAMETERS))
    config = {"optimizer": {"weight_decay": 40.0}}
    return replace(long, info={**recorded.info, "config": config})


def detached(recorded: Recorded) -> Recorded:
    uses = recorded.tokens[["step", "rollout", "position"]].assign(update=1, ratio=1.0)
    return replace(recorded, uses=uses)


def equal_rows(recorded: Recorded) -> Recorded:
    first = recorded.rollouts["rollout"] % SIZE == 0
    tokens, rows = [], recorded.rollouts.copy()
    for row in rows[first].itertuples():
        prompt = 100 * row.step + row.group
        ids = [int(token) for token in row.completion.split()]
        for rollout in range(row.rollout, row.rollout + SIZE):
            tokens += planted.token_rows(row.step, rollout, prompt, ids)
    rows["length"] = rows.groupby(["step", "group"])["length"].transform("first")
    return planted.with_loss(replace(recorded, tokens=pd.DataFrame(tokens), rollouts=rows))


def shifted_rewards(recorded: Recorded) -> Recorded:
    """Short completions, so that many are equal, and the rewards of the row before."""
    text = (recorded.rollouts["rollout"] * 7 % 3).astype(str)
    reward = text.astype(float).where(recorded.rollouts["group"] >= 0)
    right = with_rows(recorded, completion=text, token_ids=None, reward=reward)
    assert check_recorded(right)["reward_of_completion"].holds
    moved = [np.roll(part, 1) for _, part in reward.groupby(right.rollouts["step"])]
    return with_rows(right, reward=np.concatenate(moved))


def mixed(recorded: Recorded) -> Recorded:
    return with_rows(recorded, group=recorded.rollouts["rollout"] % GROUPS)


def hacked(recorded: Recorded) -> Recorded:
    rows = recorded.rollouts
    count = np.random.default_rng(0).integers(1, 9, size=len(rows)) * rows["step"]
    texts = ["= " * n + "x" for n in count]
    accuracy = (rows["rollout"] % 2) * (rows["step"] <= 2)
    parts = [
        json.dumps({"right": float(a), "steps": 0.3 * n})
        for a, n in zip(accuracy, count, strict=True)
    ]
    return with_rows(recorded, completion=texts, reward_parts=parts, reward=accuracy + 0.3 * count)


def scaled(recorded: Recorded) -> Recorded:
    one = recorded.rollouts["prompt"] == "prompt 302"
    return with_rows(recorded, advantage=recorded.rollouts["advantage"].mask(one, 40.0))


def never_ending(recorded: Recorded) -> Recorded:
    return with_rows(replace(recorded, words=replace(recorded.words, end=2)), truncated=True)


def infinite(recorded: Recorded) -> Recorded:
    reward = recorded.rollouts["reward"].copy()
    reward.iloc[40] = -math.inf
    return with_rows(recorded, reward=reward)


def same_reference(recorded: Recorded) -> Recorded:
    return with_tokens(recorded, ref_logp=recorded.tokens["logp"])


def other_reference(recorded: Recorded) -> Recorded:
    return planted.with_loss(recorded, distance=0.5)


def moved_advantages(recorded: Recorded) -> Recorded:
    by_step = recorded.rollouts.groupby("step")["advantage"]
    return with_rows(recorded, advantage=by_step.transform(lambda part: np.roll(part, 1)))


def by_slot(recorded: Recorded) -> Recorded:
    rows = recorded.rollouts
    slot = rows.groupby(["step", rows["rollout"] % SIZE])["reward"].transform("mean")
    return with_rows(recorded, advantage=rows["reward"] - slot)


def cut_pays(recorded: Recorded) -> Recorded:
    cut = recorded.rollouts["truncated"].astype(float)
    noise = np.random.default_rng(0).normal(size=len(cut))
    return with_rows(recorded, reward=cut + 0.1 * noise)


def masked_early(recorded: Recorded) -> Recorded:
    return event(prompt_in_rows(recorded), "end_outside_loss", "the end token", value=1.0)


def old_of_neighbor(recorded: Recorded) -> Recorded:
    old = recorded.tokens.groupby(["step", "rollout"])["logp"].shift(1)
    old = old.fillna(recorded.tokens["logp"])
    return with_tokens(recorded, ratio=np.exp(recorded.tokens["logp"] - old))


def old_at(heat: float) -> object:
    def plant(recorded: Recorded) -> Recorded:
        old = np.array(at_temperature(recorded, heat))
        return with_tokens(recorded, ratio=np.exp(recorded.tokens["logp"] - old))

    return plant


def summed_micro_batches(recorded: Recorded) -> Recorded:
    """Two micro-batches of the rows in order, each a mean over its own tokens."""
    tokens = recorded.tokens
    half = tokens["rollout"] >= GROUPS * SIZE // 2
    size = tokens.groupby(["step", half])["token_id"].transform("size")
    coefficient = -tokens["advantage"] / size
    return with_tokens(recorded, loss_coef=coefficient, kl_coef=math.nan, ref_logp=math.nan)


def weighted_by_length(power: float) -> object:
    def plant(recorded: Recorded) -> Recorded:
        tokens = recorded.tokens
        length = tokens.groupby(["step", "rollout"])["token_id"].transform("size")
        coefficient = -tokens["advantage"] / length**power / (GROUPS * SIZE)
        return with_tokens(recorded, loss_coef=coefficient, kl_coef=math.nan, ref_logp=math.nan)

    return plant


def paid_for_distance(coefficient: float, noise: float = 0.0) -> object:
    """The reward of even and odd rows plus a multiple of Σ ln π/π_ref, and noise."""

    def plant(recorded: Recorded) -> Recorded:
        tokens, rows = recorded.tokens, recorded.rollouts
        gap = (tokens["logp"] - tokens["ref_logp"]).groupby([tokens["step"], tokens["rollout"]])
        distance = rows.join(gap.sum().rename("gap"), on=["step", "rollout"])["gap"]
        reward = (rows["rollout"] % 8 < 3) + coefficient * distance
        return with_rows(
            recorded, reward=reward + noise * np.random.default_rng(0).normal(size=len(rows))
        )

    return plant


def stopping(recorded: Recorded) -> Recorded:
    late = recorded.updates["step"] >= 4
    moved = recorded.updates["update_norm"].where(~late, 0.0)
    return with_updates(recorded, lr=recorded.updates["lr"].where(~late, 0.0), update_norm=moved)


PLANTED = {
    "advantages_of_other_rows": moved_advantages,
    "baseline_of_other_rows": by_slot,
    "cut_rewarded": cut_pays,
    "padding_in_loss": lambda r: event(r, "padding_in_loss", "behind a row's end", value=0.8),
    "end_not_in_loss": lambda r: event(r, "end_outside_loss", "the end token", value=0.9),
    "mask_shifted": masked_early,
    "loss_pass_differs": lambda r: event(r, "trl_statistics", "other log-probabilities", value=0.6),
    "old_logp_differs": old_of_neighbor,
    "flatter_sampling": lambda r: with_tokens(
        planted.healthy(0, sharp=0.6), behavior_logp=math.nan
    ),
    "accumulation_not_divided": summed_micro_batches,
    "learning_rate_ends": stopping,
    "lagging_sampler": lagging,
    "length_twice": weighted_by_length(2),
    "kl_rewarded": paid_for_distance(0.2),
    "reward_not_finite": infinite,
    "mixed_groups": mixed,
    "equal_completions": equal_rows,
    "rewards_of_other_rows": shifted_rewards,
    "reward_constant": lambda r: with_rows(r, reward=0.0, advantage=0.0),
    "wrong_end_token": never_ending,
    "prompt_in_loss": prompt_in_rows,
    "inserted_end": forced_end,
    "inserted_token": inserted,
    "dropout": random_ratio,
    "other_template": other_start,
    "stale_sampler": stale,
    "sharper_sampling": sharper,
    "truncated_sampling": from_two,
    "advantage_sign": flipped,
    "reference_moves": same_reference,
    "reference_differs": other_reference,
    "ratio_detached": detached,
    "gradient_not_cleared": with_shares(1.0, 0.4, 0.3, 0.2),
    "entropy_sign": with_shares(0.8, 0.7, entropy=0.4),
    "zero_learning_rate": lambda r: with_updates(r, lr=0.0, update_norm=0.0),
    "not_in_optimizer": lambda r: with_updates(r, update_norm=0.0),
    "layer_update": one_layer,
    "weight_decay": decayed,
    "prompt_scale": scaled,
    "reward_feature": hacked,
    "update_too_large": lambda r: replace(r, steps=r.steps.assign(kl_step=2.0)),
    "not_finite": lambda r: with_updates(r, loss=[0.1, 0.1, *[math.nan] * (STEPS - 2)]),
}


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_named_first(healthy, cause):
    assert named(PLANTED[cause](healthy))[:1] == [cause]


def garbled(recorded: Recorded) -> Recorded:
    odd = (recorded.tokens["step"] == STEPS) & (recorded.tokens["rollout"] == 5)
    return with_tokens(recorded, logp=recorded.tokens["logp"].mask(odd, -25.0))


def without_end(recorded: Recorded) -> Recorded:
    special = recorded.tokens["token_id"].isin(list(recorded.words.special))
    return replace(recorded, tokens=recorded.tokens[~special])


def cut(recorded: Recorded) -> Recorded:
    tokens = recorded.tokens
    whole = recorded.rollouts["token_ids"].map(json.loads)
    limited = with_rows(recorded, token_ids=[json.dumps(ids[:8]) for ids in whole])
    return replace(limited, tokens=tokens[tokens["position"] < 4])


def swapped(recorded: Recorded) -> Recorded:
    """One of five pairs has the margin −5, the others 5; sides have equal lengths."""
    rows = []
    for row in recorded.rollouts.itertuples():
        sign = -1 if (row.rollout // 2) % 5 == 0 else 1
        total = -20 + sign * (2.5 if row.rollout % 2 == 0 else -2.5)
        rows += [
            {
                "step": row.step,
                "rollout": row.rollout,
                "position": at,
                "token_id": END if at == 3 else 2,
                "logp": total / 4,
            }
            for at in range(4)
        ]
    frame = pd.DataFrame(rows).reindex(columns=recorded.tokens.columns)
    return replace(recorded, tokens=frame)


@pytest.mark.parametrize(
    ("cause", "method", "plant"),
    [
        ("bad_rows", "sft", garbled),
        ("no_end_token", "sft", without_end),
        ("rows_cut", "sft", cut),
        ("pairs_swapped", "dpo", swapped),
    ],
)
def test_a_cause_of_given_rows_is_named_first(cause, method, plant):
    assert named(plant(planted.supervised(method)))[:1] == [cause]


@pytest.mark.parametrize(
    ("cause", "method", "rule", "message"),
    [
        ("labels_shifted", "sft", "recorder", "record: labels are the input's tokens moved by 1"),
        (
            "labels_of_other_tokens",
            "sft",
            "recorder",
            "record: labels differ from the input's own tokens",
        ),
        (
            "prompt_in_loss",
            "loop",
            "recorder",
            "the first token is in the loss, predicted from padding",
        ),
    ],
)
def test_what_stopped_a_recorder_is_named(healthy, cause, method, rule, message):
    empty = replace(healthy, tokens=healthy.tokens.iloc[:0], rollouts=healthy.rollouts.iloc[:0])
    empty = replace(empty, updates=healthy.updates.iloc[:0], steps=healthy.steps.iloc[:0])
    stopped = event(replace(empty, info={**healthy.info, "method": method}), rule, message)
    assert named(stopped) == [cause]


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        ("masked_inf", "ratio is inf at a masked position, and 0·inf is NaN"),
        ("float16_overflow", "lm_head gives inf: float16 overflow"),
    ],
)
def test_an_autopsy_is_named(healthy, cause, message):
    broken = with_updates(healthy, loss=[0.1, *[math.nan] * (STEPS - 1)])
    assert named(event(broken, "not_finite", message)) == [cause]


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (old_of_neighbor, "shifted by one"),
        (old_at(0.6), "at 0.60 times the temperature"),
        (lambda r: with_tokens(r, ratio=np.exp(1.0 + 0.0 * r.tokens["logp"])), "is open"),
    ],
)
def test_what_the_old_policy_is_is_told_where_it_can_be(healthy, plant, said):
    recorded = plant(healthy)
    cause = name_causes(check_recorded(recorded), recorded)[0]
    assert cause.name == "old_logp_differs" and said in cause.sentence


def test_a_ratio_to_the_sampler_is_told_by_the_sampler(healthy):
    """An old policy that is the sampler's is named by what the sampler does."""
    sampler = planted.healthy(0, sharp=1 / 0.6)
    logp = at_temperature(sampler, 0.6)
    ratio = np.exp(sampler.tokens["logp"] - logp)
    assert named(with_tokens(sampler, behavior_logp=logp, ratio=ratio)) == ["sampling_temperature"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("they differ; in rows without padding they agree", "count padding"),
        ("they differ padding stands between the tokens of a row", "padded on the right"),
        ("they differ", "is open"),
    ],
)
def test_what_the_loss_reads_is_told_where_it_can_be(healthy, text, said):
    recorded = event(healthy, "trl_statistics", text, value=0.6)
    assert said in name_causes(check_recorded(recorded), recorded)[0].sentence


@pytest.mark.parametrize("offset", [-2, 1, 3])
def test_the_number_of_rows_that_advantages_are_moved_by_is_told(healthy, offset):
    by_step = healthy.rollouts.groupby("step")["advantage"]
    moved = with_rows(healthy, advantage=by_step.transform(lambda part: np.roll(part, offset)))
    assert check_recorded(moved)["group_mean"].facts["offset"] == -offset


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("over", ["tokens", "rows"])
def test_the_number_of_summed_means_is_counted(healthy, pieces, over):
    tokens = healthy.tokens
    block = tokens["rollout"] * pieces // (GROUPS * SIZE)
    rows = GROUPS * SIZE // pieces
    length = tokens.groupby(["step", "rollout"])["token_id"].transform("size")
    size = tokens.groupby(["step", block])["token_id"].transform("size")
    divisor = size if over == "tokens" else length * rows
    planted_loss = {"loss_coef": -tokens["advantage"] / divisor, "kl_coef": math.nan}
    result = check_recorded(with_tokens(healthy, **planted_loss, ref_logp=math.nan))["loss_scale"]
    assert result.facts["pieces"] == pieces and result.value == pytest.approx(1 - 1 / pieces)


@pytest.mark.parametrize("seed", range(4))
def test_a_flatter_sampler_is_told_wherever_it_shows_most(seed):
    flat = planted.healthy(seed, sharp=0.6)
    assert named(with_tokens(flat, behavior_logp=math.nan))[:1] == ["flatter_sampling"]


def test_a_step_without_advantages_tells_nothing_of_the_scale(healthy):
    summed = summed_micro_batches(healthy)
    idle = summed.tokens["step"] == 3
    advantage = summed.tokens["advantage"].mask(idle, 0.0)
    silent = with_tokens(
        summed, advantage=advantage, loss_coef=summed.tokens["loss_coef"].mask(idle, 0.0)
    )
    assert check_recorded(silent)["loss_scale"].facts["pieces"] == 2


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, 3.0])
def test_the_power_of_the_length_in_the_loss_is_found(healthy, power):
    result = check_recorded(weighted_by_length(power)(healthy))["loss_length"]
    assert result.facts["power"] == pytest.approx(power, abs=1e-9)
    assert result.value == pytest.approx(max(0.0, power - 1))


def test_weights_of_other_kinds_are_no_power_of_the_length(healthy):
    tokens = weighted_by_length(2)(healthy).tokens
    uneven = with_tokens(
        healthy,
        loss_coef=tokens["loss_coef"] * (1 + 0.1 * (tokens["rollout"] % 3)),
        ref_logp=math.nan,
    )
    assert check_recorded(uneven)["loss_length"].value == 0


@pytest.mark.parametrize(
    ("coefficient", "noise", "value"), [(0.2, 0, 0.2), (0, 0, 0), (-0.2, 0, 0), (0.2, 0.3, 0)]
)
def test_the_reward_of_distance_is_exact_and_positive(healthy, coefficient, noise, value):
    """A penalty is no fault, and a correlation proves nothing."""
    recorded = paid_for_distance(coefficient, noise)(healthy)
    assert check_recorded(recorded)["reward_of_distance"].value == pytest.approx(value)


# -- What is said


def test_every_cause_has_words_and_every_identity_a_rule():
    shown = {identity for identity, _ in RULES.values()}
    assert set(REGISTRY) == shown and set(RULES) == set(_TEXTS)


@pytest.mark.parametrize("name", PLANTED)
def test_each_identity_is_needed(healthy, name):
    recorded = PLANTED[name](healthy)
    identity = name_causes(check_recorded(recorded), recorded)[0].identity
    assert named(recorded, frozenset({identity}))[:1] != [name]


def test_the_sentence_names_the_rows_that_carry_it(healthy):
    recorded = flipped(healthy)
    cause = name_causes(check_recorded(recorded), recorded)[0]
    assert "rows 8 to 15" in cause.sentence and "100%" in cause.evidence
    assert f"steps=[{cause.step}]" in cause.show


def test_a_verdict_counts_and_lists_what_holds(healthy):
    fine, broken = Verdict.of(healthy), Verdict.of(flipped(healthy))
    count = len(fine.results)
    assert fine.count == f"{count} identities checked, {count} hold" and not fine.causes
    assert broken.count == f"{count} identities checked, {count - 1} hold"
    assert broken.lines()[2] == broken.causes[0].sentence
    assert len(broken.lines()) < 60


def test_two_causes_that_fit_are_both_named(healthy):
    both = with_updates(flipped(healthy), update_norm=0.0)
    assert named(both) == ["advantage_sign", "not_in_optimizer"]


# -- What could not be checked


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", '{"added_tokens": ', "is not valid JSON"),
        (
            "tokenizer.json",
            '{"added_tokens": [{"special": true}]}',
            "checked: tokenizer cannot be read ('id')",
        ),
        (
            "tokenizer_config.json",
            None,
            "No such file or directory: 'tokenizer/tokenizer_config.json'",
        ),
    ],
)
def test_show_and_diagnose_say_once_that_special_tokens_are_not_known(
    tmp_path, name, content, reason
):
    run = shutil.copytree(EXAMPLE, tmp_path / "run")
    assert not verdict(load_run(run)).note
    (run / "tokenizer" / name).unlink()
    if content is not None:
        (run / "tokenizer" / name).write_text(content)
    shown = [str(section.content) for section in path_sections([run])]
    told = diagnose(run).text()
    for text in ("\n".join(shown), told):
        assert text.count("Special tokens are not known and not checked") == 1
        assert text.count(reason) == 1


def test_a_run_without_a_tokenizer_has_nothing_to_say_of_it(tmp_path):
    run = shutil.copytree(EXAMPLE, tmp_path / "run", ignore=shutil.ignore_patterns("tokenizer"))
    assert not verdict(load_run(run)).note
