"""What a training records: the values of a step, rows of the traces, observers, health rules and the run folder."""
