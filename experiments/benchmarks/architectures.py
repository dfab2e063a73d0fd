"""Every causal architecture of the installed transformers, tiny, through the token probes, against plain autograd.

Each is built with two or a few layers of width 32 and random float64 weights, in a process of its own. Norms (all methods) and
shares are compared with `torch.autograd.grad` through the model's own forward pass with eager attention, a token at a time.

    python -m experiments.benchmarks.architectures --only qwen2 --only gemma2
    python -m experiments.benchmarks.architectures --out docs/architectures.md
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import multiprocessing
import os
import sys
import textwrap
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sharpscope.errors import CheckError, UserError
from sharpscope.policy.cache import cache_keyword
from sharpscope.tokens import attribute, norms, score_norms

VOCAB = 64
TEMPERATURE = 1.3  # other than 1, so that its place in every formula counts
CHECKS = ("head", "local", "exact", "shares")
TOLERANCE = 1e-4  # many models cast norms, routers or a softmax to float32, which leaves about 1e-6
MOST_PARAMETERS = 8_000_000

_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
SIZES: dict[str, int] = {
    field: value for value, fields in _TABLES["sizes"].items() for field in fields.split()
}
SPECIAL: dict[str, dict[str, Any]] = {
    name: values for names, values in _TABLES["special"].items() for name in names.split()
}
NESTED = ("text_config", "decoder", "vision_config", "audio_config")


def tiny_config(name: str) -> PreTrainedConfig:
    """The configuration of the architecture `name` at a width of about 32 with one layer of each kind, two at least."""
    return _tiny(type(CONFIG_MAPPING[name]()), name)


def _tiny(kind: type[PreTrainedConfig], name: str) -> PreTrainedConfig:
    default = kind()
    known = default.to_dict()
    chosen = {
        key: value
        for key, value in SIZES.items()
        if key in known
        and key not in default.attribute_map
        and not (known[key] is None and key in OPTIONAL)
    }
    patterns = {
        key: list(dict.fromkeys(known[key])) for key in PATTERNS if isinstance(known.get(key), list)
    }
    depth = max([2, *map(len, patterns.values())])
    for key, distinct in patterns.items():
        chosen[key] = [distinct[i % len(distinct)] for i in range(depth)]
    chosen |= {
        key: depth
        for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        if key in chosen
    }
    for key in NESTED:
        if isinstance(inner := getattr(default, key, None), PreTrainedConfig):
            chosen[key] = _tiny(type(inner), f"{name}.{key}").to_dict()
    for place, key in enumerate(
        ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
    ):
        if isinstance(known.get(key), int):
            chosen[key] = 4 + place
    if "is_decoder" in known:
        chosen["is_decoder"] = True
    return kind(**chosen | SPECIAL.get(name, {}))


# Parts that these fields switch on stay off where a configuration leaves them out.
OPTIONAL = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "q_lora_rank",
    "rotary_dim",
    "n_inner",
    "swa_head_dim",
    "global_head_dim",
    "index_head_dim",
    "embedding_size",
)
PATTERNS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "attn_layers")


# The comparison.


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, attention mask and marks of two rows of nine and seven tokens, the second padded on the left."""
    ids = torch.randint(10, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    attention, mask = torch.ones_like(ids), torch.zeros_like(ids)
    attention[1, :2] = 0
    mask[0, [1, 4, 7, 8]] = mask[1, [3, 6, 8, 8]] = 1
    return ids * attention, attention, mask


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Redraw matrices with standard deviation 1/√fan-in, and move everything else, so that no part is zero or constant."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        finite = bool(p.isfinite().all())
        scale = float(p.std()) if finite and p.numel() > 1 else 0.0
        if not finite or (p.ndim >= 2 and float(p.mean().abs()) < max(scale, 1e-12)):
            p.copy_(noise / math.sqrt(min(max(p.shape[-1], 1), 64)))
        else:  # gains, biases, decay rates: near what they were
            p.add_(0.1 * noise * max(1.0, float(p.abs().mean())))


def gradients(model: Any, parameters: list[Tensor], *, cached: bool = False) -> Tensor:
    """(M, P) gradients of the marked tokens' log-probabilities; `cached`: of one step from the model's own cache."""
    found = []
    for row, attention, mask in zip(*rows(), strict=True):
        ids, places = row[attention.bool()][None], mask[attention.bool()].nonzero()[:, 0].tolist()
        for place in places:
            past = None
            if cached and place > 1:
                with torch.no_grad():
                    past = model(input_ids=ids[:, : place - 1], use_cache=True)[
                        cache_keyword(model)
                    ]
            given = (
                {cache_keyword(model): past, "use_cache": True} if cached else {"use_cache": False}
            )
            logits = model(input_ids=ids[:, place - 1 : place] if cached else ids, **given).logits
            if logits.shape[-1] != VOCAB:
                raise ValueError(f"its logits have the shape {tuple(logits.shape)}")
            logp = torch.log_softmax(logits[0, -1 if cached else place - 1] / TEMPERATURE, -1)[
                ids[0, place]
            ]
            parts = torch.autograd.grad(logp, parameters, allow_unused=True)
            flat = [
                torch.zeros_like(p) if g is None else g
                for g, p in zip(parts, parameters, strict=True)
            ]
            found.append(torch.cat([g.reshape(-1).double() for g in flat]))
    return torch.stack(found)


def head_gradients(model: PreTrainedModel) -> Tensor:
    """Of the output layer alone, which gets a weight of its own for it."""
    layer: Any = model.get_output_embeddings()
    weight = layer.weight
    layer.weight = nn.Parameter(weight.detach().clone())
    try:
        return gradients(model, [p for p in (layer.weight, layer.bias) if p is not None])
    finally:
        layer.weight = weight


def measured(check: str, model: PreTrainedModel, truth: Tensor) -> float:
    """Largest relative error of a probe."""
    ids, attention, mask = rows()
    picked = mask.bool()
    if check == "shares":
        coef = torch.zeros(ids.shape, dtype=torch.float64)
        coef[picked] = torch.randn(
            len(truth), generator=torch.Generator().manual_seed(2), dtype=torch.float64
        )
        total = coef[picked] @ truth
        expected = coef[picked] * (truth @ total) / total.square().sum()
        found = attribute(model, ids, mask, coef.to(model.dtype), None, attention, TEMPERATURE)[
            picked
        ].double()
        return max(float((found - expected).abs().max()), abs(float(found.sum()) - 1)) / float(
            expected.abs().max()
        )
    norms = score_norms(model, ids, mask, check, attention, TEMPERATURE)  # type: ignore[arg-type]
    return float(
        ((norms.values[picked].double() - truth.norm(dim=1)).abs() / truth.norm(dim=1)).max()
    )


def one_line(problem: BaseException) -> str:
    """Type and message, and where in the package it was raised."""
    frames = [
        f
        for f in traceback.extract_tb(problem.__traceback__)
        if f"{os.sep}sharpscope{os.sep}" in f.filename
    ]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return (
        f"{type(problem).__name__}: {textwrap.shorten(str(problem), 200, placeholder=' …')}{place}"
    )


def examine(name: str) -> dict[str, str]:
    """The table's cells of one architecture, and remarks; `reason` where nothing could be compared."""
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    try:
        config = tiny_config(name)
        with torch.device("meta"):
            size = sum(
                p.numel()
                for p in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters()
            )
        if size > MOST_PARAMETERS:
            return {"reason": f"no tiny configuration: {size:,} parameters at least"}
        torch.manual_seed(0)
        slow = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options).double().eval()
        randomize(slow)
        parameters = [p for p in slow.parameters() if p.requires_grad]
        full = gradients(slow, parameters)
        if not bool(full.isfinite().all()) or bool((full.norm(dim=1) == 0).any()):
            return {"reason": "its gradients are zero or not finite at this size"}
        truth = dict.fromkeys(CHECKS, full) | {"head": head_gradients(slow)}
    except Exception as problem:
        return {"reason": one_line(problem)}
    cells, notes = {}, []
    try:
        truth["local"] = gradients(slow, parameters, cached=True)
    except Exception as problem:
        cells["local"] = "–"
        notes.append(f"local: no step from a cache ({one_line(problem)})")
    model = (
        AutoModelForCausalLM.from_config(copy.deepcopy(config), experts_implementation="eager")
        .double()
        .eval()
    )
    model.load_state_dict(slow.state_dict())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for check in (check for check in CHECKS if check not in cells):
        try:
            error = measured(check, model, truth[check])
            cells[check] = f"{error:.0e}" if error <= TOLERANCE else f"**wrong {error:.1e}**"
        except (CheckError, UserError) as problem:
            cells[check] = "self-check" if isinstance(problem, CheckError) else "refused"
            text = " ".join(str(problem).split()).partition(": ")[2].partition("; ")[0]
            notes.append(f"{check}: {text}")
        except Exception as problem:
            cells[check] = "**crash**"
            notes.append(f"{check}: {one_line(problem)}")
    if any(not torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items()):
        notes.append("**wrong**: the probes changed the weights")
    return cells | {"remarks": "; ".join(notes)}


