"""Figures: from frames of values to matplotlib figures."""
