"""Tokens in their sentence, for the terminal: `sharpscope tokens` and `sharpscope spikes`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sharpscope.analysis.spikes import Spike
from sharpscope.errors import UserError, nearest
from sharpscope.traces import Run

SHOWN = ("probability", "advantage", "weight", "score_norm", "attribution")
CONTEXT = 7  # tokens on either side

Decode = Callable[[int], str]


def token_decoder(run: Run) -> Decode:
    """A function from token id to text, from the tokenizer that the run saved.

    Raises:
        UserError: the run has no tokenizer folder.
    """
    folder = Path(run.path) / "tokenizer"
    if not folder.is_dir():
        raise UserError(f"run '{run.path}' has no tokenizer/ folder, so its tokens cannot be shown as text")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda token: str(tokenizer.decode([token], clean_up_tokenization_spaces=False))


def visible(text: str) -> str:
    """`text` on one line with nothing that a terminal would obey: newline as ⏎, other controls as �."""
    return "".join("⏎" if c == "\n" else c if c.isprintable() else "�" for c in text)


def top_tokens(run: Run, step: int, by: str, top: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(the `top` tokens of `step` by |`by`|, all tokens of the step), with `probability` and the exact norm where there is one.

    Raises:
        UserError: no such step, no such column, or nothing recorded in it at that step.
    """
    numeric = ("probability", "logp", "entropy", "advantage", "weight", "loss_coef", "logit_grad_norm", "head_grad_norm",
               "score_norm", "score_norm_local", "attribution", "update_attribution", "heldout_influence",
               "sharp_alignment")  # fmt: skip
    if by not in numeric:
        raise UserError(f"--by {by}: no such column{nearest(by, numeric)}")
    steps = run.steps["step"].tolist()
    if step not in steps:
        raise UserError(f"--step {step}: the run has steps {min(steps, default=0)} to {max(steps, default=0)}")
    tokens = run.tokens(steps=[step])
    tokens = tokens.assign(probability=np.exp(tokens["logp"]))
    values = tokens[by].abs().dropna()
    if values.empty:
        recorded = recorded_steps(run, by)
        where = f"recorded at steps {', '.join(map(str, recorded[:12]))}" if recorded else "never recorded in this run"
        raise UserError(f"--by {by}: not recorded at step {step}; {where}")
    return tokens.loc[values.nlargest(top).index], tokens


def recorded_steps(run: Run, column: str) -> list[int]:
    """Steps at which a column of the tokens table holds a value."""
    if column == "probability":
        return [int(step) for step in run.steps["step"]]
    frame = run.tokens(columns=["step", column]).dropna(subset=[column])
    return sorted(int(step) for step in frame["step"].unique())


def render_tokens(
    chosen: pd.DataFrame, everything: pd.DataFrame, by: str, decode: Decode, title: str
) -> RenderableType:
    """The tokens in their sentence, coloured by sign (blue raises, orange lowers; both also marked), with their numbers."""
    columns = [name for name in (by, *SHOWN) if name in chosen and chosen[name].notna().any()]
    columns = list(dict.fromkeys(columns))
    table = Table(title=Text(title), pad_edge=False)
    table.add_column("rollout:position", justify="right", no_wrap=True)
    table.add_column("in its sentence", ratio=1)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    by_rollout = dict(tuple(everything.groupby("rollout")))
    for row in chosen.to_dict("records"):
        sentence = by_rollout[row["rollout"]].sort_values("position")
        cells = [_number(row[name]) for name in columns]
        table.add_row(
            f"{row['rollout']}:{row['position']}", _sentence(sentence, int(row["position"]), row[by], decode), *cells
        )
    return table


def _sentence(sentence: pd.DataFrame, position: int, value: float, decode: Decode) -> Text:
    text = Text()
    near = sentence[(sentence["position"] >= position - CONTEXT) & (sentence["position"] <= position + CONTEXT)]
    for token, place in zip(near["token_id"], near["position"], strict=True):
        piece = visible(decode(int(token)))
        if place == position:
            text.append(f"▸{piece}◂", style="bold reverse " + ("dark_orange3" if value < 0 else "deep_sky_blue3"))
        else:
            text.append(piece, style="dim")
    return text


def render_spikes(spikes: Sequence[Spike], tokens_of: Callable[[int], pd.DataFrame], decode: Decode) -> RenderableType:
    """Each spike on a screen: how large, which tokens, which prompts, which probabilities."""
    parts: list[RenderableType] = []
    for spike in spikes:
        z = "" if math.isnan(spike.z) else f", {spike.z:.1f} robust standard deviations above"
        parts.append(
            Text(
                f"step {spike.step}: gradient norm {spike.grad_norm:.3g}; typical {spike.typical:.3g}{z}", style="bold"
            )
        )
        if spike.tokens is None or spike.prompts is None or spike.probabilities is None:
            parts.append(
                Text("  no attribution was recorded at this step (recording.token_gradients_every, recording.spike_z)")
            )
            continue
        parts.append(
            render_tokens(
                spike.tokens, tokens_of(spike.step), "attribution", decode, "tokens by share of the squared norm"
            )
        )
        prompts = Table("share", "prompt", title="prompts")
        for row in spike.prompts.head(4).to_dict("records"):
            text = visible(row["prompt"])
            prompts.add_row(f"{row['attribution']:+.1%}", Text(text if len(text) <= 100 else text[:97] + "…"))
        ranges = Table("π", "share of the squared norm", "share of the tokens", title="probability ranges")
        for interval, row in zip(spike.probabilities.index, spike.probabilities.to_dict("records"), strict=True):
            ranges.add_row(Text(str(interval)), f"{row['share']:+.1%}", f"{row['tokens']:.1%}")
        parts += [prompts, ranges]
    return Group(*parts)


def _number(value: float) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3g}"
