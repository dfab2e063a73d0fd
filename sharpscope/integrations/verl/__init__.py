"""Record the actor's updates in verl (0.9.1, FSDP and FSDP2).

Set the environment variable `SHARPSCOPE_VERL=runs/x` for all of verl's processes. verl loads `plugin` by its entry point;
nothing is imported from verl otherwise.
"""
