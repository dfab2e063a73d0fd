"""What went wrong in a training run, from the log that exists: findings, the order of events, and the next command.

Reads traces of sharpscope and the logs of other trainers. Imports no torch.
"""

from sharpscope.diagnose.changes import Change, changes
from sharpscope.diagnose.findings import Finding, find
from sharpscope.diagnose.logs import Log, read_log
from sharpscope.diagnose.report import Diagnosis, diagnose

__all__ = ["Change", "Diagnosis", "Finding", "Log", "changes", "diagnose", "find", "read_log"]
