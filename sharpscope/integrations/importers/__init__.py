"""Traces from the files of trainers that sharpscope did not run: prime-rl, verl, and any table of tokens.

An importer writes what the files say; what they do not say is null, and run.json lists it under `imported`.
"""

from sharpscope.integrations.importers.jsonl import COLUMNS, import_jsonl
from sharpscope.integrations.importers.prime_rl import Coefficients, import_prime_rl
from sharpscope.integrations.importers.verl import import_verl
from sharpscope.integrations.importers.writing import Labels

__all__ = ["COLUMNS", "Coefficients", "Labels", "import_jsonl", "import_prime_rl", "import_verl"]
