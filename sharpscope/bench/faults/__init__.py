"""Faults tried on purpose: what a run survives, counted."""
