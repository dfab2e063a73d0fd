"""Record a TRL GRPOTrainer into an ordinary trace, and give its loss token weights.

Supported: TRL 1.0.0 to 1.16.0 but for 1.15.0 (both ends tested), one process, float32 or bf16.
"""

from sharpscope.integrations.trl.recorder import Recorder, record

__all__ = ["Recorder", "record"]
