"""Tables: the paper's, and where training ended. `tables.summary` has the summary of a study."""

from sharpscope.analysis.tables.endpoints import endpoint_tables
from sharpscope.analysis.tables.paper import Cell, Table, paper_tables, write_tables

__all__ = [
    "Cell",
    "Table",
    "endpoint_tables",
    "paper_tables",
    "write_tables",
]
