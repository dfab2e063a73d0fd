"""What each of two processes does (DDP, gloo): train SFT, DPO and GRPO with and without the recorder. python -m … FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from sharpscope import distributed
from sharpscope.integrations.trl import record
from tests.integrations.trainers import Weights, dpo_trainer, sft_trainer, trainer

#: 6 rows of each process, so that the second of three groups of 4 is in both; used for two updates.
GRPO = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "num_iterations": 2,
    "loss_type": "dapo",
    "max_steps": 4,
    "learning_rate": 0.005,
}
MAKERS = {
    "sft": (sft_trainer, {}, {}),
    "dpo": (dpo_trainer, {}, {}),
    "grpo": (trainer, GRPO | {"beta": 0.1, "epsilon": 0.05}, {}),
    "weighted": (trainer, GRPO | {"max_steps": 2}, {"weights": "grpo-sg", "shaping": "calibrated"}),
}


def main(folder: Path) -> None:
    kept = {}
    for name, (make, arguments, options) in MAKERS.items():
        for recorded in (True,) if options else (False, True):
            one = make(folder / "t", max_grad_norm=0.0, ddp_backend="gloo", model={"tie": False}, **arguments)
            keep = Weights()
            one.add_callback(keep)
            if recorded:
                record(one, folder / name, recording={"token_gradients_every": 1, "exact_top": 100}, **options)
            one.train()
            kept[name, recorded] = [
                *keep.before,
                {k: v.detach().clone() for k, v in one.accelerator.unwrap_model(one.model).state_dict().items()},
            ]
    every = distributed.gather(kept)
    if distributed.is_rank_zero():
        torch.save(every, folder / "kept.pt")
    torch.distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
