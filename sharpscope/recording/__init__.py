"""What a training records: the values of a step, rows of the trace, observers, health rules and the run folder.

The training loop and the recorders of `sharpscope.integrations` share it.
"""
