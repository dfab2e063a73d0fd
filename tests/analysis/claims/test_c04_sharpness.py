"""C4: sharpness, compared at one radius on one probe set."""

from __future__ import annotations

from dataclasses import replace

from tests.analysis.claims.frames import frame_run, study
from tests.analysis.claims.verdicts import verdict


def test_sharpness_is_compared_at_a_radius_and_on_a_probe_set_that_both_runs_have():
    """The treatment was probed at smaller radii alone, where any run is less sharp: that is no effect of the method."""
    runs = []
    for seed in range(8):
        for method, radii in (("grpo", (0.01, 0.05, 0.5)), ("grpo-sg", (0.01, 0.05))):
            rows = [
                {"step": 40, "quantity": q, "rho": rho, "value": 10 * rho * (1 + 0.1 * seed)}
                for q in ("sam", "asam")
                for rho in radii
            ]
            runs.append(frame_run(method, seed, probes=rows))
    result = verdict(study(*runs), "C4")
    assert result.verdict != "supported" and result.effect.value == 0 and result.n == 8
    for run in runs:
        if run.method == "grpo-sg":
            run.probes["probe_set"] = "train-1"
    elsewhere = verdict(study(*(replace(run) for run in runs)), "C4")
    assert elsewhere.verdict == "untestable" and "sharpness" in elsewhere.reason
