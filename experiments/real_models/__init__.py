"""Real language models that a Python package index holds."""
