"""Recorders for other people's trainers, and exports of a trace to loggers. Each part needs its own extra.

`sharpscope.integrations.trl.record(trainer, out="runs/x")` records a TRL GRPOTrainer; `sharpscope.integrations.loggers`
sends scalar tables to TensorBoard, Weights & Biases or trackio.
"""
