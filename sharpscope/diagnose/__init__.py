"""What went wrong in a training run, from the log that exists: findings, the order of events, and the next command.

Reads traces of sharpscope and the logs of other trainers. Imports no torch.
"""

from sharpscope.diagnose.findings import changes, find
from sharpscope.diagnose.logs import Log, read_log
from sharpscope.diagnose.report import diagnose
