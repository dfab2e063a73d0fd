"""What it costs to know every token's gradient norm and share, against a loop of `autograd.grad`, in one run.

The loop's time is taken on a sample of tokens spread over the positions and multiplied: each of its backward passes
costs the same, whatever the token. Both sides run on the same weights, threads and device; repeats alternate between
them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from experiments.benchmarks.token_stats import measure
from experiments.benchmarks.tokens_recording import recording_cost
from sharpscope.config.training import DEFAULT_INTERVALS
from sharpscope.packaged import data_path
from sharpscope.probes import attribute, directional_derivative, logp_gradient, score_norms

GPU_SHAPES: dict[str, dict[str, int]] = {
    "Qwen2.5-0.5B": {
        "layers": 24,
        "width": 896,
        "heads": 14,
        "key_heads": 2,
        "feed_forward": 4864,
        "vocabulary": 151_936,
    },
    "Qwen2.5-3B": {
        "layers": 36,
        "width": 2048,
        "heads": 16,
        "key_heads": 2,
        "feed_forward": 11_008,
        "vocabulary": 151_936,
    },
}
"""Real shapes, with random weights, that are measured where a GPU is at hand."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: the quantity; `setting`: the batch.
        seconds: median time of ours; `baseline`: of the baseline.
        ratio: in `unit`.
        required, hoped: of the ratio; None where nothing was asked.
        unit: "x faster" (the more the better), "forward passes", "% of the time" or "x the time" (the less the better).
        note: anything that a reader must know.
    """

    what: str
    setting: str
    seconds: float
    baseline: float
    ratio: float
    required: float | None
    hoped: float | None
    unit: str
    note: str = ""


def random_model(
    *,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    key_heads: int = 4,
    feed_forward: int = 384,
    vocabulary: int = 624,
    device: str = "cpu",
) -> nn.Module:
    """A randomly initialized Qwen2 of this shape, embeddings tied, in eval mode; by default the embedded policy's."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return model.to(device).eval()


def embedded() -> nn.Module:
    """The embedded Knights-and-Knaves policy, float32, in eval mode."""
    folder = data_path("policies", "knights_knaves")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.no_grad()
