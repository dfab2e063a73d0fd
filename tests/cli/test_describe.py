"""`sharpscope methods`, `weights`, `task`, `config` and `schema` print what is there."""

from __future__ import annotations

from tests.cli.invoking import invoke


def test_methods_print_the_largest_rotation_that_their_weights_allow():
    rows = {line.split("│")[1].strip(): line for line in invoke("methods").splitlines() if line.count("│") > 4}
    bounds = {
        name: rows[name].split("│")[4].strip() for name in ("grpo", "grpo-sg", "ar", "papo", "cov-grpo", "ar-lopti")
    }
    assert bounds == {"grpo": "", "grpo-sg": "9.6°", "ar": "6.4°", "papo": "30.0°", "cov-grpo": "", "ar-lopti": ""}
    assert "9.6°" in invoke("methods", "grpo-sg") and "largest rotation" not in invoke("methods", "gspo")
