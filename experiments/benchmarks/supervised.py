"""What recording supervised fine-tuning costs: the same steps of transformers' Trainer with and without the recorder.

`python -m experiments.benchmarks.supervised` prints shares of the trainer's own processor time; other programs on the machine
hardly change them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from sharpscope import record
from sharpscope.policy import PolicySpec, load_policy

SCHEDULES = {
    "coefficients and statistics alone": {"token_gradients_every": 0, "spike_z": None},
    "default (norms and attribution every 50 steps)": {},
}


def seconds(recording: dict[str, Any] | None, steps: int, rows: int, length: int) -> float:
    """Processor time of `steps` updates [s] after a first one, of `rows` sequences of `length` tokens, a quarter of them prompt."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    policy = load_policy(PolicySpec(model="embedded:knights_knaves"))
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, policy.head.weight.shape[0], (rows * (steps + 1), length), generator=draw)
    labels = ids.clone()
    labels[:, : length // 4] = -100
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.process_time())

    def collate(indices: list[int]) -> dict[str, torch.Tensor]:
        return {"input_ids": ids[indices], "labels": labels[indices], "attention_mask": torch.ones_like(ids[indices])}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            report_to=[],
            use_cpu=True,
            per_device_train_batch_size=rows,
            max_steps=steps + 1,
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            learning_rate=1e-5,
        )
        trainer = Trainer(
            model=policy.model,
            args=arguments,
            processing_class=policy.tokenizer,
            train_dataset=list(range(len(ids))),
            data_collator=collate,
            callbacks=[Clock()],
        )
        if recording is not None:
            record(trainer, Path(folder) / "run", recording=recording)
        trainer.train()
    return times[-1] - times[0]


def main() -> None:
    """Print the share of each schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    given = vars(parser.parse_args())
    torch.set_num_threads(1)
    plain = seconds(None, **given)
    print(
        f"Trainer alone: {plain / given['steps']:.3f} s a step ({given['rows']} sequences of {given['length']} tokens)"
    )
    for name, recording in SCHEDULES.items():
        print(f"{name}: {seconds(recording, **given) / plain - 1:+.0%}")


if __name__ == "__main__":
    main()
