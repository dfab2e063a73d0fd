"""Recording on whatever GPU there is, with random weights: `gpu --minutes 8`.

In this order, as far as the time goes: are the numbers right (`gpu_checks`), do recorded and unrecorded trainings end with the
same weights bit for bit, what does recording cost at the shapes of 0.5B, 1.5B and 3B, and does 7B fit into memory. Without a GPU
it runs on the CPU, for which `--shape tiny` is meant.
"""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import sharpscope
from experiments.benchmarks.common import SHAPES, Cost, Row, cost, peak, random_model, random_rows
from experiments.benchmarks.gpu_checks import checks
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
MEMORY_ONLY = "7b"


def gpu(
    minutes: float, shapes: list[str], rows: int = 8, length: int = 512, steps: int = 11
) -> list[Row]:
    """Correctness, equality, prices and memory; what there is no time or memory for is said."""
    ends = time.perf_counter() + 60 * minutes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = "tiny" if shapes == ["tiny"] else "0.9m"
    found = [*checks(device, small), *_equalities(small, device)]
    last = [MEMORY_ONLY] if device == "cuda" and shapes != ["tiny"] else []
    took = 0.0
    for shape in [*shapes, *last]:
        left = ends - time.perf_counter()
        if left < 3 * took:  # a shape takes about three times as long as the one before
            found.append(_missing(f"{shape}: not measured", f"{left / 60:.1f} minutes left"))
            break
        began = time.perf_counter()
        try:
            measure = _memory if shape == MEMORY_ONLY else _prices
            found += measure(Training(shape, device, rows=rows, length=length, steps=steps))
        except torch.OutOfMemoryError as problem:
            found.append(_missing(f"{shape}: out of memory", str(problem).splitlines()[0][:100]))
        if device == "cuda":
            torch.cuda.empty_cache()
        took = time.perf_counter() - began
    return found


def _missing(what: str, why: str) -> Row:
    return Row(what, math.nan, "", note=why)


