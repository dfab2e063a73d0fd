"""Recorders for other trainers, and exports of traces to loggers. Each part needs its own extra.

`sharpscope.integrations.trl.record(trainer, out="runs/x")` records a TRL GRPOTrainer; `sharpscope.integrations.loggers`
sends scalar tables to TensorBoard, Weights & Biases or trackio.
"""