def _child(name: str, end: Any) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    end.send(examine(name))


def apart(name: str, limit: float = 900.0) -> dict[str, str]:
    """`examine` in a process of its own, so that a crash or a hang leaves the others alone."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(name, there))
    child.start()
    there.close()
    try:
        return (
            here.recv()
            if here.poll(limit)
            else {"reason": f"**crash**: no result within {limit:g} s"}
        )
    except EOFError:
        return {"reason": "**crash** of the process"}
    finally:
        child.kill()
        child.join()


INTRO = """# Architectures

Which probes work on which of {count} causal architectures of transformers {version}, as `experiments/benchmarks/architectures.py`
found it with torch {torch}; the script writes this page. Each was built at a tiny size (width 32, two layers or one of each kind,
{vocab} words, windows of four positions) with random float64 weights, and compared on two rows of tokens with plain
`torch.autograd.grad` through its own forward pass with eager attention. A number is the largest relative error over the tokens.
*refused*: one line of `UserError`; *self-check*: the probe found that its numbers differ from autograd's and did not report them.
`local` runs in segments of four positions, and is compared with a single step from the model's own cache, whose keys and values
are constants.

"""


def table(found: dict[str, dict[str, str]]) -> str:
    """The page in Markdown."""
    text = INTRO.format(
        count=len(found),
        version=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        vocab=VOCAB,
    )
    lines = [
        f"| architecture | {' | '.join(CHECKS)} | remarks |",
        "|---|" + "---|" * (len(CHECKS) + 1),
    ]
    for name, cells in found.items():
        values = [cells.get(check, "–") for check in CHECKS]
        note = (
            cells.get("reason", cells.get("remarks", "")).replace("<", "&lt;").replace("|", "\\|")
        )
        lines.append(f"| {name} | {' | '.join(values)} | {note} |")
    return text + "\n".join(lines) + "\n"


def main() -> int:
    """Run the architectures that are asked for; the exit status is 1 if any crashed or gave a wrong number."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, metavar="NAME"
    )
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file")
    options = parser.parse_args()
    torch.set_num_threads(1)  # before the first fork
    norms.SEGMENT = 4
    found: dict[str, dict[str, str]] = {}
    for name in options.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        found[name] = apart(name)
        print(name, found[name], file=sys.stderr, flush=True)
    if options.out:
        options.out.write_text(table(found), encoding="utf-8")
    return int(any("**" in value for cells in found.values() for value in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
