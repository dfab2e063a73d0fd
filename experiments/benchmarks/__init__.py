"""Benchmarks: each measures a ratio against a plain implementation or another library in the same run; see speed.md."""
