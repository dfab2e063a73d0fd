"""Benchmarks: a ratio against the naive way or a peer, both measured in the same run on the same machine."""
