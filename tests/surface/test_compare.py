"""Two checkpoints: weights, tokens and the swap test against what is computed by hand."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from sharpscope.analysis.text import UNSURE
from sharpscope.cli.comparing import paired, sharpness_sentences, swap_sentences
from sharpscope.cli.probing import short_names
from sharpscope.config.run import SamplingSpec
from sharpscope.config.tasks import CustomSpec
from sharpscope.errors import UserError
from sharpscope.policy import PolicySpec, load_policy, render_prompts
from sharpscope.policy.generation import generate
from sharpscope.surface import Estimate, lm_surface
from sharpscope.surface.compare import change_curvature, sharpness_of, token_changes
from sharpscope.surface.swap import js_divergence, swap_test
from sharpscope.surface.weights import parameter_change, weight_changes
from sharpscope.tasks import make_task
from tests.loops import some
from tests.models import generator, objective, random_batch, small_model


def toy():
    return make_task(CustomSpec(factory="tests.toy_task:vowels"))


def moved_copy(model, size: float = 0.05):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p += size * torch.randn(p.shape, generator=generator(p.numel()), dtype=p.dtype)
    return other


def test_changes_of_weights_are_those_of_numpy():
    base = small_model()
    tuned = moved_copy(base)
    table = weight_changes(base, tuned).set_index("name")
    parts, seen = dict(base.named_parameters()), 0
    for name, after in some(tuned.named_parameters()):
        w, a = parts[name].detach().numpy(), after.detach().numpy()
        row, delta = table.loc[name], a - w
        assert row["norm"] == pytest.approx(np.linalg.norm(delta))
        assert row["relative_norm"] == pytest.approx(np.linalg.norm(delta) / np.linalg.norm(w))
        bits = [torch.tensor(x).bfloat16() for x in (w, a)]
        assert row["changed_bfloat16"] == pytest.approx(float((bits[0] != bits[1]).double().mean()))
        if w.ndim != 2:
            assert math.isnan(row["spectral_norm"])
            continue
        seen += 1
        s = np.linalg.svd(delta, compute_uv=False)
        assert row["spectral_norm"] == pytest.approx(s[0])
        q = s**2 / (s**2).sum()
        assert row["effective_rank"] == pytest.approx(np.exp(-(q * np.log(q)).sum()))
        k = min(8, *w.shape)
        u, _, vt = np.linalg.svd(w, full_matrices=False)
        turned = np.linalg.svd(a, full_matrices=False)[0][:, :k]
        cosine = min(np.linalg.svd(u[:, :k].T @ turned, compute_uv=False)[-1], 1.0)
        assert row["angle"] == pytest.approx(np.degrees(np.arccos(cosine)), abs=1e-4)
        inside = np.linalg.norm(u[:, :k].T @ delta @ vt[:k].T) ** 2 / np.linalg.norm(delta) ** 2
        assert row["principal_share"] == pytest.approx(inside)
    assert seen > 5
    change = parameter_change(base, tuned)
    assert float(change.norm()) == pytest.approx(math.sqrt((table["norm"] ** 2).sum()))
    with pytest.raises(UserError, match="two checkpoints of one architecture"):
        weight_changes(small_model(intermediate_size=12), tuned)


def test_tokens_have_the_divergence_of_both_distributions():
    base = small_model()
    tuned, given = moved_copy(base), objective("nll", random_batch(vocab=13, rows=4, prompt=3))
    with (
        lm_surface(base, given, check="off") as first,
        lm_surface(tuned, given, check="off") as second,
    ):
        table = token_changes(first, second)
        logp = [surface.logp() for surface in (first, second)]
        same = token_changes(first, first)
    assert len(table) == int(given.batch.scored.sum())
    for name, values in zip(("logp_base", "logp_tuned"), logp, strict=True):
        expected = values[given.batch.scored].numpy()
        np.testing.assert_allclose(table[name], expected, rtol=1e-6)
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.25, 0.75])
    m = (p + q) / 2
    js = 0.5 * (p[:2] * np.log(p[:2] / m[:2])).sum() + 0.5 * (q[1:] * np.log(q[1:] / m[1:])).sum()
    found = js_divergence(torch.tensor(p).log(), torch.tensor(q).log())
    assert float(found) == pytest.approx(js)
    assert table["js"].between(0, math.log(2)).all() and (table["js"] > 1e-6).all()
    assert same["js"].max() < 1e-12 and same["same_top"].all()


def test_curvature_along_a_change_is_its_quadratic_form():
    model, given = small_model(), objective("nll", random_batch(vocab=13, rows=4, prompt=3))
    change = parameter_change(model, moved_copy(model))
    with lm_surface(model, given, check="off") as surface:
        rows = {row.quantity: row for row in change_curvature(surface, change, 0)}
        form = float(change @ (surface.hessian() @ change) / (change @ change))
    assert rows["along_change"].value == pytest.approx(form, rel=1e-9)
    assert np.mean(rows["along_change"].prompt_values) == pytest.approx(form, rel=1e-9)
    assert rows["smallest"].value < rows["along_random"].value < rows["largest"].value


@pytest.fixture(scope="module")
def policies(tiny_policy):
    base, tuned = (load_policy(PolicySpec(model=str(tiny_policy))) for _ in range(2))
    with torch.no_grad():
        for p in tuned.model.parameters():
            p += 0.1 * p.std() * torch.randn(p.shape, generator=generator(p.numel()))
    return base, tuned


def test_the_arms_of_a_swap_are_both_models_and_between(policies):
    base, tuned = policies
    task, spec = toy(), SamplingSpec(max_new_tokens=8)
    examples = task.splits()["train"][:12]
    seed = int(torch.randint(2**62, (), generator=generator(5)))
    table = swap_test(base, tuned, task, examples, spec, seed=seed, shares=(0.25,))
    arms = {arm: rows.set_index("prompt") for arm, rows in table.groupby("arm")}
    assert set(arms) == {"base", "tuned", "changed", "random"}
    for name, policy in (("base", base), ("tuned", tuned)):
        texts = generate(policy, render_prompts(examples, policy), 1, spec, generator(5)).texts
        scores = [float(task.score(examples[i], t).correct) for i, t in enumerate(texts)]
        assert arms[name]["correct"].tolist() == scores
    assert arms["base"]["used"].eq(0).all() and arms["tuned"]["used"].eq(1).all()
    assert 0.05 < arms["changed"]["used"].iloc[0] < 0.6
    assert 0.05 < arms["random"]["used"].iloc[0] < 0.6
    same = swap_test(base, base, task, examples, spec, shares=(0.25,))
    each = [rows["correct"].tolist() for _, rows in same.groupby("arm")]
    assert all(values == each[0] for values in each)


def rows_of(values):
    values = tuple(map(float, values))
    names = ("loss", "sam", "sam_cross_fitted", "average")
    made = [Estimate("perturbation", name, float(np.mean(values)), rho=0.1) for name in names]
    known = {
        "prompt_values": values,
        "prompt_std_error": np.std(values, ddof=1) / len(values) ** 0.5,
    }
    return [Estimate(**{**vars(row), **known, "std_error": 0.0}) for row in made]


class Stopped:
    """The toy task, whose completions end at an `a`, or get a reply there."""

    name, stop = "stopped", ("a",)

    def __init__(self, reply: str | None) -> None:
        self.reply, self.task, self.texts = reply, toy(), list[str]()

    def splits(self):
        return self.task.splits()

    def respond(self, example, completion):
        return self.reply

    def score(self, example, completion):
        self.texts.append(completion)
        return self.task.score(example, completion)


def test_a_swap_ends_completions_where_the_task_does(policies):
    spec, task, endless, replying = (
        SamplingSpec(max_new_tokens=12),
        *map(Stopped, (None, None, "b")),
    )
    endless.stop = ("never",)
    examples = task.splits()["train"][:12]
    for one in (task, endless):
        swap_test(*policies, one, examples, spec, shares=(0.25,))
    # of the base model, whose numbers are the same; the last token may extend beyond the stop
    pairs = list(zip(task.texts[:12], endless.texts[:12], strict=True))
    assert all(whole.startswith(text) for text, whole in pairs)
    assert all(whole.find("a") < len(text) for text, whole in pairs)
    cut = [text for text, whole in pairs if text != whole]
    assert cut and all("a" in text for text in cut)
    with pytest.raises(UserError, match="replies within completions"):
        swap_test(*policies, replying, examples, spec)


def test_a_pair_that_its_interval_does_not_tell_apart_is_said_so():
    noise = np.random.default_rng(0).normal(size=40)
    noise -= noise.mean() - 0.01
    found = {"base": rows_of(noise), "tuned": rows_of(noise[::-1])}
    lines = [text for text in sharpness_sentences(found, ["base", "tuned"]) if "difference" in text]
    assert len(lines) == 4 and all("difference not distinguishable" in line for line in lines)
    assert all(line.count(UNSURE) == 2 for line in lines)
    found["tuned"] = rows_of(noise + 5 + 0.1 * noise[::-1])
    lines = [text for text in sharpness_sentences(found, ["base", "tuned"]) if "difference" in text]
    assert len(lines) == 4 and not any("not distinguishable" in line for line in lines)
    # an interval without width decides nothing
    assert not paired(np.zeros(3), np.ones(3)).seen
    assert paired(np.zeros(4), [1.0, 1.1, 0.9, 1.0]).seen


def test_a_gain_that_is_not_there_has_no_shares(policies):
    task = toy()
    table = swap_test(
        *[policies[0]] * 2, task, task.splits()["train"][:4], SamplingSpec(max_new_tokens=4)
    )
    lines = list(swap_sentences(table, ["a", "b"]))
    assert "not distinguishable" in lines[0] and not any("of the gain" in line for line in lines)
    assert len(lines) == 7


def test_values_of_both_have_one_number_for_each_prompt():
    given = objective("nll", random_batch(vocab=13, rows=4, prompt=3))
    with lm_surface(small_model(), given, check="off") as surface:
        rows = {row.quantity: row for row in sharpness_of(surface, 0.05, 0)}
    for name in ("loss", "sam", "sam_cross_fitted", "average"):
        assert len(rows[name].prompt_values) == 4
        assert np.mean(rows[name].prompt_values) == pytest.approx(rows[name].value, rel=1e-9)


def test_models_are_named_by_what_tells_them_apart():
    assert short_names(["a/x/ck-1", "a/x/ck-2"]) == ["ck-1", "ck-2"]
    assert short_names(["../a/ck", "../b/ck"]) == ["a/ck", "b/ck"]
    assert short_names(["embedded:math", "runs/s/step-1"]) == ["embedded:math", "step-1"]
