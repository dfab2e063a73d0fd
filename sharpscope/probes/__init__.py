"""Observers: they see a model and a frozen batch, change nothing, and say how sure they are."""
