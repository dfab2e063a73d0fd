"""Recorders for other trainers and loops (`sharpscope.record`), importers of their files, and exports to loggers.

Each part needs its own extra.
"""
