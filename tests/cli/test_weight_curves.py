"""`sharpscope weights`: curves of the published function, and weights on the tokens of a run."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

import sharpscope
from sharpscope.cli.weight_curves import function_curves, observed, step_of
from sharpscope.errors import UserError
from sharpscope.objective import named_method
from tests.cli.invoking import EXAMPLE, GRPO, invoke


def test_weights_on_the_tokens_of_a_run(tmp_path: Path):
    picture = tmp_path / "weights.png"
    output = invoke("weights", "grpo-sg", "tr-grpo", "--run", GRPO, "--out", str(picture))
    assert picture.stat().st_size > 10_000
    _, shares = observed([named_method("grpo-sg"), named_method("tr-grpo")], sharpscope.load_run(GRPO), 1)
    sg, tr = shares.to_dict("records")
    # calibrated: the 10th and 90th percentile over the gradient land on the bounds
    data = step_of(sharpscope.load_run(GRPO), 1)
    weight, mass = observed([named_method("grpo-sg")], sharpscope.load_run(GRPO), 1)[0]["weight"], data.mass[data.mask]
    for bound, at in ((1.0, "at L"), (1.4, "at U")):
        on = np.isclose(weight, bound, atol=1e-6)
        assert sg[at] == pytest.approx(on.mean())
        share = float(mass[on].sum() / mass.sum())
        assert sg[f"gradient {at}"] == pytest.approx(share)
        assert 0.1 <= share <= 0.1 + float(mass.max() / mass.sum())
    assert sg["bound [°]"] == pytest.approx(9.594, abs=1e-3) and "9.594" in output
    assert math.isnan(tr["bound [°]"])  # its weights act inside the clip
    assert math.isnan(sg["killed"]) and f"{tr['killed']:.3f}" in output
    # TR-GRPO: at ratio 1 a positive token with w > 1.2 has no gradient
    tokens, _ = observed([named_method("tr-grpo")], sharpscope.load_run(GRPO), 1)
    positive = (data.token_advantage[data.mask] > 0).numpy()
    assert tr["killed"] == pytest.approx((positive & (tokens["weight"].to_numpy() > 1.2)).mean())


def test_weights_names_what_a_run_does_not_have(tmp_path: Path):
    out = ["--out", str(tmp_path / "weights.png")]
    reduced = EXAMPLE.parent / "reference" / "grpo-s0"
    with pytest.raises(UserError, match=r"is a reduced run .* give the full run"):
        invoke("weights", "--run", str(reduced), *out)
    shutil.copytree(GRPO, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "traces" / "rollouts")
    with pytest.raises(UserError, match=r"--step 4: .* but no rollouts"):
        invoke("shapings", "--run", str(tmp_path / "run"), "--step", "4", *out)
    assert not (tmp_path / "weights.png").exists()


def test_curves_are_the_published_function():
    curves = function_curves([named_method("grpo-sg"), named_method("ar"), named_method("grpo-sg-reverse")])
    sg = curves[curves["method"] == "grpo-sg"]
    assert set(sg["axis"]) == {"logit"}
    expected = (2 * (1 / (1 + np.exp(-sg["x"] / 9)) - 0.25)).clip(1.0, 1.4)
    np.testing.assert_allclose(sg["weight"], expected, rtol=1e-9)
    reverse = curves[curves["method"] == "grpo-sg-reverse"]
    np.testing.assert_allclose(reverse["weight"].to_numpy(), 2.4 - expected.to_numpy(), rtol=1e-9)
    ar = curves[(curves["method"] == "ar") & (curves["axis"] == "probability")]
    np.testing.assert_allclose(ar["weight"], 0.2 * ar["x"] + 0.8, rtol=1e-9)
