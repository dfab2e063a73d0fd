"""Record a TRL GRPOTrainer as a run, and add token weights to its loss.

Supported: TRL 1.0.0 to 1.16.0 but for 1.15.0 (both ends tested), one process or several (DDP, FSDP2), float32 or bf16.
"""

from sharpscope.integrations.trl.recorder import Recorder, record

__all__ = ["Recorder", "record"]
