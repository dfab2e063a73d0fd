"""Probes of any causal language model on given prompts and completions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sharpscope.config.probes import ObjectiveName, ProbesSpec
from sharpscope.errors import UserError
from sharpscope.probes.objectives import Objective, TokenBatch, completion_batch
from sharpscope.probes.runner import ProbeBatch, limited_surface
from sharpscope.probes.token_gradients import score_norms

if TYPE_CHECKING:
    import pandas as pd

    from sharpscope.policy import Policy


@dataclass(frozen=True)
class DataRow:
    """One row of a data file.

    Attributes:
        prompt: text of the prompt.
        completion: text of the completion; an end-of-text token is added unless it is truncated.
        reward: success in [0, 1], or None.
        truncated: whether the completion was cut at a length limit.
        meta: may contain `messages`, `prefill` and `templated`; see `sharpscope.tasks.Example`.
    """

    prompt: str
    completion: str
    reward: float | None = None
    truncated: bool = False
    meta: Mapping[str, Any] | None = None


def read_rows(path: Path | str) -> list[DataRow]:
    """Rows of a JSONL or Parquet file with `prompt` and `completion`; optional: `reward`, `truncated`, `meta`.

    Raises:
        UserError: a missing file, an unknown file extension, a line that is not JSON, or a row without both texts.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"data, {path}: no such file")
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            records = pq.read_table(path).to_pylist()
        except pa.ArrowException as problem:
            raise UserError(f"data, {path}: not a Parquet file that can be read ({problem})") from problem
    elif path.suffix in (".jsonl", ".json"):
        records = _json_lines(path)
    else:
        raise UserError(f"data, {path}: ends in '{path.suffix}'; give a .jsonl or .parquet file")
    rows = [_data_row(record, number, path) for number, record in enumerate(records, 1)]
    if not rows:
        raise UserError(f"data, {path}: holds no rows")
    return rows


def text_batch(policy: Policy, rows: Sequence[DataRow]) -> TokenBatch:
    """Tokenized rows with the completion tokens scored; the advantage is the success minus its mean over equal prompts.

    Raises:
        UserError: a row is longer than the model's context, or a completion is empty.
    """
    from sharpscope.policy import render_prompts
    from sharpscope.tasks import Example

    prompts = render_prompts([Example.from_row(row.prompt, "", dict(row.meta or {})) for row in rows], policy)
    pairs: list[tuple[list[int], list[int]]] = []
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True), 1):
        ids = list(policy.tokenizer(row.completion, add_special_tokens=False)["input_ids"])
        if not row.truncated and (not ids or ids[-1] not in policy.eos_ids) and policy.eos_ids:
            ids.append(policy.eos_ids[0])
        if not prompt or not ids:
            raise UserError(f"data, row {number}: the {'completion' if prompt else 'prompt'} is empty")
        length = len(prompt) + len(ids)
        if policy.context is not None and length > policy.context:
            raise UserError(f"data, row {number}: {length} tokens, the context is {policy.context}; leave it out")
        pairs.append((prompt, ids))
    reward = torch.tensor([math.nan if row.reward is None else row.reward for row in rows], dtype=torch.float64)
    known = reward.nan_to_num(1.0)
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, (prompt, _) in enumerate(pairs):
        by_prompt.setdefault(tuple(prompt), []).append(index)
    advantage = torch.zeros_like(known)
    for members in by_prompt.values():
        advantage[members] = known[members] - known[members].mean()
    return completion_batch(pairs, reward=known, advantage=advantage).to(policy.device)


def text_batches(
    policy: Policy,
    rows: Sequence[DataRow],
    functionals: Sequence[ObjectiveName] = ("nll",),
    *,
    temperature: float = 1.0,
    seed: int = 0,
    label: str = "data",
) -> list[ProbeBatch]:
    """The batch of given texts for `run`.

    `nll` needs only texts. `surrogate` and `expected_failure` need rewards and assume that the policy wrote the completions:
    the anchors are its own log-probabilities.

    Args:
        policy: policy from `sharpscope.policy.load_policy`.
        rows: see `read_rows`.
        functionals: names of the objectives to probe.
        temperature: softmax temperature.
        seed: seed of every random vector.
        label: value of the `probe_set` column.

    Raises:
        UserError: missing rewards, or rows that are empty or too long.
    """
    missing = sum(row.reward is None for row in rows)
    if missing and any(name != "nll" for name in functionals):
        raise UserError(
            f"data: {missing} of {len(rows)} rows have no reward, which {', '.join(functionals)} needs; use nll alone"
        )
    batch = text_batch(policy, rows)
    return [ProbeBatch(label, tuple(Objective(name, batch, temperature) for name in functionals), seed)]


def token_norms(policy: Policy, rows: Sequence[DataRow], spec: ProbesSpec) -> pd.DataFrame:
    """The log-probability and the score norm (method `local`) of each completion token.

    Args:
        policy: policy to probe.
        rows: texts; see `read_rows`.
        spec: memory limits and self-check.

    Returns:
        One row per completion token: `row` of the file, `position` in the completion, `token_id`, `logp` [nats] and
        `score_norm_local`.
    """
    import pandas as pd

    batch = text_batch(policy, rows)
    mask = batch.scored
    attention = torch.arange(mask.shape[1], device=mask.device) < batch.lengths[:, None]
    with limited_surface(policy.model, Objective("nll", batch), spec) as surface:
        logp = surface.logp()
    norms = score_norms(
        policy.model, batch.input_ids, mask, method="local", attention_mask=attention.long(), check=spec.check
    )
    row, column = mask.nonzero(as_tuple=True)
    columns = {
        "row": row,
        "position": mask.long().cumsum(1)[row, column] - 1,
        "token_id": batch.input_ids[row, column],
        "logp": logp[row, column],
        "score_norm_local": norms.values[row, column],
    }
    return pd.DataFrame({name: values.cpu().numpy() for name, values in columns.items()})


def _json_lines(path: Path) -> list[Any]:
    records = []
    with path.open(encoding="utf-8") as lines:  # str.splitlines would also split at U+2028
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    records.append(json.loads(line))
                except json.JSONDecodeError as problem:
                    raise UserError(f"data, {path} line {number}: not JSON ({problem.msg})") from problem
    return records


def _data_row(record: Any, number: int, path: Path) -> DataRow:
    texts = [record.get(name) if isinstance(record, dict) else None for name in ("prompt", "completion")]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"data, {path} row {number}: needs the texts 'prompt' and 'completion'")
    reward, meta = record.get("reward"), record.get("meta")
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        raise UserError(f"data, {path} row {number}: reward {reward!r} is not a finite number")
    return DataRow(
        str(texts[0]),
        str(texts[1]),
        None if reward is None else float(reward),
        bool(record.get("truncated", False)),
        meta if isinstance(meta, dict) else None,
    )
