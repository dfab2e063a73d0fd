"""Tokens in their sentence, for the terminal: `sharpscope tokens` and `sharpscope spikes`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sharpscope.analysis.spikes import Spike
from sharpscope.errors import UserError, nearest
from sharpscope.traces import Run

SHOWN = ("probability", "advantage", "weight", "norm", "attribution")
HEADINGS = {
    "probability": "π", "advantage": "adv.", "attribution": "share", "update_attribution": "share of\nupdate",
    "heldout_influence": "held-out\ninfluence", "loss_coef": "coef.",
}  # fmt: skip
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
    tokenizer: Any
    if (folder / "tokenizer.json").is_file():
        # AutoTokenizer gives some model types (Qwen2 among them) a class that cuts text in another way than the file says.
        from sharpscope.policy.embedded import load_tokenizer

        tokenizer = load_tokenizer(folder)
    else:
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
    """The tokens in their sentence, coloured by sign (blue raises, orange lowers; both also marked), with their numbers.

    A norm is the exact one where it was recorded, else the local tier's, marked by ~.
    """
    columns = [name for name in dict.fromkeys((by, *SHOWN)) if name == "norm" or chosen[name].notna().any()]
    table = Table(title=Text(title), pad_edge=False, padding=(0, 1, 0, 0), expand=True)
    table.add_column("rollout:\nposition", justify="right", no_wrap=True)
    table.add_column("in its sentence", ratio=1)
    for name in columns:
        table.add_column(HEADINGS.get(name, name.replace("_", "\n", 1)), justify="right", no_wrap=True)
    by_rollout = dict(tuple(everything.groupby("rollout")))
    for row in chosen.to_dict("records"):
        sentence = by_rollout[row["rollout"]].sort_values("position")
        cells = [_norm(row) if name == "norm" else _number(row[name]) for name in columns]
        table.add_row(
            f"{row['rollout']}:{row['position']}", _sentence(sentence, int(row["position"]), row[by], decode), *cells
        )
    return table


def _norm(row: Mapping[Any, Any]) -> str:
    """‖∇ log π‖: the exact norm, or the local tier's marked by ~."""
    exact, local = row.get("score_norm", math.nan), row.get("score_norm_local", math.nan)
    if not math.isnan(exact):
        return _number(exact)
    return _number(local) if math.isnan(local) else f"~{_number(local)}"


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
        shown = spike.prompts.head(4)
        for share, text in zip(
            shown["attribution"], _told_apart([visible(text) for text in shown["prompt"]]), strict=True
        ):
            prompts.add_row(f"{share:+.1%}", Text(text))
        ranges = Table("π", "share of the squared norm", "share of the tokens", title="probability ranges")
        for interval, row in zip(spike.probabilities.index, spike.probabilities.to_dict("records"), strict=True):
            ranges.add_row(
                f"{max(interval.left, 0.0):g} to {interval.right:g}", f"{row['share']:+.1%}", f"{row['tokens']:.1%}"
            )
        parts += [prompts, ranges]
    return Group(*parts)


def _told_apart(texts: list[str], width: int = 100) -> list[str]:
    """The texts, cut to `width`, without what they all begin with (whole words) where that is long."""
    same = 0
    if len(set(texts)) > 1:
        same = next((i for i, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), 0)
        same = texts[0].rfind(" ", 0, same) + 1
    if same > width // 4:
        texts = ["… " + text[same:] for text in texts]
    return [text if len(text) <= width else text[: width - 1] + "…" for text in texts]


def _number(value: float) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3g}"
