"""What runs and probes of two versions of the code compute, compared to the last bit.

A change that should not move a number is checked against the commit before it:

    git worktree add /tmp/before COMMIT
    (cd /tmp/before && python -m tests.frozen.runs record before.json)
    python -m tests.frozen.runs record after.json
    python -m tests.frozen.runs compare /tmp/before/before.json after.json

If COMMIT does not contain this file, copy it there. Only public names are used. Hashes depend on the machine's arithmetic, so
both sides must be recorded on one machine.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METHODS = ("grpo", "grpo-sg", "tr-grpo", "ar-lopti", "gspo", "grpo-sam", "dapo", "cov-grpo")
SMALL = {
    "steps": 3,
    "threads": 1,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 24,
    "update.mini_batches": 2,
    "method.kl.coef": 0.01,
    "evaluation.every": 3,
    "evaluation.prompts": 4,
    "recording.token_gradients_every": 1,
    "recording.group_share": 1.0,
    "recording.rotation_every": 10,
    "recording.exact_tokens": 4,
    "recording.heldout_influence_every": 2,
    "checkpoint.every": 0,
    "probes.every": 3,
    "probes.curvature_prompts": 4,
    "probes.prompts": 4,
    "probes.heldout_prompts": 4,
    "probes.samples": 2,
    "health.memory.action": "off",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "gpt_neox": {"rotary_pct": 0.5, "hidden_dropout": 0.0, "attention_dropout": 0.0},
}


def record() -> dict[str, str]:
    """A hash for each column of each trace and for each result of a probe."""
    return dict(_runs()) | dict(_probes())


def _runs() -> Iterator[tuple[str, str]]:
    from sharpscope.config import build_config
    from sharpscope.traces import TABLES, load_run, timing_columns
    from sharpscope.training import train

    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS:
            values = SMALL | {"method": method, "out": f"{folder}/{method}"}
            if method == "dapo":
                values["method.kl.coef"] = 0.0
            run = load_run(train(build_config(values=values)).run_dir)
            for table in TABLES.keys() - {"reductions"}:
                frame = run.tokens() if table == "tokens" else getattr(run, table)
                for column in frame.columns.drop(timing_columns(table), errors="ignore"):
                    data = frame[column].to_json(orient="values", double_precision=15)
                    if frame[column].dtype.kind in "fiub":
                        data = frame[column].to_numpy().tobytes().hex()
                    yield f"run {method} {table}.{column}", _hash(data)


def _probes() -> Iterator[tuple[str, str]]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from sharpscope import attribute, curvature, score_norms, sharpness

    torch.set_num_threads(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    for name, options in MODELS.items():
        torch.manual_seed(0)
        config = CONFIG_MAPPING[name](
            vocab_size=37,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
            max_position_embeddings=64,
            **sizes,
            **options,
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        ids = torch.randint(2, 37, (3, 12), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        mask[:, :4] = 0
        coef = torch.randn(ids.shape, generator=torch.Generator().manual_seed(2))
        for method in ("head", "local", "exact"):
            yield f"probe {name} score_norms {method}", _tensor(score_norms(model, ids, mask, method).values)
        yield f"probe {name} attribute forward", _tensor(attribute(model, ids, mask, coef))
        for parameter in model.parameters():
            parameter.requires_grad_(True)

        def loss(model: Any = model, ids: Any = ids) -> Any:
            logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
            return -logp.gather(-1, ids[:, 1:, None]).mean()

        found = curvature(loss, list(model.parameters()), top=2, trace_probes=4)
        yield f"probe {name} curvature", _hash(repr((found.top, found.trace, found.smallest)))
        for kind in ("sam", "asam"):
            one = sharpness(loss, list(model.parameters()), rho=0.05, kind=kind)
            yield f"probe {name} sharpness {kind}", _hash(repr((one.value, one.first_order)))


def _tensor(value: Any) -> str:
    return _hash(value.detach().cpu().numpy().tobytes().hex())


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compare(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """One line for each value that differs, is missing or is new."""
    lines = [f"differs: {name}" for name in before if name in after and before[name] != after[name]]
    lines += [f"missing: {name}" for name in before if name not in after]
    return lines + [f"new: {name}" for name in after if name not in before]


def main(arguments: list[str]) -> int:
    """`record FILE` or `compare BEFORE AFTER`."""
    match arguments:
        case ["record", file]:
            Path(file).write_text(json.dumps(record(), indent=0), encoding="utf-8")
            return 0
        case ["compare", before, after]:
            found = compare(*(json.loads(Path(file).read_text(encoding="utf-8")) for file in (before, after)))
            print("\n".join(found) or "equal")
            return int(any(not line.startswith("new") for line in found))
    print(__doc__)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
