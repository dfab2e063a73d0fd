"""What went wrong in a training run, from the log that exists: findings, the order of events, and the next command.

Reads traces of sharpscope and the logs of other trainers. Imports no torch.
"""

from sharpscope.diagnose.changes import changes
from sharpscope.diagnose.findings import find
from sharpscope.diagnose.logs import Log, read_log, read_logs
from sharpscope.diagnose.report import diagnose, diagnose_runs
