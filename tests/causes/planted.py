"""Tables of a healthy training, drawn from a random policy in numpy, in which tests plant a cause."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import replace

import numpy as np
import pandas as pd

from sharpscope.causes.recorded import TOKEN_COLUMNS, Recorded, Words

STEPS, GROUPS, SIZE, LENGTH, VOCABULARY, END = 6, 4, 8, 14, 7, 1
LR, PARAMETERS, BETA = 1e-3, 10_000, 0.1
PROMPT = (2, 3, 4)


def distribution(prefix: tuple[int, ...], sharp: float = 1.0) -> np.ndarray:
    """The policy's next-token distribution, a function of the prefix alone."""
    seed = zlib.crc32(repr(prefix).encode())
    logits = 4.0 * np.random.default_rng(seed).normal(size=VOCABULARY)
    logits[0], logits[END] = -40.0, logits[END] - 4.0  # no padding, and few ends
    logits *= sharp
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def draw(random: np.random.Generator, prompt: int, sharp: float = 1.0) -> list[int]:
    """A completion of a prompt: tokens up to and with the end token, at most LENGTH."""
    tokens: list[int] = []
    while len(tokens) < LENGTH and (not tokens or tokens[-1] != END):
        p = distribution((prompt, *tokens), sharp)
        tokens.append(int(random.choice(VOCABULARY, p=p)))
    return tokens


def token_rows(step: int, rollout: int, prompt: int, tokens: list[int]) -> list[dict]:
    """What the policy says of a completion's tokens."""
    rows = []
    for position, token in enumerate(tokens):
        p = distribution((prompt, *tokens[:position]))
        logp = math.log(p[token])
        entropy = -float(p @ np.log(p))
        row = {"step": step, "rollout": rollout, "position": position, "token_id": token}
        row |= {"update": 0, "logp": logp, "behavior_logp": logp, "entropy": entropy}
        rows.append(row | {"collision": float(p @ p), "ratio": 1.0})
    return rows


def healthy(seed: int = 0, sharp: float = 1.0) -> Recorded:
    """A training whose sampler is `sharp` times as sharp as the policy that is recorded (1: healthy)."""
    random = np.random.default_rng(seed)
    tokens, rollouts = [], []
    for step in range(1, STEPS + 1):
        for rollout in range(GROUPS * SIZE):
            group = rollout // SIZE
            prompt = 100 * step + group
            drawn = draw(random, prompt, sharp)
            tokens += token_rows(step, rollout, prompt, drawn)
            rollouts.append(
                {
                    "step": step,
                    "rollout": rollout,
                    "group": group,
                    "prompt": f"prompt {prompt}",
                    "completion": " ".join(map(str, drawn)),
                    "reward": float(sum(drawn) % 2 if group else 0),
                    "reward_parts": None,
                    "length": len(drawn),
                    "truncated": drawn[-1] != END,
                    "token_ids": json.dumps([*PROMPT, prompt, *drawn]),
                    "prompt_tokens": len(PROMPT) + 1,
                }
            )
    rows = pd.DataFrame(rollouts)
    rows["advantage"] = rows["reward"] - rows.groupby(["step", "group"])["reward"].transform("mean")
    return with_loss(
        Recorded(
            steps=steps_table(),
            updates=updates_table(),
            rollouts=rows,
            tokens=pd.DataFrame(tokens),
            uses=pd.DataFrame(columns=["step", "rollout", "position", "update", "ratio"]),
            events=pd.DataFrame(columns=["step", "rule", "value", "message"]),
            info={
                "method": "loop",
                "trainable_parameters": PARAMETERS,
                "trainer": {"name": "loop with AdamW"},
            },
            words=Words(special={0: "<pad>", END: "<end>", 6: "<stop>"}, end=END, pad=0),
        )
    )


def with_loss(recorded: Recorded, distance: float = 0.0) -> Recorded:
    """The training with the coefficients and shares of a right loss; its reference is at a `distance` from the start [nats]."""
    tokens = recorded.tokens.reset_index(drop=True)
    rows = recorded.rollouts.set_index(["step", "rollout"])["advantage"]
    keys = pd.MultiIndex.from_frame(tokens[["step", "rollout"]])
    advantage = rows.reindex(keys).to_numpy()
    count = tokens.groupby("step")["token_id"].transform("size")
    gap = distance + 0.3 * np.sin(np.arange(len(tokens))) * (tokens["step"] - 1)
    tokens["advantage"] = advantage
    tokens["ref_logp"] = tokens["logp"] - gap
    tokens["kl_coef"] = BETA * -np.expm1(-gap) / count
    tokens["loss_coef"] = -advantage / count + tokens["kl_coef"]
    tokens["attribution"] = 1.0 / count
    tokens["inclusion_probability"] = 1.0
    updates = recorded.updates.assign(tokens=tokens.groupby("step").size().to_numpy())
    return replace(recorded, tokens=tokens[list(TOKEN_COLUMNS)], updates=updates)


def steps_table() -> pd.DataFrame:
    """One row a step."""
    step = np.arange(1, STEPS + 1)
    return pd.DataFrame({"step": step, "kl_step": 0.01, "lr": LR, "entropy_mean": 1.0})


def updates_table() -> pd.DataFrame:
    """One update a step, of half of Adam's largest length."""
    layers = json.dumps({"0.mlp": 0.3, "1.mlp": 0.3, "norm": 0.01})
    return pd.DataFrame(
        {
            "step": np.arange(1, STEPS + 1),
            "update": 0,
            "skipped": False,
            "loss": 0.1,
            "grad_norm": 0.5,
            "clip_factor": 1.0,
            "lr": LR,
            "update_norm": 0.5 * LR * math.sqrt(PARAMETERS),
            "update_norm_by_layer": layers,
            "grad_norm_by_layer": layers,
        }
    )


def supervised(method: str = "sft", seed: int = 0) -> Recorded:
    """A training on given completions that end with the end token; of pairs, the second is cut by one token."""
    base = healthy(seed)
    tokens, rollouts = [], []
    for _, row in base.rollouts.iterrows():
        ids = [int(token) for token in row["completion"].split() if int(token) != END]
        ids = [*(ids or [2]), END]
        prompt = int(row["prompt"].split()[1])
        tokens += token_rows(row["step"], row["rollout"], prompt, ids)
        rollouts.append(row.to_dict() | {"token_ids": json.dumps([*PROMPT, prompt, *ids])})
    info = {"method": method, "trainable_parameters": PARAMETERS, "trainer": {"name": "SFTTrainer"}}
    frame = pd.DataFrame(tokens).reindex(columns=list(TOKEN_COLUMNS))
    rows = pd.DataFrame(rollouts).assign(reward=np.nan, advantage=np.nan, truncated=None)
    return replace(base, tokens=frame, rollouts=rows, info=info)
