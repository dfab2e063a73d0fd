"""Record a transformers Trainer, TRL's SFTTrainer or DPOTrainer as a run; and what all recorders of that family share."""

from sharpscope.integrations.hf_trainer.arguments import check_setup, checked_config, common_settings, schedule_notes
from sharpscope.integrations.hf_trainer.base import TrainerRecorder, own_forward
from sharpscope.integrations.hf_trainer.batches import Batch, same_prompts, unused_tokens
from sharpscope.integrations.hf_trainer.step import Step, TokenLoss
from sharpscope.integrations.hf_trainer.supervised import SupervisedRecorder, own_statistics, record
from sharpscope.integrations.hf_trainer.trace import Trace

__all__ = [
    "Batch",
    "Step",
    "SupervisedRecorder",
    "TokenLoss",
    "Trace",
    "TrainerRecorder",
    "check_setup",
    "checked_config",
    "common_settings",
    "own_forward",
    "own_statistics",
    "record",
    "same_prompts",
    "schedule_notes",
    "unused_tokens",
]
