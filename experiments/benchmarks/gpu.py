"""Recording on whatever GPU there is, with random weights at the shapes of 0.5B, 1.5B and 3B: `gpu --minutes 8`.

A training loop of one's own with `sharpscope.record`: off, coefficients only, norms and shares every tenth
step, shares at a spike. The
weights must end equal bit for bit. Without a GPU it runs on the CPU, for which `--shape tiny` is meant.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import sharpscope
from experiments.benchmarks.common import SHAPES, Row, cost, random_model, random_rows
from sharpscope.config.run import RecordingSpec
from sharpscope.tokens import score_norms
from sharpscope.traces import load_run

NEVER = {f"{name}_every": 0 for name in ("token_gradients", "rotation", "heldout_influence")}
QUIET: dict[str, Any] = NEVER | {"spike_z": None, "exact_tokens": 0}
MODES: dict[str, dict[str, Any] | None] = {
    "off": None,
    "coefficients": QUIET,
    "norms and shares every tenth step": QUIET | {"token_gradients_every": 10, "group_share": 1.0},
    "coefficients, shares at a spike": QUIET | {"spike_z": 6.0, "group_share": 1.0},
}
"""What is recorded -> fields of `recording`; every training has a planted spike."""


def gpu(
    minutes: float, shapes: list[str], rows: int = 8, length: int = 512, steps: int = 11
) -> list[Row]:
    """All rows of the shapes for which there is time; what is left out is said."""
    ends, found = time.perf_counter() + 60 * minutes, []
    for shape in shapes:
        began = time.perf_counter()
        try:
            found += _shape(shape, rows, length, steps)
        except torch.OutOfMemoryError as problem:
            found.append(
                Row(
                    f"{shape}: out of memory",
                    float("nan"),
                    "",
                    note=str(problem).splitlines()[0][:100],
                )
            )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        left, took = ends - time.perf_counter(), time.perf_counter() - began
        if left < 3 * took and shape != shapes[-1]:
            after = ", ".join(shapes[shapes.index(shape) + 1 :])
            found.append(
                Row(
                    f"not measured: {after}", float("nan"), "", note=f"{left / 60:.1f} minutes left"
                )
            )
            break
    return found


def _shape(shape: str, rows: int, length: int, steps: int) -> list[Row]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found, ended, seconds = [], {}, {}
    for mode, recording in MODES.items():
        with tempfile.TemporaryDirectory() as folder:
            one, weights = _train(
                shape, device, recording, Path(folder) / "run", rows, length, steps
            )
            seconds[mode], ended[mode] = one.wall, weights
            if recording is None:
                found.append(
                    Row(
                        f"{shape}: {steps} steps of {rows} × {length} tokens, not recorded",
                        one.wall,
                        "s",
                    )
                )
                base = one
                continue
            share = 100 * (one.wall / seconds["off"] - 1)
            extra = (one.extra - base.extra) / 2**30
            equal = all(map(torch.equal, ended["off"], weights))
            note = f"{extra:.2f} GiB more memory; weights {'equal' if equal else 'NOT equal'} bit for bit"
            required = "≤ 3" if mode == "coefficients" else ""
            found.append(
                Row(f"{shape}: {mode}, beyond not recorded", share, "%", required, "", note)
            )
            if mode == "coefficients":
                tokens = load_run(Path(folder) / "run").rows("tokens")
                size = sum(
                    f.stat().st_size for f in (Path(folder) / "run").glob("traces/tokens/*.parquet")
                )
                limit = RecordingSpec().token_rows
                gigabytes = size / tokens * limit * 1000 / 1e9
                note = f"{size / tokens:.0f} bytes a token; {limit:,} tokens of a step are written, spikes whole"
                found.append(
                    Row(
                        f"{shape}: Parquet of 1,000 steps of 2 million tokens",
                        gigabytes,
                        "GB",
                        "",
                        "",
                        note,
                    )
                )
            del weights
    return [*found, *_norms(shape, device, length)]


def _train(
    shape: str,
    device: str,
    recording: dict[str, Any] | None,
    out: Path,
    rows: int,
    length: int,
    steps: int,
) -> tuple[Any, list[torch.Tensor]]:
    """The cost of a training, and its final weights on the CPU."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = random_model(SHAPES[shape], dtype, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    recorder = None
    if recording is not None:
        recorder = sharpscope.record(
            model,
            optimizer,
            tokenizer=_tokenizer(),
            out=out,
            recording=recording,
            critical_sharpness=False,
            steps=steps,
        )

    def work() -> None:
        for step in range(steps):
            ids, mask = random_rows(model, rows, length, seed=step)
            mask[:, : length // 4] = 0  # the prompt
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            logp = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            advantage = torch.linspace(-1, 1, rows, device=ids.device)[:, None]
            planted = 30.0 if step == steps - 2 else 1.0
            loss = -planted * (advantage * logp * mask[:, 1:]).sum() / mask.sum()
            if recorder is not None:
                recorder.tokens(
                    logp, ids, mask, advantages=advantage[:, 0], rewards=advantage[:, 0]
                )
            loss.backward()
            if recorder is not None:
                recorder.step(loss)
            optimizer.step()
            optimizer.zero_grad()
        if recorder is not None:
            recorder.close()

    found = cost(work)
    return found, [p.detach().cpu() for p in model.parameters()]


def _norms(shape: str, device: str, length: int) -> list[Row]:
    """Local norms in the training's precision against exact ones in float32, on 100 tokens."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = random_model(SHAPES[shape], dtype, device)
    ids, _ = random_rows(model, 4, min(length, 128))
    mask = torch.zeros_like(ids)
    mask[:, torch.linspace(1, ids.shape[1] - 1, 25).long()] = 1
    local = score_norms(model, ids, mask, check="off").values[mask.bool()]
    exact = score_norms(model.float(), ids, mask, "exact").values[mask.bool()]
    ratio = (local.double() / exact.double()).cpu()
    ranks = torch.stack([x.double().cpu().argsort().argsort().double() for x in (local, exact)])
    rank = float(torch.corrcoef(ranks)[0, 1])
    note = f"rank correlation {rank:.3f}; 10 to 90 % of the tokens: {ratio.quantile(0.1):.3f} to {ratio.quantile(0.9):.3f}"
    what = f"{shape}: local norm in {str(dtype).removeprefix('torch.')} over exact, median of {len(ratio)} tokens"
    return [Row(what, float(ratio.median()), "×", "", "", note)]


def _tokenizer() -> Any:
    """Random words have no text; the recorder only needs to decode them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<end>": 0, "<pad>": 1} | {f"w{i}": i for i in range(2, 512)}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")
