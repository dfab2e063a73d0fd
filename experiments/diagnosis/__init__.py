"""Logs made on purpose, and how often each rule of `sharpscope diagnose` is wrong."""
