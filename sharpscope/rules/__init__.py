"""Health rules: one table, judged after each step by the training loop and the recorders, and in a log by `sharpscope diagnose`.

Imports no torch, and `rules.table` no numpy, since the command line reads it before it knows what to do.
"""