@dataclass(frozen=True)
class Training:
    """A loop of one's own on random tokens, with a spike at the last step but one."""

    shape: str
    device: str
    dtype: torch.dtype | None = None  # None: bfloat16 on a GPU, float32 on a CPU
    rows: int = 8
    length: int = 512
    steps: int = 11
    compiled: bool = False

    def model(self) -> Any:
        usual = torch.bfloat16 if self.device == "cuda" else torch.float32
        made = random_model(SHAPES[self.shape], self.dtype or usual, self.device)
        if self.compiled:
            made.compile()
        return made

    def run(self, recording: dict[str, Any] | None, out: Path) -> tuple[Cost, list[torch.Tensor]]:
        """The cost of the training, recorded as said or not at all, and its final weights on the CPU."""
        model = self.model()
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
                steps=self.steps,
            )
        found = cost(lambda: self._train(model, optimizer, recorder))
        return found, [p.detach().cpu() for p in model.parameters()]

    def _train(self, model: Any, optimizer: torch.optim.Optimizer, recorder: Any) -> None:
        for step in range(self.steps):
            ids, mask = random_rows(model, self.rows, self.length, seed=step)
            mask[:, : self.length // 4] = 0  # the prompt
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            logp = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            advantage = torch.linspace(-1, 1, self.rows, device=ids.device)[:, None]
            planted = 30.0 if step == self.steps - 2 else 1.0
            loss = -planted * (advantage * logp * mask[:, 1:]).sum() / mask.sum()
            if recorder is not None:
                given = {"advantages": advantage[:, 0], "rewards": advantage[:, 0]}
                recorder.tokens(logp, ids, mask, **given)
            loss.backward()
            if recorder is not None:
                recorder.step(loss)
            optimizer.step()
            optimizer.zero_grad()
        if recorder is not None:
            recorder.close()


def _equalities(shape: str, device: str) -> list[Row]:
    """Number of weights that differ between a recorded and an unrecorded training."""
    everything = {"token_gradients_every": 1, "group_share": 1.0}
    found = []
    for name, dtype, compiled in (
        ("float32", torch.float32, False),
        ("bfloat16", torch.bfloat16, False),
        ("float32, torch.compile", torch.float32, True),
    ):
        training = Training(shape, device, dtype, 4, 32, 3, compiled)
        what = f"{shape}, {name}: weights that recording every step changed"
        try:
            with tempfile.TemporaryDirectory() as folder:
                plain = training.run(None, Path(folder) / "off")[1]
                recorded = training.run(everything, Path(folder) / "run")[1]
        except RuntimeError as problem:  # a compiler that is not there
            found.append(_missing(what, " ".join(str(problem).split())[:160]))
            continue
        pairs = zip(plain, recorded, strict=True)
        found.append(Row(what, sum(int((a != b).sum()) for a, b in pairs), "", "0"))
    return found


def _prices(training: Training) -> list[Row]:
    """The time and memory that each way of recording adds, the bytes that it writes, and how good local norms are."""
    shape, found = training.shape, list[Row]()
    base, weights = training.run(None, Path("unused"))
    told = f"{training.steps} steps of {training.rows} × {training.length} tokens"
    found.append(Row(f"{shape}: {told}, not recorded", base.wall, "s"))
    for mode, recording in MODES.items():
        if recording is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            one, ended = training.run(recording, Path(folder) / "run")
            share = 100 * (one.wall / base.wall - 1)
            extra = (one.extra - base.extra) / 2**30
            equal = "equal" if all(map(torch.equal, weights, ended)) else "NOT equal"
            note = f"{extra:.2f} GiB more memory; weights {equal} bit for bit"
            required = "≤ 3" if mode == "coefficients" else ""
            what = f"{shape}: {mode}, beyond not recorded"
            found.append(Row(what, share, "%", required, "", note))
            if mode == "coefficients":
                found.append(_bytes(shape, Path(folder) / "run"))
    return [*found, _norms(training)]


def _bytes(shape: str, run: Path) -> Row:
    """Size of the tokens of 1,000 large steps, by the bytes of a token in this run."""
    size = sum(file.stat().st_size for file in run.glob("traces/tokens/*.parquet"))
    of_token = size / load_run(run).rows("tokens")
    limit = RecordingSpec().token_rows
    note = f"{of_token:.0f} bytes a token; {limit:,} tokens of a step are written, spikes whole"
    what = f"{shape}: Parquet of 1,000 steps of 2 million tokens"
    return Row(what, of_token * limit * 1000 / 1e9, "GB", "", "", note)


def _norms(training: Training) -> Row:
    """Local norms in the training's precision against exact ones in float32, on 100 tokens."""
    model = training.model()
    ids, _ = random_rows(model, 4, min(training.length, 128))
    mask = torch.zeros_like(ids)
    mask[:, torch.linspace(1, ids.shape[1] - 1, 25).long()] = 1
    dtype = str(model.dtype).removeprefix("torch.")
    local = score_norms(model, ids, mask, check="off").values[mask.bool()]
    exact = score_norms(model.float(), ids, mask, "exact").values[mask.bool()]
    ratio = (local.double() / exact.double()).cpu()
    ranks = torch.stack([x.double().cpu().argsort().argsort().double() for x in (local, exact)])
    rank = float(torch.corrcoef(ranks)[0, 1])
    low, high = (float(ratio.quantile(q)) for q in (0.1, 0.9))
    note = f"rank correlation {rank:.3f}; 10 to 90 % of the tokens: {low:.3f} to {high:.3f}"
    what = f"{training.shape}: local norm in {dtype} over exact, median of {len(ratio)} tokens"
    return Row(what, float(ratio.median()), "×", "", "", note)


def _memory(training: Training) -> list[Row]:
    """Peak memory of one gradient and of the local norms beside it, above the weights; nothing is trained."""
    model = training.model()
    ids, mask = random_rows(model, 1, training.length)
    held = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30

    def gradient() -> None:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum().backward()

    plain = peak(gradient) / 2**30
    model.zero_grad(set_to_none=True)
    norms = peak(lambda: score_norms(model, ids, mask, check="off")) / 2**30
    what, note = f"{training.shape}: memory above the weights", f"weights {held:.1f} GiB"
    return [
        Row(f"{what}, a gradient of 1 × {training.length} tokens", plain, "GiB", "", "", note),
        Row(f"{what}, local norms of them", norms, "GiB", "", "", note),
    ]


def _tokenizer() -> Any:
    """Random words have no text; the recorder only needs to decode them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<end>": 0, "<pad>": 1} | {f"w{i}": i for i in range(2, 512)}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")