def sampled_rows(model: nn.Module, rows: int, length: int, seed: int = 0) -> Tensor:
    """(rows, length) token ids drawn from the model at temperature 1, by a generator of `seed`; never the end."""
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    ids = torch.randint(2, vocabulary, (rows, 1), generator=generator, device=device)
    cache, read = None, ids
    while ids.shape[1] < length:
        out = model(input_ids=read, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[:, -1].float()
        logits[:, :2] = -torch.inf  # padding and end of text
        read = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
        ids = torch.cat([ids, read], 1)
    return ids


def loop_norms(model: nn.Module, ids: Tensor, positions: Sequence[int]) -> list[float]:
    """The baseline: a backward pass a token over a kept graph, ids (1, S); norms of the tokens at `positions`."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), -1)
    logp = logp.gather(1, ids[0, 1:, None])[:, 0]
    found = []
    for position in positions:
        gradients = torch.autograd.grad(logp[position - 1], parameters, retain_graph=True)
        found.append(float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt()))
    return found


def timed(function: Callable[[], Any], device: torch.device) -> float:
    """Wall seconds of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


class Baseline:
    """Seconds that the loop takes per token of a row, measured in small samples between the other measurements."""

    def __init__(self, model: nn.Module, ids: Tensor, sample: int) -> None:
        length = ids.shape[1]
        self._model, self._ids = model, ids[:1]
        self._positions = sorted({max(1, round((i + 0.5) * length / sample)) for i in range(sample)})
        self._seconds: list[float] = []

    def measure(self) -> None:
        """One sample more; the forward pass is left out."""
        device = self._ids.device
        none = timed(lambda: loop_norms(self._model, self._ids, []), device)
        all_ = timed(lambda: loop_norms(self._model, self._ids, self._positions), device)
        self._seconds.append(max(all_ - none, 0.0) / len(self._positions))

    @property
    def per_token(self) -> float:
        """Median seconds of one token."""
        return statistics.median(self._seconds)


def _spread(ids: Tensor, chosen: int | None) -> Tensor:
    """(N, S) mask of all tokens but the first of a row, or of `chosen` spread over each row."""
    mask, length = torch.zeros_like(ids), ids.shape[1]
    places = slice(1, None) if chosen is None else [max(1, round((i + 0.5) * length / chosen)) for i in range(chosen)]
    mask[:, places] = 1
    return mask


def sketch_error(model: nn.Module, ids: Tensor, directions: int, chosen: int, seeds: int = 5) -> float:
    """Median relative error of the sketch's norms over several seeds, against the exact ones on `chosen` tokens a row.

    Tokens share directions, so the errors of one seed rise and fall together.
    """
    exact = score_norms(model, ids, _spread(ids, chosen), "exact").values
    mask, at, errors = _spread(ids, None), exact > 0, []
    for seed in range(seeds):
        sketch = score_norms(model, ids, mask, "sketch", directions=directions, seed=seed).values
        errors.append((sketch[at] - exact[at]).abs() / exact[at])
    return float(torch.cat(errors).median())


def versus_loop(
    model: nn.Module,
    ids: Tensor,
    ours: Callable[[Tensor, Tensor], object],
    repeats: int,
    sample: int,
    chosen: int | None = None,
) -> tuple[float, float]:
    """(median seconds of `ours(ids, mask)`, seconds that the loop would take), on all tokens or on `chosen` a row."""
    mask = _spread(ids, chosen)
    baseline, seconds = Baseline(model, ids, sample), []
    ours(ids[:1, :8], mask[:1, :8])  # warm up
    for _ in range(repeats):
        baseline.measure()
        seconds.append(timed(lambda: ours(ids, mask), ids.device))
    return statistics.median(seconds), baseline.per_token * int(mask.sum())


def directions_needed(model: nn.Module, ids: Tensor, error: float = 0.045, pilot: int = 24) -> int:
    """K at which the sketch's median error of a token's norm is `error`, from the standard errors of a pilot run."""
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    found = score_norms(model, ids, mask, "sketch", directions=pilot)
    assert found.std_error is not None
    at = mask.bool() & (found.squared > 0)
    # Half of a normal's draws lie within 0.674 standard deviations; the norm's relative error is half its square's.
    relative = 0.674 * found.std_error[at] / (2 * found.squared[at])
    return max(2, round(float((relative.median() / error) ** 2 * pilot) + 0.5))


def attribution_costs(model: nn.Module, ids: Tensor, repeats: int) -> tuple[dict[str, float], float]:
    """Kind of attribution -> median seconds, and those of a forward pass to log-probabilities.

    The kinds are shares of the gradient, beyond the gradient itself, and derivatives along a given direction.
    """
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    coef = mask.float()
    direction = logp_gradient(model, ids, mask, coef)

    @torch.no_grad()
    def forward() -> None:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])

    runs: dict[str, Callable[[], Any]] = {
        "pass": forward,
        "gradient": lambda: logp_gradient(model, ids, mask, coef),
        "both": lambda: attribute(model, ids, mask, coef),
        "given": lambda: directional_derivative(model, ids, mask, direction),
    }
    seconds = [{name: timed(run, ids.device) for name, run in runs.items()} for _ in range(repeats + 1)][1:]

    def median(of: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(of(each) for each in seconds)

    found = {
        "forward mode": median(lambda each: each["both"] - each["gradient"]),
        "forward mode, given direction": median(lambda each: each["given"]),
    }
    return found, median(lambda each: each["pass"])


def table(
    model: nn.Module,
    *,
    rows: int = 8,
    length: int = 256,
    long_rows: int = 2,
    long: int = 1024,
    repeats: int = 5,
    sample: int = 16,
    exact_tokens: int | None = None,
) -> Iterator[Row]:
    """The benchmark's lines for one model; `exact_tokens` a row instead of all (for models whose loop takes hours)."""
    ids, setting = sampled_rows(model, rows, length), f"{rows} x {length} tokens"
    ours, loop = versus_loop(model, ids, lambda i, m: score_norms(model, i, m, "exact"), repeats, sample, exact_tokens)
    each = "all tokens" if exact_tokens is None else f"{exact_tokens} tokens a row"
    yield Row(f"exact, {each}", setting, ours, loop, loop / ours, 5, 8, "x faster")
    ours, loop = versus_loop(model, ids, lambda i, m: score_norms(model, i, m, "local"), repeats, sample)
    yield Row("local, all tokens", setting, ours, loop, loop / ours, 100, 250, "x faster")
    long_ids = sampled_rows(model, long_rows, long)
    K = directions_needed(model, long_ids)
    ours, loop = versus_loop(
        model, long_ids, lambda i, m: score_norms(model, i, m, "sketch", directions=K), repeats, sample
    )
    error = sketch_error(model, long_ids, K, 2 * sample)
    note = f"K = {K} directions; median error of a norm {error:.1%} over 5 seeds, against {2 * sample} exact ones a row"
    yield Row("sketch, all tokens", f"{long_rows} x {long} tokens", ours, loop, loop / ours, 20, 30, "x faster", note)
    costs, one = attribution_costs(model, ids, repeats)
    asked = ((3.0, 2.5), (None, None))
    for (name, ours), (required, hoped) in zip(costs.items(), asked, strict=True):
        note = "shares and gradient, less the gradient alone" if name == "forward mode" else ""
        yield Row(f"attribution, {name}", setting, ours, one, ours / one, required, hoped, "forward passes", note)


def recording_rows(repeats: int, quick: bool) -> Iterator[Row]:
    """The default recording's share of training time: of every token's record, and with held-out influence beside it."""
    small = ("rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=8") if quick else ()
    cost = recording_cost(repeats, torch.get_num_threads(), small)
    notes = (
        f"a step {cost.step:.2f} s; recording the tables {cost.plain:.3f} s, score norms and shares {cost.gradients:.2f} s "
        f"every {DEFAULT_INTERVALS['token_gradients_every']}th step",
        f"influence {cost.influence:.2f} s every {DEFAULT_INTERVALS['heldout_influence_every']}th step",
    )
    names = ("default recording of tokens", "the same and held-out influence")
    asked = ((15.0, 5.0), (None, None))
    for name, seconds, (required, hoped), note in zip(
        names, (cost.recording, cost.with_influence), asked, notes, strict=True
    ):
        ratio, unit = 100 * cost.share(seconds), "% of the time"
        yield Row(name, "training steps", seconds, cost.step + seconds, ratio, required, hoped, unit, note)


def statistics_row(repeats: int, quick: bool) -> Row:
    """All of `TokenStats` against log-softmax and gather alone."""
    words = 2_000 if quick else 151_936
    cost = measure(vocabulary=words, repeats=repeats)
    note = f"against log-softmax in cache-sized blocks {cost.ratio_blocked:.2f}, with the output layer {cost.ratio_with_head:.2f}"
    what = f"TokenStats, {words:,} words"
    return Row(what, "96 tokens", cost.statistics_s, cost.log_softmax_s, cost.ratio, 2, 1.3, "x the time", note)


def _embedded_rows(small: dict[str, int], repeats: int, quick: bool) -> Iterator[Row]:
    yield from table(embedded(), **small)
    yield from recording_rows(1 if quick else repeats, quick)
    yield statistics_row(1 if quick else repeats, quick)


def run(*, quick: bool = False, repeats: int = 5, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Everything that the command prints and writes, as plain values; `tell` hears each line as it is known."""
    small: dict[str, int] = (
        {"rows": 2, "length": 32, "long_rows": 1, "long": 64, "repeats": 1, "sample": 4}
        if quick
        else {"repeats": repeats}
    )
    found: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "quick": quick,
        "repeats": 1 if quick else repeats,
        "torch": torch.__version__,
        "embedded policy": [],
    }

    def keep(name: str, rows: Iterable[Row]) -> None:
        found[name] = []
        for row in rows:
            found[name].append(asdict(row))
            tell(f"{name}: {row.what}: {row.ratio:.2f} {row.unit}")

    keep("embedded policy", _embedded_rows(small, repeats, quick))
    if not torch.cuda.is_available():
        found["gpu"] = "GPU numbers are missing: none was at hand"
        return found
    found["gpu"] = torch.cuda.get_device_name()
    for name, shape in GPU_SHAPES.items():
        model = random_model(**shape, device="cuda")
        rows = table(
            model,
            rows=2,
            length=128 if quick else 1024,
            long_rows=2,
            long=128 if quick else 1024,
            repeats=1 if quick else repeats,
            sample=4,
            exact_tokens=32,
        )
        keep(name, rows)
        del model
    return found
