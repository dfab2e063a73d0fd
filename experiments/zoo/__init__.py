"""The bug zoo: short trainings, each with one planted cause of a kind that people make, and healthy controls.

    python -m experiments.zoo run [NAME ...] [--seed 0] [--out runs/zoo]
    python -m experiments.zoo table [--out runs/zoo]

`docs/causes.md` has the table of results.
"""
