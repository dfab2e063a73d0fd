"""What each of two processes does (DDP, gloo): train SFT and DPO with and without the recorder. python -m … FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from sharpscope import distributed
from sharpscope.integrations.hf_trainer import record
from tests.integrations.trainers import Weights, dpo_trainer, sft_trainer

MAKERS = {"sft": sft_trainer, "dpo": dpo_trainer}


def main(folder: Path) -> None:
    kept = {}
    for name, make in MAKERS.items():
        for recorded in (False, True):
            one = make(folder / "t", max_grad_norm=0.0, ddp_backend="gloo", model={"tie": False})
            keep = Weights()
            one.add_callback(keep)
            if recorded:
                record(one, folder / name, recording={"token_gradients_every": 1, "exact_top": 100})
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
