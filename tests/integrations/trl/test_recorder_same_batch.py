"""A tiny model trained on one batch by our loop and by TRL: the same coefficients, norms and updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sharpscope

pytest.importorskip("trl", reason="TRL is not installed (test extra)")

from sharpscope.integrations.record import record
from tests.integrations.same_batch import CASES, EPOCHS, EPS, GROUP, KL, LR, batch, check_equal, our_run
from tests.integrations.trainers import tokenizer, trainer


@pytest.mark.parametrize("name", CASES)
def test_trl_does_what_our_loop_does(name: str, tmp_path: Path):
    case, given = CASES[name], batch()
    texts = tokenizer().batch_decode(given.prompts)
    left = {text: [i for i, other in enumerate(texts) if other == text] for text in texts}

    def generated(prompts: list[str], _: Any) -> dict[str, Any]:
        rows = [left[text].pop(0) for text in prompts]
        ids = [given.completions[row] for row in rows]
        return {
            "prompt_ids": [given.prompts[row] for row in rows],
            "completion_ids": ids,
            "logprobs": [[-1.0 - 0.1 * t for t in range(len(row))] for row in ids],
        }

    def rewarded(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [given.rewards[given.completions.index(list(ids))] for ids in completion_ids]

    one = trainer(
        tmp_path / "t",
        beta=KL,
        loss_type=case.trl_loss,
        scale_rewards=case.scale,
        num_iterations=EPOCHS,
        max_steps=EPOCHS,
        learning_rate=LR,
        adam_epsilon=EPS,
        num_generations=GROUP,
        use_bias_correction_kl=False,
        prompts=list(left),
        rewards=[rewarded],
        rollout_func=generated,
    )
    record(
        one,
        out=tmp_path / "run",
        recording={"token_gradients_every": 1, "exact_tokens": 100, "group_share": 1.0},
        critical_sharpness=False,
    )
    one.train()
    columns = ["loss_coef", "advantage", "ratio", "logp", "score_norm", "score_norm_local", "attribution"]
    check_equal(our_run(tmp_path, case), sharpscope.load_run(tmp_path / "run"), columns)
