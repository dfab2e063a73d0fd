"""Probes of any causal language model on given prompts and completions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sharpscope.config.probes import ObjectiveName
from sharpscope.errors import UserError
from sharpscope.probes.objectives import Objective, completion_batch
from sharpscope.probes.runner import ProbeBatch

if TYPE_CHECKING:
    import pandas as pd

    from sharpscope.policy import Policy


def read_rows(path: Path | str) -> pd.DataFrame:
    """Rows of a JSONL or Parquet file with the texts `prompt` and `completion`.

    Optional are `reward`, a success in [0, 1]; `truncated`, whether the completion was cut at a length limit, so that no end-of-text
    token is added; and `meta`, a dictionary with `messages`, `prefill` and `templated` (see `sharpscope.tasks.Example`). Where a row
    does not have them they are NaN, False and {}.

    Raises:
        UserError: a missing file, an unknown file extension, a file that is not what its extension says, or a row without both
            texts.
    """
    import pandas as pd

    path = Path(path)
    if not path.is_file():
        raise UserError(f"data, {path}: no such file")
    if path.suffix not in (".parquet", ".jsonl", ".json"):
        raise UserError(f"data, {path}: ends in '{path.suffix}'; give a .jsonl or .parquet file")
    try:
        if path.suffix == ".parquet":
            found = pd.read_parquet(path)
        else:
            found = pd.read_json(path, lines=True, dtype=False, convert_dates=False)
    except (OSError, ValueError) as problem:
        raise UserError(f"data, {path}: cannot be read as {path.suffix[1:]} ({problem})") from problem
    if found.empty:
        raise UserError(f"data, {path}: holds no rows")
    found = found.reindex(columns=["prompt", "completion", "reward", "truncated", "meta"])
    texts = found[["prompt", "completion"]].map(lambda value: isinstance(value, str)).all(axis=1)
    if not texts.all():
        raise UserError(f"data, {path} row {int(texts.argmin()) + 1}: needs the texts 'prompt' and 'completion'")
    meta = found["meta"].map(lambda value: value if isinstance(value, dict) else {})
    reward = pd.to_numeric(found["reward"], errors="coerce").astype(float)
    return found.assign(reward=reward, truncated=found["truncated"] == 1, meta=meta)


def text_batches(
    policy: Policy,
    rows: pd.DataFrame,
    functionals: Sequence[ObjectiveName] = ("nll",),
    *,
    seed: int = 0,
    label: str = "data",
) -> list[ProbeBatch]:
    """The batch of given texts for `run`.

    `nll` needs only texts. `expected_failure` needs rewards and assumes that the policy wrote the completions: the anchors
    are its own log-probabilities.

    Args:
        policy: from `sharpscope.policy.load_policy`.
        rows: see `read_rows`.
        functionals: names of the objectives.
        seed: of every random vector.
        label: value of the `probe_set` column.

    Raises:
        UserError: missing rewards, or rows that are empty or too long.
    """
    from sharpscope.policy import render_prompts
    from sharpscope.tasks import Example

    missing = int(rows["reward"].isna().sum())
    if missing and any(name != "nll" for name in functionals):
        raise UserError(
            f"data: {missing} of {len(rows)} rows have no reward, which {', '.join(functionals)} needs; use nll alone"
        )
    examples = [Example.from_row(prompt, "", meta) for prompt, meta in zip(rows["prompt"], rows["meta"], strict=True)]
    prompts = render_prompts(examples, policy)
    pairs: list[tuple[Sequence[int], Sequence[int]]] = []
    texts = zip(prompts, rows["completion"], rows["truncated"], strict=True)
    for number, (prompt, completion, truncated) in enumerate(texts, 1):
        ids = list(policy.tokenizer(completion, add_special_tokens=False)["input_ids"])
        if not truncated and (not ids or ids[-1] not in policy.eos_ids) and policy.eos_ids:
            ids.append(policy.eos_ids[0])
        if not prompt or not ids:
            raise UserError(f"data, row {number}: the {'completion' if prompt else 'prompt'} is empty")
        length = len(prompt) + len(ids)
        if policy.context is not None and length > policy.context:
            raise UserError(f"data, row {number}: {length} tokens, the context is {policy.context}; leave it out")
        pairs.append((prompt, ids))
    reward = torch.tensor(rows["reward"].fillna(1.0).to_numpy(dtype=float))
    batch = completion_batch(pairs, reward=reward).to(policy.device)
    return [ProbeBatch(label, tuple(Objective(name, batch) for name in functionals), seed)]
