"""What a planned study can decide, before any compute."""

from __future__ import annotations

import numpy as np

from sharpscope.analysis.outlook import outlook
from sharpscope.analysis.power import power_of
from sharpscope.analysis.terms import DEFAULT
from tests.analysis.claims.frames import CONFIG, paired_study


def configs(methods, seeds, **changes):
    found = {}
    for method in methods:
        for seed in range(seeds):
            config = {key: {**part} for key, part in CONFIG.items()}
            config |= {
                "seed": seed,
                "steps": 100,
                "method": {"name": method},
                "recording": {
                    "tokens_every": 1,
                    "token_gradients_every": 10,
                    "exact_random": 4,
                    "heldout_influence_every": 0,
                },
                "probes": {"every": 50, "curvature": False, "prompts": 64},
                "evaluation": {"every": 50, "prompts": 400, "samples": 1},
            }
            for part, values in changes.items():
                config[part] |= values
            found[f"{method}-{seed}"] = config
    return found


def by_claim(found):
    return {(line.claim, line.version): line for line in found}


def test_a_planned_study_knows_what_it_cannot_decide():
    found = by_claim(outlook(configs(("grpo", "grpo-sg"), 5), DEFAULT, "grpo", "grpo-sg"))
    assert found["C7", "between runs"].missing == "5 pairs of runs with one seed; the rule needs 6: 1 more"
    assert "grpo-sg-reverse" in found["C10", "between runs"].missing
    assert "curvature" in found["C11", ""].missing and "no grid" in found["C6", ""].missing
    assert not found["C3", ""].missing and found["C3", ""].n == 50
    enough = by_claim(outlook(configs(("grpo", "grpo-sg"), 6), DEFAULT, "grpo", "grpo-sg"))
    assert (
        not enough["C7", "between runs"].missing
        and "can be supported and refuted" in enough["C7", "between runs"].line()
    )
    off = by_claim(outlook(configs(("grpo", "grpo-sg"), 6, probes={"every": 0}), DEFAULT, "grpo", "grpo-sg"))
    assert "probes.every" in off["C4", "between runs"].missing


def test_a_pilot_gives_the_power_of_the_planned_size():
    pilot = power_of(paired_study(12, 0.0, noise=0.03, rng=np.random.default_rng(0), unseen=0.3, train=0.7), ["C7"])
    few, many = (
        by_claim(outlook(configs(("grpo", "grpo-sg"), 8, evaluation={"prompts": n}), DEFAULT, "grpo", "grpo-sg", pilot))
        for n in (400, 6400)
    )
    designs = [found["C7", "between runs"].design for found in (few, many)]
    assert designs[0].sizes["answers"] == 400 and designs[1].sizes["answers"] == 6400
    # prompts are of each level
    levels = configs(("grpo", "grpo-sg"), 8, evaluation={"prompts": 200}, task={"people": [3, 4]})
    both = by_claim(outlook(levels, DEFAULT, "grpo", "grpo-sg", pilot))["C7", "between runs"]
    assert both.design == designs[0]
    assert designs[1].supported > designs[0].supported + 0.1 and "power" in few["C7", "between runs"].line()


def test_a_budget_promises_no_held_out_influence_and_only_bounds_the_steps_with_norms():
    auto = {"budget": 0.05, "token_gradients_every": None, "heldout_influence_every": None}
    lines = {}
    for name, changes in {
        "budget": auto,
        "no budget": auto | {"budget": None},
        "set": auto | {"token_gradients_every": 10, "heldout_influence_every": 25},
    }.items():
        lines[name] = by_claim(outlook(configs(("grpo", "grpo-sg"), 6, recording=changes), DEFAULT, "grpo", "grpo-sg"))
    influence = {name: found["C9", "influence of recorded tokens"] for name, found in lines.items()}
    assert "no step is sure to measure held-out influence" in influence["budget"].missing and influence["budget"].n == 0
    assert (influence["no budget"].n, influence["set"].n) == (6 * (100 // 50), 6 * (100 // 25))
    for name, found in lines.items():
        line = found["C3", ""]
        assert line.n == 6 * 10 and ("recording.budget allows, at most 60" in line.line()) == (name == "budget")
